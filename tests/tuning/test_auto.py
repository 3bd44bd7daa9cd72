"""plan="auto": the job is measured, plans are searched and tried, one stays; gradients stay right throughout."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.characterization.recording import Recorder
from gradsync.compressors import ErrorFeedback, Signum, TopK, dgc
from gradsync.devices.streams import Moment
from gradsync.engine.plan_control import ASK_AGAIN_STEPS
from gradsync.engine.step_listener import active, recording
from gradsync.engine.trial import RUN_OFF_ROUNDS, TURN_STEPS
from gradsync.planner import CompressingPlanner, Constraints, Job, Search, candidate_plans, default_plan
from gradsync.planner.pieces import InPieces, Pieces
from gradsync.plans.profile import Profile
from gradsync.schemes import MajorityVote
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import ParameterProfile
from gradsync.tuning import auto
from gradsync.tuning.auto import AutoMeasurement, AutoPlanner
from gradsync_lab.rivals.rival_plans import CountedCuts, layerwise_plans
from tests.frontends.conservation import left_to_send
from tests.frontends.models import Perceptron
from tests.quick import FEWER, patched, quickly
from tests.world import Ranks, new_oracle_group

World = Callable[[int], Ranks]
TOP = ErrorFeedback(TopK(0.05))
MEASURED, WARMUP, MOST_PLANS = 2, 2, 6
TRIAL_STEPS = (MOST_PLANS * 2 + 2 * RUN_OFF_ROUNDS) * TURN_STEPS
LONGEST = 2 * TRIAL_STEPS + ASK_AGAIN_STEPS + WARMUP + 1 + 2 * MEASURED


class WithTable(nn.Module):
    """A table with sparse gradients below dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 8, sparse=True)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table((x.abs() * 50).long() % 200)).mean(dim=1)


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


def on_slow_links(job: Job, constraints: Constraints) -> list[gradsync.Plan]:
    """Returns plans for links of 100 kB/s, where compressing pays."""
    slow = replace(job.network, cost=replace(job.network.cost, bandwidth_bytes_per_s=1e5))
    return candidate_plans(replace(job, network=slow), constraints)


