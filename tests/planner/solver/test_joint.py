"""The joint search is near the best plan, its lower bound holds, and both are the same on every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from gradsync.planner.solver import joint
from gradsync.planner.solver.joint import Certificate, best_of_all, certify, lower_bound, search, split_items
from gradsync.planner.solver.machine import step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, check_parts, layerwise
from gradsync_lab.papers.reference import bytecomp_problem
from gradsync_lab.rivals.cuts import best_cuts
from gradsync_lab.rivals.merge import fixed_size, whole
from gradsync_lab.rivals.trials import gap_cases, random_problem
from tests.planner.solver.random_problems import any_chains, random_parts

needs_native = pytest.mark.skipif(joint.native is None, reason="the native search is not built")


@needs_native
def test_it_is_within_1_percent_of_the_best_of_all_plans_on_average_and_3_at_worst() -> None:
    found = list(gap_cases(range(300), most_items=6))
    gaps = [trial.gap for trial in found]
    assert min(gaps) > -1e-12
    assert sum(gaps) / len(gaps) <= 0.01
    assert max(gaps) <= 0.03, max(found, key=lambda trial: trial.gap)
    assert all(trial.slack > -1e-9 for trial in found), "a plan takes less than the bound"
    assert all(trial.certified_gap >= trial.gap - 1e-9 for trial in found)


@needs_native
def test_the_machine_plays_as_the_reference_does() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        problem = any_chains(draw) if seed % 2 else random_problem(seed, options=5)
        parts = random_parts(draw, problem)
        plain = [(part.start, part.stop, part.option) for part in parts]
        assert joint.native.play(joint._native(problem), plain) == pytest.approx(step_s(problem, parts), rel=1e-12)


@needs_native
def test_no_plan_of_any_chains_is_below_the_bound() -> None:
    for seed in range(200):
        problem = any_chains(random.Random(seed), most_items=4)
        best = best_of_all(problem)
        for labels in (1, 16):
            for upper_s in (best.seconds, 2 * best.seconds + 1):
                assert lower_bound(problem, upper_s, labels=labels) <= best.seconds * (1 + 1e-12), seed


@needs_native
def test_without_the_native_module_plans_and_bounds_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [random_problem(seed, most_items=5) for seed in range(4)]
    problems += [any_chains(random.Random(seed), most_items=4) for seed in range(4)]
    natively = [(search(p, effort=0.2), best_of_all(p), lower_bound(p, 1e6, labels=1)) for p in problems]
    monkeypatch.setattr(joint, "native", None)
    for problem, (found, best, bound) in zip(problems, natively, strict=True):
        again = search(problem, effort=0.2)
        assert (again.parts, again.seconds) == (found.parts, pytest.approx(found.seconds, rel=1e-12))
        assert best_of_all(problem).seconds == pytest.approx(best.seconds, rel=1e-12)
        assert lower_bound(problem, 1e6) == pytest.approx(bound, rel=1e-12)


# Worked out by other code, in ms: exact with every item alone; cuts with dense and device; with host too
EXACT = {
    "vgg16": {"A": (88.92, 89.30, 88.92), "B": (93.21, 93.21, 93.21), "C": (85.61, 85.61, 85.61)},
    "lstm": {"A": (82.67, 82.96, 82.67), "B": (80.26, 80.26, 80.26), "C": (74.52, 74.52, 74.52)},
    "bert-base": {"A": (80.50, 73.26, 71.98), "B": (78.41, 71.69, 69.88), "C": (70.07, 67.36, 67.36)},
    "gpt2": {"A": (219.21, 219.42, 219.10), "B": (216.49, 216.49, 216.49), "C": (212.86, 212.86, 212.86)},
}


@needs_native
@pytest.mark.parametrize("case", "ABC")
@pytest.mark.parametrize("model", EXACT)
def test_it_finds_the_exact_plans_of_the_reference_tables(model: str, case: str) -> None:
    problem = bytecomp_problem(model, case)
    on_device = replace(problem, options=problem.options[:2])
    alone, device, all_ways = (1e-3 * ms for ms in EXACT[model][case])
    assert search(problem, max_items=1, effort=16).seconds == pytest.approx(alone, abs=1e-4)
    assert search(on_device, effort=16).seconds == pytest.approx(device, abs=1e-4)
    assert search(problem, effort=16).seconds == pytest.approx(all_ways, abs=1e-4)


@needs_native
@pytest.mark.parametrize("case", "ABC")
def test_a_plan_of_bert_is_certified_within_1_percent(case: str) -> None:
    problem = bytecomp_problem("bert-base", case)
    certificate = certify(problem, search(problem, effort=4), labels=16)
    assert 0 <= certificate.gap <= 0.01


def test_a_gap_is_the_share_above_the_bound() -> None:
    assert Certificate(1.1, 1.0).gap == pytest.approx(0.1)
    assert Certificate(0.0, 0.0).gap == 0.0


@needs_native
@pytest.mark.parametrize("model", ["vgg16", "lstm", "bert-base", "gpt2", "resnet101"])
def test_joint_is_no_worse_than_best_cuts_than_fixed_sizes_and_than_every_item_alone(model: str) -> None:
    problem = bytecomp_problem(model, "B")
    joined = search(problem).seconds * (1 - 1e-9)
    assert joined <= search(problem, max_items=1).seconds
    for option in range(len(problem.options)):
        one = replace(problem, options=problem.options[option : option + 1])
        cut = search(one).seconds
        assert joined <= cut
        assert cut * (1 - 1e-9) <= step_s(one, whole(one))
        assert cut * (1 - 1e-9) <= step_s(one, layerwise(one, 0))
        for size in (1e6, 4e6, 25 * 2**20, 64 * 2**20):
            assert cut * (1 - 1e-9) <= step_s(one, fixed_size(one, 0, size))


@needs_native
def test_cuts_with_one_option_are_near_the_exact_ones() -> None:
    problem = replace(bytecomp_problem("bert-base", "A"), options=bytecomp_problem("bert-base", "A").options[:1])
    assert search(problem).seconds <= best_cuts(problem).seconds * 1.002


@needs_native
def test_the_plan_takes_what_it_says_and_covers_the_items() -> None:
    for seed in range(30):
        problem = random_problem(seed, items=40, options=6)
        found = search(problem)
        check_parts(problem, found.parts)
        assert found.seconds == pytest.approx(step_s(problem, found.parts), rel=1e-12)
        assert search(problem) == found


def faster(problem: Problem, by: float) -> Problem:
    """Returns the problem with `by` times the bandwidth between nodes."""

    def curve(demand: Demand) -> Curve:
        if demand.resource is not Resource.INTER:
            return demand.curve
        return Curve(demand.curve.amounts, tuple(seconds / by for seconds in demand.curve.seconds))

    options = [replace(o, chain=tuple(replace(d, curve=curve(d)) for d in o.chain)) for o in problem.options]
    return replace(problem, options=tuple(options))


@needs_native
def test_more_bandwidth_is_never_worse_where_nothing_is_decoded() -> None:
    for seed in range(100):  # decoding that comes earlier can interrupt backward at a worse time, so there it can be
        problem = random_problem(seed, most_items=6)
        encoded = tuple(replace(option, chain=upto_inter(option)) for option in problem.options)
        faster_ones = [faster(replace(problem, options=encoded), by) for by in (1, 2, 8, 64)]
        for slow, fast in pairwise(faster_ones):
            found = search(slow)
            assert step_s(fast, found.parts) <= found.seconds * (1 + 1e-12), seed
            assert search(fast).seconds <= found.seconds * (1 + 1e-12), seed


def upto_inter(option: Option) -> tuple[Demand, ...]:
    """Returns the chain up to its first demand between nodes."""
    first = [demand.resource for demand in option.chain].index(Resource.INTER)
    return option.chain[: first + 1]


@pytest.mark.parametrize("native", [True, False])
def test_where_links_take_no_time_nothing_is_compressed(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(joint, "native", None)
    problem = faster(random_problem(3, items=7, options=2), float("inf"))
    found = search(problem, effort=0.2)
    assert {part.option for part in found.parts} == {0}
    assert found.seconds == pytest.approx(sum(problem.gaps_s) + problem.rest_s)
    assert certify(problem, found).gap == pytest.approx(0.0)


@pytest.mark.parametrize("native", [True, False])
def test_it_keeps_to_what_items_may(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(joint, "native", None)
    for seed in range(5):
        draw = random.Random(seed)
        free = random_problem(seed, items=6, options=3)
        allowed = tuple(frozenset(draw.sample(range(3), draw.randint(1, 3))) for _ in range(6))
        problem = replace(free, allowed=allowed, alone=tuple(draw.random() < 0.3 for _ in range(6)))
        found, best = search(problem, effort=0.2), best_of_all(problem, max_items=2)
        check_parts(problem, found.parts)
        check_parts(problem, best.parts)
        assert max(part.stop - part.start for part in best.parts) <= 2
        bound = lower_bound(problem, found.seconds)
        assert bound <= min(found.seconds, best.seconds) * (1 + 1e-12)


@needs_native
def test_constraints_are_kept_between_coarse_places_to_cut() -> None:
    draw = random.Random(0)
    free = random_problem(0, items=200, options=4)
    allowed = tuple(frozenset({draw.randrange(4), 0}) for _ in range(200))
    problem = replace(free, allowed=allowed, alone=tuple(draw.random() < 0.1 for _ in range(200)))
    found = search(problem)
    check_parts(problem, found.parts)
    assert found.seconds <= search(problem, max_items=1).seconds * (1 + 1e-9)
    assert certify(problem, found).gap <= 0.1


@pytest.mark.parametrize("native", [True, False])
def test_no_items_take_what_backward_takes(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(joint, "native", None)
    nothing = Problem((), (), (Option("dense", (Demand(Resource.INTER, Curve.linear(1.0, 1.0)),)),), rest_s=2.0)
    found = search(nothing)
    assert (found.parts, found.seconds) == ((), 2.0)
    assert best_of_all(nothing).seconds == lower_bound(nothing, 2.0) == 2.0


def test_wrong_arguments_are_refused() -> None:
    problem = random_problem(0)
    for call in (
        lambda: search(problem, effort=0),
        lambda: search(problem, max_items=0),
        lambda: lower_bound(problem, 1.0, labels=0),
        lambda: split_items(problem, 0.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()


def test_constraints_without_a_plan_are_refused() -> None:
    one = Option("dense", (Demand(Resource.INTER, Curve.linear(1.0, 1.0)),))
    with pytest.raises(ValueError, match="may take no option"):
        Problem((1.0,), (1.0,), (one,), allowed=(frozenset(),))


def test_pieces_share_what_their_item_has_and_become_ready_together() -> None:
    per_element = (1.0, 8.0, 2.0)
    dense = Option("dense", (Demand(Resource.INTER, Curve.linear(1.0, 1.0), per_element),))
    problem = Problem((1.0, 2.0, 3.0), (4.0, 10.0, 10.0), (dense,), alone=(False, False, True))
    pieces = split_items(problem, 4.0)
    assert pieces.problem.gaps_s == (1.0, 2.0, 0.0, 0.0, 3.0)
    assert pieces.problem.nbytes == (4.0, 10 / 3, 10 / 3, 10 / 3, 10.0)
    assert pieces.problem.options[0].chain[0].amounts == (1.0, 8 / 3, 8 / 3, 8 / 3, 2.0)
    assert pieces.spans(Part(0, 2, 0)) == [(0, 0.0, 1.0), (1, 0.0, 1 / 3)]
    assert pieces.spans(Part(2, 5, 0)) == [(1, 1 / 3, 1.0), (2, 0.0, 1.0)]


@needs_native
def test_a_giant_in_pieces_overlaps_its_own_encoding() -> None:
    chain = (Demand(Resource.COMPUTE, Curve.linear(0.1, 1.0)), Demand(Resource.INTER, Curve.linear(0.1, 1.0)))
    problem = Problem((1.0,), (10.0,), (Option("coded", chain),))
    pieces = split_items(problem, 1.0)
    assert search(problem).seconds == pytest.approx(1 + 10.1 + 10.1)
    assert search(pieces.problem).seconds < 1 + 10.1 + 10.1 - 5
