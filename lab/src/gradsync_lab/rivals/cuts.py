"""Finds the best of all ways to cut a problem's gradients (items) into buckets, where all take one exchange option.

The best cuts are those of MergeComp's model of a step, `machine.deferred_s`: encoding delays backward, each channel
serves the buckets in order, and all decoding waits for the last transfer. A `Solution`'s seconds are those of the full
machine (`planner.solver.problem`). Items that may not take the option take the first option that they may. A bucket
never holds items of different options, and never holds an item marked `alone` together with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gradsync.planner.solver.machine import END, ROWS, Level, advance, deferred_s, finish, follows, step_s
from gradsync.planner.solver.problem import Curve, Part, Problem, Resource, Solution

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

ROUNDING = 1e-12  # equal sums in another order differ by less


def best_cuts(problem: Problem, option: int = 0) -> Solution:
    """Returns the best cuts into any number of buckets by MergeComp's model of a step, by dynamic programming.

    Where all items take the option, one of its tasks queues for a link, and the costs of all others are linear, this
    takes O(n^3), and of equally good cuts those with the fewest buckets are returned. Otherwise the search keeps, after
    each item, all cuts of the items so far that no other cuts beat.
    """
    if not problem.size:
        return Solution((), step_s(problem, ()))
    options = item_options(problem, option)
    best: tuple[Part, ...] = ()
    if _is_linear(problem, options):
        best_s = float("inf")
        for seconds, parts in _by_count_linear(problem, options, problem.size):
            if seconds < best_s * (1 - ROUNDING):
                best, best_s = parts, seconds
    else:
        best = _best_by_labels(problem, option)
    return Solution(best, step_s(problem, best))


def curve(problem: Problem, option: int = 0, most: int | None = None) -> list[Solution]:
    """Returns F(y), the best cuts into y buckets with the seconds of a step, for each possible y up to `most`."""
    counts = by_count(problem, option, problem.size if most is None else min(most, problem.size))
    return [Solution(parts, step_s(problem, parts)) for _, parts in counts]


def by_count(problem: Problem, option: int, most: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    """Yields (seconds in MergeComp's model, the best cuts), for each possible number of buckets up to `most`."""
    options = item_options(problem, option)
    if not problem.size:
        return iter([(problem.rest_s, ())])
    return (_by_count_linear if _is_linear(problem, options) else _by_count_labels)(problem, options, most)


def item_options(problem: Problem, option: int) -> list[int]:
    """Returns the exchange option of each item (gradient): `option`, or else the first that the item may take."""
    if problem.allowed is None:
        return [option] * problem.size
    return [option if option in may else min(may) for may in problem.allowed]


def may_join(problem: Problem, options: Sequence[int]) -> list[bool]:
    """Returns, for each item (gradient), whether a bucket may hold the item together with the one before it."""
    alone = problem.alone or (False,) * problem.size
    return [
        item > 0 and options[item] == options[item - 1] and not alone[item] and not alone[item - 1]
        for item in range(problem.size)
    ]


def cut_at(problem: Problem, option: int, stops: Sequence[int]) -> tuple[Part, ...]:
    """Returns buckets of items (gradients) that end at `stops`, and where neighbours may not share a bucket."""
    options = item_options(problem, option)
    joins = may_join(problem, options)
    places = {0, problem.size, *stops, *(item for item in range(problem.size) if not joins[item])}
    return tuple(Part(start, stop, options[start]) for start, stop in pairwise(sorted(places)))


def _is_linear(problem: Problem, options: Sequence[int]) -> bool:
    """Whether `_by_count_linear` applies: all items take one exchange option, and its costs are of the needed form.

    Exactly one of its tasks must queue for a link or OFFLOAD, at any cost; the costs of all others must be linear.
    """
    if len(set(options)) > 1:
        return False
    channels = 0
    for demand, later in zip(problem.options[options[0]].chain, follows(problem.options[options[0]]), strict=True):
        if not later and demand.resource is not Resource.COMPUTE:
            channels += 1
        elif len(demand.curve.amounts) > 2:
            return False
    return channels == 1


def _by_count_linear(problem: Problem, options: Sequence[int], most: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    """Yields (seconds, buckets) of the best cuts into each possible number of buckets up to `most`, by a table C(i, k).

    C(i, k) is the earliest time at which the link is free after i buckets that hold the first k items.
    """
    option = problem.options[options[0]]
    tables = _tables(problem, options[0])
    count = problem.size
    possible = _possible(problem, options)
    ready = np.concatenate([[0.0], np.cumsum(problem.gaps_s)])
    call_s = after_call_s = after_s = 0.0
    transfer = np.zeros((count + 1, count + 1))
    for demand, later, table in zip(option.chain, follows(option), tables, strict=True):
        if later:
            after_call_s += demand.curve(0.0)
            after_s += table[0, count] - demand.curve(0.0)
        elif demand.resource is Resource.COMPUTE:
            call_s += demand.curve(0.0)
            ready = ready + table[0] - demand.curve(0.0)
        else:
            transfer = table
    transfer = np.where(possible, transfer, np.inf)
    free = np.full(count + 1, np.inf)
    free[0] = 0.0
    came_from: list[Ints] = []
    for number in range(1, min(most, count) + 1):
        payload = ready + number * call_s
        ends = np.maximum(free[:, None], payload[None, :]) + transfer
        came_from.append(np.argmin(ends, axis=0))
        free = np.take_along_axis(ends, came_from[-1][None, :], axis=0)[0]
        if free[count] < np.inf:
            last_s = max(free[count], payload[count] + problem.rest_s) + number * after_call_s + after_s
            yield float(last_s), _back(came_from, options)


def _back(came_from: Sequence[Ints], options: Sequence[int]) -> tuple[Part, ...]:
    stop, parts = len(options), []
    for sources in reversed(came_from):
        start = int(sources[stop])
        parts.append(Part(start, stop, options[start]))
        stop = start
    return tuple(reversed(parts))


def _possible(problem: Problem, options: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Returns whether items (gradients) start..stop-1 may form one bucket, (n + 1, n + 1) bool by [start, stop]."""
    begins = np.zeros(problem.size + 1, dtype=np.intp)  # start of the longest bucket with that stop
    for item, joined in enumerate(may_join(problem, options)):
        begins[item + 1] = begins[item] if joined else item
    start, stop = np.ogrid[: problem.size + 1, : problem.size + 1]
    return (start < stop) & (start >= begins[None, :])


def _tables(problem: Problem, option: int) -> list[Floats]:
    """Returns, for each task of an exchange option, its seconds for a bucket of items start..stop-1, by [start, stop].

    A task is an encoding, a transfer or a decoding. Entries without items are the cost of an empty call.
    """
    tables = []
    for demand in problem.options[option].chain:
        amounts = np.concatenate([[0.0], np.cumsum(problem.nbytes if demand.amounts is None else demand.amounts)])
        tables.append(_seconds(demand.curve, np.maximum(amounts[None, :] - amounts[:, None], 0.0)))
    return tables


def _seconds(curve: Curve, amounts: Floats) -> Floats:
    """Evaluates the piecewise linear curve at each entry of an array of amounts."""
    knots, seconds = np.array(curve.amounts), np.array(curve.seconds)
    place = np.clip(np.searchsorted(knots, amounts, side="right"), 1, len(knots) - 1)
    slopes = np.diff(seconds) / np.diff(knots)
    found: Floats = seconds[place - 1] + (amounts - knots[place - 1]) * slopes[place - 1]
    return found


@dataclass(frozen=True)
class _Labels:
    """The n kept ways (labels) to cut the same number of first items into buckets, of which no way beats another.

    Each has its times when resources get free, the start of its last bucket, and the label that this bucket extends.
    """

    rows: Floats  # (n, ROWS)
    starts: Ints  # (n,) where the last bucket begins
    sources: Ints  # (n,) number of the label that ends there


class _LabelSearch:
    """A search for the best cuts that extends labels (ways to cut the first items into buckets) bucket by bucket.

    A label is kept unless another one frees all resources as early and leaves no more decoding to do. Where a task's
    seconds are not linear in its bytes, no single label need beat all others.
    """

    def __init__(self, problem: Problem, options: Sequence[int]) -> None:
        self._problem = problem
        self._options = options
        self._tables = {option: _tables(problem, option) for option in set(options)}
        self._possible = _possible(problem, options)
        self._ready = np.concatenate([[0.0], np.cumsum(problem.gaps_s)])
        self.empty = _Labels(np.zeros((1, ROWS)), np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp))

    def extend(self, before: Sequence[_Labels | None], stop: int, limit_s: float = np.inf) -> _Labels | None:
        """Returns the labels of the first `stop` items: labels of fewer items and one more bucket; None if none fits.

        `before[q]` has the labels (ways to cut) of the first q items. Labels are dropped with which the step must take
        longer than `limit_s`.
        """
        found = [(q, labels.rows) for q, labels in enumerate(before) if labels and q < stop and self._possible[q, stop]]
        if not found:
            return None
        origin = np.repeat([q for q, _ in found], [len(rows) for _, rows in found])
        source = np.concatenate([np.arange(len(rows)) for _, rows in found])
        rows = np.concatenate([rows for _, rows in found])
        option = self._options[stop - 1]
        after = np.stack(
            advance(
                list(rows.T),
                self._ready[stop] - self._ready[origin],
                self._problem.options[option],
                [table[origin, stop] for table in self._tables[option]],
                Level.DEFERRED,
                np.maximum,
            ),
            axis=1,
        )
        # no later demand reaches a queue before backward goes on, so earlier free times make no difference
        after[:, 1:END] = np.maximum(after[:, 1:END], after[:, :1])
        rest_s = self._ready[-1] - self._ready[stop] + self._problem.rest_s
        possible = np.flatnonzero(finish(list(after.T), rest_s, Level.DEFERRED, np.maximum) <= limit_s)
        kept = possible[_least(after[possible])]
        return _Labels(after[kept], origin[kept], source[kept]) if len(kept) else None

    def best(self, layers: Sequence[Sequence[_Labels | None]]) -> tuple[float, tuple[Part, ...]]:
        """Returns the least seconds of a step by MergeComp's model, and the buckets that take them.

        Args:
            layers: `layers[i][k]` has the labels (ways to cut) of the first k items into i + 1 buckets. The same list
                may stand for every i, if it has the labels of any number of buckets.
        """
        stop, parts = len(self._options), list[Part]()
        label, least_s = 0, 0.0
        for layer in reversed(layers):
            labels = layer[stop]
            assert labels is not None
            if not parts:
                seconds = finish(list(labels.rows.T), self._problem.rest_s, Level.DEFERRED, np.maximum)
                label, least_s = int(np.argmin(seconds)), float(np.min(seconds))
            start = int(labels.starts[label])
            parts.append(Part(start, stop, self._options[start]))
            stop, label = start, int(labels.sources[label])
            if not stop:
                break
        return least_s, tuple(reversed(parts))


def _least(rows: Floats) -> Ints:
    """Returns the numbers of the rows that no other row equals or undercuts in all columns.

    Of equal rows, the first is kept.
    """
    left: Ints = np.lexsort(rows.T[::-1])
    kept = []
    while len(left):
        kept.append(left[0])
        left = left[1:][(rows[left[1:]] < rows[left[0]]).any(axis=1)]
    return np.array(kept, dtype=np.intp)


def _best_by_labels(problem: Problem, option: int) -> tuple[Part, ...]:
    known = [cut_at(problem, option, stops) for stops in ((), range(problem.size))]
    limit_s = min(deferred_s(problem, parts) for parts in known) * (1 + ROUNDING)
    fusion = _LabelSearch(problem, item_options(problem, option))
    labels: list[_Labels | None] = [fusion.empty]
    for stop in range(1, problem.size + 1):
        labels.append(fusion.extend(labels, stop, limit_s))
    return fusion.best([labels] * problem.size)[1]


def _by_count_labels(problem: Problem, options: Sequence[int], most: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    fusion = _LabelSearch(problem, options)
    before: list[_Labels | None] = [fusion.empty, *[None] * problem.size]
    layers: list[list[_Labels | None]] = []
    for _ in range(min(most, problem.size)):
        before = [None, *(fusion.extend(before, stop) for stop in range(1, problem.size + 1))]
        layers.append(before)
        if before[-1] is not None:
            yield fusion.best(layers)
