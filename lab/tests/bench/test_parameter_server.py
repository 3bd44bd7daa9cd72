"""Parameter servers add up pushes and keep the staleness bound, and post-local SGD averages in the right steps."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gradsync.optim.lars import LARS
from gradsync_lab.bench.methods import method
from gradsync_lab.bench.parameter_server import ParameterServers, divide_steps
from gradsync_lab.bench.replicas import mixings_of
from gradsync_lab.bench.rivals import GRADIENT_STEPS, PostLocalSGD
from tests.frontends.models import Convolutions, Perceptron
from tests.world import Ranks, World

Worlds = Callable[[int], Ranks]
TIMEOUT = timedelta(seconds=10)
SETTINGS: dict[type[Optimizer], dict[str, Any]] = {
    SGD: {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    Adagrad: {"initial_accumulator_value": 0.01, "weight_decay": 0.1, "lr_decay": 0.5},
    Adam: {"weight_decay": 0.1},
    AdamW: {"betas": (0.8, 0.9)},
}


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron()


def in_two_groups(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """Returns an optimiser of two groups with different rates; the second group comes first in the model."""
    first, *others = model.parameters()
    groups = [{"params": others}, {"params": [first], "lr": 0.5}]
    return kind(groups, lr=0.1, **SETTINGS[kind])


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def everyones(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def pushes_of_one_worker(kind: type[Optimizer]) -> None:
    """Checks pushes to stripes that cut tensors and groups; the other workers take no step."""
    model, size = perceptron(), dist.get_world_size()
    twin = copy.deepcopy(model)
    handle = ParameterServers(model, optimizer := in_two_groups(kind, model), TIMEOUT)
    plain = in_two_groups(kind, twin)
    scale = divide_steps(kind, plain.param_groups, size)
    for step in range(5):
        give_gradients(twin, step)
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale
        plain.step()
        if dist.get_rank() == 0:
            give_gradients(model, step)
            optimizer.step()
            torch.testing.assert_close(values(model), values(twin))
    handle.consensus()
    handle.detach()
    torch.testing.assert_close(values(model), values(twin))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", SETTINGS)
def test_servers_step_as_the_optimizer_would_and_nobody_waits_for_workers(
    world: Worlds, kind: type[Optimizer], size: int
) -> None:
    world(size).run(pushes_of_one_worker, kind)


def pushes_add_up(staleness: int | None) -> list[Tensor]:
    """Returns parameters after pushes of numbers whose sums are exact in any order."""
    rank, size, steps = dist.get_rank(), dist.get_world_size(), 8
    model = nn.Linear(5, 3)
    nn.init.constant_(model.weight, 8.0)
    nn.init.constant_(model.bias, rank)  # rank 0's is taken
    handle = ParameterServers(model, optimizer := SGD(model.parameters(), lr=0.25 * size), TIMEOUT, staleness=staleness)
    for _ in range(steps):
        model.weight.grad = torch.full((3, 5), rank + 1.0)
        optimizer.step()
        assert model.weight.grad is None
    handle.consensus()
    handle.detach()
    moved = 0.25 * steps * sum(each + 1 for each in range(size))
    assert torch.equal(model.weight, torch.full((3, 5), 8.0 - moved)), "so many steps by the mean gradient"
    assert torch.equal(model.bias, torch.zeros(3)), "there was no gradient"
    return [model.weight.detach()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("staleness", [None, 1, 3])
def test_as_many_pushes_as_workers_are_a_step_by_the_mean_gradient(
    world: Worlds, staleness: int | None, size: int
) -> None:
    world(size).run(pushes_add_up, staleness)


def a_consensus_after_training(name: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = Convolutions()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, handle = method(name).wrap(model, optimizer, TIMEOUT)
    assert handle is not None
    for _ in range(GRADIENT_STEPS + 1 + dist.get_rank() * (name == "asp")):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 2, 8, 8)).square().mean().backward()
        optimizer.step()
    means = torch.stack(everyones(model.norm.running_mean)).mean(dim=0)
    handle.consensus()
    handle.detach()
    assert all(torch.equal(each, values(model)) for each in everyones(values(model)))
    torch.testing.assert_close(model.norm.running_mean, means)
    assert not means.eq(0).any()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["asp", "ssp", "ssp1", "post_local_sgd", "post_local_sgd8"])
def test_after_a_consensus_all_have_one_model(world: Worlds, name: str, size: int) -> None:
    world(size).run(a_consensus_after_training, name)


def steps_of_one_alone(staleness: int) -> tuple[int, str]:
    """Trains one worker alone until it has to wait; returns its steps and the error."""
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = ParameterServers(model, optimizer, timedelta(seconds=2), staleness=staleness)
    steps, said = 0, ""
    if dist.get_rank() == 0:
        try:
            while True:
                give_gradients(model, 0)
                optimizer.step()
                steps += 1
        except RuntimeError as error:
            said = str(error)
    dist.barrier()
    handle.detach()
    return steps, said


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_worker_waits_where_its_lead_would_exceed_the_bound(world: Worlds, staleness: int) -> None:
    (steps, said), *_ = world(3).run(steps_of_one_alone, staleness)
    assert steps == staleness
    assert said == (
        f"step {staleness}: rank 0 is {staleness + 1} steps ahead of rank 1, which did not come further within 2 s"
    )


def leads_of_workers(staleness: int, steps: int) -> int:
    """Returns this worker's largest lead after a step; other workers count themselves before they push."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = distributed_c10d._get_default_store()
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = ParameterServers(model, optimizer, TIMEOUT, staleness=staleness)
    largest = 0
    for step in range(steps):
        pace = torch.zeros(())
        for _ in range(2000 * (rank == size - 1)):  # one is slow
            pace += 1
        store.add(f"leads {staleness} {rank}", 1)
        give_gradients(model, step)
        optimizer.step()
        largest = max(largest, step + 1 - min(store.add(f"leads {staleness} {each}", 0) for each in range(size)))
    handle.consensus()
    handle.detach()
    return largest


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_worker_is_further_ahead_than_the_bound(world: Worlds, staleness: int) -> None:
    assert max(world(3).run(leads_of_workers, staleness, 20)) <= staleness