class Convolution(nn.Module):
    """A convolution with channels-last parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(6, 16, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.view(4, 6, 1, 1).expand(4, 6, 3, 3)).flatten(1)


@quickly()
def loses_nothing_for_good(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    alone = copy.deepcopy(model)
    planner = AutoPlanner(Constraints((TOP,)), steps=MEASURED, warmup=WARMUP, search=on_slow_links)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    came_in, came_out = ({n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(2))
    ran: dict[str, bool] = {}
    for step in range(LONGEST + 5):
        ran[handle.plan.digest] = all(bucket.scheme.traits.exact for bucket in handle.plan.buckets)
        for name, gradient in gradients(model, step, dist.get_rank()).items():
            came_out[name] += dist.get_world_size() * gradient
        for name, gradient in gradients(alone, step, dist.get_rank()).items():
            came_in[name] += gradient
    assert handle.settled and set(ran.values()) == {True, False}, "plans that lose something and plans that do not"
    left = left_to_send(model, handle.state_dict()["state"])
    for name, total in came_in.items():
        sent = total - left[name].view_as(total)
        dist.all_reduce(sent)
        torch.testing.assert_close(sent, came_out[name], rtol=1e-4, atol=1e-4)
    handle.detach()


@pytest.mark.parametrize("make", [Perceptron, Convolution])
def test_lossy_plans_that_are_tried_lose_nothing_for_good(world: World, make: Callable[[], nn.Module]) -> None:
    world(2).run(loses_nothing_for_good, make)


def until_it_is_measured(model: nn.Module, handle: gradsync.Attachment, steps: int = 0) -> int:
    """Trains until the job is measured, and `steps` more; returns the number of steps."""
    step = 0
    while active() is None:
        assert step < LONGEST and not handle.settled
        gradients(model, step, dist.get_rank())
        step += 1
    for more in range(steps):
        gradients(model, step + more, dist.get_rank())
    return step + steps


@quickly()
def plans_before_it_is_measured(always: bool) -> tuple[list[str], str, str | None]:
    """Returns the plans before the measurement, the plan of the measured steps, and the present one told the search."""
    torch.manual_seed(0)
    model, told = Perceptron(), []

    def search(job: Job, constraints: Constraints) -> list[gradsync.Plan]:
        told.append(job.present and job.present.digest)
        return layerwise_plans(job, constraints)

    planner = AutoPlanner(Constraints((TOP,), always=always), steps=MEASURED, warmup=WARMUP, search=search)
    with patch.object(auto, "default_planner", lambda: two_plans):
        handle = gradsync.attach(model, plan=planner, timeout=20)
    ran = []
    for step in range(LONGEST):
        ran.append(handle.plan.digest)
        gradients(model, step, dist.get_rank())
        if active() is not None:
            break
    measured = handle.plan.digest
    settle(model, handle)
    handle.detach()
    return list(dict.fromkeys(ran)), measured, told[0] if told else None


def two_plans(profiles: Sequence[ParameterProfile], size: int) -> list[gradsync.Plan]:
    return [default_plan(profiles, size, bucket_bytes=nbytes) for nbytes in (1 << 20, 64)]


def test_the_default_planner_chooses_first_and_its_plan_is_what_others_must_beat(world: World) -> None:
    first, second = world(2).run(plans_before_it_is_measured, False)
    ran, measured, told = first
    assert len(ran) == 3 and measured in ran, "plans were tried before anything was measured"
    assert told == measured and second[:2] == first[:2] and second[2] is None, "rank 0 searches"


def test_nothing_is_tried_first_where_no_exact_plan_may_stay(world: World) -> None:
    (ran, measured, told), _ = world(2).run(plans_before_it_is_measured, True)
    assert len(ran) == 2 and ran[-1] == measured and told is None, "the order of gradients showed in the first step"


@quickly()
def detached_while_it_is_measured() -> None:
    model = Perceptron()
    for measured in (None, 0, WARMUP + 2):
        handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
        if measured is None:
            gradients(model, 0, dist.get_rank())
        else:
            until_it_is_measured(model, handle, measured)
        handle.detach()
        assert active() is None
    usual = torch.autograd.backward
    assert usual.__module__ == "torch.autograd", "backward is torch's again"
    handle = gradsync.attach(model, plan="auto", timeout=20)
    handle.detach()


def test_it_can_be_detached_while_it_is_measured(world: World) -> None:
    world(2).run(detached_while_it_is_measured)


def stays_by_default(deterministic_rank: int | None, recorded_rank: int | None) -> str:
    model = Perceptron()
    torch.use_deterministic_algorithms(dist.get_rank() == deterministic_rank)
    recorded = recording(Recorder(1000)) if dist.get_rank() == recorded_rank else nullcontext()
    with recorded:
        handle = gradsync.attach(model, plan="auto", timeout=20)
        torch.use_deterministic_algorithms(False)
        first = handle.plan.digest
        for step in range(4):
            gradients(model, step, dist.get_rank())
        assert handle.settled and handle.profile is None
        handle.detach()
    return first


@pytest.mark.parametrize(("deterministic", "recorded"), [(0, None), (1, None), (None, 0), (None, 1)])
def test_jobs_that_some_rank_cannot_measure_keep_the_default_plan(
    world: World, deterministic: int | None, recorded: int | None
) -> None:
    assert len(set(world(2).run(stays_by_default, deterministic, recorded))) == 1


@quickly()
def waits_for_a_recorder() -> tuple[bool, bool]:
    """Returns whether a job is measured while somebody records its later steps, and whether it is after that."""
    model = Perceptron()
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
    gradients(model, 0, dist.get_rank())
    with recording(Recorder(1000)):
        for step in range(3 * ASK_AGAIN_STEPS):
            gradients(model, step, dist.get_rank())
        meanwhile = handle.profile is not None or isinstance(active(), AutoMeasurement)
    settle(model, handle)
    measured = handle.profile is not None
    handle.detach()
    return meanwhile, measured


def test_a_search_waits_until_a_recorder_that_began_later_has_ended(world: World) -> None:
    assert world(2).run(waits_for_a_recorder) == [(False, True)] * 2


def no_plans(job: Job, constraints: Constraints) -> list[gradsync.Plan]:
    raise ValueError("nothing will do")


@quickly()
def no_plan_is_found() -> bool:
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP, search=no_plans), timeout=20)
    until_it_is_measured(model, handle)
    present = handle.plan.digest
    for step in range(LONGEST):
        gradients(model, step, dist.get_rank())
    same = handle.settled and handle.plan.digest == present
    handle.detach()
    return same


def test_training_goes_on_where_no_plan_is_found(world: World) -> None:
    assert world(2).run(no_plan_is_found) == [True, True]


@quickly()
def must_plan_and_cannot() -> list[str]:
    """Returns the errors on this rank, after checking that another model can still be measured."""
    said = []
    for search in (no_plans, lambda job, constraints: []):
        model = Perceptron()
        planner = AutoPlanner(steps=MEASURED, warmup=WARMUP, search=search, must_plan=True)
        handle = gradsync.attach(model, plan=planner, timeout=20)
        try:
            for step in range(LONGEST):
                gradients(model, step, dist.get_rank())
        except RuntimeError as error:
            said.append(str(error))
        handle.detach()
    model = Perceptron()
    torch.use_deterministic_algorithms(True)
    try:
        gradsync.attach(model, plan=AutoPlanner(must_plan=True), timeout=20)
    except RuntimeError as error:
        said.append(str(error))
    finally:
        torch.use_deterministic_algorithms(False)
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
    for step in range(LONGEST):
        gradients(model, step, dist.get_rank())
    assert handle.settled and handle.profile is not None
    handle.detach()
    return said


def test_a_job_that_must_be_planned_for_and_cannot_raises_on_all_ranks_and_measures_no_longer(world: World) -> None:
    for said in world(2).run(must_plan_and_cannot):
        assert said == [
            "no plan was found: ValueError: nothing will do",
            "no plan was found: the search returned none",
            "the job cannot be measured: torch.use_deterministic_algorithms is on, and timing would decide",
        ]


@quickly()
def runs_what_a_search_finds() -> tuple[list[list[str]], float]:
    """Returns the buckets' names under DGC, and the distance of the first step's gradients from the means."""
    torch.manual_seed(0)
    model = Perceptron()
    alone = copy.deepcopy(model)
    lossy = dgc(1.0, momentum=0.0)  # keeps state of its own, and loses nothing
    constraints = Constraints((lossy,), always=True, matrices_only=True)
    planner = AutoPlanner(constraints, steps=MEASURED, warmup=WARMUP, search=CountedCuts(2), must_plan=True)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    step = 0
    while not handle.settled:
        gradients(model, step, dist.get_rank())
        step += 1
    mine = gradients(model, step, dist.get_rank())
    means = [gradients(alone, step, rank) for rank in range(dist.get_world_size())]
    worst = max(
        float((mine[name] - torch.stack([of_rank[name] for of_rank in means]).mean(dim=0)).abs().max())
        for name in mine
        if mine[name].numel()
    )
    names = [bucket.names for bucket in handle.plan.buckets if not bucket.scheme.traits.exact]
    handle.detach()
    return names, worst


def test_the_plan_of_another_search_runs_with_momentum_too_where_all_that_may_be_is_compressed(world: World) -> None:
    (names, worst), other = world(2).run(runs_what_a_search_finds)
    assert other[0] == names and len(names) == 2
    assert {name for bucket in names for name in bucket} == {f"layers.{n}.weight" for n in (0, 2, 4)} | {"nothing"}
    assert worst < 1e-6


class DenseTable(nn.Module):
    """A table whose gradients have dense layout and are mostly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20_000, 16)
        self.body = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table((x.abs() * 50).long() % 200)).mean(dim=1)


