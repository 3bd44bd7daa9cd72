"""Measuring a job gives all ranks the same profile and does not change training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.characterization.recording import Recorder
from gradsync.devices.streams import Moment
from gradsync.engine.plan_control import MAX_OBSERVATIONS
from gradsync.engine.step_listener import recording
from gradsync.planner import default_plan
from gradsync.planner.default.network import Network
from gradsync.plans.profile import Profile, Span
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from gradsync.tuning.default import MeasuringPlanner
from gradsync.tuning.measurement import Kind, Measurement, measure
from gradsync.tuning.stopwatch import StepMoments, Stopwatch
from tests.quick import quickly
from tests.world import Ranks

STEPS, WARM_UP = 4, 3
TIMEOUT_S = 15.0
MEASURED = WARM_UP + 1 + 2 * STEPS


class Model(nn.Module):
    """A sparse table, a dense one most of whose rows stay zero, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8, sparse=True)
        self.found = nn.Embedding(3000, 32)
        self.first = nn.Linear(40, 64)
        self.second = nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.table(ids), self.found(ids)], dim=-1)
        return self.second(torch.tanh(self.first(both))).square().mean()


class Training:
    """A training loop with its own random numbers, the same in every instance."""

    def __init__(self, *, ddp: bool = False) -> None:
        torch.manual_seed(3)
        self.module = Model()
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.model: nn.Module = nn.parallel.DistributedDataParallel(self.module) if ddp else self.module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.handle: gradsync.Attachment | None = None
        self.ran = 0
        self.early = 0  # steps in which something was exchanged before backward had ended

    def attach(self) -> None:
        self.handle = gradsync.attach(self.model, plan=default_plan, timeout=TIMEOUT_S)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(500, (64,), generator=self.generator)).backward()
        self.optimizer.step()
        self.ran += 1

    def counted_step(self) -> None:
        self.step()
        assert self.handle is not None
        timeline = self.handle.timeline()
        (backward,) = (task for task in timeline if task.stream == "compute")
        flights = [task.start_s for task in timeline if task.stream == "link"]
        assert flights
        self.early += self.ran > WARM_UP and min(flights) < backward.end_s


def measured_and_not(ddp: bool) -> tuple[str, int, bool, list[str]]:
    """Returns the profile, its steps, whether weights are those of an unmeasured run, and ready names in order."""
    plain, watched = Training(ddp=ddp), Training(ddp=ddp)
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(plain.module).items()}
    for training in (plain, watched):
        training.attach()
    seen: list[StepMoments] = []
    ended = Stopwatch.step_ended

    def noted(watch: Stopwatch, now: Moment) -> StepMoments:
        seen.append(step := ended(watch, now))
        return step

    with quickly(), patch.object(Stopwatch, "step_ended", noted):
        profile = measure(watched.counted_step, model=watched.module, steps=STEPS, warmup=WARM_UP, candidates=())
    ran = watched.ran
    assert not watched.early
    watched.step()
    for _ in range(ran + 1):
        plain.step()
    ours, theirs = watched.module.state_dict(), plain.module.state_dict()
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    profile.check(specs, dist.get_world_size())
    for training in (plain, watched):
        assert training.handle is not None
        training.handle.detach()
    times = [step.times().ready_s for step in seen[WARM_UP:]]
    orders = [sorted(ready_s, key=ready_s.__getitem__) for ready_s in times]
    assert all(order == orders[0] for order in orders)
    return profile.to_json(), ran, same, orders[0]


