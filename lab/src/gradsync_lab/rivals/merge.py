"""Rules of MergeComp, MG-WFBP, GradientFlow and DDP that cut a problem's items (gradients) into buckets.

All buckets take one option. As in `cuts`, items that may not take the option take the first that they may, in buckets
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, sqrt

from gradsync.planner.solver.machine import ROWS, Level, advance, deferred_s, follows, step_s
from gradsync.planner.solver.problem import Part, Problem, Resource, Solution

from .cuts import ROUNDING, by_count, cut_at, item_options, may_join

DDP_BYTES = 25 << 20


def whole(problem: Problem, option: int = 0) -> tuple[Part, ...]:
    """Returns one bucket of all items (gradients), or as few buckets as the items allow."""
    return cut_at(problem, option, ())


def fixed_size(problem: Problem, option: int = 0, nbytes: float = DDP_BYTES) -> tuple[Part, ...]:
    """Returns buckets of gradients (items) in ready order that close as soon as they hold `nbytes`, as DDP's do."""
    stops, held = [], 0.0
    joins = may_join(problem, item_options(problem, option))
    for item, size in enumerate(problem.nbytes):
        held = held + size if joins[item] else size
        if held >= nbytes:
            stops.append(item + 1)
            held = 0.0
    return cut_at(problem, option, stops)


def lazy(problem: Problem, option: int = 0, nbytes: float | None = None) -> tuple[Part, ...]:
    """Returns the buckets of GradientFlow's lazy all-reduce (Sun et al., 2019), which wait until they hold `nbytes`.

    Where buckets end depends on order and sizes alone, so all ranks send alike, whatever is ready when.

    Args:
        nbytes: 0: each gradient by itself; infinite: all in one bucket. None: `lazy_bytes`, and the last bucket is cut
            once more where that shortens the step.
    """
    if nbytes is not None:
        return fixed_size(problem, option, nbytes)
    parts = fixed_size(problem, option, lazy_bytes(problem, option))
    ends = [part.stop for part in parts]
    last = range(parts[-1].start + 1, parts[-1].stop) if parts else ()
    parted = [cut_at(problem, option, sorted([*ends, stop])) for stop in last]
    return min((parts, *parted), key=partial(step_s, problem))


def lazy_bytes(problem: Problem, option: int = 0) -> float:
    """Returns the bucket size in bytes that minimises latencies plus the exposed exchange of the last bucket.

    S bytes in buckets of x cost S / x latencies, and the exchange of the last x bytes is exposed. The sum of both costs
    is least at x = sqrt(S alpha / beta), with latency alpha and time per byte beta of the option's transfers. alpha and
    beta are taken from large transfers, as small ones may use another algorithm.
    """
    transfers = [d for d in problem.options[option].chain if d.resource in (Resource.INTRA, Resource.INTER)]
    amounts = [problem.amount(demand, 0, problem.size) for demand in transfers]
    all_s, half_s = (sum(d.curve(share * a) for d, a in zip(transfers, amounts, strict=True)) for share in (1, 0.5))
    moving_s = 2 * (all_s - half_s)
    return sum(problem.nbytes) * sqrt(max(all_s - moving_s, 0.0) / moving_s) if moving_s > 0 else inf


def equal_counts(problem: Problem, option: int = 0, count: int = 2) -> tuple[Part, ...]:
    """Returns `count` buckets with equally many items (gradients) each, to within one."""
    return cut_at(problem, option, [number * problem.size // count for number in range(1, count)])


def mg_wfbp(problem: Problem, option: int = 0) -> tuple[Part, ...]:
    """Returns the buckets of MG-WFBP (Shi et al., INFOCOM 2019), for exchanges that take alpha + beta * bytes.

    Gradients (items) are taken in ready order. Without the next gradient, the bucket's transfer would begin once the
    bucket is encoded and the link free, and move its first byte after the latency alpha. The bucket takes the next
    gradient if this is ready by then: the wait costs less than the alpha that merging saves. alpha is the time of
    `option`'s transfers for 0 bytes.
    """
    options = item_options(problem, option)
    joins = [*may_join(problem, options), False]
    rows: list[float] = [0.0] * ROWS
    stops: list[int] = []
    start = 0
    for stop in range(1, problem.size + 1):
        backward_s = sum(problem.gaps_s[start:stop])
        taken, seconds = problem.options[options[start]], problem.seconds(options[start], start, stop)
        if joins[stop]:
            transfers = [demand for demand in taken.chain if demand.resource in (Resource.INTRA, Resource.INTER)]
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
    return cut_at(problem, option, stops)


def two_buckets(problem: Problem, option: int = 0) -> Solution:
    """Returns the best two buckets by MergeComp's rule: the first cut at which the second bucket waits for the first.

    At the optimum the first bucket's transfer ends just when the second's payload is ready. The better of the found cut
    and the one before it is returned; with linear costs it is the optimum.

    Raises:
        ValueError: there are fewer than two items, or the items may not share a bucket.
    """
    if problem.size < 2 or len(whole(problem, option)) > 1:
        raise ValueError("two_buckets needs two items or more that may share a bucket: use cuts.best_cuts")
    low, high = 1, problem.size - 1  # the first cut that waits, or the last cut
    while low < high:
        middle = (low + high) // 2
        if _second_waits(problem, cut_at(problem, option, [middle])):
            high = middle
        else:
            low = middle + 1
    cuts = [cut_at(problem, option, [cut]) for cut in (low - 1, low) if cut]
    best = min(cuts, key=lambda parts: deferred_s(problem, parts))
    return Solution(best, step_s(problem, best))


def _second_waits(problem: Problem, parts: Sequence[Part]) -> bool:
    """Whether the second bucket, at the last resource that it queues for (a link), waits for the first bucket."""
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
    """Returns where MergeComp's released binary search cuts `size` items into two buckets.

    The search is right for exact times with a single minimum; a plateau, or noise above the difference of two cuts that
    are two items apart, misleads it.

    Args:
        measure: seconds of a step with the first `cut` items in one bucket and the rest in the other; called once for
            each cut (the release averages 20 iterations).

    Raises:
        ValueError: there are fewer than two items.
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
    """Returns MergeComp's cuts as published: the best into 1, 2, .. `most` buckets, until another bucket does not help.

    The search stops at the first number of buckets whose step is not shorter than the one before by more than the share
    `threshold`. The published search finds the best cuts by enumeration and bisection; here the best cuts are exact.
    """
    found = by_count(problem, option, max(most, len(whole(problem, option))))
    best_s, best = next(found)
    for seconds, parts in found:
        if not seconds < best_s * (1.0 - max(threshold, ROUNDING)):
            break
        best_s, best = seconds, parts
    return Solution(best, step_s(problem, best))