@quickly()
def compresses_no_rows(search: Search) -> tuple[dict[str, str], float]:
    torch.manual_seed(0)
    model = DenseTable()
    alone = copy.deepcopy(model)
    constraints = Constraints((TOP,), always=True)
    planner = AutoPlanner(constraints, steps=MEASURED, warmup=WARMUP, search=search, must_plan=True)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    step = 0
    while not handle.settled:
        gradients(model, step, dist.get_rank())
        step += 1
    worst = 0.0
    for number in range(step, step + 3):
        mine = gradients(model, number, dist.get_rank())["table.weight"]
        means = [gradients(alone, number, rank)["table.weight"] for rank in range(dist.get_world_size())]
        worst = max(worst, float((mine - torch.stack(means).mean(dim=0)).abs().max()))
    schemes = {name: bucket.scheme for bucket in handle.plan.buckets for name in bucket.names}
    handle.detach()
    return {
        name: scheme.traits.layout.value if scheme.traits.exact else "lossy" for name, scheme in schemes.items()
    }, worst


@pytest.mark.parametrize("search", [candidate_plans, layerwise_plans])
def test_dense_gradients_found_sparse_by_rows_lose_nothing_where_all_others_do(world: World, search: Search) -> None:
    for ways, worst in world(2).run(compresses_no_rows, search):
        assert ways == {"table.weight": Layout.ROWS.value, "body.weight": "lossy", "body.bias": "lossy"}
        assert worst < 1e-6