@pytest.mark.parametrize("ddp", [False, True])
def test_all_ranks_get_the_same_profile_and_train_on_as_without(ddp: bool, world: Callable[[int], Ranks]) -> None:
    results = world(2).run(measured_and_not, ddp)
    texts, ran, same, orders = zip(*results, strict=True)
    assert texts[0] == texts[1]
    assert ran == (MEASURED, MEASURED) and same == (True, True)
    profile = Profile.from_json(texts[0])
    assert [p.name for p in profile.in_ready_order()] == orders[0] == orders[1]
    if not ddp:  # which makes gradients ready by buckets
        assert orders[0].index("second.bias") < orders[0].index("first.weight") < orders[0].index("table.weight")
    assert (profile.world, profile.nodes, profile.steps) == (2, (0, 0), STEPS)
    assert profile.parts.step_s > profile.parts.backward.median_s > profile.in_ready_order()[-1].ready.median_s > 0
    assert profile.parts.optimizer.median_s > 0
    for factor in (profile.overlap.transfer_by_kernel, profile.overlap.kernel_by_transfer):
        assert factor is not None and 0 < factor.low <= factor.value
    (link,) = profile.links
    assert (link.span, link.size, len(link.collectives)) == (Span.ALL, 2, 4)
    assert all(len(fit.points) >= 3 for fit in link.collectives.values())
    assert {"scale", "sum_ranges", "join_ranges"} <= profile.kernels.keys()
    seen = {p.name: p for p in profile.parameter_profiles()}
    table, found = seen["table.weight"], seen["found.weight"]
    assert table.sparse and table.density is not None and 50 < table.density.rows <= 64
    assert not found.sparse and found.density is not None and found.density.density < 0.05
    assert found.elements is not None and seen["first.weight"].elements is None


def planned_by_a_profile() -> tuple[bool, str]:
    """Returns whether the planner uses the measured costs, and the plan's digest."""
    first, second = Training(), Training()
    first.attach()
    with quickly():
        profile = measure(first.step, steps=1, warmup=2, candidates=())
    planner = MeasuringPlanner(Network.of(profile))
    handle = gradsync.attach(second.module, plan=planner)
    for _ in range(3):
        second.step()
    assert first.handle is not None
    first.handle.detach()
    handle.detach()
    return planner.cost == profile.cost_model(), handle.plan.digest


def test_a_profile_is_used_again_by_the_planner_that_measures(world: Callable[[int], Ranks]) -> None:
    (kept, plan), other = world(2).run(planned_by_a_profile)
    assert kept and other == (kept, plan)


def measured_over_nodes() -> str:
    """Measures four ranks on two nodes."""
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    try:
        training = Training()
        training.attach()
    finally:
        del os.environ["GROUP_RANK"]
    with quickly():
        profile = measure(training.step, steps=2, warmup=2, candidates=())
    assert training.handle is not None
    training.handle.detach()
    return profile.to_json()


def test_links_inside_nodes_and_across_them_are_told_apart(world: Callable[[int], Ranks]) -> None:
    first, *others = world(4).run(measured_over_nodes)
    assert others == [first] * 3
    profile = Profile.from_json(first)
    assert profile.nodes == (0, 0, 1, 1)
    assert [(link.span, link.size) for link in profile.links] == [(Span.ALL, 4), (Span.INSIDE, 2), (Span.ACROSS, 2)]
    cost, across = profile.cost_model(), profile.link(Span.ACROSS).link.bandwidth_bytes_per_s
    assert cost.intra is not None and cost.bandwidth_bytes_per_s == 2 * across.value


def measured_alone() -> str:
    training = Training()
    training.attach()
    with quickly():
        return gradsync.measure(training.step, steps=2, warmup=2, candidates=()).to_json()


def test_one_rank_has_no_links_to_measure(world: Callable[[int], Ranks]) -> None:
    profile = Profile.from_json(world(1).run(measured_alone)[0])
    assert (profile.world, profile.links, profile.overlap.backward_by_transfer) == (1, (), None)
    assert profile.overlap.transfer_by_kernel is profile.overlap.kernel_by_transfer is None
    assert profile.parts.backward.median_s > 0