def falls(victim: int, staleness: int | None) -> str:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = ParameterServers(model, optimizer, timedelta(seconds=5), staleness=staleness)
    dist.barrier()
    try:
        for step in range(100):
            if dist.get_rank() == victim and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            give_gradients(model, step)
            optimizer.step()
    except RuntimeError as error:
        handle.detach()
        return str(error)
    raise AssertionError("it went on")


@pytest.mark.parametrize("staleness", [None, 3])
def test_without_one_server_the_other_ranks_raise(staleness: int | None) -> None:
    with World(3) as short_lived:
        short_lived.start(falls, 1, staleness)
        first, dead, last = short_lived.outcomes(limit_s=20)
    assert dead.died
    for outcome in (first, last):
        assert outcome.error is None, outcome.error
        assert "no answer from the server on rank 1: " in outcome.value or "ahead of rank 1" in outcome.value


def what_is_refused() -> list[str]:
    said = []
    model, doubled = nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.float64)
    for refused, optimizer in (
        (model, LARS(model.parameters(), lr=1.0)),
        (doubled, SGD(doubled.parameters(), lr=1.0)),
    ):
        try:
            ParameterServers(refused, optimizer, TIMEOUT)
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_servers_cannot_step_is_refused(world: Worlds) -> None:
    ((of_kind, of_type),) = world(1).run(what_is_refused)
    assert "by SGD, Adagrad, Adam, AdamW; got LARS" in of_kind
    assert of_type == "parameter servers hold float32 on the CPU, got torch.float64 on cpu"


class Sleeping(Optimizer):
    """An optimiser as of an emulated workload."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        assert all(p.grad is None for group in self.param_groups for p in group["params"])


def steps_that_are_emulated() -> bool:
    model = perceptron()
    before = values(model)
    handle = ParameterServers(model, optimizer := Sleeping(model.parameters()), TIMEOUT)
    give_gradients(model, 0)
    optimizer.step()
    handle.consensus()
    handle.detach()
    return torch.equal(before, values(model))


def test_steps_that_are_emulated_move_nothing(world: Worlds) -> None:
    assert world(2).run(steps_that_are_emulated) == [True, True]


def local_steps_after_others(every: int) -> list[bool]:
    """Returns, for each step, whether all ranks have the same parameters after it."""
    model = nn.Linear(6, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = PostLocalSGD(model, optimizer, TIMEOUT, every=every)
    oracle = DistributedDataParallel(twin := copy.deepcopy(model))
    same = []
    for step in range(GRADIENT_STEPS + 2 * every + 1):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        handle.ddp(x).square().mean().backward()
        optimizer.step()
        if step < GRADIENT_STEPS:
            oracle.zero_grad()
            oracle(x).square().mean().backward()
            SGD(twin.parameters(), lr=0.1).step()
            torch.testing.assert_close(values(model), values(twin))
        same.append(all(torch.equal(each, values(model)) for each in everyones(values(model))))
    handle.detach()
    assert handle.mixes_by is not None
    assert len(mixings_of(handle.mixes_by, dist.get_world_size())) == every, "what a block is a multiple of"
    return same


@pytest.mark.parametrize("every", [2, 3])
def test_post_local_sgd_is_ddp_and_then_averages_in_one_step_of_so_many(world: Worlds, every: int) -> None:
    cycle = [True, *[False] * (every - 1)]
    assert world(2).run(local_steps_after_others, every) == [[True] * GRADIENT_STEPS + 2 * cycle + [True]] * 2


def test_names_say_how_far_apart_and_how_often() -> None:
    for name in ("asp", "ssp", "ssp12", "post_local_sgd", "post_local_sgd16"):
        assert method(name).name == name and not method(name).exact and not method(name).sparse
    for name in ("ssp0", "asp2", "post_local_sgd1", "post_local_sgd0"):
        with pytest.raises(ValueError, match=f"unknown method '{name}'; .* asp and ssp, parameter servers"):
            method(name)
