"""plan="auto": the job is measured, plans are searched and tried, one stays; gradients are right all the while."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.auto import AutoPlanner
from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.drift import WINDOW_STEPS
from gradsync.planner import rehearsed
from gradsync.planner.ways import Constraints
from gradsync.schemes import HalfPrecision
from gradsync.trial import ROUNDS, TURN_STEPS
from tests.engine.models import Perceptron
from tests.world import Ranks, new_oracle_group

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(BlockInt(8))
MEASURED, WARMUP, MOST_PLANS = 2, 2, 6
LONGEST = WARMUP + 1 + 2 * MEASURED + MOST_PLANS * ROUNDS * TURN_STEPS


class WithTable(nn.Module):
    """A table with sparse gradients below dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 8, sparse=True)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table((x.abs() * 50).long() % 200)).mean(dim=1)


@contextmanager
def quickly() -> Iterator[None]:
    """Inside, what kernels cost is measured of few: it is not the matter here."""
    usual = rehearsed.PLANNED, rehearsed.NUMELS
    rehearsed.PLANNED, rehearsed.NUMELS = (), (256, 1024, 4096)
    try:
        yield
    finally:
        rehearsed.PLANNED, rehearsed.NUMELS = usual


def gradients(model: nn.Module, step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model.zero_grad()
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}


@quickly()
def trains_by_means_until_a_plan_stays(make: Callable[[], nn.Module]) -> tuple[str, int]:
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
    assert not handle.settled
    step = 0
    while not handle.settled and step < LONGEST:
        mine = gradients(model, step, dist.get_rank())
        means = [gradients(alone, step, rank) for rank in range(dist.get_world_size())]
        for name, gradient in mine.items():
            mean = torch.stack([of_rank[name] for of_rank in means]).mean(dim=0)
            torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)
        step += 1
    assert handle.settled
    gradients(model, step, dist.get_rank())
    digest = handle.plan.digest
    handle.detach()
    return digest, step


@pytest.mark.parametrize("make", [Perceptron, WithTable])
def test_gradients_are_means_until_one_plan_stays_on_all_ranks(world: World, make: Callable[[], nn.Module]) -> None:
    found = world(2).run(trains_by_means_until_a_plan_stays, make)
    assert len(set(found)) == 1, "the same plan after the same number of steps"
    assert found[0][1] > WARMUP + 2 * MEASURED


@quickly()
def loses_nothing_for_good() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    alone = copy.deepcopy(model)
    allowed = Constraints(lossy=(FEEDBACK, HalfPrecision(values="bfloat16")), most_error=1.0)
    handle = gradsync.attach(model, plan=AutoPlanner(allowed, steps=MEASURED, warmup=WARMUP), timeout=20)
    came_in, came_out = ({n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(2))
    size = dist.get_world_size()
    for step in range(LONGEST + 5):
        for name, gradient in gradients(model, step, dist.get_rank()).items():
            came_out[name] += size * gradient
        for rank in range(size):
            for name, gradient in gradients(alone, step, rank).items():
                came_in[name] += gradient
    assert handle.settled
    left = torch.zeros(1)
    for key, values in handle.state_dict()["state"].items():
        left += values.abs().sum() if key.endswith(".residual") else 0.0
    dist.all_reduce(left)
    for name, total in came_in.items():
        lost, most = (total - came_out[name]).abs().sum(), 0.02 * total.abs().sum()
        assert lost <= left.item() + most + 1e-6, f"{name}: bfloat16 rounds, all else is left to be sent"
    handle.detach()


def test_lossy_plans_that_are_tried_lose_nothing_for_good(world: World) -> None:
    world(2).run(loses_nothing_for_good)


@quickly()
def detached_while_it_is_measured() -> None:
    model = Perceptron()
    for steps in (1, WARMUP + 2):
        handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
        for step in range(steps):
            gradients(model, step, dist.get_rank())
        handle.detach()
    usual = torch.autograd.backward
    assert usual.__module__ == "torch.autograd", "backward is torch's again"
    handle = gradsync.attach(model, plan="auto", timeout=20)
    handle.detach()


def test_it_can_be_detached_while_it_is_measured(world: World) -> None:
    world(2).run(detached_while_it_is_measured)


def stays_by_default() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        handle = gradsync.attach(Perceptron(), plan="auto", timeout=20)
    finally:
        torch.use_deterministic_algorithms(False)
    model = Perceptron()
    gradients(model, 0, 0)
    handle.detach()


def test_deterministic_jobs_keep_the_default_plan(world: World) -> None:
    world(2).run(stays_by_default)


@quickly()
def measured_again_when_steps_take_longer() -> list[bool]:
    from gradsync import drift, planning

    planning.Drift = Impatient  # type: ignore[misc, assignment]
    try:
        torch.manual_seed(0)
        model = Perceptron()
        handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
        seen = []
        for step in range(3 * LONGEST):
            gradients(model, step, dist.get_rank())
            seen.append(handle.settled)
        handle.detach()
        return seen
    finally:
        planning.Drift = drift.Drift  # type: ignore[misc]


class Impatient:
    """Sees a change ten steps after a plan stays, once."""

    seen = 0

    def __init__(self) -> None:
        self._steps = 0
        self.median_s = 0.1

    def step_ended(self, seconds: float) -> bool:
        self._steps += 1
        return self._steps == 10

    def judge(self, slowest_s: float) -> bool:
        Impatient.seen += 1
        return Impatient.seen == 1


def test_a_job_that_has_changed_is_measured_and_planned_for_again(world: World) -> None:
    for seen in world(2).run(measured_again_when_steps_take_longer):
        first = seen.index(True)
        again = seen.index(False, first)
        assert True in seen[again:] and seen[-1]
    assert WINDOW_STEPS > 10


@quickly()
def plans_behind_ddp() -> str:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Perceptron(), process_group=new_oracle_group())
    alone = copy.deepcopy(model.module)
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
    step = 0
    while not handle.settled and step < LONGEST:
        mine = gradients(model, step, dist.get_rank())
        means = [gradients(alone, step, rank) for rank in range(dist.get_world_size())]
        for name, gradient in mine.items():
            mean = torch.stack([of_rank[name.removeprefix("module.")] for of_rank in means]).mean(dim=0)
            torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)
        step += 1
    assert handle.settled and handle.profile is not None
    digest = handle.plan.digest
    handle.detach()
    return digest


def test_it_plans_behind_ddps_hook_too(world: World) -> None:
    assert len(set(world(2).run(plans_behind_ddp))) == 1
