"""Searches the cuts and options with the shortest step together, and bounds the plan's distance from the best.

The search begins with plans of one option and buckets of one size, from single items to all in one. Then:

- label setting over positions to cut, which are close where bytes or time are (as in MergeComp, arXiv 2103.15195). A
  label is when each resource is free after the parts so far, served in order; demands on COMPUTE behind another
  resource (decoding) wait beside it until backward has come to where they interrupt it. This approximates the machine.
  Of the labels at a position, those are kept that promise most, given the least load that can follow, resource by
  resource and weighted against each other;
- local moves from the best plans, each simulated on the machine: another option for a part, or for the next parts with
  the same one, a cut moved, parts merged, a part split. A move is kept where the plan gets shorter. When none helps, a
  few neighbouring parts of the best plan are drawn at random and improved likewise.

All budgets are counts, not times, and random numbers are fixed: equal arguments give an equal plan, bit for bit, on
every rank. The native module runs the search where it is built, else `reference` finds the same plan some hundred times
slower.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from . import reference
from .machine import step_s
from .problem import Demand, Option, Part, Problem, Solution
from .reference import Settings

try:
    native: Any = importlib.import_module("gradsync.planner._search")
except ImportError:  # installed without a compiler
    native = None

POSITIONS = 64  # positions to cut at, for problems of some hundred items
TRANSITIONS = 80_000  # labels to create
DEMANDS = 60_000  # demands to simulate in all plans together
USUAL_SIZE = 314  # items; larger problems get budgets by the square of their size, as pairs of cuts are as many


def search(problem: Problem, *, max_items: int | None = None, effort: float = 1.0) -> Solution:
    """Returns the best plan that the search finds, within a few per mille of the optimum.

    It takes 10 ms for 314 items (gradients), 0.2 s for 1000.

    Args:
        problem: the gradients with their times and bytes, and the ways to exchange them.
        max_items: most items of a part (bucket); 1 gives every item a part of its own.
        effort: factor on the amount of work, and so on time.

    Raises:
        ValueError: if the constraints leave no plan.
    """
    if not effort > 0:
        raise ValueError(f"effort must be above 0, got {effort}")
    more = effort * max(1.0, problem.size / USUAL_SIZE) ** 2
    settings = Settings(
        max_items=_most(problem, max_items),
        positions=max(round(POSITIONS * effort**0.125), problem.size // 8),
        transitions=TRANSITIONS * more,
        demands=int(DEMANDS * more),
    )
    if native is None:
        return _solution(reference.find(problem, settings))
    parts, seconds = native.find(
        _native(problem), settings.max_items, settings.positions, settings.transitions, settings.demands
    )
    return _solution(Solution(tuple(Part(*part) for part in parts), seconds))


def best_of_all(problem: Problem, *, max_items: int | None = None) -> Solution:
    """Returns the plan with the shortest step by simulating all possible ones, so only for the smallest problems.

    There are 5 million plans for 8 items (gradients) and 6 options (ways to exchange a bucket).

    Args:
        problem: the gradients with their times and bytes, and the ways to exchange them.
        max_items: most items of a part (bucket); each part gets one of the options.

    Raises:
        ValueError: if the constraints leave no plan.
    """
    most = _most(problem, max_items)
    if native is None:
        return _solution(reference.exhaust(problem, most))
    parts, seconds = native.exhaust(_native(problem), most)
    return _solution(Solution(tuple(Part(*part) for part in parts), seconds))


def lower_bound(problem: Problem, upper_s: float, *, max_items: int | None = None, labels: int | None = None) -> float:
    """Returns a lower bound, in seconds, of the step with any plan; `upper_s` if no plan takes less than that.

    A plan cuts the items (gradients) into parts (buckets), and gives each an option: a chain of demands (tasks), each
    on COMPUTE or a link (any other resource). A part's n-th demand on a link comes after those of earlier parts. This
    is label setting over all plans, exact on a relaxation of the machine. A label has, for a plan of the first parts,
    these coordinates, none above its value on the machine in any plan that begins with these parts:

    - *backward*: its time so far, and the demands on COMPUTE at the begin of chains. These are served before backward
      goes on, so no later part is ready before.
    - *work*: backward and all demands on COMPUTE, which come one after another.
    - *turn n*, for each link and n: the end of the last n-th demand there, before which no later part's n-th one
      begins. So chains are simulated exactly, except that demands on COMPUTE never wait.
    - *load*, for a link on which chains have several demands: the maximum over parts of (begin of its first demand +
      all its demands there and those of later parts, which all come later).
    - *follow*: for demands on COMPUTE that end chains (decoding), the maximum over parts of (end of the part's last
      link demand + the demands on COMPUTE behind it and those of later parts). Only parts count whose last link demand
      is the n-th on one link: the link and n that most options have.
    - *end*: the largest bound so far: ends of chains, and for weights w with sum 1 the sum over resources of w * (work
      or load + least load of later parts), which is at most the largest of these.

    Labels are combined by + and max only, so a label may be dropped if another one is nowhere above it, or if its end
    is `upper_s` or more; if more than `labels` are left for plans of the same first items, near ones are replaced by
    their componentwise minimum, which is a lower bound of each.

    Args:
        upper_s: the seconds of a known plan; the closer to the best, the faster the computation.
        max_items: most items of a part.
        labels: labels kept for plans that end with the same item; more give a better bound in more time. By default 16
            for 314 items, 4 for 1000: half a second to one. Always 1 without the native module.
    """
    if labels is None:
        labels = min(max(round(16 * (USUAL_SIZE / max(problem.size, 1)) ** 2), 4), 64)
    if labels < 1:
        raise ValueError(f"labels must be at least 1, got {labels}")
    most = _most(problem, max_items)
    if native is None:
        return reference.lower_bound(problem, upper_s, most)
    bound: float = native.lower_bound(_native(problem), upper_s, most, labels)
    return bound


def player(problem: Problem) -> Callable[[Sequence[Part]], float]:
    """Returns a function that simulates plans of this problem and returns the seconds of their training steps.

    A plan is a sequence of `Part`, one for each bucket. The result is that of `machine.step_s`, but faster, as the
    problem is converted once.
    """
    if native is None:
        return functools.partial(step_s, problem)
    known = _native(problem)
    return lambda parts: float(native.play(known, [(part.start, part.stop, part.option) for part in parts]))


@dataclass(frozen=True)
class Certificate:
    """The seconds of a plan's training step, and a lower bound of the seconds with any plan."""

    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The share by which the plan's step may exceed the best plan's: 0.01 is one per cent."""
        return self.seconds / self.bound_s - 1.0 if self.bound_s else 0.0


def certify(
    problem: Problem, solution: Solution, *, max_items: int | None = None, labels: int | None = None
) -> Certificate:
    """Returns the seconds of the solution's plan together with a lower bound of the seconds of any plan.

    Args:
        problem: the problem that was solved.
        max_items: most items (gradients) of a bucket in the plans that the bound is for; None: any number.
        labels: effort of the bound, see `lower_bound`: a larger number gives a better bound in more time.
    """
    bound_s = lower_bound(problem, solution.seconds, max_items=max_items, labels=labels)
    return Certificate(solution.seconds, bound_s)


@dataclass(frozen=True)
class Pieces:
    """A planning problem whose large items (gradients) were cut into pieces, each an item of `problem`.

    `counts`: the number of pieces of each original item.
    """

    problem: Problem
    counts: tuple[int, ...]  # number of pieces of each item

    def spans(self, part: Part) -> list[tuple[int, float, float]]:
        """Returns which original items (gradients) a `part` (bucket) of `self.problem` covers: (item, begin, end).

        Begin and end are shares of the item: (3, 0.5, 1.0) is the second half of item 3.
        """
        found = []
        first = 0
        for item, count in enumerate(self.counts):
            begin, end = max(part.start - first, 0), min(part.stop - first, count)
            if begin < end:
                found.append((item, begin / count, end / count))
            first += count
        return found


def split_items(problem: Problem, largest_bytes: float, whole: Collection[int] = ()) -> Pieces:
    """Returns the planning problem with large items (gradients) cut into equal pieces of at most `largest_bytes`.

    Pieces of an item become ready together and share its bytes, or other amounts, equally. Items that must be alone in
    a bucket stay whole.

    `whole`: indices of further items that stay whole.

    Raises:
        ValueError: if `largest_bytes` is not above 0.
    """
    if not largest_bytes > 0:
        raise ValueError(f"largest_bytes must be above 0, got {largest_bytes}")
    counts = [
        1 if item in whole or (problem.alone and problem.alone[item]) else max(1, -int(-nbytes // largest_bytes))
        for item, nbytes in enumerate(problem.nbytes)
    ]
    origin = tuple(item for item, count in enumerate(counts) for _ in range(count))

    def shared(amounts: Sequence[float]) -> tuple[float, ...]:
        return tuple(amounts[item] / counts[item] for item in origin)

    rows: dict[tuple[float, ...], tuple[float, ...]] = {}
    options = []
    for option in problem.options:
        chain = []
        for demand in option.chain:
            if demand.amounts is not None and demand.amounts not in rows:
                rows[demand.amounts] = shared(demand.amounts)
            amounts = None if demand.amounts is None else rows[demand.amounts]
            chain.append(Demand(demand.resource, demand.curve, amounts))
        options.append(Option(option.name, tuple(chain)))
    first = [piece == 0 or origin[piece - 1] != item for piece, item in enumerate(origin)]
    cut = Problem(
        gaps_s=tuple(problem.gaps_s[item] if begins else 0.0 for item, begins in zip(origin, first, strict=True)),
        nbytes=shared(problem.nbytes),
        options=tuple(options),
        allowed=None if problem.allowed is None else tuple(problem.allowed[item] for item in origin),
        alone=None if problem.alone is None else tuple(problem.alone[item] for item in origin),
        rest_s=problem.rest_s,
    )
    return Pieces(cut, tuple(counts))


def _most(problem: Problem, max_items: int | None) -> int:
    if max_items is not None and max_items < 1:
        raise ValueError(f"max_items must be at least 1, got {max_items}")
    return max(problem.size, 1) if max_items is None else min(max_items, max(problem.size, 1))


def _solution(found: Solution) -> Solution:
    if found.seconds == float("inf"):
        raise ValueError("no plan keeps to the constraints: allow more options, or loosen `alone` and max_items")
    return found


def _native(problem: Problem) -> Any:
    """Returns the problem converted to the class of the native (C++) module."""
    rows: dict[tuple[float, ...] | None, int] = {None: 0}

    def chain(option: Option) -> list[Any]:
        return [
            (int(demand.resource), rows.setdefault(demand.amounts, len(rows)), curve.amounts, curve.seconds)
            for demand in option.chain
            for curve in (demand.curve,)
        ]

    options = [chain(option) for option in problem.options]
    amounts = [problem.nbytes if row is None else row for row in rows]
    allowed = [
        [problem.allowed is None or option in problem.allowed[item] for item in range(problem.size)]
        for option in range(len(problem.options))
    ]
    alone = problem.alone or (False,) * problem.size
    return native.Problem(problem.gaps_s, problem.rest_s, amounts, options, allowed, alone)
