"""Cuts are the best in MergeComp's model, and rivals cut as their papers say."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import inf

import pytest

from gradsync.planner.solver.machine import deferred_s, step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, check_parts, layerwise
from gradsync_lab.papers.reference import DENSE, bytecomp_problem, mergecomp_problem
from gradsync_lab.rivals.cuts import best_cuts, curve
from gradsync_lab.rivals.merge import (
    equal_counts,
    fixed_size,
    lazy,
    lazy_bytes,
    mergecomp,
    mg_wfbp,
    released_cut,
    two_buckets,
    whole,
)
from tests.planner.solver.random_problems import coded

MODEL_L = [  # by other code, ms: 1, 2, 3 buckets, best and its number, layer-wise, 25 MiB and its number, 2 equal
    ("vgg16", 187.3, 105.4, 101.5, 101.2, 4, 113.4, 102.4, 5, 123.4),
    ("bert-base", 146.3, 114.9, 104.4, 91.5, 13, 166.2, 92.9, 13, 116.8),
    ("gpt2", 302.4, 255.2, 246.7, 243.4, 5, 282.0, 247.8, 13, 272.9),
    ("lstm", 135.0, 122.7, 119.5, 119.5, 3, 121.9, 120.2, 5, 122.7),
]
HALF_PRECISION = [  # worked out by other code, ms in cases A, B, C: 25 MiB buckets at 16 bits; the best cuts
    ("vgg16", (389.46, 157.02, 85.77), (388.37, 155.93, 85.61)),
    ("bert-base", (314.16, 131.21, 73.38), (307.37, 125.63, 72.76)),
    ("gpt2", (369.37, 260.48, 221.97), (356.11, 254.82, 221.75)),
    ("lstm", (277.45, 145.82, 88.75), (276.55, 145.50, 88.44)),
]


@pytest.mark.parametrize(
    ("model", "one", "two", "three", "best", "best_number", "layer_wise", "ddp", "ddp_number", "halves"), MODEL_L
)
def test_our_table_of_cuts_is_reached(
    model: str,
    one: float,
    two: float,
    three: float,
    best: float,
    best_number: int,
    layer_wise: float,
    ddp: float,
    ddp_number: int,
    halves: float,
) -> None:
    problem = mergecomp_problem(model)
    by_count = [solution.parts for solution in curve(problem, most=3)]
    best_parts, ddp_parts = best_cuts(problem).parts, fixed_size(problem)
    plans = [*by_count, best_parts, layerwise(problem, 0), ddp_parts, equal_counts(problem, count=2)]
    found = [1e3 * deferred_s(problem, parts) for parts in plans]
    assert found == pytest.approx([one, two, three, best, layer_wise, ddp, halves], abs=0.051)
    assert (len(best_parts), len(ddp_parts)) == (best_number, ddp_number)
    assert 1e3 * deferred_s(problem, two_buckets(problem).parts) == pytest.approx(two, abs=0.051)


@pytest.mark.parametrize(("model", "ddp", "best"), HALF_PRECISION)
def test_our_table_of_half_precision_is_reached(model: str, ddp: tuple[float, ...], best: tuple[float, ...]) -> None:
    for case, ddp_ms, best_ms in zip("ABC", ddp, best, strict=True):
        problem = bytecomp_problem(model, case)
        assert 1e3 * step_s(problem, fixed_size(problem, DENSE)) == pytest.approx(ddp_ms, abs=0.0051)
        assert 1e3 * best_cuts(problem, DENSE).seconds == pytest.approx(best_ms, abs=0.0051)


def test_no_other_way_to_cut_beats_the_best() -> None:
    for seed in range(40):
        random_ = random.Random(seed)
        problem = coded(random_, knees=bool(seed % 2))
        rivals = [
            whole(problem),
            layerwise(problem, 0),
            fixed_size(problem, nbytes=random_.randrange(1, 6)),
            equal_counts(problem, count=3),
            mg_wfbp(problem),
            mergecomp(problem).parts,
        ]
        best_s = deferred_s(problem, best_cuts(problem).parts)
        assert all(best_s <= deferred_s(problem, parts) for parts in rivals), seed


def of_two(problem: Problem) -> list[float]:
    return [deferred_s(problem, (Part(0, cut, 0), Part(cut, problem.size, 0))) for cut in range(1, problem.size)]


def is_valley(values: list[float]) -> bool:
    rises = [b > a for a, b in itertools.pairwise(values) if a != b]
    return rises == sorted(rises)


def test_two_buckets_have_one_valley_and_the_crossing_finds_it() -> None:
    """Checks the linear model against figures of other code."""
    for seed in range(300):
        problem = coded(random.Random(seed), knees=False, most_items=14)
        if problem.size >= 2:
            assert is_valley(of_two(problem)), seed
            assert deferred_s(problem, two_buckets(problem).parts) == min(of_two(problem)), seed


def test_two_buckets_have_one_valley_with_constant_then_linear_encoding() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        problem = coded(random_, knees=False, most_items=14)
        encode, *others = problem.options[0].chain
        encode = replace(encode, curve=Curve.knee(float(random_.randrange(5)), 1.0, float(random_.randrange(1, 9))))
        problem = replace(problem, options=(Option("coded", (encode, *others)),))
        assert is_valley(of_two(problem)), seed


def test_with_encoding_beside_backward_two_buckets_may_have_two_valleys() -> None:
    chain = (Demand(Resource.OFFLOAD, Curve.knee(1.0, 1.0, 5.0)), Demand(Resource.INTER, Curve.linear(5.0, 1.0)))
    many = (
        replace(coded(random.Random(seed), knees=False, most_items=9), options=(Option("beside", chain),))
        for seed in range(300)
    )
    assert not all(is_valley(of_two(problem)) for problem in many if problem.size > 2)


@pytest.mark.parametrize(
    ("size", "least", "most"), [(10, 3, 5), (32, 6, 8), (148, 10, 13), (161, 11, 13), (314, 12, 15)]
)
def test_the_released_search_probes_as_often_as_it_did(size: int, least: int, most: int) -> None:
    probes = []
    for best in range(2, size - 1):
        asked: list[int] = []

        def measure(cut: int, best: int = best, asked: list[int] = asked) -> float:
            asked.append(cut)
            return abs(cut - best)

        assert abs(released_cut(size, measure) - best) <= 1
        assert len(set(asked)) == len(asked)
        probes.append(len(asked))
    assert least <= min(probes) and max(probes) <= most


def test_the_released_search_is_misled_by_a_plateau() -> None:
    assert released_cut(100, lambda cut: 1.0 if cut < 90 else 0.5) < 10


def test_mergecomp_stops_where_one_more_bucket_does_not_help() -> None:
    problem = mergecomp_problem("bert-base")
    seconds = [deferred_s(problem, solution.parts) for solution in curve(problem, most=5)]
    assert seconds == sorted(seconds, reverse=True)
    assert [len(mergecomp(problem, most=most).parts) for most in (1, 2, 5)] == [1, 2, 5]
    assert len(mergecomp(problem, most=5, threshold=0.1).parts) == 2  # the third gains 9 %
    assert len(mergecomp(problem, most=5, threshold=0.07).parts) == 3  # the fourth 5 %


def test_the_stop_rule_can_miss_the_best() -> None:
    """A third bucket gains nothing, a fourth 8 %."""
    chain = (
        Demand(Resource.COMPUTE, Curve.linear(1.0, 1.0)),
        Demand(Resource.INTER, Curve.linear(2.0, 2.0)),
        Demand(Resource.COMPUTE, Curve.linear(1.0, 0.0)),
    )
    problem = Problem((15.0, 2.0, 2.0, 2.0, 15.0), (2.0, 5.0, 12.0, 12.0, 12.0), (Option("coded", chain),))
    assert [deferred_s(problem, solution.parts) for solution in curve(problem)] == [169, 133, 133, 123, 124]
    assert len(mergecomp(problem, most=5).parts) == 2


def test_mg_wfbp_merges_what_is_ready_before_a_start_of_its_own_would_be_through() -> None:
    """Item 1 is ready 1 s after item 0, item 2 another 4 s later, with the first two in transfer; alpha is 2."""
    option = Option("all-reduce", (Demand(Resource.INTER, Curve.linear(2.0, 1.0)),))
    problem = Problem((1.0, 1.0, 4.0), (1.0, 1.0, 1.0), (option,))
    assert mg_wfbp(problem) == (Part(0, 2, 0), Part(2, 3, 0))
    busy = Problem((1.0, 1.0, 3.0, 4.0), (9.0, 9.0, 1.0, 1.0), (Option("all-reduce", option.chain),))
    assert mg_wfbp(busy) == (Part(0, 2, 0), Part(2, 4, 0))  # the link is busy with the first: the last two may wait
    assert step_s(busy, mg_wfbp(busy)) < min(step_s(busy, layerwise(busy, 0)), step_s(busy, whole(busy)))


def test_mg_wfbp_merges_as_much_where_kernels_run_beside_the_exchange() -> None:
    """60 gradients of 100 kB, 3 ms apart, take 2 ms and 60 ns a byte on the link; kernels take a hundredth."""
    link = Demand(Resource.INTER, Curve.linear(2e-3, 6e-8))
    kernel = Demand(Resource.OFFLOAD, Curve.linear(2e-5, 6e-10))
    parts = [
        mg_wfbp(Problem((3e-3,) * 60, (1e5,) * 60, (Option("all-reduce", chain),)))
        for chain in ((link,), (kernel, link), (kernel, link, kernel))
    ]
    assert all(len(found) < 10 for found in parts)


def test_buckets_of_fixed_size_close_as_soon_as_they_hold_it() -> None:
    option = Option("dense", (Demand(Resource.INTER, Curve.linear(0.0, 1.0)),))
    problem = Problem((0.0,) * 5, (3.0, 3.0, 9.0, 1.0, 1.0), (option,))
    assert fixed_size(problem, nbytes=6.0) == (Part(0, 2, 0), Part(2, 3, 0), Part(3, 5, 0))
    assert equal_counts(problem, count=2) == (Part(0, 2, 0), Part(2, 5, 0))
    assert equal_counts(problem, count=9) == layerwise(problem, 0)
    assert whole(problem) == (Part(0, 5, 0),)


def test_lazy_buckets_are_of_one_gradient_all_of_them_or_as_many_as_cost_least() -> None:
    """100 gradients of 1 MB, with 2 ms latency and 2 ns per byte, go in buckets of 10 MB."""
    option = Option("all-reduce", (Demand(Resource.INTER, Curve.linear(1e-3, 1e-9)),) * 2)
    problem = Problem((1e-3,) * 100, (1e6,) * 100, (option,))
    assert lazy(problem, nbytes=0.0) == layerwise(problem, 0)
    assert lazy(problem, nbytes=inf) == whole(problem)
    assert lazy_bytes(problem) == pytest.approx(1e7)
    assert lazy(problem) == fixed_size(problem, nbytes=lazy_bytes(problem))
    small = Option("all-reduce", (Demand(Resource.INTER, Curve((0.0, 1e4, 1e5, 1e6), (1e-4, 1e-4, 2.1e-3, 3e-3))),))
    assert lazy_bytes(replace(problem, options=(small,))) == pytest.approx((1e8 * 2e-3 / 1e-9) ** 0.5), "of large ones"
    free = replace(problem, options=(Option("free", (Demand(Resource.COMPUTE, Curve.linear(0.0, 1e-9)),)),))
    assert lazy(free) == whole(free), "nothing is moved"


@pytest.mark.parametrize("latency_s", [1e-4, 1e-3, 5e-3])
def test_the_lazy_threshold_is_about_the_best_where_the_link_is_what_takes_time(latency_s: float) -> None:
    """The step is within a tenth of the best, which is the aim."""
    option = Option("all-reduce", (Demand(Resource.INTER, Curve.linear(latency_s, 5e-9)),))
    problem = Problem((3e-3,) * 100, (1e6,) * 100, (option,))
    sweep = [step_s(problem, lazy(problem, nbytes=1e5 * 2**power)) for power in range(12)]
    assert step_s(problem, lazy(problem)) <= 1.1 * min(sweep)
    assert max(sweep) > 1.4 * min(sweep)


def test_items_that_may_not_be_merged_are_not() -> None:
    option = Option("dense", (Demand(Resource.INTER, Curve.linear(1.0, 1.0)),))
    sparse = Option("sparse", (Demand(Resource.INTER, Curve.linear(2.0, 0.1)),))
    either, only_sparse = frozenset({0, 1}), frozenset({1})
    problem = Problem(
        (1.0,) * 6,
        (1.0,) * 6,
        (option, sparse),
        allowed=(either, either, only_sparse, only_sparse, either, either),
        alone=(False, False, True, True, False, False),
    )
    forced = (Part(0, 2, 0), Part(2, 3, 1), Part(3, 4, 1), Part(4, 6, 0))
    assert whole(problem) == fixed_size(problem) == lazy(problem, nbytes=inf) == forced
    for parts in (best_cuts(problem).parts, mergecomp(problem, most=9).parts, mg_wfbp(problem)):
        check_parts(problem, parts)
    assert [len(solution.parts) for solution in curve(problem)] == [4, 5, 6]
    with pytest.raises(ValueError, match="two items or more that may share a bucket"):
        two_buckets(problem)


def test_no_item_and_one_item_have_cuts() -> None:
    problem = mergecomp_problem("lstm")
    none, one = replace(problem, gaps_s=(), nbytes=()), replace(problem, gaps_s=(1.0,), nbytes=(4.0,))
    for ways in (whole, fixed_size, equal_counts, mg_wfbp, lazy):
        assert ways(none) == ()
        assert ways(one) == (Part(0, 1, 0),)
    for search in (best_cuts, mergecomp):
        assert search(none).parts == ()
        assert search(one).parts == (Part(0, 1, 0),)
    assert [len(solution.parts) for solution in curve(one, most=5)] == [1]
    with pytest.raises(ValueError, match="two buckets need 2 items or more, got 1"):
        released_cut(1, lambda cut: 0.0)
