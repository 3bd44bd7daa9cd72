"""Cuts, options and devices decided together: a plan within milliseconds, and how far from the best it can be.

It begins with plans of one option and buckets of one size, from every item alone to all in one. Then:

- label setting (`mergecomp.md` 3.5) over places to cut, which are close where the bytes or the time are. A label is
  when each resource is free once the parts so far are served in their order; demands on COMPUTE behind another
  resource (decoding) wait beside it until backward has come to where they interrupt it. That is the machine only
  roughly. Of the labels at a place some are kept: those that promise most with the least that can follow, resource by
  resource and weighed against each other;
- from the best plans, moves that the machine itself plays: another option for a part or for the next parts that have
  the same one, a cut moved, parts merged, a part split. A move stays where the plan takes less. Once none does, a few
  neighbouring parts of the best plan are drawn anew and improved likewise.

Everything is counted, nothing timed or drawn by chance: the same arguments give the same plan, bit for bit, on every
rank. The native module does it where it is built, else `reference`: the same plan some hundred times later.
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

POSITIONS = 64  # places to cut, of a problem of some hundred items
TRANSITIONS = 80_000  # from label to label
DEMANDS = 60_000  # that all plays together serve
USUAL_SIZE = 314  # items; more get more than in proportion, since there are more pairs of places to cut


def search(problem: Problem, *, max_items: int | None = None, effort: float = 1.0) -> Solution:
    """The best plan found: within some per mille of the best in about 10 ms for 314 items, 0.2 s for 1000.

    Args:
        max_items: of a part; 1 gives every item a part of its own.
        effort: how much work, and so time, is spent, in proportion.

    Raises:
        ValueError: where the constraints leave no plan.
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
    """The best of all plans, each of them played: 5 million for 8 items and 4 options.

    Raises:
        ValueError: where the constraints leave no plan.
    """
    most = _most(problem, max_items)
    if native is None:
        return _solution(reference.exhaust(problem, most))
    parts, seconds = native.exhaust(_native(problem), most)
    return _solution(Solution(tuple(Part(*part) for part in parts), seconds))


def lower_bound(problem: Problem, upper_s: float, *, max_items: int | None = None, labels: int | None = None) -> float:
    """Seconds below which no plan is, or `upper_s` where no plan can take less.

    Exact label setting over all cuts and options on a relaxation of the machine. A label has for a plan of the first
    parts, no part of which is after the machine in any plan that begins with them:

    - *backward*: its time so far and the demands on COMPUTE with which chains begin. Each of them is served before
      backward goes on, so no later part is ready before.
    - *work*: backward and all demands on COMPUTE, which come one after another.
    - for each link and n *turn n*: the end of the last n-th demand there. The next n-th one begins no earlier, by the
      rule of the order, nor before the demand ahead of it in its chain ends: so chains are followed as they are,
      only that on COMPUTE they never wait.
    - for a link with several turns *load*: max over parts of (begin of its first demand + all demands of it and later
      parts). Those come later: their first demand by the rule of the order, the others after it.
    - *follow*: behind the link turn that most chains end with before they go on to COMPUTE, likewise.
    - *end*: the largest bound so far: ends of chains, and for weights w that are 1 together the sum over resources of
      w * (work or load + least that later parts add to it), which is at most the largest of them.

    All enter by + and max only, so a label that another one is below in everything may be dropped, as may one whose
    end is `upper_s` or more; and where there are more than `labels` at an item, near ones are replaced by their
    componentwise least, which is below whatever they are below.

    Args:
        upper_s: what a plan takes; the closer, the faster this is.
        labels: kept at every item; more give a better bound for more time. By default 16 for 314 items, 4 for 1000:
            half a second to one. Without the native module it is 1.
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
    """`machine.step_s` for many plans of one problem."""
    if native is None:
        return functools.partial(step_s, problem)
    known = _native(problem)
    return lambda parts: float(native.play(known, [(part.start, part.stop, part.option) for part in parts]))


@dataclass(frozen=True)
class Certificate:
    """A plan's seconds, and below which no plan can be."""

    seconds: float
    bound_s: float

    @property
    def gap(self) -> float:
        """By what share the plan can be above the best one: 0.01 is one per cent."""
        return self.seconds / self.bound_s - 1.0 if self.bound_s else 0.0


def certify(
    problem: Problem, solution: Solution, *, max_items: int | None = None, labels: int | None = None
) -> Certificate:
    """How good a plan is at least, by `lower_bound`."""
    bound_s = lower_bound(problem, solution.seconds, max_items=max_items, labels=labels)
    return Certificate(solution.seconds, bound_s)


@dataclass(frozen=True)
class Pieces:
    """A problem whose large items are cut into pieces."""

    problem: Problem
    counts: tuple[int, ...]  # by item

    def spans(self, part: Part) -> list[tuple[int, float, float]]:
        """What a part of the cut problem is of: items, and from which share of the item to which."""
        found = []
        first = 0
        for item, count in enumerate(self.counts):
            begin, end = max(part.start - first, 0), min(part.stop - first, count)
            if begin < end:
                found.append((item, begin / count, end / count))
            first += count
        return found


def split_items(problem: Problem, largest_bytes: float, whole: Collection[int] = ()) -> Pieces:
    """Cuts items into equal pieces of at most so many bytes, which become ready together and share the amounts.

    Items that must be alone stay whole, and those in `whole`.

    Raises:
        ValueError: where `largest_bytes` is not above 0.
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
    """The problem as the native module takes it."""
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
