"""The simulated machine follows its rules, and the recurrences bound its times."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gradsync.planner.solver.machine import ROWS, Level, deferred_s, finish, matrix, play, recurrence_s, step_s
from gradsync.planner.solver.maxplus import NEVER, apply
from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource, layerwise
from tests.planner.solver.random_problems import any_chains, one_channel, random_parts


def fixed(resource: Resource, *seconds: float) -> Demand:
    """Returns a demand that takes these seconds, one number an item."""
    return Demand(resource, Curve.linear(0.0, 1.0), seconds)


def drawn(problem: Problem, parts: tuple[Part, ...]) -> list[tuple[str, str, float, float]]:
    return [(task.name, task.stream, task.start_s, task.end_s) for task in play(problem, parts)]


def test_encoding_and_decoding_interrupt_backward() -> None:
    chain = (fixed(Resource.COMPUTE, 2, 2), fixed(Resource.INTER, 3, 3), fixed(Resource.COMPUTE, 1, 1))
    problem = Problem((4.0, 8.0), (1.0, 1.0), (Option("signs", chain),), rest_s=2.0)
    assert drawn(problem, layerwise(problem, 0)) == [
        ("backward 0", "compute", 0.0, 4.0),
        ("0: signs", "compute", 4.0, 6.0),
        ("0: signs", "inter", 6.0, 9.0),
        ("backward 1", "compute", 6.0, 9.0),
        ("0: signs", "compute", 9.0, 10.0),
        ("backward 1", "compute", 10.0, 15.0),
        ("1: signs", "compute", 15.0, 17.0),
        ("backward", "compute", 17.0, 19.0),
        ("1: signs", "inter", 17.0, 20.0),
        ("1: signs", "compute", 20.0, 21.0),
    ]


def test_the_first_demands_of_parts_keep_the_order_of_the_parts() -> None:
    """Part 1 is ready first but waits for the link: part 0, still encoded on another core, comes first."""
    host = Option("host", (fixed(Resource.OFFLOAD, 5, 5), fixed(Resource.INTER, 10, 10)))
    device = Option("device", (fixed(Resource.COMPUTE, 0.5, 0.5), fixed(Resource.INTER, 10, 10)))
    problem = Problem((0.0, 1.0), (1.0, 1.0), (host, device))
    assert step_s(problem, (Part(0, 1, 0), Part(1, 2, 1))) == 25.0


def test_the_second_demand_on_a_link_takes_its_turn_by_waiting_time() -> None:
    """A small part's hierarchical exchange waits for the large part's first phase, which was ready earlier."""
    chain = (fixed(Resource.INTRA, 1, 6), fixed(Resource.INTER, 3, 3), fixed(Resource.INTRA, 1, 1))
    problem = Problem((0.0, 0.0), (1.0, 1.0), (Option("two levels", chain),))
    intra = [(name, begin) for name, stream, begin, _ in drawn(problem, layerwise(problem, 0)) if stream == "intra"]
    assert intra == [("0: two levels", 0.0), ("1: two levels", 1.0), ("0: two levels", 7.0), ("1: two levels", 10.0)]


def test_a_part_takes_its_curve_of_the_sum_of_its_items() -> None:
    option = Option("dense", (Demand(Resource.INTER, Curve.linear(1.0, 2.0)),))
    problem = Problem((1.0, 1.0), (3.0, 4.0), (option,))
    (task,) = [task for task in play(problem, (Part(0, 2, 0),)) if task.stream == "inter"]
    assert (task.start_s, task.duration_s, task.nbytes) == (2.0, 15.0, 7.0)


def test_an_empty_problem_takes_what_backward_takes() -> None:
    assert step_s(Problem((), (), (Option("dense", ()),), rest_s=2.0), ()) == 2.0
    assert step_s(Problem((), (), (Option("dense", ()),)), ()) == 0.0


def charged_s(problem: Problem, parts: Sequence[Part]) -> float:
    return recurrence_s(problem, parts, Level.CHARGED)


def test_without_decoding_the_recurrence_is_the_machine() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        problem = one_channel(random_, decode=False)
        parts = random_parts(random_, problem)
        reached = step_s(problem, parts)
        assert charged_s(problem, parts) == deferred_s(problem, parts) == reached, seed


def test_options_have_the_matrices_of_the_paper() -> None:
    """The matrices of ByteComp's model of a step with a = 2, h = 3, k = 5, d = 7; rows: compute, offload, inter."""
    plain, device, host = (
        Option("plain", (fixed(Resource.INTER, 7),)),
        Option("device", (fixed(Resource.COMPUTE, 3), fixed(Resource.INTER, 7))),
        Option("host", (fixed(Resource.OFFLOAD, 5), fixed(Resource.INTER, 7))),
    )
    problem = Problem((2.0,), (1.0,), (plain, device, host))
    rows = (Resource.COMPUTE, Resource.OFFLOAD, Resource.INTER)

    def shown(option: int) -> list[list[float]]:
        found = matrix(problem, Part(0, 1, option), Level.CHARGED)
        return [[found[row][column] for column in rows] for row in rows]

    assert shown(0) == [[2, NEVER, NEVER], [NEVER, 0, NEVER], [2 + 7, NEVER, 7]]
    assert shown(1) == [[2 + 3, NEVER, NEVER], [NEVER, 0, NEVER], [2 + 3 + 7, NEVER, 7]]
    assert shown(2) == [[2, NEVER, NEVER], [2 + 5, 5, NEVER], [2 + 5 + 7, 5 + 7, 7]]


def test_the_product_of_matrices_is_the_recurrence() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        problem = any_chains(random_)
        parts = random_parts(random_, problem)
        rows: tuple[float, ...] = (0.0,) * ROWS
        for part in parts:
            rows = apply(matrix(problem, part, Level.CHARGED), rows)
        assert finish(rows, problem.rest_s, Level.CHARGED) == charged_s(problem, parts), seed


def test_the_machine_takes_no_longer_than_the_charged_level() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        problem = one_channel(random_, decode=True)
        parts = random_parts(random_, problem)
        assert step_s(problem, parts) <= charged_s(problem, parts), seed


def test_charging_the_channel_alone_would_be_no_bound() -> None:
    """Decoding earlier parts delays the last part's readiness: the charged bound must count COMPUTE, too."""
    chain = (fixed(Resource.INTER, 1, 1, 1), fixed(Resource.COMPUTE, 4, 4, 0))
    problem = Problem((1.0, 5.0, 5.0), (1.0,) * 3, (Option("decoded", chain),))
    parts = layerwise(problem, 0)
    of_the_channel = max(1 + 1 + 4, 6, 11) + 1.0  # what the last transfer ends at if decoding delays only transfers
    assert of_the_channel < step_s(problem, parts) <= charged_s(problem, parts)


def test_deferred_decoding_follows_the_last_transfer() -> None:
    chain = (fixed(Resource.COMPUTE, 1, 1), fixed(Resource.INTER, 2, 2), fixed(Resource.COMPUTE, 3, 4))
    problem = Problem((2.0, 9.0), (1.0, 1.0), (Option("signs", chain),))
    assert deferred_s(problem, layerwise(problem, 0)) == 2 + 1 + 9 + 1 + 2 + 3 + 4
