"""Plans on trial: every step's gradients are the mean whatever plan runs, and all ranks keep the same, fastest one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.bucket import TensorSpec
from gradsync.comm import Group
from gradsync.density import ParameterProfile
from gradsync.planner import default_plan, default_plans
from gradsync.schemes import AllReduce, State
from gradsync.schemes.base import register
from gradsync.trial import ROUNDS, TURN_STEPS
from tests.engine.models import Perceptron
from tests.engine.twins import assert_same_on_all_ranks, averaged
from tests.world import Ranks

World = Callable[[int], Ranks]


@register
@dataclass(frozen=True)
class Tardy(AllReduce):
    """All-reduce that takes its time."""

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        time.sleep(0.05)
        return await super().synchronize(x, state, group, scale)


def slow_first(profiles: Sequence[ParameterProfile], world_size: int) -> list[gradsync.Plan]:
    """Of three plans the second one is fast."""
    specs = {p.name: p.tensor for p in profiles}
    names = [p.name for p in profiles]
    return [
        gradsync.Plan.make(specs, world_size, [(names, Tardy())]),
        gradsync.Plan.make(specs, world_size, [(names[:3], AllReduce()), (names[3:], AllReduce())]),
        gradsync.Plan.make(specs, world_size, [(names[::-1], Tardy())]),
    ]


def kept_plan(wrap: bool) -> tuple[list[bool], list[int], list[list[str]]]:
    torch.manual_seed(0)
    local = Perceptron()
    torch.manual_seed(0)
    inner = Perceptron()
    model = DistributedDataParallel(inner) if wrap else inner
    handle = gradsync.attach(model, plan=slow_first, timeout=15)
    settled, buckets = [], []
    for number in range(3 * ROUNDS * TURN_STEPS + 3):
        torch.manual_seed(10 * number + dist.get_rank())
        x = torch.randn(4, 6)
        for each in (local, model):
            each.zero_grad()
            each(x).square().mean().backward()
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
    assert settled.index(True) == 3 * ROUNDS * TURN_STEPS + 1  # one step is observed, one runs before the plan is new
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


class Wide(nn.Module):
    """Five MiB in twenty tensors: enough for buckets of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(20)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def settles_when_timing_must_not_decide() -> list[bool]:
    settled = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        model = Wide()
        handle = gradsync.attach(model, timeout=15)
        for _ in range(2):
            model(torch.ones(1, 256)).sum().backward()
        settled.append(handle.settled)
        handle.detach()
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
    assert [len(plan.buckets) for plan in wide] == [2, 5, 5] and wide[0] == default_plan(profiles(Wide()), 4)
