"""Candidates of a job: the plan of the search comes before plans that need none, and only allowed plans are listed."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.planner.default.network import Network
from gradsync.planner.default.plan import default_plan, default_plans
from gradsync.planner.pieces import Pieces, at_once
from gradsync.planner.search import predict as predicting
from gradsync.planner.search.candidates import FAR_LONGER, MOST_TRIED, UNSURE, candidate_plans, searched
from gradsync.planner.search.job import Job
from gradsync.planner.search.options import formulate
from gradsync.planner.search.predict import predict
from gradsync.planner.search.ways import Constraints, ways_of
from gradsync.planner.solver.joint import search
from gradsync.plans.plan import Plan
from gradsync.schemes import HalfPrecision
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import ParameterProfile
from tests.planner.search.test_options import PARAMETERS, Straight, job

FEEDBACK = ErrorFeedback(BlockInt(8))
SPECS = {p.name: p.tensor for p in PARAMETERS}


def on(bandwidth_bytes_per_s: float) -> Job:
    return replace(
        job(), network=Network(CostModel(3e-4, bandwidth_bytes_per_s, transport=Straight()), Placement.one_per_node(4))
    )


def test_candidates_fit_the_model_the_quickest_first_and_are_the_same_again() -> None:
    here = on(25e6)
    plans = candidate_plans(here, Constraints(lossy=(FEEDBACK,)))
    for plan in plans:
        plan.check(SPECS, 4)
    seconds = [predict(plan, here).seconds for plan in plans]
    assert 1 < len(plans) <= MOST_TRIED and seconds == sorted(seconds)
    assert [p.digest for p in candidate_plans(here, Constraints(lossy=(FEEDBACK,)))] == [p.digest for p in plans]
    exact = [all(bucket.scheme.traits.exact for bucket in plan.buckets) for plan in plans]
    assert not exact[0] and any(exact), "bytes cost much here, and one plan loses nothing"


def test_the_plan_that_runs_is_the_first_and_stands_for_all_made_without_a_search() -> None:
    here = on(25e6)
    usual = default_plan(here.profiles, 4)
    plans = candidate_plans(replace(here, present=usual), Constraints(lossy=(FEEDBACK,)))
    assert plans[0] == usual and len({plan.digest for plan in plans}) == len(plans) > 1
    without_search = {plan.digest for plan in default_plans(here.profiles, 4, here.network)}
    assert not without_search & {plan.digest for plan in plans[1:]}
    best = plans[1]
    again = candidate_plans(replace(here, present=best), Constraints(lossy=(FEEDBACK,)))
    assert again[0] == best and best not in again[1:]


def test_of_plans_that_take_far_longer_one_is_tried_at_most() -> None:
    here = on(25e6)
    plans = candidate_plans(here, Constraints(lossy=(FEEDBACK,)))
    first, *others = (here.beside_s + predict(plan, here).seconds for plan in plans)
    assert others and all(seconds <= FAR_LONGER * first for seconds in others[1:])


def test_the_best_plan_is_tried_in_fewer_buckets_too() -> None:
    count = 40
    profiles = tuple(
        ParameterProfile(f"p{number}", TensorSpec((1 << 18,), torch.float32), sparse=False, position=number)
        for number in range(count)
    )
    network = Network(CostModel(1e-4, 1e9), Placement.one_per_node(4))
    here = Job(profiles, {f"p{number}": 0.01 * (number + 1) for number in range(count)}, 0.01 * count, network)
    plans = candidate_plans(here)
    seconds = [here.beside_s + predict(plan, here).seconds for plan in plans]
    fewest = min(range(len(plans)), key=lambda number: len(plans[number].buckets))
    assert len(plans[fewest].buckets) < len(plans[0].buckets) and seconds[fewest] <= (1 + UNSURE) * seconds[0]


def test_where_bytes_cost_nothing_nothing_is_compressed() -> None:
    found = searched(on(1e15), Constraints(lossy=(FEEDBACK, HalfPrecision())))
    assert all(bucket.scheme.traits.exact for bucket in found.plan.buckets)
    assert found.certificate().gap < 0.05


def test_what_must_be_lossy_is_in_every_candidate() -> None:
    half = HalfPrecision(values="bfloat16")
    for plan in candidate_plans(on(1e15), Constraints(lossy=(half,), always=True)):
        for bucket in plan.buckets:
            if "half" not in bucket.names and not set(bucket.names) & {"users", "items"}:
                assert bucket.scheme == half, "half has 16 bits already, tables are exact"


def test_measured_errors_count_where_the_user_names_none() -> None:
    measured = replace(on(25e6), errors={p.name: {str(FEEDBACK): 0.5} for p in PARAMETERS})
    exact = searched(measured, Constraints(lossy=(FEEDBACK,), most_error=0.1)).plan
    lossy = searched(measured, Constraints(lossy=(FEEDBACK,), most_error=0.6)).plan
    assert all(bucket.scheme.traits.exact for bucket in exact.buckets)
    assert not all(bucket.scheme.traits.exact for bucket in lossy.buckets)


def test_one_rank_needs_no_search() -> None:
    alone = replace(job(), network=Network(CostModel(1e-4, 1e9), Placement.one_per_node(1)))
    (plan,) = candidate_plans(alone)
    assert plan.world == 1


def test_a_giant_that_takes_long_to_encode_goes_in_pieces_where_that_is_shorter() -> None:
    giant = ParameterProfile("giant", TensorSpec((1 << 21,), torch.float32), sparse=False, position=0)
    slow = {FEEDBACK.kernel(kernel): KernelCost(1e-5, 2e-8) for kernel in ("compress", "decompress")}
    network = Network(CostModel(3e-4, 25e6, kernels=slow), Placement.one_per_node(4))
    here = Job((giant,), {"giant": 0.01}, 0.01, network)
    ways = ways_of(here, Constraints(lossy=(FEEDBACK,), always=True))
    whole = formulate(here, ways)
    at_once = predict(whole.plan(search(whole.problem).parts), here).seconds
    plan = searched(here, Constraints(lossy=(FEEDBACK,), always=True)).plan
    plan.check({"giant": giant.tensor}, 4)
    assert len(plan.buckets) > 1 and predict(plan, here).seconds < 0.9 * at_once


def test_a_search_in_pieces_finds_the_same_plans_and_predicts_two_steps_in_a_piece_at_most() -> None:
    here, constraints = on(25e6), Constraints(lossy=(FEEDBACK,))
    with patch.object(predicting, "forecast", side_effect=predicting.forecast) as forecasts:

        def counted() -> Pieces[list[Plan]]:
            pieces = candidate_plans.pieces(here, constraints)
            while True:
                before = forecasts.call_count
                try:
                    next(pieces)
                except StopIteration as ended:
                    return ended.value
                finally:
                    counts.append(forecasts.call_count - before)
                yield

        counts: list[int] = []
        plans = at_once(counted())
    assert len(counts) > 50 and max(counts) <= 2 * predicting.ITERATIONS
    assert plans == candidate_plans(here, constraints)
