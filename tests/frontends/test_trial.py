"""Plans on trial: every step's gradients are the mean under any plan, and all ranks keep the same, fastest plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.comm import Group
from gradsync.devices.streams import HostMoment, Moment
from gradsync.engine.plan_control import Planner
from gradsync.engine.trial import CLOSE, FAR, TURN_STEPS, Trial
from gradsync.planner import default_plan, default_plans
from gradsync.schemes import AllReduce, State, register
from gradsync.tensors.bucket import Bucket, TensorSpec
from gradsync.tensors.density import ParameterProfile
from tests.frontends.models import Perceptron
from tests.frontends.twins import assert_same_on_all_ranks, averaged
from tests.world import Ranks

World = Callable[[int], Ranks]


class Clock:
    """A clock for trials that does not depend on how busy the machine is."""

    now_s = 0.0


def timed_step_ended(
    trial: Trial[Any], _: Moment, usual: Callable[[Trial[Any], Moment], bool] = Trial.step_ended
) -> bool:
    Clock.now_s += 0.01
    return usual(trial, HostMoment(Clock.now_s))


@register
@dataclass(frozen=True)
class Tardy(AllReduce):
    """All-reduce with a delay."""

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        Clock.now_s += 0.01 * ((CLOSE + FAR) / 2 - 1)  # not far behind, and not close
        return await super().synchronize(x, state, group, scale)


def slow_first(profiles: Sequence[ParameterProfile], world_size: int) -> list[gradsync.Plan]:
    """Returns three plans; the second one is the fastest."""
    specs = {p.name: p.tensor for p in profiles}
    names = [p.name for p in profiles]
    return [
        gradsync.Plan.make(specs, world_size, [(names, Tardy())]),
        gradsync.Plan.make(specs, world_size, [(names[:3], AllReduce()), (names[3:], AllReduce())]),
        gradsync.Plan.make(specs, world_size, [(names[::-1], Tardy())]),
    ]


@patch.object(Trial, "step_ended", timed_step_ended)
def kept_plan(wrap: bool) -> tuple[list[bool], list[int], list[list[str]]]:
    torch.manual_seed(0)
    local = Perceptron()
    torch.manual_seed(0)
    inner = Perceptron()
    model = DistributedDataParallel(inner) if wrap else inner
    handle = gradsync.attach(model, plan=slow_first, timeout=15)
    settled, buckets = [], []
    for number in range(3 * 2 * TURN_STEPS + 3):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(4, 6)
        for each in (local, model):
            each.zero_grad(set_to_none=number % 2 == 0)
            with nullcontext() if each is local or number % 3 else handle.no_sync():
                each(x).square().mean().backward()
            if number % 3 == 0:
                each(x + 1).square().mean().backward()
        for got, own in zip(model.parameters(), local.parameters(), strict=True):
            assert got.grad is not None and own.grad is not None
            torch.testing.assert_close(got.grad, averaged(own.grad), rtol=1e-5, atol=1e-6)
        settled.append(handle.settled)
        buckets.append(len(handle.plan.buckets))
    assert_same_on_all_ranks(dict(inner.named_parameters()))
    plan = handle.plan
    handle.detach()
    return settled, buckets, [bucket.names for bucket in plan.buckets]


@pytest.mark.parametrize("wrap", [False, True], ids=["attach", "ddp"])
def test_the_fastest_plan_is_kept_on_all_ranks(world: World, wrap: bool) -> None:
    first, second = world(2).run(kept_plan, wrap)
    assert first == second
    settled, buckets, names = first
    assert [len(bucket) for bucket in names] == [3, 5]
    assert settled.index(True) == 3 * 2 * TURN_STEPS + 1  # one step is observed, one runs before the plan is new
    assert set(buckets[: settled.index(True)]) == {1, 2}


def planner_without_plans() -> str:
    model = nn.Linear(3, 3)
    try:
        gradsync.attach(model, plan=lambda profiles, world_size: [], timeout=15)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_planner_without_plans_is_refused(world: World) -> None:
    assert all("the planner made no plan" in message for message in world(2).run(planner_without_plans))


def one_fits_not(profiles: Sequence[ParameterProfile], world_size: int) -> list[gradsync.Plan]:
    """Returns two plans, the second for another world size."""
    plans = default_plan(profiles, world_size), default_plan(profiles, world_size + 1)
    return list(plans[: 1 + any(p.position for p in profiles)])


def state_has_no_place(profiles: Sequence[ParameterProfile], world_size: int) -> list[gradsync.Plan]:
    """Returns two plans, the second without a place for the residual of the first."""
    specs, names = {p.name: p.tensor for p in profiles}, [p.name for p in profiles]
    return [gradsync.Plan.make(specs, world_size, [(names, scheme)]) for scheme in (Residual(), AllReduce())]


@register
@dataclass(frozen=True)
class Residual(AllReduce):
    """All-reduce with state."""

    def init(self, bucket: Bucket, group: Group) -> State:
        return {"residual": torch.zeros(bucket.numel)}


def fails_with(planner: Planner) -> tuple[list[str], int]:
    """Returns the errors of all steps from the first that fails, and the number of good ones."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    handle = gradsync.attach(model, plan=planner, timeout=15)
    errors, good = [], 0
    for _ in range(2 + TURN_STEPS):
        try:
            model(torch.ones(2, 3)).sum().backward()
            good += 1
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    handle.detach()
    return errors, good


@pytest.mark.parametrize(
    ("planner", "message", "steps"),
    [
        (one_fits_not, "the plan is for 3 ranks, this job has 2", 0),
        (state_has_no_place, "has no place for the state", 1 + TURN_STEPS),
    ],
)
def test_plans_that_do_not_fit_stop_every_rank(world: World, planner: Planner, message: str, steps: int) -> None:
    for errors, good in world(2).run(fails_with, planner):
        assert message in errors[0] and good == steps
        assert all("gradient synchronisation stopped earlier" in error for error in errors[1:])


class Wide(nn.Module):
    """A model of 5 MiB in twenty tensors: enough for buckets of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(20)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def settles_when_timing_must_not_decide() -> list[bool]:
    settled = []
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            model = Wide()
            handle = gradsync.attach(model, timeout=15)
            for _ in range(2):
                model(torch.ones(1, 256)).sum().backward()
            settled.append(handle.settled)
            handle.detach()
            assert handle.settled
    finally:
        torch.use_deterministic_algorithms(False)
    return settled


def test_deterministic_algorithms_are_not_chosen_by_time(world: World) -> None:
    for settled in world(2).run(settles_when_timing_must_not_decide):
        assert settled == [False, True]


def test_bucket_sizes_are_tried_only_where_they_differ() -> None:
    def profiles(model: nn.Module) -> list[ParameterProfile]:
        return [ParameterProfile(n, TensorSpec.of(p), sparse=False) for n, p in model.named_parameters()]

    assert len(default_plans(profiles(Perceptron()), 4)) == 1
    wide = default_plans(profiles(Wide()), 4)
    assert [len(plan.buckets) for plan in wide] == [2, 5] and wide[0] == default_plan(profiles(Wide()), 4)
    assert len(default_plans(profiles(Wide()), 1)) == 1  # nothing travels
    large = [replace(p, tensor=TensorSpec((1 << 20,), torch.float32)) for p in profiles(Wide())]
    assert [len(plan.buckets) for plan in default_plans(large, 4)] == [4, 20]