def a_table_both_ways(job: Job, constraints: Constraints) -> list[gradsync.Plan]:
    """Returns a plan that compresses a table, and one that sends its rows."""
    compressing = CompressingPlanner(constraints.lossy[0])(job.profiles, job.world_size)
    return [compressing, default_plan(job.profiles, job.world_size)]


@quickly()
def residual_of_a_table() -> tuple[str, list[str], list[str]]:
    """Returns how a table travels, and which of two plans, compressed or by rows, may follow the present one."""
    torch.manual_seed(0)
    model = DenseTable()
    constraints = Constraints((TOP,), always=True)
    planner = AutoPlanner(constraints, steps=MEASURED, warmup=WARMUP, search=a_table_both_ways, must_plan=True)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    settle(model, handle)
    engine = handle._engine
    scheme = next(bucket.scheme for bucket in handle.plan.buckets if "table.weight" in bucket.names)
    assert any(key.startswith("table.weight") for key in handle.state_dict()["state"])
    rows = default_plan(list(engine.profiles.values()), 2)
    followers = [[p.digest for p in engine.followers(plans)] for plans in ([rows, handle.plan], [rows])]
    assert followers[0] == [handle.plan.digest]
    handle.detach()
    return scheme.traits.layout.value, *followers


def test_rows_of_a_table_are_not_tried_beside_plans_that_keep_its_residual(world: World) -> None:
    for layout, either, rows_only in world(2).run(residual_of_a_table):
        assert layout == Layout.FLAT.value and len(either) == 1 and rows_only == []


def test_planners_of_the_same_constraints_and_search_have_the_same_settings() -> None:
    searches = (candidate_plans, layerwise_plans, CountedCuts(2), CountedCuts(3), lambda job, constraints: [])
    settings = [AutoPlanner(search=search).settings for search in searches]
    assert len(set(settings)) == len(searches)
    assert AutoPlanner(search=CountedCuts(2)).settings == settings[2]
    assert AutoPlanner(Constraints((TOP,))).settings != AutoPlanner().settings == settings[0]


def test_what_cannot_be_planned_for_is_refused_when_the_planner_is_made() -> None:
    for lossy in (dgc(0.01, momentum=0.9), MajorityVote(Signum())):
        with pytest.raises(ValueError, match=r"keeps momentum, .* automatic plans cannot try it"):
            AutoPlanner(Constraints((lossy,)))
    for wrong, said in (
        ({"steps": 0}, r"steps must be in \[1, 1000000\], got 0"),
        ({"steps": 10**30}, r"steps must be in \[1, 1000000\], got 10"),
        ({"warmup": 3.0}, "warmup must be a whole number, got 3.0"),
        ({"constraints": [TOP]}, "constraints must be .*Constraints or None, got"),
        ({"search": "best"}, "search must be callable, got 'best'"),
        ({"must_plan": 1}, "must_plan must be True or False, got 1"),
        ({"averaging": True}, "averaging must be .*AveragingPlanner or None, got True"),
    ):
        with pytest.raises(ValueError, match=said):
            AutoPlanner(**wrong)  # type: ignore[arg-type]
    specs = [ParameterProfile("w", TensorSpec((2,), torch.float32), sparse=False)]
    with pytest.raises(ValueError, match="exact names 'typo', which no parameter"):
        AutoPlanner(Constraints((TOP,), exact=("typo",)))(specs, 2)


