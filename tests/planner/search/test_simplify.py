"""Simplifying a plan: the plan that loses least, in the fewest buckets, among those that are predicted as fast."""

from __future__ import annotations

import pytest

from gradsync.planner.search.simplify import AS_LONG, simplified
from gradsync.planner.solver.joint import player, search
from gradsync.planner.solver.machine import step_s
from gradsync.planner.solver.problem import (
    Curve,
    Demand,
    Option,
    Part,
    Problem,
    Resource,
    Solution,
    check_parts,
    layerwise,
)
from gradsync_lab.rivals.trials import random_problem


def problem(gap_s: float, *, items: int = 6) -> Problem:
    dense = Option("dense", (Demand(Resource.INTER, Curve.linear(0.01, 0.1)),))
    lossy = Option("lossy", (Demand(Resource.INTER, Curve.linear(0.01, 0.01)),))
    return Problem((gap_s,) * items, (1.0,) * items, (dense, lossy))


def test_what_backward_hides_loses_nothing_and_shares_buckets() -> None:
    hidden = problem(1.0)
    parts = layerwise(hidden, 1)
    found = simplified(hidden, Solution(parts, step_s(hidden, parts)), ranks=(0, 1))
    *early, last = found.parts
    assert last.option == 1, "nothing hides the last one"
    assert len(early) == 1 and early[0].option == 0
    assert found.seconds <= AS_LONG * step_s(hidden, parts)


def test_what_is_not_hidden_stays_compressed() -> None:
    bare = problem(0.0)
    parts = (Part(0, 6, 1),)
    assert simplified(bare, Solution(parts, step_s(bare, parts)), ranks=(0, 1)).parts == parts


@pytest.mark.parametrize("seed", range(40))
def test_any_plan_stays_a_plan_and_takes_no_longer(seed: int) -> None:
    drawn = random_problem(seed, items=12)
    found = search(drawn)
    ranks = list(range(len(drawn.options)))
    simple = simplified(drawn, found, ranks)
    check_parts(drawn, simple.parts)
    assert simple.seconds == pytest.approx(step_s(drawn, simple.parts))
    assert simple.seconds <= AS_LONG * found.seconds * (1 + 1e-9)
    assert len(simple.parts) <= len(found.parts)


def test_parts_that_must_be_apart_are_not_merged() -> None:
    apart = Problem((1.0,) * 3, (1.0,) * 3, problem(1.0).options, alone=(False, True, False))
    found = simplified(apart, Solution(layerwise(apart, 0), step_s(apart, layerwise(apart, 0))), ranks=(0, 1))
    assert [(part.start, part.stop) for part in found.parts] == [(0, 1), (1, 2), (2, 3)]
    assert player(apart)(found.parts) == pytest.approx(step_s(apart, found.parts))
