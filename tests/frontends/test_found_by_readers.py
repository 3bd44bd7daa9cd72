"""Training loops, found by reading the code, in which ranks diverged or raised errors where DDP is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.frontends.models import Perceptron
from tests.frontends.test_ranks_apart import raising
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

World = Callable[[int], Ranks]


def thawed() -> str:
    model = Perceptron()
    model.layers[0].requires_grad_(False)
    handle = gradsync.attach(model, timeout=10)
    model(torch.randn(4, 6)).mean().backward()
    model.layers[0].requires_grad_(True)
    said = raising(lambda: model(torch.randn(4, 6)))
    handle.detach()
    return said


def test_a_parameter_that_is_thawed_raises(world: World) -> None:
    assert all("'layers.0.weight' was frozen" in said for said in world(2).run(thawed))


def converted_and_back(model: Perceptron, number: int) -> None:
    """Converts a part, which gives its parameters other autograd nodes, and puts them back into the same memory."""
    for parameter in model.layers[0].parameters() if number == 2 else ():
        memory = parameter.data
        parameter.data = memory.half()
        parameter.data = memory


def frozen_converted_and_thawed(model: Perceptron, number: int) -> None:
    if number == 1:
        model.layers[0].requires_grad_(False)
        model.layers[0].half().float()
    if number == 2:
        model.layers[0].requires_grad_(True)


def trained_through(change: Callable[[Perceptron, int], None], parts: bool) -> None:
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, timeout=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        change(model, number)
        optimizer.zero_grad()
        for micro in range(2):
            torch.manual_seed(10 * number + micro + 100 * dist.get_rank())
            with nullcontext() if micro else handle.no_sync():
                (model.layers if parts else model)(torch.randn(4, 6)).square().mean().backward()
        if number != 1:
            weight = model.layers[0].weight.grad
            assert weight is not None and weight.any(), f"step {number}"
        assert_same_on_all_ranks({n: p.grad for n, p in model.named_parameters() if p.requires_grad and "0" in n})
        optimizer.step()
    assert_same_on_all_ranks(dict(model.named_parameters()))
    handle.detach()


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("change", [converted_and_back, frozen_converted_and_thawed])
def test_parts_that_are_converted_and_back_are_trained(
    world: World, change: Callable[[Perceptron, int], None], parts: bool
) -> None:
    world(2).run(trained_through, change, parts)


def stepped_inside_backward(name: str) -> str:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2, bias=False))
    hooked = model.get_parameter(name)
    optimizer = torch.optim.SGD([hooked], lr=0.1)
    handle = gradsync.attach(model, timeout=10)
    hooked.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    said = raising(lambda: [model(torch.randn(4, 6)).mean().backward() for _ in range(2)])
    handle.detach()
    return said


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])  # the last gradient of a backward, and the first
def test_an_optimiser_that_steps_inside_backward_raises(world: World, name: str) -> None:
    assert all("stepped inside backward" in said for said in world(2).run(stepped_inside_backward, name))


def optimisers_of_their_own() -> None:
    """Makes an optimiser for each local task: on some ranks, a new object gets the address of a freed one."""
    torch.manual_seed(0)
    model = Perceptron()
    kept = []
    handle = gradsync.attach(model, timeout=10)
    for _ in range(4):
        for _ in range(3):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if dist.get_rank() == 1:
                kept.append(optimizer)
            with handle.no_sync():
                optimizer.zero_grad()
                model(torch.randn(4, 6)).mean().backward()
            optimizer.step()
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= 2
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(dict(model.named_parameters()))
    handle.detach()


def test_optimisers_may_come_and_go(world: World) -> None:
    world(2).run(optimisers_of_their_own)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


def backwards_of_parts() -> None:
    """Runs backward of two losses of one forward, one after the other: together they use all parameters."""
    torch.manual_seed(0)
    model = gradsync.DistributedDataParallel(TwoHeads(), timeout=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        actor, critic = model(torch.randn(4, 4))
        actor.mean().backward()
        critic.mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(dict(model.named_parameters()))


def test_parts_of_a_model_may_have_backwards_of_their_own(world: World) -> None:
    world(2).run(backwards_of_parts)


def a_part_in_training() -> None:
    """Calls `model.eval()` but keeps normalisation in training: forward takes buffers from rank 0, as DDP does."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    handle = gradsync.attach(model, timeout=10)
    model.eval()
    model[1].train()
    seen: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda m, _: seen.append(m.running_mean.clone()))
    for _ in range(3):
        model(torch.randn(8, 4) + dist.get_rank()).mean().backward()
    for mean in seen:
        first = mean.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(mean, first)
    handle.detach()


def test_buffers_of_a_part_in_training_are_rank_0s(world: World) -> None:
    world(2).run(a_part_in_training)


@pytest.mark.parametrize("way", ["attach", "class"])
def test_sharpness_aware_minimisation_is_no_drift(world: World, way: str) -> None:
    world(2).run(sharpness_aware, way)


def sharpness_aware(way: str) -> None:
    """Trains with SAM: each rank perturbs weights by its own gradient, from a backward inside `no_sync()`."""
    torch.manual_seed(0)
    module = nn.Linear(4, 1)
    wrapper = gradsync.DistributedDataParallel(module, timeout=10, verify_every=1) if way == "class" else None
    handle = wrapper.attachment if wrapper else gradsync.attach(module, timeout=10, verify_every=1)
    model = wrapper or module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(6):
        torch.manual_seed(10 * number + dist.get_rank())
        batch = torch.randn(8, 4)
        with handle.no_sync():
            model(batch).square().mean().backward()
        settled = [p.detach().clone() for p in module.parameters()]
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.05 * p.grad)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            for p, before in zip(module.parameters(), settled, strict=True):
                p.copy_(before)
        optimizer.step()
    assert_same_on_all_ranks(dict(module.named_parameters()))
    handle.detach()


def compiled_step(way: str) -> None:
    """Compiles the whole step, with backward and optimiser, by `torch.compile`: gradsync's hooks still run."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model = module
    if way == "class":
        model = gradsync.DistributedDataParallel(module, timeout=10)
    elif way == "hook":
        model = DistributedDataParallel(module)
    handle = model.attachment if way == "class" else gradsync.attach(model, timeout=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of graph breaks
        for number in range(4):
            torch.manual_seed(10 * number + dist.get_rank())
            compiled(torch.randn(8, 4))
    assert_same_on_all_ranks(dict(module.named_parameters()))
    assert sum(bucket.steps for bucket in handle.statistics()) > 0
    handle.detach()


@pytest.mark.parametrize("way", ["attach", "class", "hook"])
def test_a_whole_step_may_be_compiled(world: World, way: str) -> None:
    world(2).run(compiled_step, way)