@quickly()
def measured_again_when_steps_take_longer() -> list[bool]:
    from gradsync.engine import drift, plan_control

    Impatient.seen = 0  # of this test: the process may have served others
    plan_control.Drift = Impatient
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
        plan_control.Drift = drift.Drift


class Impatient:
    """A drift detector that reports one change, ten steps after a plan stays."""

    seen = 0

    def __init__(self) -> None:
        self._steps = 0
        self.median_s = 0.1

    def step_ended(self, began: Moment, ended: Moment) -> bool:
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


@quickly()
def resumes_bit_by_bit(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    planner = AutoPlanner(Constraints((TOP,), always=True), steps=MEASURED, warmup=WARMUP, search=on_slow_links)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    step = settle(model, handle)
    gradients(model, step, dist.get_rank())
    saved = through_a_file(handle.state_dict())
    assert any(values.any() for values in saved["state"].values()), "something is left to be sent"
    expected = [gradients(model, step, dist.get_rank()) for step in range(5)]
    plan, profile = handle.plan, handle.profile
    handle.load_state_dict(saved)  # back, in the same job
    assert all(bucket.steps > 0 for bucket in handle.statistics()), "nothing else is begun anew"
    for step, wanted in enumerate(expected):
        for name, gradient in gradients(model, step, dist.get_rank()).items():
            assert torch.equal(gradient, wanted[name]), (step, name)
    handle.detach()
    again = AutoPlanner(Constraints((TOP,), always=True), steps=MEASURED, warmup=WARMUP, search=on_slow_links)
    for is_measured in (False, True):  # before the first step, and while it is measured
        handle = gradsync.attach(other, plan=again, timeout=20)
        if is_measured:
            until_it_is_measured(other, handle, WARMUP)
        with torch.inference_mode(is_measured):  # what is made in it is trained on nevertheless
            handle.load_state_dict(saved)
        assert handle.settled and handle.plan == plan and handle.profile == profile and active() is None
        for step, wanted in enumerate(expected):
            for name, gradient in gradients(other, step, dist.get_rank()).items():
                assert torch.equal(gradient, wanted[name]), (step, name)
        assert handle.settled and handle.plan == plan
        assert handle.state_dict().keys() == saved.keys()
        other.zero_grad(set_to_none=False)
        handle.detach()


def settle(model: nn.Module, *handles: gradsync.Attachment) -> int:
    """Trains until all handles are settled; returns the number of steps."""
    step = 0
    while not all(handle.settled for handle in handles) and step < LONGEST:
        gradients(model, step, dist.get_rank())
        step += 1
    gradients(model, step, dist.get_rank())
    assert all(handle.settled for handle in handles)
    return step + 1


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("make", [Perceptron, Convolution, WithTable])
def test_a_resumed_job_goes_on_with_its_plan_as_if_it_had_never_stopped(
    world: World, make: Callable[[], nn.Module]
) -> None:
    world(2).run(resumes_bit_by_bit, make)


@quickly()
def state_of_another_job() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    quick = {"steps": MEASURED, "warmup": WARMUP}
    handle = gradsync.attach(model, plan=AutoPlanner(**quick), timeout=20)
    settle(model, handle)
    saved = handle.state_dict()
    handle.detach()
    profile = Profile.from_json(saved["planned"]["profile"])
    others = (
        {"torch": "2.0"},
        {"device": "cuda"},
        {"nodes": (7, 8)},
        {"world": 3, "nodes": (0, 1, 2)},
    )
    handle = gradsync.attach(model, plan=AutoPlanner(**quick), timeout=20)
    first = handle.plan
    for other in others:
        planned = saved["planned"] | {"profile": profile.model_copy(update=other).to_json()}
        handle.load_state_dict({**saved, "planned": planned})
        assert not handle.settled and handle.plan == first, f"it is planned for anew: {other}"
        assert handle.state_dict()["step"] == saved["step"]
    handle.detach()
    handle = gradsync.attach(model, plan=AutoPlanner(Constraints((TOP,)), **quick), timeout=20)
    handle.load_state_dict(saved)
    assert not handle.settled
    settle(model, handle)
    handle.detach()
    handle = gradsync.attach(model, plan=handle.plan, timeout=20)
    handle.load_state_dict(saved)
    assert "planned" not in handle.state_dict(), "a plan that was given stays"
    handle.detach()


def test_state_of_another_job_is_taken_over_and_the_job_planned_for_anew(world: World) -> None:
    world(2).run(state_of_another_job)


@quickly()
def states_that_differ() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
    settle(model, handle)
    saved, rank = handle.state_dict(), dist.get_rank()
    handle.detach()
    handle = gradsync.attach(model, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20)
    slower = {**saved, "planned": saved["planned"] | {"usual_step_s": 1.0}}
    without = {key: value for key, value in saved.items() if key != "planned"}
    both = r"step \d+, plan \w+ by measurement \w+ on rank 0, step \d+"
    for wrong, message in (
        (slower, rf"the ranks differ: {both}, plan \w+ by measurement \w+ on rank 1"),
        (without, rf"the ranks differ: {both} on rank 1"),
    ):
        with pytest.raises(ValueError, match=message):
            handle.load_state_dict(wrong if rank == 1 else saved)
    for planned, message in (
        ({}, "the state's 'planned' is not what"),
        (
            saved["planned"] | {"usual_step_s": -1.0},
            "the state's usual_step_s must be a number of seconds above 0, got -1.0",
        ),
        (saved["planned"] | {"profile": "{"}, "the profile is no JSON"),
    ):
        expected = (ValueError, message) if rank == 1 else (RuntimeError, f"rank 1 could not: {message}")
        with pytest.raises(expected[0], match=expected[1]):
            handle.load_state_dict({**saved, "planned": planned} if rank == 1 else saved)
    assert not handle.settled and handle.state_dict()["step"] == 0, "nothing has changed"
    usual = {**saved, "planned": saved["planned"] | {"usual_step_s": 0.5}}
    handle.load_state_dict(usual)
    assert handle.settled and handle.state_dict()["planned"] == usual["planned"]
    handle.detach()


def test_ranks_whose_states_differ_are_told_so(world: World) -> None:
    world(2).run(states_that_differ)


class Both(nn.Module):
    """Two models that train in turns, as one module for `gradients`."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([model(x).flatten(1) for model in self.models], dim=1)


@quickly()
def plans_for_two(together: bool) -> list[str]:
    torch.manual_seed(0)
    models = [Perceptron(), Perceptron()]
    handles = [gradsync.attach(m, plan=AutoPlanner(steps=MEASURED, warmup=WARMUP), timeout=20) for m in models]
    step = 0
    while not all(handle.settled for handle in handles) and step < 3 * LONGEST:
        for trained in [Both(*models)] if together else models:
            alone = copy.deepcopy(trained)
            mine = gradients(trained, step, dist.get_rank())
            means = [gradients(alone, step, rank) for rank in range(dist.get_world_size())]
            for name, gradient in mine.items():
                mean = torch.stack([of_rank[name] for of_rank in means]).mean(dim=0)
                torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)
        step += 1
    assert all(handle.settled and handle.profile is not None for handle in handles)
    for handle in handles:
        handle.detach()
    return [handle.plan.digest for handle in handles]


@pytest.mark.parametrize("together", [False, True], ids=["in turns", "by one backward"])
def test_two_models_are_measured_one_after_the_other(world: World, together: bool) -> None:
    first, second = world(2).run(plans_for_two, together)
    assert first == second


@quickly()
def one_of_two_goes(which: int, by_detach: bool) -> bool:
    torch.manual_seed(0)
    models = [Perceptron(), Perceptron()]
    planner = AutoPlanner(steps=MEASURED, warmup=WARMUP)
    handles = [gradsync.attach(model, plan=planner, timeout=20) for model in models]
    for step in range(LONGEST):
        for model in models:
            gradients(model, step, dist.get_rank())
        if active() is not None:
            break
    engine = weakref.ref(handles[which]._engine)
    if by_detach:
        handles[which].detach()
    del handles[which], models[which], model
    gc.collect()
    settle(models[0], handles[0])
    assert handles[0].profile is not None
    handles[0].detach()
    return engine() is None


@pytest.mark.parametrize("which", [0, 1], ids=["measured", "waiting"])
@pytest.mark.parametrize("by_detach", [True, False], ids=["detached", "dropped"])
def test_the_other_of_two_models_is_measured_when_one_goes(world: World, which: int, by_detach: bool) -> None:
    assert all(world(2).run(one_of_two_goes, which, by_detach)), "nothing keeps the one that went"


SEARCHED = 50
A_PIECE_A_STEP = (*FEWER, (auto, "after_steps", lambda pieces, highest: pieces))
QUICK = {"steps": MEASURED, "warmup": WARMUP}


@InPieces
def plans_after_many_pieces(job: Job, constraints: Constraints) -> Pieces[list[gradsync.Plan]]:
    """Returns a plan with one bucket for each parameter, which is not the default plan."""
    for _ in range(SEARCHED):
        yield
    return layerwise_plans(job, Constraints((TOP,), always=True))


@InPieces
def no_plans_after_many_pieces(job: Job, constraints: Constraints) -> Pieces[list[gradsync.Plan]]:
    for _ in range(SEARCHED):
        yield
    raise ValueError("nothing will do")


def until_the_search_begins(model: nn.Module, handle: gradsync.Attachment) -> int:
    """Trains until the last measured step; returns the number of steps."""
    step = until_it_is_measured(model, handle, WARMUP + 2 + 2 * MEASURED)
    assert not handle.settled
    return step


@patched(A_PIECE_A_STEP)
def trains_while_plans_are_searched() -> list[str]:
    """Returns the plan in force in each step from the begin of the search."""
    torch.manual_seed(0)
    model = Perceptron()
    alone = copy.deepcopy(model)
    planner = AutoPlanner(Constraints((TOP,)), **QUICK, search=plans_after_many_pieces, must_plan=True)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    first = until_the_search_begins(model, handle)
    assert handle.profile is None and "planned" not in handle.state_dict()
    plans, exact = [], True
    for step in range(first, first + SEARCHED + 5):
        mine = gradients(model, step, dist.get_rank())
        means = [gradients(alone, step, rank) for rank in range(dist.get_world_size())]
        plans.append(handle.plan.digest)
        exact = exact and plans[-1] == plans[0]
        for name, gradient in mine.items() if exact else ():
            mean = torch.stack([of_rank[name] for of_rank in means]).mean(dim=0)
            torch.testing.assert_close(gradient, mean, rtol=1e-5, atol=1e-6)
        assert handle.settled == (not exact)
    handle.detach()
    return plans


def test_training_goes_on_while_rank_0_searches_and_all_ranks_change_plans_in_the_same_step(world: World) -> None:
    first, second = world(2).run(trains_while_plans_are_searched)
    assert first == second
    present = first.count(first[0])
    assert SEARCHED - 2 <= present <= SEARCHED + 1 and len(set(first[present:])) == 1


@patched(A_PIECE_A_STEP)
def the_search_fails_between_steps(must_plan: bool) -> tuple[int, str, bool]:
    """Returns the number of steps until the search has failed, its error, and whether the first plan stays."""
    torch.manual_seed(0)
    model = Perceptron()
    planner = AutoPlanner(**QUICK, search=no_plans_after_many_pieces, must_plan=must_plan)
    handle = gradsync.attach(model, plan=planner, timeout=20)
    step, said = until_the_search_begins(model, handle), ""
    present = handle.plan.digest
    try:
        while not handle.settled:
            gradients(model, step, dist.get_rank())
            step += 1
    except RuntimeError as error:
        said = str(error)
        assert active() is None
    same = handle.plan.digest == present
    handle.detach()
    return step, said, same


@pytest.mark.parametrize("must_plan", [False, True])
def test_an_error_of_a_search_between_steps_reaches_all_ranks_in_the_same_step(world: World, must_plan: bool) -> None:
    first, second = world(2).run(the_search_fails_between_steps, must_plan)
    assert first == second and first[0] > SEARCHED
    assert first[1:] == ("no plan was found: ValueError: nothing will do" if must_plan else "", True)


@patched(A_PIECE_A_STEP)
def stopped_while_plans_are_searched() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=AutoPlanner(**QUICK, search=plans_after_many_pieces), timeout=20)
    until_the_search_begins(model, handle)
    engine = weakref.ref(handle._engine)
    handle.detach()
    assert active() is None
    del handle
    gc.collect()
    assert engine() is None, "the search holds nothing"
    handle = gradsync.attach(model, plan=AutoPlanner(**QUICK, search=plans_after_many_pieces), timeout=20)
    step = until_the_search_begins(model, handle)
    while not handle.settled:
        gradients(model, step, dist.get_rank())
        step += 1
    gradients(model, step, dist.get_rank())
    saved = handle.state_dict()
    handle.detach()
    handle = gradsync.attach(model, plan=AutoPlanner(**QUICK, search=plans_after_many_pieces), timeout=20)
    step = until_the_search_begins(model, handle)
    handle.load_state_dict(saved)
    assert handle.settled and active() is None
    plan, profile = handle.plan, handle.profile
    for more in range(SEARCHED + 5):
        gradients(model, step + more, dist.get_rank())
    assert handle.settled and handle.plan == plan and handle.profile == profile, "no search goes on"
    handle.detach()


def test_detaching_a_model_or_loading_its_state_ends_a_search(world: World) -> None:
    world(2).run(stopped_while_plans_are_searched)


def interrupted_at_once(job: Job, constraints: Constraints) -> list[gradsync.Plan]:
    raise KeyboardInterrupt


@InPieces
def interrupted_in_a_piece(job: Job, constraints: Constraints) -> Pieces[list[gradsync.Plan]]:
    for _ in range(3):
        yield
    raise KeyboardInterrupt


def interrupts(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def interrupted_planner(profiles: Sequence[ParameterProfile], size: int) -> gradsync.Plan:
    """Returns the default plan for a new model; Ctrl-C ends rank 0's second call, after the first step."""
    if dist.get_rank() == 0 and any(profile.position for profile in profiles[:1]):
        raise KeyboardInterrupt
    return default_plan(profiles, size)


@patched(A_PIECE_A_STEP)
def interrupted_between_steps(where: str) -> list[str]:
    """Ctrl-C comes on rank 0 while it does what belongs between two steps; returns errors of this and a further try."""
    torch.manual_seed(0)
    model, said = Perceptron(), []
    search = {"pieces": interrupted_in_a_piece, "at once": interrupted_at_once}.get(where, candidate_plans)
    plan = interrupted_planner if where == "planner" else AutoPlanner(**QUICK, search=search)
    handle = gradsync.attach(model, plan=plan, timeout=10)
    makes_profile = where == "profile" and dist.get_rank() == 0
    with patch.object(AutoMeasurement, "_profile", interrupts) if makes_profile else nullcontext():
        for _ in range(2):
            try:
                for step in range(200):
                    gradients(model, step, dist.get_rank())
            except BaseException as error:
                said.append(f"{type(error).__name__}: {error}")
    handle.detach()
    return said


@pytest.mark.parametrize("where", ["pieces", "at once", "profile", "planner"])
def test_ctrl_c_on_one_rank_between_two_steps_stops_all_ranks(world: World, where: str) -> None:
    interrupted, other = world(2).run(interrupted_between_steps, where)
    assert interrupted[0] == "KeyboardInterrupt: "
    assert interrupted[1].startswith("RuntimeError: gradient synchronisation stopped earlier: ")
    assert other[0].startswith("GroupError: ") and "rank 0" in other[0] and "KeyboardInterrupt" in other[0]
    assert other[1].startswith("GroupError: gradient synchronisation stopped earlier: ")
