"""Measurements and plans on an accelerator, as a model: by the device's clock, whatever the host's says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Group
from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.planner import default_plan
from gradsync.planner.search.ways import Constraints
from gradsync.plans.plan import Plan
from gradsync.plans.profile import Profile, Span
from gradsync.schemes import AGSparse, AllReduce, CompressedAllGather, HalfPrecision, State, register
from gradsync.tensors.density import ParameterProfile
from gradsync.tuning.auto import AutoPlanner
from gradsync.tuning.measurement import measure
from tests.quick import quickly
from tests.stream_model import BYTE_S, CALL_S, LINK_BYTE_S, MESSAGE_S, on_a_pretended_accelerator
from tests.world import Ranks

pytestmark = pytest.mark.streams

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(BlockInt(8))
PAUSE_S = 0.02  # of the host, in each forward
MOST_STEPS = 150
LONG = 1 << 20  # elements that a tardy scheme's device works on


@register
@dataclass(frozen=True)
class SlowOnDevice(AllReduce):
    """All-reduce behind work of the device that the host hardly notices."""

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        torch.zeros(LONG).add_(1.0)
        return await super().synchronize(x, state, group, scale)


class Net(nn.Module):
    """A sparse table below a perceptron, whose host code is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 16, sparse=True)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return self.layers(self.table(rows).mean(1))


class Training:
    """A training loop on the pretended device."""

    def __init__(self, plan: object) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.handle = gradsync.attach(self.net, self.optimizer, plan, timeout=20)  # type: ignore[arg-type]
        self._draws = torch.Generator().manual_seed(torch.distributed.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(torch.randint(200, (6, 3), generator=self._draws)).square().mean().backward()
        self.optimizer.step()


def measured() -> str:
    with on_a_pretended_accelerator(), quickly():
        training = Training(default_plan)
        profile = measure(training.step, steps=4, warmup=3, candidates=(CompressedAllGather(FEEDBACK),))
        training.handle.detach()
    return profile.to_json()


def test_a_job_is_measured_by_the_clock_of_its_device(world: World) -> None:
    texts = world(2).run(measured)
    assert texts[0] == texts[1]
    profile = Profile.from_json(texts[0])
    assert profile.parts.step_s < PAUSE_S / 2, "the host's pauses are none of the device's"
    backward_s = profile.parts.backward.median_s
    assert backward_s > 10 * CALL_S
    ready = [parameter.ready.median_s for parameter in profile.in_ready_order()]
    assert ready == sorted(ready) and 0 < ready[0] < ready[-1] <= backward_s
    spread_s = profile.parts.backward.spread_s
    assert spread_s < 1e-6 * backward_s, "the pretended device takes the same time in each step"
    link = profile.link(Span.ALL)
    assert link.link.bandwidth_bytes_per_s.value == pytest.approx(1 / LINK_BYTE_S, rel=0.2)
    all_reduce = link.collectives[next(iter(link.collectives))].points
    assert all(point.seconds.value >= MESSAGE_S for point in all_reduce)
    assert 0 < profile.kernels["scale"].byte_s.value < 20 * BYTE_S
    assert profile.host is not None
    assert {FEEDBACK.kernel("compress"), FEEDBACK.kernel("decompress")} <= profile.host.kernels.keys()


def planned() -> tuple[str, list[float]]:
    with on_a_pretended_accelerator(), quickly():
        training = Training(AutoPlanner(Constraints(lossy=(HalfPrecision(),)), steps=2, warmup=2))
        for _ in range(MOST_STEPS):
            training.step()
            if training.handle.settled:
                break
        assert training.handle.settled
        profile, plan = training.handle.profile, training.handle.plan
        sums = [float(parameter.detach().double().sum()) for parameter in training.net.parameters()]
        training.handle.detach()
    assert profile is not None
    return plan.digest, sums


def test_plans_are_searched_and_tried_there(world: World) -> None:
    (plan, sums), (other, others) = world(2).run(planned, limit_s=110)
    assert plan == other and sums == others


def ended_by_a_trial() -> str:
    """Returns the scheme of the plan that stays, of two of which the first one takes the device longer."""

    def two(profiles: Sequence[ParameterProfile], world_size: int) -> list[Plan]:
        specs = {p.name: p.tensor for p in profiles}
        table, *dense = specs
        return [
            Plan.make(specs, world_size, [(dense, s), ([table], AGSparse())]) for s in (SlowOnDevice(), HalfPrecision())
        ]

    with on_a_pretended_accelerator(), quickly():
        training = Training(two)
        for _ in range(MOST_STEPS):
            training.step()
            if training.handle.settled:
                break
        kept = training.handle.plan.buckets[0].scheme.name
        training.handle.detach()
    return kept


def test_a_trial_counts_the_device_s_time(world: World) -> None:
    assert world(2).run(ended_by_a_trial) == ["half_precision"] * 2
