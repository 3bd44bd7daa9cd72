"""Uneven inputs: with `join`, ranks make different numbers of steps and end with the weights of DDP's join."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.frontends.models import Branches, Perceptron, Tables
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks, new_oracle_group

World = Callable[[int], Ranks]


class Normed(nn.Module):
    """A model with buffers, one of which its training forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.3)
        return self.layers(x - self.mean)


def made(way: str, make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, Any]:
    """Returns (the module to call, which has `no_sync`; the object with `join`), with other weights on each rank."""
    torch.manual_seed(dist.get_rank())
    module = make()
    if way == "oracle":
        model = DistributedDataParallel(module, process_group=new_oracle_group(), **options)
        return model, model
    if way == "drop-in":
        model = gradsync.DistributedDataParallel(module, timeout=20, **options)
        return model, model
    if way == "hook":
        model = DistributedDataParallel(module, **options)
        model.register_comm_hook(gradsync.DDPState(timeout_s=20), gradsync.ddp_hook)
        return model, model
    handle = gradsync.attach(module, timeout=20, **options)
    return module, handle


def example(make: Callable[[], nn.Module], number: int) -> Tensor:
    torch.manual_seed(100 * number + dist.get_rank())
    return torch.randint(30, (4, 5)) if make is Tables else torch.randn(4, 6)


