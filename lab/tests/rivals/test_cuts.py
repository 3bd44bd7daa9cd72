"""The best cuts equal those of brute force, for linear costs and for any."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from gradsync.planner.solver.machine import deferred_s, step_s
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource
from gradsync_lab.papers.reference import mergecomp_problem
from gradsync_lab.rivals.cuts import best_cuts, curve
from tests.planner.solver.random_problems import coded


def partitions(problem: Problem, option: int = 0) -> list[tuple[Part, ...]]:
    found = []
    for cuts in itertools.product([False, True], repeat=problem.size - 1):
        stops = [place for place, cut in enumerate(cuts, start=1) if cut]
        found.append(tuple(Part(a, b, option) for a, b in itertools.pairwise([0, *stops, problem.size])))
    return found


@pytest.mark.parametrize("knees", [False, True])
def test_the_best_cuts_are_those_of_brute_force(knees: bool) -> None:
    for seed in range(50):
        problem = coded(random.Random(seed), knees=knees)
        plans = partitions(problem)
        found = best_cuts(problem)
        assert deferred_s(problem, found.parts) == min(deferred_s(problem, plan) for plan in plans), seed
        assert found.seconds == step_s(problem, found.parts), seed


@pytest.mark.parametrize("knees", [False, True])
def test_the_curve_has_the_best_cuts_of_each_number(knees: bool) -> None:
    for seed in range(25):
        problem = coded(random.Random(seed), knees=knees, most_items=7)
        found = {len(solution.parts): deferred_s(problem, solution.parts) for solution in curve(problem)}
        best: dict[int, float] = {}
        for plan in partitions(problem):
            best[len(plan)] = min(best.get(len(plan), float("inf")), deferred_s(problem, plan))
        assert found == best, seed


def test_labels_find_what_the_table_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mergecomp_problem("lstm")
    expected = [deferred_s(problem, solution.parts) for solution in (best_cuts(problem), *curve(problem))]
    monkeypatch.setattr("gradsync_lab.rivals.cuts._is_linear", lambda problem, options: False)
    found = [deferred_s(problem, solution.parts) for solution in (best_cuts(problem), *curve(problem))]
    assert found == pytest.approx(expected, rel=1e-12)


def test_encoding_on_another_core_and_two_links_are_cut_best_too() -> None:
    chain = (
        Demand(Resource.OFFLOAD, Curve.linear(2.0, 1.0)),
        Demand(Resource.INTRA, Curve.linear(1.0, 1.0)),
        Demand(Resource.INTER, Curve.linear(3.0, 1.0)),
    )
    for seed in range(25):
        problem = replace(coded(random.Random(seed), knees=False, most_items=7), options=(Option("x", chain),))
        best_s = min(step_s(problem, plan) for plan in partitions(problem))
        assert best_cuts(problem).seconds == best_s, seed
