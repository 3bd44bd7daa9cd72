"""What is worth a try of a job: the search's plan before those that need none, and only plans that are allowed."""

from __future__ import annotations

from dataclasses import replace

from gradsync.cluster import Placement
from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.costs import CostModel
from gradsync.planner.candidates import MOST_TRIED, candidate_plans, searched
from gradsync.planner.job import Job
from gradsync.planner.measure import Network
from gradsync.planner.predict import predict
from gradsync.planner.ways import Constraints
from gradsync.schemes import HalfPrecision
from tests.planner.test_options import PARAMETERS, job

FEEDBACK = ErrorFeedback(BlockInt(8))
SPECS = {p.name: p.tensor for p in PARAMETERS}


def on(bandwidth_bytes_per_s: float) -> Job:
    return replace(job(), network=Network(CostModel(3e-4, bandwidth_bytes_per_s), Placement.one_per_node(4)))


def test_candidates_fit_the_model_the_quickest_first_and_are_the_same_again() -> None:
    here = on(25e6)
    plans = candidate_plans(here, Constraints(lossy=(FEEDBACK,)))
    for plan in plans:
        plan.check(SPECS, 4)
    seconds = [predict(plan, here).seconds for plan in plans]
    assert 1 < len(plans) <= MOST_TRIED and seconds == sorted(seconds)
    assert [p.digest for p in candidate_plans(here, Constraints(lossy=(FEEDBACK,)))] == [p.digest for p in plans]
    exact = [all(bucket.make_scheme().exact for bucket in plan.buckets) for plan in plans]
    assert not exact[0] and any(exact), "bytes cost much here, and one plan loses nothing"


def test_where_bytes_cost_nothing_nothing_is_compressed() -> None:
    found = searched(on(1e15), Constraints(lossy=(FEEDBACK, HalfPrecision())))
    assert all(bucket.make_scheme().exact for bucket in found.plan.buckets)
    assert found.certificate().gap < 0.05


def test_what_must_be_lossy_is_in_every_candidate() -> None:
    half = HalfPrecision(values="bfloat16")
    for plan in candidate_plans(on(1e15), Constraints(lossy=(half,), always=True)):
        for bucket in plan.buckets:
            if "half" not in bucket.names and not set(bucket.names) & {"users", "items"}:
                assert bucket.make_scheme() == half, "half has 16 bits already, tables are exact"


def test_measured_errors_count_where_the_user_names_none() -> None:
    measured = replace(on(25e6), errors={p.name: {str(FEEDBACK): 0.5} for p in PARAMETERS})
    exact = searched(measured, Constraints(lossy=(FEEDBACK,), most_error=0.1)).plan
    lossy = searched(measured, Constraints(lossy=(FEEDBACK,), most_error=0.6)).plan
    assert all(bucket.make_scheme().exact for bucket in exact.buckets)
    assert not all(bucket.make_scheme().exact for bucket in lossy.buckets)


def test_one_rank_needs_no_search() -> None:
    alone = replace(job(), network=Network(CostModel(1e-4, 1e9), Placement.one_per_node(1)))
    (plan,) = candidate_plans(alone)
    assert plan.world == 1
