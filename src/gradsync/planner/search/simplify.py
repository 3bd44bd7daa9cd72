"""Simplifies a plan: among plans about as fast, takes one with less lossy options and fewer buckets.

A search for the shortest step is indifferent to anything that backward hides. There, compression would lose accuracy
without gain, and every bucket costs the engine some time that no model contains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..solver.joint import player
from ..solver.problem import Part, Problem, Solution

AS_LONG = 1.002  # a step up to so many times the shortest counts as equal: no measurement tells them apart


def simplified(problem: Problem, solution: Solution, ranks: Sequence[int]) -> Solution:
    """Returns a solution with less lossy options and fewer buckets, whose step is at most `AS_LONG` times as long.

    An option is a way to exchange a bucket. First, all buckets with one option change together to a less lossy one,
    then each bucket alone; then neighbours merge.

    Args:
        problem: the planning problem in numbers.
        solution: the solution that the search found.
        ranks: for each option a number that grows with its loss of accuracy (0: exact); lower ones are preferred.
    """
    play, most_s = player(problem), AS_LONG * solution.seconds
    parts = list(solution.parts)

    def takes(changed: list[Part]) -> bool:
        return play(changed) <= most_s

    for option in sorted({part.option for part in parts}, key=lambda o: -ranks[o]):
        same = [place for place, part in enumerate(parts) if part.option == option]
        for places in (same, *([place] for place in same)):
            parts = next(filter(takes, _with_better(problem, parts, places, ranks)), parts)
    place = 0
    while place + 1 < len(parts):
        merged = next(filter(takes, _merged(problem, parts, place, ranks)), None)
        if merged is None:
            place += 1
        else:
            parts = merged
    return Solution(tuple(parts), play(parts))


def _with_better(problem: Problem, parts: list[Part], places: Sequence[int], ranks: Sequence[int]) -> list[list[Part]]:
    """Returns a plan for each less lossy option that the parts at `places` may take, the least lossy first.

    `ranks`: for each option a number that grows with its loss of accuracy.
    """
    present = min(ranks[parts[place].option] for place in places)
    allowed = set.intersection(*(_allowed(problem, parts[place]) for place in places))
    better = sorted((option for option in allowed if ranks[option] < present), key=lambda option: ranks[option])
    return [
        [replace(part, option=option) if place in places else part for place, part in enumerate(parts)]
        for option in better
    ]


def _merged(problem: Problem, parts: list[Part], place: int, ranks: Sequence[int]) -> list[list[Part]]:
    """Returns plans with part `place` and the next merged, by the less lossy of their options, by both if equal.

    Empty if the merged part is not allowed. `ranks`: for each option a number that grows with its loss of accuracy.
    """
    first, second = parts[place : place + 2]
    if problem.alone is not None and any(problem.alone[first.start : second.stop]):
        return []
    whole = Part(first.start, second.stop, first.option)
    least = min(ranks[first.option], ranks[second.option])
    options = [option for option in sorted({first.option, second.option}) if ranks[option] == least]
    allowed = _allowed(problem, whole)
    return [
        [*parts[:place], replace(whole, option=option), *parts[place + 2 :]] for option in options if option in allowed
    ]


def _allowed(problem: Problem, part: Part) -> set[int]:
    if problem.allowed is None:
        return set(range(len(problem.options)))
    return set.intersection(*(set(problem.allowed[item]) for item in range(part.start, part.stop)))
