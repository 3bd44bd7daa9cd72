"""A predicted step: the engine's turns at the job's costs, with backward stretched by the work beside it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.costs.forecast import forecast
from gradsync.costs.timeline import Task, covered_s
from gradsync.planner.default.network import Network
from gradsync.planner.search.job import Job, Slowdown
from gradsync.planner.search.predict import _Spans, predict
from gradsync.plans.plan import Plan
from gradsync.plans.profile import Interval, Overlap
from gradsync.schemes import AGSparse, AllReduce, HalfPrecision
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile

COST = CostModel(1e-3, 1e8)
SPEC = TensorSpec((256, 256), torch.float32)
TABLE = TensorSpec((1000, 8), torch.float32)
DENSITY = DensityProfile(1000, 10.0, {4: 2.0}, "rows", 10.0)


def job(slowdown: Slowdown | None = None, *, known: bool = True) -> Job:
    profiles = [ParameterProfile(name, SPEC, sparse=False, position=n) for n, name in enumerate(("last", "middle"))]
    profiles.append(ParameterProfile("table", TABLE, sparse=True, density=DENSITY if known else None, position=2))
    ready_s = {"last": 0.01, "middle": 0.02, "table": 0.03}
    network = Network(COST, Placement.one_per_node(4))
    return Job(tuple(profiles), ready_s, 0.031, network, slowdown or Slowdown())


def plan() -> Plan:
    specs = {"last": SPEC, "middle": SPEC, "table": TABLE}
    return Plan.make(specs, 4, [(["last"], AllReduce()), (["middle"], AllReduce()), (["table"], AGSparse())])


def packed() -> Plan:
    """Returns a plan where the second bucket's kernels run while the first bucket is sent."""
    specs = {"last": SPEC, "middle": SPEC, "table": TABLE}
    return Plan.make(specs, 4, [(["last", "middle"], HalfPrecision()), (["table"], AGSparse())])


def test_without_anything_shared_it_is_the_forecast_of_the_turns() -> None:
    here = job()
    found = predict(plan(), here)
    buckets = {b.id: b.bucket({p.name: p.tensor for p in here.profiles}) for b in plan().buckets}
    steps = {
        b.id: b.scheme.steps(buckets[b.id].specs, (DENSITY,) if b.id == "2" else (), here.network.placement)
        for b in plan().buckets
    }
    ready_s = {"0": 0.01, "1": 0.02, "2": 0.03}
    assert list(found.tasks[1:]) == forecast(plan().order, steps, ready_s, COST, here.network.placement)
    assert found.tasks[0].stream == "compute" and found.backward_s == 0.031
    assert found.seconds == max(task.end_s for task in found.tasks) > 0.031


def test_what_shares_the_cores_stretches_backward_and_so_the_exchange() -> None:
    alone, shared = predict(plan(), job()), predict(plan(), job(Slowdown(backward_by_transfer=2.0)))
    in_flight = [task for task in shared.tasks if task.stream == "link" and task.start_s < shared.backward_s]
    covered_s = sum(min(task.end_s, shared.backward_s) - task.start_s for task in in_flight)
    assert shared.backward_s == pytest.approx(0.031 + covered_s / 2, rel=0.05)
    assert shared.seconds > alone.seconds
    began_s = [min(task.start_s for task in found.tasks if task.stream == "link") for found in (alone, shared)]
    assert began_s[1] == pytest.approx(began_s[0])
    with pytest.raises(ValueError, match=r"backward_by_kernel must be at least 1, got 0.5"):
        Slowdown(backward_by_kernel=0.5)


def test_backward_stretches_what_goes_on_beside_it_until_it_ends() -> None:
    here, twice = predict(plan(), job()), predict(plan(), job(Slowdown(transfer_by_backward=2.0)))
    first, beside = (next(task for task in found.tasks if task.stream == "link") for found in (here, twice))
    assert first.start_s == beside.start_s and beside.end_s > first.end_s
    assert beside.duration_s == pytest.approx(min(2 * first.duration_s, first.duration_s + (0.031 - first.start_s) / 2))
    last, after = (found.tasks[-1] for found in (here, twice))
    assert after.duration_s == pytest.approx(last.duration_s), "nothing is beside it any more"


@pytest.mark.parametrize(
    ("slowdown", "stretched", "other"),
    [(Slowdown(transfer_by_kernel=2.0), "link", "kernel"), (Slowdown(kernel_by_transfer=2.0), "kernel", "link")],
    ids=["transfers", "kernels"],
)
def test_transfers_and_kernels_beside_each_other_take_longer(slowdown: Slowdown, stretched: str, other: str) -> None:
    """Half of the time that kernels and transfers share is lost, and no other time is."""

    def times(slowdown: Slowdown, stream: str) -> dict[str, Task]:
        return {task.name: task for task in predict(packed(), job(slowdown)).tasks if task.stream == stream}

    alone, beside, others = times(Slowdown(), stretched), times(slowdown, stretched), times(slowdown, other)
    lost_s = {name: task.duration_s - alone[name].duration_s for name, task in beside.items()}
    busy = [(task.start_s, task.end_s) for task in others.values()]
    shared_s = {name: covered_s(busy, task.start_s, task.end_s) for name, task in beside.items()}
    assert max(shared_s.values()) > 5e-5
    assert lost_s == pytest.approx({name: seconds / 2 for name, seconds in shared_s.items()}, abs=1e-9)
    assert [t.duration_s for t in times(slowdown, other).values()] == pytest.approx(
        [t.duration_s for t in times(Slowdown(), other).values()]
    )


def test_measured_overlap_makes_nothing_faster() -> None:
    measured = Overlap(
        backward_by_transfer=Interval(value=0.95, low=0.9, high=2.0),
        kernel_by_backward=Interval(value=8.0, low=2.0, high=9.0),
    )
    assert Slowdown.of(measured) == Slowdown(kernel_by_backward=8.0)


def test_plans_and_gradients_that_are_not_the_jobs_are_refused() -> None:
    with pytest.raises(ValueError, match="the density of 'table' is not known: measure the job"):
        predict(plan(), job(known=False))
    with pytest.raises(ValueError, match="the plan is for 4 ranks, this job has 2"):
        predict(plan(), replace(job(), network=Network(COST, Placement.one_per_node(2))))


def test_seconds_before_a_moment_count_what_overlaps_once_as_they_do_in_a_timeline() -> None:
    draw = Random(0)
    begins_s = [draw.random() for _ in range(40)]
    tasks = [
        Task(str(number), "link", begin_s, begin_s + draw.random() / 30) for number, begin_s in enumerate(begins_s)
    ]
    for moment_s in [0.0, *begins_s, *(task.end_s for task in tasks), 2.0]:
        intervals = [(task.start_s, task.end_s) for task in tasks]
        assert _Spans.of(tasks).before(moment_s) == pytest.approx(covered_s(intervals, 0.0, moment_s), abs=1e-12)
    assert _Spans.of([]).before(1.0) == 0.0