def train(
    way: str, make: Callable[[], nn.Module], steps: list[int], settings: dict[str, Any], accumulate: bool = False
) -> dict[str, Tensor]:
    """Makes each rank's number of steps inside `join`, then two more on all ranks."""
    options = {"find_unused_parameters": True} if make is Tables else {}  # DDP's join of sparse gradients needs it
    model, joinable = made(way, make, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        if accumulate:
            with joinable.no_sync():
                model(example(make, number + 50)).square().mean().backward()
        model(example(make, number)).square().mean().backward()
        optimizer.step()

    with joinable.join(**settings):
        for number in range(steps[dist.get_rank()]):
            step(number)
            if way in ("drop-in", "attach"):  # in DDP's join ranks that are through wait for a backward of this
                model.eval()
                with torch.no_grad():
                    model(example(make, number))
                model.train()
    inner = getattr(model, "module", model)
    found = {f"joined {name}": tensor.clone() for name, tensor in inner.state_dict().items()}
    assert_same_on_all_ranks(found)
    for number in range(2):
        step(1000 + number)
    assert_same_on_all_ranks(dict(inner.named_parameters()))
    return {**found, **dict(inner.named_parameters())}  # behind join DDP goes on to take buffers of the last rank


def compare(
    way: str, make: Callable[[], nn.Module], steps: list[int], settings: dict[str, Any], accumulate: bool
) -> None:
    expected = train("oracle", make, steps, settings, accumulate)
    found = train(way, make, steps, settings, accumulate)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("way", ["drop-in", "attach", "hook"])
@pytest.mark.parametrize(
    ("make", "steps", "settings", "accumulate"),
    [
        (Perceptron, [1, 4], {}, False),
        (Perceptron, [5, 2, 3], {"divide_by_initial_world_size": False}, False),
        (Perceptron, [3, 0], {}, False),  # a rank without any input
        (Perceptron, [2, 3], {}, True),
        (Perceptron, [2, 2], {"enable": False}, False),
        (Normed, [1, 3, 2], {}, False),
        (Normed, [1, 3, 2], {}, True),
        (Tables, [3, 1], {"divide_by_initial_world_size": False}, False),
    ],
)
def test_weights_are_those_of_ddps_join(
    world: World, way: str, make: Callable[[], nn.Module], steps: list[int], settings: dict[str, Any], accumulate: bool
) -> None:
    world(len(steps)).run(compare, way, make, steps, settings, accumulate)


def several() -> None:
    """Runs the forwards of both models before the first backward."""
    steps = [4, 1][dist.get_rank()]
    expected = [train("oracle", Perceptron, [4, 1], {}), train("oracle", Normed, [4, 1], {})]
    models = [made("drop-in", make)[0] for make in (Perceptron, Normed)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    with Join(models):
        for number in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [model(example(Perceptron, number)).square().mean() for model in models]
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
    for model, theirs in zip(models, expected, strict=True):
        for name, value in model.module.state_dict().items():
            torch.testing.assert_close(value, theirs[f"joined {name}"])


def test_several_models_join_together(world: World) -> None:
    world(2).run(several)


def terminate(way: str) -> str:
    model, joinable = made(way, Perceptron)
    try:
        with joinable.join(throw_on_early_termination=True):
            for number in range(1 + dist.get_rank()):
                model(example(Perceptron, number)).mean().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("way", ["drop-in", "attach"])
def test_all_ranks_raise_when_the_first_is_through(world: World, way: str) -> None:
    through, told = world(2).run(terminate, way)
    assert "Rank 0 exhausted all inputs" in through
    assert "Detected at least one rank that exhausted inputs" in told


def forward_without_backward() -> str:
    """Runs forwards without backwards inside `join`, in a group of its own (a message stays); returns the error."""
    model, joinable = made("attach", Perceptron, process_group=dist.new_group())
    try:
        with joinable.join():
            for number in range(2 * dist.get_rank()):
                model(example(Perceptron, number))
    except RuntimeError as error:
        return str(error)
    finally:
        joinable.detach()
    return "nothing raised"


def test_a_forward_without_a_backward_raises_on_all_ranks(world: World) -> None:
    for text in world(2).run(forward_without_backward):
        assert "must be followed by its backward" in text


def what_a_rank_keeps(way: str, make: Callable[[], nn.Module]) -> list[dict[str, Tensor]]:
    """Keeps gradients over several epochs: left over, zeroed in place, or by reference."""
    model, joinable = made(way, make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for epoch in range(4):
        kept: list[dict[str, Tensor]] = []
        with joinable.join(divide_by_initial_world_size=epoch % 2 == 0):
            for number in range([3, 7][(dist.get_rank() + epoch) % 2]):
                with nullcontext() if number % 2 else joinable.no_sync():
                    model(example(make, 10 * epoch + number)).square().mean().backward()
                if number % 2:
                    optimizer.step()
                    kept.append({name: p.grad for name, p in model.named_parameters()})
                    optimizer.zero_grad(set_to_none=epoch > 1)
        found += [*kept, {name: p.grad.clone() for name, p in model.named_parameters()}]
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if epoch == 2:
            optimizer.zero_grad()
    return [{name.removeprefix("module."): tensor for name, tensor in each.items()} for each in found]


def compare_what_is_kept(way: str) -> None:
    for make in (Perceptron, Normed):
        expected, found = what_a_rank_keeps("oracle", make), what_a_rank_keeps(way, make)
        for number, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, msg=lambda t, n=name, i=number: f"{n}, {i}: {t}")


@pytest.mark.parametrize("way", ["drop-in", "attach"])
def test_a_rank_that_is_through_keeps_its_own_gradients(world: World, way: str) -> None:
    world(2).run(compare_what_is_kept, way)


def sharded(way: str, beside: bool) -> None:
    """Compares a sharded optimiser in the same `Join` with one that is not sharded.

    `beside`: another model is in a `Join` that an error has left, as far as anybody knows.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    steps = 4 * dist.get_rank()  # rank 0 has no gradients at all
    expected = train("oracle", Perceptron, [0, 4], {})
    other, left = made("attach", Normed)
    hook = left.joinable.join_hook() if beside else None
    model, joinable = made(way, Perceptron)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    with Join([model if way == "drop-in" else joinable.joinable, optimizer]):
        for number in range(steps):
            model(example(Perceptron, number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in getattr(model, "module", model).named_parameters():
        torch.testing.assert_close(tensor, expected[f"joined {name}"])
        assert tensor.grad is None
    del other, hook


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("way", ["drop-in", "attach"])
def test_a_sharded_optimiser_joins_too(world: World, way: str, beside: bool) -> None:
    world(2).run(sharded, way, beside)


def around_join(way: str) -> None:
    """Runs a forward without a backward before and behind `join`, also on one rank."""
    model, joinable = made(way, Perceptron)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        model(example(Perceptron, 0))
        with joinable.join():
            for number in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                model(example(Perceptron, number)).square().mean().backward()
                optimizer.step()
        if dist.get_rank() == 0:
            model(example(Perceptron, 0))
        optimizer.zero_grad()
        (model(example(Perceptron, 1)) + model(example(Perceptron, 2))).square().mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(dict(getattr(model, "module", model).named_parameters()))


@pytest.mark.parametrize("way", ["drop-in", "attach"])
def test_what_join_asks_for_it_asks_for_inside_only(world: World, way: str) -> None:
    world(2).run(around_join, way)


def unused_inside() -> str:
    """Leaves parameters unused inside `join`, in a group of its own (a message stays); returns the error."""
    model = gradsync.DistributedDataParallel(Branches(), process_group=dist.new_group(), timeout=20)
    try:
        with model.join():
            for number in range(1 + 2 * dist.get_rank()):
                model(example(Perceptron, number), (0, 1, 2) if number == 0 else (0, 1)).mean().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        model.attachment.detach()
    return "nothing raised"


def test_a_forward_that_raises_is_told_to_ranks_that_are_through(world: World) -> None:
    for text in world(2).run(unused_inside):
        assert "branches.2.weight" in text


def join_of_parameters() -> None:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, optimizer, gradsync.planner.AveragingPlanner(), timeout=20)
    with pytest.raises(RuntimeError, match="this plan averages parameters after"):
        handle.join()
    handle.detach()


def test_a_plan_of_parameters_refuses(world: World) -> None:
    world(2).run(join_of_parameters)
