"""ByteComp's search as published (Wang et al., "Espresso", EuroSys 2023): an option for each gradient, without merging.

Algorithm 1 takes the gradients (items), the largest first, and gives each the option (way to exchange it) with the
least F, the estimated step time, among options that use no OFFLOAD (another core or the host). Algorithm 2 then moves
some of the compression to OFFLOAD.
F is the recurrence `Level.CHARGED` of `planner.solver.machine`, (max,+) linear, so that one change is evaluated in
O(log n). The seconds of a `Solution` are the full machine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from gradsync.planner.solver.machine import ROWS, Level, finish, matrix, step_s
from gradsync.planner.solver.maxplus import Matrix, Product, Vector, apply, identity, multiply
from gradsync.planner.solver.problem import Part, Problem, Resource, Solution

ROUNDING = 1e-12  # products of the same steps in another order differ by less
MOST_COMBINATIONS = 1 << 22  # that Algorithm 2 tries; takes some seconds


def bytecomp(problem: Problem, offloaded: Mapping[int, int], *, dense: int = 0) -> Solution:
    """Runs ByteComp's Algorithms 1 and 2: returns each gradient's option (way to exchange it), and the step time.

    Args:
        offloaded: option that codes on COMPUTE (backward's device) -> the same one on OFFLOAD (another core or host).
        dense: the number of the option without compression.
    """
    return bytecomp_offload(problem, bytecomp_device(problem, dense=dense).parts, offloaded, dense=dense)


def bytecomp_device(problem: Problem, options: Sequence[int] | None = None, *, dense: int = 0) -> Solution:
    """Runs ByteComp's Algorithm 1: chooses the gradients (items) to compress, and an option (way to exchange) for each.

    All items begin with the option `dense`, or with the first option that the item may take. The largest item is taken
    first, of equally large ones the last. Items before `_Plan.last_bubble` keep their option; it is looked for anew
    after every change (a bubble: a link is idle because the next part is not ready). An item changes its option only
    where F, the estimated step time, becomes less.

    Args:
        options: numbers of the options to try; None: all that have no task on OFFLOAD (another core or the host).
    """
    if options is None:
        options = [n for n, option in enumerate(problem.options) if not _asks(problem, n, Resource.OFFLOAD)]
    plan = _Plan(problem, [_begin(problem, item, dense) for item in range(problem.size)])
    waiting = sorted(range(problem.size), key=lambda item: (problem.nbytes[item], item))
    first = plan.last_bubble()  # items before it are out of the queue
    while waiting:
        item = waiting.pop()
        if item < first:
            continue
        present = plan.chosen[item]
        best, best_s = present, plan.seconds_with(item, present)
        for option in options:
            if option != present and _may(problem, item, option):
                seconds = plan.seconds_with(item, option)
                if seconds < best_s * (1 - ROUNDING):
                    best, best_s = option, seconds
        if best != present:
            plan.choose(item, best)
            first = max(first, plan.last_bubble())
    return _solution(problem, plan.chosen)


def bytecomp_offload(
    problem: Problem,
    parts: Sequence[Part],
    offloaded: Mapping[int, int],
    *,
    dense: int = 0,
    most_combinations: int = MOST_COMBINATIONS,
) -> Solution:
    """Runs ByteComp's Algorithm 2: chooses the gradients (items) whose compression moves to another core or the host.

    `parts` must hold one item each; `offloaded` maps an option (way to exchange an item) to the one that does the same
    there. Items whose option is not `dense` are grouped by size and option. In each group the first items in ready
    order are offloaded, as many as give the least F, the estimated step time, over all combinations of such counts. Of
    equally good combinations, the one that offloads the fewest of the first group is taken, then of the second.

    Raises:
        ValueError: there are more combinations than `most_combinations`; their number is exponential in the groups.
    """
    chosen = [part.option for part in parts]
    if len(chosen) != problem.size:
        raise ValueError(f"expected a part for each of the {problem.size} items, got {len(chosen)}")
    groups: dict[tuple[float, int], list[int]] = {}
    for item, option in enumerate(chosen):
        if option != dense and option in offloaded and _may(problem, item, offloaded[option]):
            groups.setdefault((problem.nbytes[item], option), []).append(item)
    sizes = tuple(len(group) + 1 for group in groups.values())
    if prod(sizes) > most_combinations:
        raise ValueError(
            f"Algorithm 2 would try {prod(sizes)} combinations of {len(groups)} groups, at most {most_combinations} "
            "are allowed: raise most_combinations, or search with gradsync.planner.solver.joint"
        )
    if groups:
        counts = _best_counts(problem, chosen, list(groups.values()), offloaded)
        for count, group in zip(counts, groups.values(), strict=True):
            for item in group[:count]:
                chosen[item] = offloaded[chosen[item]]
    return _solution(problem, chosen)


def _best_counts(
    problem: Problem, chosen: Sequence[int], groups: Sequence[Sequence[int]], offloaded: Mapping[int, int]
) -> list[int]:
    """Returns how many items of each group (of equal size and option) to offload, for the least estimated step time."""
    place = {item: (number, rank) for number, group in enumerate(groups) for rank, item in enumerate(group)}
    steps = list(_steps(problem, chosen, offloaded, set(place)))
    sizes = tuple(len(group) + 1 for group in groups)
    best, best_s = 0, float("inf")
    for begin in range(0, prod(sizes), _AT_ONCE):
        numbers = np.arange(begin, min(begin + _AT_ONCE, prod(sizes)))
        counts = np.unravel_index(numbers, sizes)
        rows = np.zeros((ROWS, len(numbers)))
        for fixed, movable, (present, instead) in steps:
            rows = _apply_to_all(fixed, rows)
            if movable is not None:
                number, rank = place[movable]
                rows = np.where(counts[number] > rank, _apply_to_all(instead, rows), _apply_to_all(present, rows))
        seconds = finish(list(rows), problem.rest_s, Level.CHARGED, np.maximum)
        if seconds.min() < best_s:
            best, best_s = begin + int(seconds.argmin()), float(seconds.min())
    return [int(count) for count in np.unravel_index(best, sizes)]


_AT_ONCE = 1 << 14  # combinations evaluated together: their rows stay in the cache


class _Plan:
    """The option of each item (gradient), and when resources are free before it, to evaluate changed options fast."""

    def __init__(self, problem: Problem, chosen: list[int]) -> None:
        self.chosen = chosen
        self._problem = problem
        self._known: dict[tuple[int, int], Matrix] = {}
        self._rows: list[Vector] = [(0.0,) * ROWS]
        for item, option in enumerate(chosen):
            self._rows.append(apply(self._matrix(item, option), self._rows[-1]))
        self._product = Product([self._matrix(item, option) for item, option in enumerate(chosen)] or [identity(ROWS)])

    def _matrix(self, item: int, option: int) -> Matrix:
        if (item, option) not in self._known:
            self._known[item, option] = matrix(self._problem, Part(item, item + 1, option), Level.CHARGED)
        return self._known[item, option]

    def seconds_with(self, item: int, option: int) -> float:
        rows = self._product.after(apply(self._matrix(item, option), self._rows[item]), item + 1)
        seconds: float = finish(rows, self._problem.rest_s, Level.CHARGED)
        return seconds

    def choose(self, item: int, option: int) -> None:
        self.chosen[item] = option
        self._product.replace(item, item + 1, self._matrix(item, option))
        for later in range(item, len(self.chosen)):
            rows = apply(self._matrix(later, self.chosen[later]), self._rows[later])
            if rows == self._rows[later + 1]:
                break
            self._rows[later + 1] = rows

    def last_bubble(self) -> int:
        """Returns the earliest of the used links' last bubbles (items an idle link waits for); 0 if one has none."""
        links = (Resource.INTRA, Resource.INTER)
        in_use = [link for link in links if any(_asks(self._problem, option, link) for option in set(self.chosen))]
        return min((self._last_bubble_of(link) for link in in_use), default=0)

    def _last_bubble_of(self, link: Resource) -> int:
        for item in reversed(range(len(self.chosen))):
            line = self._matrix(item, self.chosen[item])[link]
            rows = self._rows[item]
            if max(a + b for a, b in zip(line, rows, strict=True)) > line[link] + rows[link]:
                return item
        return 0


def _steps(
    problem: Problem, chosen: Sequence[int], offloaded: Mapping[int, int], movable: set[int]
) -> Iterator[tuple[Matrix, int | None, tuple[Matrix, Matrix]]]:
    """Yields for each movable item the matrix of the fixed items before it, the item, its matrices kept and offloaded.

    Movable items may be offloaded, fixed ones keep their options. A (max,+) matrix maps the times when resources get
    free before some items to those after them. The last entry is for the fixed items after the last movable one: it has
    None as item, and two identity matrices.
    """
    nothing = identity(ROWS)
    fixed = nothing
    for item, option in enumerate(chosen):
        step = matrix(problem, Part(item, item + 1, option), Level.CHARGED)
        if item in movable:
            yield fixed, item, (step, matrix(problem, Part(item, item + 1, offloaded[option]), Level.CHARGED))
            fixed = nothing
        else:
            fixed = multiply(step, fixed)
    yield fixed, None, (nothing, nothing)


def _apply_to_all(step: Matrix, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Applies a (max,+) matrix, as `apply` does, to n columns of times when resources get free, (ROWS, n)."""
    after = np.full_like(rows, -np.inf)
    for row, line in enumerate(step):
        for column, entry in enumerate(line):
            if entry > -np.inf:
                np.maximum(after[row], rows[column] + entry, out=after[row])
    return after


def _asks(problem: Problem, option: int, resource: Resource) -> bool:
    return any(demand.resource is resource for demand in problem.options[option].chain)


def _may(problem: Problem, item: int, option: int) -> bool:
    return problem.allowed is None or option in problem.allowed[item]


def _begin(problem: Problem, item: int, dense: int) -> int:
    return dense if problem.allowed is None or dense in problem.allowed[item] else min(problem.allowed[item])


def _solution(problem: Problem, chosen: Sequence[int]) -> Solution:
    parts = tuple(Part(item, item + 1, option) for item, option in enumerate(chosen))
    return Solution(parts, step_s(problem, parts))