def trial_goes_on() -> tuple[bool, bool, int]:
    """Returns whether a trial was on before and after a measurement, and the steps from there to its end."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(600, 600) for _ in range(3)]
    model = nn.Sequential(*layers)
    handle = gradsync.attach(model)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        model(torch.ones(1, 600)).sum().backward()

    for _ in range(4):
        step()
    before = not handle.settled
    with quickly():
        measure(step, steps=1, warmup=2, candidates=())
    behind, measured = not handle.settled, count
    while not handle.settled and count < 200:
        step()
    return before, behind, count - measured


def test_plans_on_trial_wait_for_the_measurement(world: Callable[[int], Ranks]) -> None:
    results = world(2).run(trial_goes_on)
    assert len(set(results)) == 1
    before, behind, left = results[0]
    assert before and behind and left > 5


def refusals() -> list[str]:
    """Returns the errors where nothing can be measured."""
    training = Training()
    said = []

    def refused(step: Callable[[], object], **settings: int) -> None:
        try:
            measure(step, **settings)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))

    refused(training.step)
    training.attach()
    refused(training.step, warmup=2 + dist.get_rank())
    with recording(Recorder(steps=9)):
        refused(training.step)
    training.step()  # nothing of it is left
    assert training.handle is not None
    training.handle.detach()
    assert torch.autograd.backward.__name__ == "backward" and not hasattr(torch.autograd.backward, "__wrapped__")
    return said


def test_what_cannot_be_measured_says_why_on_every_rank(world: Callable[[int], Ranks]) -> None:
    for unattached, differ, twice in world(2).run(refusals):
        assert "step_fn has synchronised no gradients" in unattached and "gradsync.attach(model)" in unattached
        assert "the settings of a measurement: the ranks differ" in differ and "warmup=3" in differ
        assert "recorded or measured already" in twice


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"step_fn": 3}, "step_fn must be callable, got 3"),
        ({"steps": 10**30}, r"steps must be in \[1, 1000000\]"),
        ({"steps": True}, "steps must be a whole number, got True"),
        ({"warmup": "5"}, "warmup must be a whole number, got '5'"),
        ({"model": "net"}, "model must be an instance of Module or None, got 'net'"),
        ({"candidates": 3}, "candidates must be a list, got 3"),
    ],
)
def test_wrong_arguments_are_told_before_a_step(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure(**{"step_fn": lambda: pytest.fail("no step is made"), **wrong})


def fails_beside_a_transfer() -> str:
    """Returns the error where the second rank's backward fails during a timed transfer."""
    training = Training()
    training.attach()
    busy_step = WARM_UP + 2

    def fail(gradient: Tensor) -> None:
        if training.ran == busy_step and dist.get_rank() == 1:
            raise ZeroDivisionError("a user's own error")

    training.module.first.weight.register_hook(fail)
    try:
        with quickly():
            measure(training.step, steps=STEPS, warmup=WARM_UP, candidates=())
    except (RuntimeError, ZeroDivisionError) as error:
        assert training.ran == busy_step and training.handle is not None
        training.handle.detach()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def test_a_rank_that_fails_beside_a_transfer_lets_no_other_one_wait(world: Callable[[int], Ranks]) -> None:
    first, second = world(2).run(fails_beside_a_transfer)
    assert "a user's own error" in second
    assert "rank 1" in first and "backward ended with an error on this rank" in first


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"steps must be in \[1, 1000000\], got 0"):
        Measurement(steps=0)
    with pytest.raises(ValueError, match=f"warmup must be at least {MAX_OBSERVATIONS}, .* got 1"):
        Measurement(warmup=1)
    with pytest.raises(ValueError, match=r"candidates must be compressors, or schemes of flat buckets, got 'topk'"):
        Measurement(candidates=("topk",))


def test_quiet_and_busy_steps_take_turns() -> None:
    kinds = Measurement(steps=3, warmup=2)._kinds
    quiet, transfer, kernel = Kind.QUIET, Kind.TRANSFER, Kind.KERNEL
    assert kinds == [Kind.WARM_UP, Kind.WARM_UP, Kind.LOOK, quiet, transfer, quiet, kernel, quiet, transfer]
    assert Measurement(steps=3, warmup=2).steps_needed == len(kinds)
