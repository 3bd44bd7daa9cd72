"""Where to cut the items into buckets for one option, as MergeComp and others do it, and exactly (`mergecomp.md`).

MergeComp's model of a step is `machine.deferred_s`: encoding delays backward, a channel serves the buckets in order,
all decoding waits for the last transfer. What is called best here is so in this model; a `Solution` says what the
machine takes. Items that may not take the option take the first that they may. Buckets never join items of different
options, nor those that must be alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .machine import END, ROWS, Level, advance, deferred_s, finish, follows, step_s
from .problem import Curve, Part, Problem, Resource, Solution

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

DDP_BYTES = 25 << 20


def whole(problem: Problem, option: int = 0) -> tuple[Part, ...]:
    """One bucket, or as few as there may be."""
    return _parts(problem, option, ())


def fixed_size(problem: Problem, option: int = 0, nbytes: float = DDP_BYTES) -> tuple[Part, ...]:
    """Closes a bucket as soon as it holds `nbytes`."""
    stops, held = [], 0.0
    joins = _joins(problem, _options(problem, option))
    for item, size in enumerate(problem.nbytes):
        held = held + size if joins[item] else size
        if held >= nbytes:
            stops.append(item + 1)
            held = 0.0
    return _parts(problem, option, stops)


def equal_counts(problem: Problem, option: int = 0, count: int = 2) -> tuple[Part, ...]:
    """`count` buckets of as many items each, to within one."""
    return _parts(problem, option, [number * problem.size // count for number in range(1, count)])


def mg_wfbp(problem: Problem, option: int = 0) -> tuple[Part, ...]:
    """Merging of MG-WFBP (Shi et al., INFOCOM 2019), for exchanges that take alpha + beta * bytes.

    In ready order: a bucket takes the next item where that is ready before the bucket's transfer, if it began as soon
    as the link is free, would be through its alpha. Waiting for it then costs less than the alpha of its own that it
    saves. alpha is what the option's transfers take of nothing.
    """
    options = _options(problem, option)
    joins = [*_joins(problem, options), False]
    rows: list[float] = [0.0] * ROWS
    stops: list[int] = []
    start = 0
    for stop in range(1, problem.size + 1):
        backward_s = sum(problem.gaps_s[start:stop])
        taken, seconds = problem.options[options[start]], problem.seconds(options[start], start, stop)
        if joins[stop]:
            transfers = [demand for demand in taken.chain if demand.resource is not Resource.COMPUTE]
            encode_s = sum(seconds[: taken.chain.index(transfers[0])]) if transfers else 0.0
            free_s = rows[transfers[0].resource] if transfers else 0.0
            through_s = max(rows[Resource.COMPUTE] + backward_s + encode_s, free_s) + sum(
                demand.curve(0.0) for demand in transfers
            )
            if rows[Resource.COMPUTE] + backward_s + problem.gaps_s[stop] < through_s:
                continue
        rows = advance(rows, backward_s, taken, seconds, Level.DEFERRED)
        stops.append(stop)
        start = stop
    return _parts(problem, option, stops)


def two_buckets(problem: Problem, option: int = 0) -> Solution:
    """MergeComp's two buckets by the rule where its optimum lies: the first cut at which the second bucket waits.

    There the transfer of the first ends just when the payload of the second is ready; of that cut and the one before
    it the better one. With linear costs it is the optimum (`mergecomp.md` 4.1).

    Raises:
        ValueError: where there are fewer than two items, or they may not be in two buckets.
    """
    if problem.size < 2 or len(whole(problem, option)) > 1:
        raise ValueError("two_buckets needs two items or more that may share a bucket: use best_cuts")
    low, high = 1, problem.size - 1  # the first cut that waits, or the last cut
    while low < high:
        middle = (low + high) // 2
        if _second_waits(problem, _parts(problem, option, [middle])):
            high = middle
        else:
            low = middle + 1
    cuts = [_parts(problem, option, [cut]) for cut in (low - 1, low) if cut]
    best = min(cuts, key=lambda parts: deferred_s(problem, parts))
    return Solution(best, step_s(problem, best))


def _second_waits(problem: Problem, parts: Sequence[Part]) -> bool:
    """Whether the second bucket finds the last resource that it queues for busy with the first."""
    first, second = parts
    option = problem.options[first.option]
    queues = [demand.resource for demand, later in zip(option.chain, follows(option), strict=True) if not later]
    if not queues or queues[-1] is Resource.COMPUTE:
        return True  # nothing overlaps with backward
    link = queues[-1]

    def after(rows: Sequence[float], part: Part) -> list[float]:
        backward_s = sum(problem.gaps_s[part.start : part.stop])
        return advance(rows, backward_s, option, problem.seconds(part.option, part.start, part.stop), Level.DEFERRED)

    rows = after([0.0] * ROWS, first)
    free = list(rows)
    free[link] = float("-inf")
    return after(rows, second)[link] > after(free, second)[link]


def released_cut(size: int, measure: Callable[[int], float]) -> int:
    """The binary search that MergeComp released, for two buckets of `size` items: where to cut.

    `measure(cut)` says how long a step takes with the first `cut` items in one bucket and the rest in the other; it is
    asked once for each cut (20 iterations each in the release). Right for exact times of a single valley; a plateau, or
    noise above the difference of two cuts that are two items apart, sends it the wrong way.
    """
    if size < 2:
        raise ValueError(f"two buckets need 2 items or more, got {size}")
    measured: dict[int, float] = {}

    def seconds(cut: int) -> float:
        if cut not in measured:
            measured[cut] = measure(cut)
        return measured[cut]

    start, end = 1, size - 1
    while start < end - 1:
        middle = (start + end) // 2
        if seconds(middle) > seconds(middle + 2):
            start = middle + 2
        else:
            end = middle
    inside = [cut for cut in measured if 1 < cut < size - 1]
    return min(inside, key=lambda cut: (measured[cut], cut)) if inside else size // 2


def mergecomp(problem: Problem, option: int = 0, *, most: int = 4, threshold: float = 0.0) -> Solution:
    """MergeComp as published: the best cuts into 2, 3, .. `most` buckets, until one more does not help.

    It stops at the first number whose step is not shorter than that of one bucket less by more than the share
    `threshold`. The published search finds the best cuts of a number by enumeration and bisection; here they are exact.
    """
    found = _by_count(problem, option, most)
    best_s, best = next(found)
    for seconds, parts in found:
        if not seconds < best_s * (1.0 - threshold):
            break
        best_s, best = seconds, parts
    return Solution(best, step_s(problem, best))


def best_cuts(problem: Problem, option: int = 0) -> Solution:
    """The best of all cuts into any number of buckets, by dynamic programming.

    O(n^3) where the option's curves on COMPUTE are linear and it has one channel, else by labels (`mergecomp.md` 3.4).
    """
    if not problem.size:
        return Solution((), step_s(problem, ()))
    options = _options(problem, option)
    if _is_linear(problem, options):
        _, best = min(_by_count_linear(problem, options, problem.size), key=lambda found: found[0])
    else:
        best = _best_by_labels(problem, option)
    return Solution(best, step_s(problem, best))


def curve(problem: Problem, option: int = 0, most: int | None = None) -> list[Solution]:
    """F(y): the best cuts into each number of buckets up to `most`, from the least that there may be."""
    counts = _by_count(problem, option, problem.size if most is None else min(most, problem.size))
    return [Solution(parts, step_s(problem, parts)) for _, parts in counts]


def _by_count(problem: Problem, option: int, most: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    """Seconds of the model and best cuts, for each number of buckets that there may be, rising."""
    options = _options(problem, option)
    if not problem.size:
        return iter([(problem.rest_s, ())])
    return (_by_count_linear if _is_linear(problem, options) else _by_count_labels)(problem, options, most)


def _options(problem: Problem, option: int) -> list[int]:
    """The option of each item."""
    if problem.allowed is None:
        return [option] * problem.size
    return [option if option in may else min(may) for may in problem.allowed]


def _joins(problem: Problem, options: Sequence[int]) -> list[bool]:
    """Whether each item may be in a bucket with the one before it."""
    alone = problem.alone or (False,) * problem.size
    return [
        item > 0 and options[item] == options[item - 1] and not alone[item] and not alone[item - 1]
        for item in range(problem.size)
    ]


def _parts(problem: Problem, option: int, stops: Sequence[int]) -> tuple[Part, ...]:
    """Buckets that end at `stops` and wherever they must."""
    options = _options(problem, option)
    joins = _joins(problem, options)
    places = {0, problem.size, *stops, *(item for item in range(problem.size) if not joins[item])}
    return tuple(Part(start, stop, options[start]) for start, stop in pairwise(sorted(places)))


def _is_linear(problem: Problem, options: Sequence[int]) -> bool:
    """Whether what precedes and follows the transfers depends only on how many buckets there are and what they hold."""
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
    """`mergecomp.md` 3.4: C(i, k) is when the link is free after i buckets that hold the first k items."""
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
    """[start, stop]: whether these items may be one bucket."""
    begins = np.zeros(problem.size + 1, dtype=np.intp)  # of the longest one with that stop
    for item, joined in enumerate(_joins(problem, options)):
        begins[item + 1] = begins[item] if joined else item
    start, stop = np.ogrid[: problem.size + 1, : problem.size + 1]
    return (start < stop) & (start >= begins[None, :])


def _tables(problem: Problem, option: int) -> list[Floats]:
    """[start, stop] for each demand of the option: its seconds for these items, of no items what a call takes."""
    tables = []
    for demand in problem.options[option].chain:
        amounts = np.concatenate([[0.0], np.cumsum(problem.nbytes if demand.amounts is None else demand.amounts)])
        tables.append(_seconds(demand.curve, np.maximum(amounts[None, :] - amounts[:, None], 0.0)))
    return tables


def _seconds(curve: Curve, amounts: Floats) -> Floats:
    """The curve, of many amounts."""
    knots, seconds = np.array(curve.amounts), np.array(curve.seconds)
    place = np.clip(np.searchsorted(knots, amounts, side="right"), 1, len(knots) - 1)
    slopes = np.diff(seconds) / np.diff(knots)
    found: Floats = seconds[place - 1] + (amounts - knots[place - 1]) * slopes[place - 1]
    return found


@dataclass(frozen=True)
class _Labels:
    """States that buckets of the first items may lead to, each with the one it came from."""

    rows: Floats  # (n, ROWS)
    starts: Ints  # (n,) where the last bucket begins
    sources: Ints  # (n,) number of the label there


class _Fusion:
    """Labels by how many items they hold; with knees in its curves, one state need not be better than all others."""

    def __init__(self, problem: Problem, options: Sequence[int]) -> None:
        self._problem = problem
        self._options = options
        self._tables = {option: _tables(problem, option) for option in set(options)}
        self._possible = _possible(problem, options)
        self._ready = np.concatenate([[0.0], np.cumsum(problem.gaps_s)])
        self.empty = _Labels(np.zeros((1, ROWS)), np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp))

    def extend(self, before: Sequence[_Labels | None], stop: int, limit_s: float = np.inf) -> _Labels | None:
        """What one more bucket, which ends at `stop`, makes of all labels before, where that may still be in time."""
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
        # nothing that comes reaches a queue before backward goes on, so how long it has been free says nothing
        after[:, 1:END] = np.maximum(after[:, 1:END], after[:, :1])
        rest_s = self._ready[-1] - self._ready[stop] + self._problem.rest_s
        possible = np.flatnonzero(finish(list(after.T), rest_s, Level.DEFERRED, np.maximum) <= limit_s)
        kept = possible[_least(after[possible])]
        return _Labels(after[kept], origin[kept], source[kept]) if len(kept) else None

    def best(self, layers: Sequence[Sequence[_Labels | None]]) -> tuple[float, tuple[Part, ...]]:
        """The least seconds of the model, and the buckets; `layers[i][k]`: labels of k items whose last bucket is i-th.

        They may be the same for all i, since each label knows where it came from.
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
    """Numbers of the rows that no other row equals or undercuts in all columns; of equal rows, the first."""
    left: Ints = np.lexsort(rows.T[::-1])
    kept = []
    while len(left):
        kept.append(left[0])
        left = left[1:][(rows[left[1:]] < rows[left[0]]).any(axis=1)]
    return np.array(kept, dtype=np.intp)


def _best_by_labels(problem: Problem, option: int) -> tuple[Part, ...]:
    known = [whole(problem, option), fixed_size(problem, option), equal_counts(problem, option, problem.size)]
    limit_s = min(deferred_s(problem, parts) for parts in known) * (1 + 1e-12)
    fusion = _Fusion(problem, _options(problem, option))
    labels: list[_Labels | None] = [fusion.empty]
    for stop in range(1, problem.size + 1):
        labels.append(fusion.extend(labels, stop, limit_s))
    return fusion.best([labels] * problem.size)[1]


def _by_count_labels(problem: Problem, options: Sequence[int], most: int) -> Iterator[tuple[float, tuple[Part, ...]]]:
    fusion = _Fusion(problem, options)
    before: list[_Labels | None] = [fusion.empty, *[None] * problem.size]
    layers: list[list[_Labels | None]] = []
    for _ in range(min(most, problem.size)):
        before = [None, *(fusion.extend(before, stop) for stop in range(1, problem.size + 1))]
        layers.append(before)
        if before[-1] is not None:
            yield fusion.best(layers)
