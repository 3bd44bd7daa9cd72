"""Problems: invalid ones are refused by name, and curves give the seconds of amounts."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest

from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, check_parts, layerwise

DENSE = Option("dense", (Demand(Resource.INTER, Curve.linear(1.0, 2.0)),))


def test_a_curve_is_linear_between_its_knots_and_beyond_the_last() -> None:
    curve = Curve((0.0, 2.0, 4.0), (1.0, 1.0, 5.0))
    assert [curve(amount) for amount in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0)] == [1.0, 1.0, 1.0, 3.0, 5.0, 9.0]
    assert Curve.linear(1.0, 2.0)(3.0) == 7.0
    assert [Curve.knee(1.0, 2.0, 3.0)(amount) for amount in (0.0, 3.0, 5.0)] == [1.0, 1.0, 5.0]


def test_what_a_part_takes_is_of_its_items_amounts() -> None:
    counted = Option(
        "counted", (Demand(Resource.COMPUTE, Curve.linear(0.0, 1.0), amounts=(1.0, 10.0, 100.0)), *DENSE.chain)
    )
    problem = Problem((1.0,) * 3, (1.0, 2.0, 3.0), (DENSE, counted))
    assert problem.seconds(0, 0, 3) == [13.0]
    assert problem.seconds(1, 1, 3) == [110.0, 11.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Curve((0.0,), (1.0,)), "at least 2 knots"),
        (lambda: Curve((1.0, 2.0), (1.0, 1.0)), "begin with 0 and rise"),
        (lambda: Curve((0.0, 0.0), (1.0, 1.0)), "begin with 0 and rise"),
        (lambda: Curve((0.0, 1.0), (2.0, 1.0)), "must not be negative nor fall"),
        (lambda: Curve((0.0, 1.0), (1.0, inf)), "must be finite"),
        (lambda: Curve((0.0, nan), (1.0, 1.0)), "must be finite"),
        (lambda: Problem((-1.0,), (1.0,), (DENSE,)), "finite and not negative"),
        (lambda: Problem((1.0,), (nan,), (DENSE,)), "finite and not negative"),
        (lambda: Problem((1.0,), (1.0, 2.0), (DENSE,)), "nbytes must have one entry for each of the 1 items, got 2"),
        (lambda: Problem((1.0,), (1.0,), ()), "there must be a way to exchange"),
        (lambda: Problem((1.0,), (1.0,), (DENSE,), (frozenset(),)), "item 0 may take no option: loosen"),
        (lambda: Problem((1.0,), (1.0,), (DENSE,), (frozenset({3}),)), r"item 0 may take options \[3\], there are 1"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_parts_must_cover_the_items_and_keep_to_the_constraints() -> None:
    problem = Problem((1.0,) * 3, (1.0,) * 3, (DENSE, DENSE), (frozenset({0}),) * 3, (False, True, False))
    check_parts(problem, layerwise(problem, 0))
    for parts, message in (
        ([Part(0, 1, 0), Part(2, 3, 0)], "must follow one another"),
        ([Part(0, 1, 0), Part(1, 2, 0)], "end with item 2, there are 3"),
        ([Part(0, 2, 0), Part(2, 3, 0)], "must be alone"),
        ([Part(0, 1, 1), Part(1, 2, 0), Part(2, 3, 0)], "may not take option 1"),
    ):
        with pytest.raises(ValueError, match=message):
            check_parts(problem, parts)
