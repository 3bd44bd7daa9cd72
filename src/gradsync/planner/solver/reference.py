"""The search of `joint` in Python: a reference for tests of the native module, and a fallback where that is missing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import accumulate
from math import sqrt

from .machine import step_s
from .problem import Demand, Option, Part, Problem, Resource, Solution

PENDING = 3
STARTS = 8  # plans from label setting whose step is simulated
SPREADS = (0.03, 0.2)  # for one pass each: how much the mean bound over all weightings counts beside the largest
GAIN = 1e-9  # relative; a smaller improvement is rounding
HOPE = 1.02  # a label is dropped if its lower bound exceeds so many times the best plan's seconds
TURNS = 6  # plans that are improved first, each with an equal share of the budget
WINDOW = 4  # most parts that one random change draws anew
PATIENCE = 50  # random changes in a row without improvement after which the search ends
LEAST, MOST = 4.0, 512.0  # bounds on the number of labels kept at a position
NEVER = float("inf")

Weights = tuple[float, ...]  # one weight per resource


@dataclass(frozen=True)
class Settings:
    """The limits of a search: how many plans it may weigh and simulate, and how many gradients a bucket may have.

    Attributes:
        max_items: most items (gradients) of a bucket.
        positions: number of places between items at which the first phase of the search may cut.
        transitions: most partial plans that the first phase may make.
        demands: most tasks in all simulated plans together.
    """

    max_items: int  # most items of a part
    positions: int  # number of positions between items at which label setting may cut
    transitions: float  # most labels that label setting may create
    demands: int  # most demands in all simulated plans together


def find(problem: Problem, settings: Settings) -> Solution:
    """Returns the best plan found; a solution without buckets (`parts`) where the constraints allow no plan."""
    if problem.size == 0:
        return Solution((), problem.rest_s)
    return _Search(problem, settings).run()


def exhaust(problem: Problem, max_items: int) -> Solution:
    """Returns the best of all plans with at most `max_items` items (gradients) in a bucket, by simulating each one."""
    prices = _Prices(problem)
    best = Solution((), NEVER)

    def plans(start: int) -> Iterator[tuple[Part, ...]]:
        if start == problem.size:
            yield ()
        for stop in range(start + 1, min(problem.size, start + max_items) + 1):
            for option in range(len(problem.options)):
                if prices.may(start, stop, option):
                    for rest in plans(stop):
                        yield (Part(start, stop, option), *rest)

    for parts in plans(0):
        seconds = step_s(problem, parts)
        if seconds < best.seconds:
            best = Solution(parts, seconds)
    return best


def lead_of(option: Option) -> int:
    """Returns how many tasks on backward's core (`COMPUTE`) come first in a way to exchange a bucket.

    They are mostly encoding; tasks elsewhere, such as transfers, follow them.
    """
    links = [place for place, demand in enumerate(option.chain) if demand.resource is not Resource.COMPUTE]
    return links[0] if links else len(option.chain)


def turns_of(option: Option) -> list[int]:
    """Returns, for each task of a way to exchange a bucket, how many earlier ones are on the same resource."""
    resources = [demand.resource for demand in option.chain]
    return [resources[:place].count(resource) for place, resource in enumerate(resources)]


def weights_of(problem: Problem) -> list[Weights]:
    """Returns rows of weights, by which the search adds up how long each resource is busy.

    A row has one weight for each resource, and its sum is 1.
    """
    present = {demand.resource for option in problem.options for demand in option.chain}
    used = [resource for resource in Resource if resource is Resource.COMPUTE or resource in present]
    rows = [tuple(float(other is resource) for other in Resource) for resource in used]
    for place, one in enumerate(used):
        for other in used[place + 1 :]:
            for share in (0.25, 0.5, 0.75) if place == 0 else (0.5,):  # place 0 is COMPUTE, the usual bottleneck
                rows.append(tuple({one: share, other: 1 - share}.get(resource, 0.0) for resource in Resource))
    return rows


class _Prices:
    """Prefix sums over a problem's items, by which the durations of any part are computed in constant time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ready = [0.0, *accumulate(problem.gaps_s)]
        self.bytes = self._sums(problem.nbytes)
        rows = {demand.amounts for option in problem.options for demand in option.chain}
        self._amounts = {row: self.bytes if row is None else self._sums(row) for row in rows}
        size, options = problem.size, range(len(problem.options))
        self._alone = self._sums([float(mark) for mark in problem.alone or (False,) * size])

        def may(item: int, option: int) -> bool:
            return problem.allowed is None or option in problem.allowed[item]

        self.refused = [self._sums([float(not may(item, option)) for item in range(size)]) for option in options]
        self.leads = [lead_of(option) for option in problem.options]
        self.turns = [turns_of(option) for option in problem.options]

    @staticmethod
    def _sums(values: Iterable[float]) -> list[float]:
        return [0.0, *accumulate(values)]

    def may_join(self, start: int, stop: int) -> bool:
        return stop - start == 1 or self._alone[stop] == self._alone[start]

    def may(self, start: int, stop: int, option: int) -> bool:
        return self.refused[option][stop] == self.refused[option][start] and self.may_join(start, stop)

    def of(self, option: int, start: int, stop: int) -> list[float]:
        """Returns the seconds of each demand of the option for the items [start, stop)."""
        return [self._of(demand, start, stop) for demand in self.problem.options[option].chain]

    def _of(self, demand: Demand, start: int, stop: int) -> float:
        sums = self._amounts[demand.amounts]
        return demand.curve(sums[stop] - sums[start])

    def beats(self, a: int, of_a: Sequence[float], b: int, of_b: Sequence[float]) -> bool:
        """Whether each demand of option `a` has, in order, one of `b`, no shorter, in a like place on its resource."""
        x, y = self.problem.options[a].chain, self.problem.options[b].chain
        matched = 0
        for place, demand in enumerate(y):
            if matched == len(x):
                break
            if demand.resource is Resource.COMPUTE:
                alike = (matched < self.leads[a]) == (place < self.leads[b])
            else:
                alike = self.turns[a][matched] == self.turns[b][place]
            if x[matched].resource is demand.resource and alike and of_a[matched] <= of_b[place]:
                matched += 1
        return matched == len(x)


@dataclass
class _Label:
    """A partial plan in label setting (dynamic programming): the seconds when each resource gets free after its parts.

    `free[COMPUTE]` is the time that backward has reached.
    """

    free: list[float] = field(default_factory=lambda: [0.0] * len(Resource))
    pending: list[tuple[float, float]] = field(default_factory=list)  # (start, seconds) that will interrupt backward
    done: float = 0.0
    score: float = 0.0
    origin: int = 0
    parent: _Label | None = None
    option: int = 0

    def following(self, option: int) -> _Label:
        return _Label(list(self.free), list(self.pending), self.done, 0.0, 0, self, option)

    def work(self) -> float:
        total = self.free[Resource.COMPUTE]
        for _, seconds in self.pending:
            total += seconds
        return total

    def before(self, other: _Label) -> bool:
        free = all(mine <= its for mine, its in zip(self.free, other.free, strict=True))
        return free and self.done <= other.done and self.work() <= other.work()

    def defer(self, since: float, seconds: float) -> None:
        if len(self.pending) == PENDING:  # approximate: the first two become one
            self.pending[:2] = [(self.pending[0][0], self.pending[0][1] + self.pending[1][1])]
        place = len(self.pending)
        while place and self.pending[place - 1][0] > since:
            place -= 1
        self.pending.insert(place, (since, seconds))

    def advance(self, seconds: float) -> None:
        """Adds `seconds` to the time of backward, and those of pending demands that interrupt it meanwhile."""
        now = self.free[Resource.COMPUTE] + seconds
        while self.pending and self.pending[0][0] < now:
            now += self.pending.pop(0)[1]
        self.free[Resource.COMPUTE] = now

    def serve(self, option: Option, lead: int, turns: Sequence[int], seconds: Sequence[float]) -> None:
        at = self.free[Resource.COMPUTE]
        for place, (demand, taken) in enumerate(zip(option.chain, seconds, strict=True)):
            resource = demand.resource
            if place < lead:
                self.free[Resource.COMPUTE] = at = at + taken
            elif resource is Resource.COMPUTE:
                self.defer(at, taken)
                at += taken
            else:
                at = max(self.free[resource], at) + taken
                # A part's second demand on a link comes late, after demands of later parts: only its load counts.
                self.free[resource] = self.free[resource] + taken if turns[place] else at
        self.done = max(self.done, at)
        self.free = [max(free, self.free[Resource.COMPUTE]) for free in self.free]

    def finish(self, rest_s: float) -> float:
        last = self.following(0)
        last.advance(rest_s)
        now = last.free[Resource.COMPUTE]
        for since, seconds in last.pending:
            now = max(now, since) + seconds
        return max(now, self.done, *last.free)


@dataclass(frozen=True)
class _Way:
    """A bucket from position `origin` on, which label setting may append to a partial plan; `seconds`: of its tasks."""

    origin: int
    option: int
    seconds: list[float]


class _Search:
    def __init__(self, problem: Problem, settings: Settings) -> None:
        self._problem, self._settings = problem, settings
        self._prices = _Prices(problem)
        self._served = 0
        self._best = Solution((), NEVER)
        self._random = 0
        self._options = self._worthwhile()

    def run(self) -> Solution:
        self._fixed_sizes()
        places = self._positions()
        transitions = self._settings.transitions
        starts = [self._best]
        ways = self._ways(places, self._options)
        for spread in SPREADS:
            starts += self._program(places, ways, transitions / 2.0, spread)
        if len(self._options) > 1:
            for option in self._options:
                share = transitions / (2.0 * len(self._options))
                starts += self._program(places, self._ways(places, [option]), share, SPREADS[0])[:1]
        starts.sort(key=lambda solution: solution.seconds)
        for place, start in enumerate(starts):
            if self._spent():
                break
            if all(start.parts != other.parts for other in starts[:place]):
                self._polish(start, self._served + self._settings.demands // TURNS)
        self._polish(self._best, self._settings.demands)
        patience = PATIENCE
        while patience and not self._spent():
            before = self._best
            kicked = self._redrawn()
            if kicked is not None:
                self._polish(kicked, self._settings.demands)
            patience = patience - 1 if self._best is before else PATIENCE - 1
        return self._best

    def _spent(self) -> bool:
        return self._served >= self._settings.demands

    def _may(self, start: int, stop: int, option: int) -> bool:
        return stop - start <= self._settings.max_items and self._prices.may(start, stop, option)

    def _play(self, parts: Sequence[Part]) -> float:
        self._served += sum(len(self._problem.options[part.option].chain) for part in parts)
        return step_s(self._problem, parts)

    def _played(self, parts: Sequence[Part]) -> Solution:
        solution = Solution(tuple(parts), self._play(parts))
        if solution.seconds < self._best.seconds:
            self._best = solution
        return solution

    def _worthwhile(self) -> list[int]:
        """Returns options that, for parts of some size, no other beats in each task's seconds; of equals, the first."""
        prices, size, options = self._prices, self._problem.size, range(len(self._problem.options))
        wanted: set[int] = set()
        length = 1
        while length <= size:
            for quarter in range(4):
                start = (size - length) * quarter // 3
                seconds = [prices.of(option, start, start + length) for option in options]

                def replaces(a: int, b: int, seconds: list[list[float]] = seconds) -> bool:
                    return prices.beats(a, seconds[a], b, seconds[b]) and self._as_free(a, b)

                wanted |= {
                    option
                    for option in options
                    if not any(
                        other != option and replaces(other, option) and (other < option or not replaces(option, other))
                        for other in options
                    )
                }
            length *= 2
        return sorted(wanted)

    def _as_free(self, a: int, b: int) -> bool:
        """Whether all items that may take option `b` may take `a`."""
        return all(
            self._prices.may(item, item + 1, a) or not self._prices.may(item, item + 1, b)
            for item in range(self._problem.size)
        )

    def _fixed_sizes(self) -> None:
        """Simulates plans of one option and one bucket size (an item, all, halves, ...); keeps the best as `_best`."""
        sums, items = self._prices.bytes, self._problem.size
        for option in self._options:
            for step in range(10):
                size = sums[-1] * 2.0 ** (1 - step) if step else 0.0
                parts: list[Part] = []
                start = 0
                for item in range(1, items + 1):
                    full = sums[item] - sums[start] >= size or item == items
                    if not full and self._may(start, item + 1, option):
                        continue
                    if not self._may(start, item, option):
                        break
                    parts.append(Part(start, item, option))
                    start = item
                if start == items:
                    self._played(parts)

    def _positions(self) -> list[int]:
        """Returns the positions between items at which plans may be cut: all, or about `Settings.positions` of many.

        Of many, those are chosen between which bytes and seconds of backward are about equal.
        """
        size = self._problem.size
        affordable = sqrt(self._settings.transitions / (LEAST * len(self._options)))
        wanted = min(self._settings.positions, int(affordable) + 1)
        chosen = list(range(size + 1))
        if size <= wanted or self._settings.max_items < size:
            return chosen
        sums, ready = self._prices.bytes, self._prices.ready
        share = [0.0]
        for i in range(1, size + 1):
            share.append(
                share[-1]
                + 0.5 / size
                + (sums[i] - sums[i - 1]) / max(sums[-1], 1e-300)
                + (ready[i] - ready[i - 1]) / max(ready[-1], 1e-300)
            )
        step = share[-1] / wanted
        while step < share[-1]:
            chosen = [0]
            for i in range(1, size):
                if share[i + 1] - share[chosen[-1]] > step or self._must_cut(i):
                    chosen.append(i)
            chosen.append(size)
            if len(chosen) <= wanted + 1:
                break
            step *= 1.1
        return chosen

    def _must_cut(self, i: int) -> bool:
        if not self._prices.may_join(i - 1, i + 1):
            return True
        return any((sums[i] > sums[i - 1]) != (sums[i + 1] > sums[i]) for sums in self._prices.refused)

    def _ways(self, places: Sequence[int], options: Sequence[int]) -> list[list[_Way]]:
        """Returns, for each position, the possible parts that end there."""
        ways: list[list[_Way]] = [[] for _ in places]
        for j, stop in enumerate(places):
            for i in reversed(range(j)):
                if stop - places[i] > self._settings.max_items:
                    break
                ways[j] += [
                    _Way(i, option, self._prices.of(option, places[i], stop))
                    for option in options
                    if self._may(places[i], stop, option)
                ]
        return ways

    def _program(
        self, places: Sequence[int], ways: list[list[_Way]], transitions: float, spread: float
    ) -> list[Solution]:
        """Runs a dynamic program over `places`, the positions where buckets may end; returns its best plans.

        `transitions`: about how many labels (partial plans) may be created. A label's score is its largest lower bound
        plus `spread` times the mean of its bounds over all weightings of resources.
        """
        problem, prices = self._problem, self._prices
        number = sum(map(len, ways))
        width = int(min(max(transitions / max(number, 1), LEAST), MOST))
        weights = weights_of(problem)
        ahead = self._look_ahead(ways, weights)

        labels: list[list[_Label]] = [[_Label()], *([] for _ in places[1:])]
        for j in range(1, len(places)):
            candidates = []
            behind = prices.ready[-1] + problem.rest_s - prices.ready[places[j]]
            for way in ways[j]:
                gap = prices.ready[places[j]] - prices.ready[places[way.origin]]
                option, lead, turns = problem.options[way.option], prices.leads[way.option], prices.turns[way.option]
                for source in labels[way.origin]:
                    label = source.following(way.option)
                    label.advance(gap)
                    label.serve(option, lead, turns, way.seconds)
                    label.origin = way.origin
                    work = label.work() + behind
                    most, total = label.done, 0.0
                    for row, least in zip(weights, ahead[j], strict=True):
                        reach = row[0] * work + least
                        for resource in range(1, len(Resource)):
                            reach += row[resource] * label.free[resource]
                        most = max(most, reach)
                        total += reach
                    if most < self._best.seconds * HOPE:
                        label.score = most + spread * total / len(weights)
                        candidates.append(label)
            labels[j] = _kept(candidates, width, last=j + 1 == len(places))
        ends = nsmallest(STARTS, labels[-1], key=lambda label: label.finish(problem.rest_s))
        return [self._played(_parts(end, places)) for end in ends]

    def _look_ahead(self, ways: list[list[_Way]], weights: list[Weights]) -> list[list[float]]:
        """Returns, by position where plans may be cut, a lower bound of the load behind it for each row of `weights`.

        The load is the seconds of the following items' tasks, each times the weight of the resource that it keeps busy.
        """
        ahead = [[NEVER] * len(weights) for _ in ways]
        ahead[-1] = [0.0] * len(weights)
        for j in reversed(range(1, len(ways))):
            for way in ways[j]:
                load = [0.0] * len(Resource)
                for demand, taken in zip(self._problem.options[way.option].chain, way.seconds, strict=True):
                    load[demand.resource] += taken
                for w, row in enumerate(weights):
                    cost = ahead[j][w]
                    for resource in Resource:
                        cost += row[resource] * load[resource]
                    ahead[way.origin][w] = min(ahead[way.origin][w], cost)
        return ahead

    def _polish(self, now: Solution, demands: int) -> None:
        """Changes one part of the plan after another; keeps the improved plan as `_best` if it is the shortest so far.

        Ends when no change helps, or when the whole search has simulated `demands` tasks.
        """
        unchanged, place = 0, 0
        while unchanged < len(now.parts) and self._served < min(demands, self._settings.demands):
            if place >= len(now.parts):
                place = 0
            before = now
            for move in (self._other_option, self._shift, self._merge, self._split, self._group):
                now = move(now, place)
            unchanged = 0 if now is not before else unchanged + 1
            place += 1
        if now.seconds < self._best.seconds:
            self._best = now

    def _better(self, now: Solution, parts: Sequence[Part]) -> Solution:
        seconds = self._play(parts)
        return now if seconds >= now.seconds * (1 - GAIN) else Solution(tuple(parts), seconds)

    def _replace(self, now: Solution, first: int, count: int, *by: Part) -> Solution:
        """Returns the plan with `count` parts from `first` on replaced by `by` if allowed and faster, else `now`."""
        if not all(self._may(part.start, part.stop, part.option) for part in by):
            return now
        return self._better(now, (*now.parts[:first], *by, *now.parts[first + count :]))

    def _other_option(self, now: Solution, p: int) -> Solution:
        for option in self._options:
            part = now.parts[p]
            if option != part.option:
                now = self._replace(now, p, 1, Part(part.start, part.stop, option))
        return now

    def _shift(self, now: Solution, p: int) -> Solution:
        for sign in (-1, 1):
            step = 1
            while p + 1 < len(now.parts):
                a, b = now.parts[p : p + 2]
                cut = a.stop + sign * step
                if cut <= a.start or cut >= b.stop:
                    break
                now = self._replace(now, p, 2, Part(a.start, cut, a.option), Part(cut, b.stop, b.option))
                step *= 2
        return now

    def _merge(self, now: Solution, p: int) -> Solution:
        if p + 1 >= len(now.parts):
            return now
        start, stop = now.parts[p].start, now.parts[p + 1].stop
        for option in self._options:
            merged = self._replace(now, p, 2, Part(start, stop, option))
            if merged is not now:
                return merged
        return now

    def _split(self, now: Solution, p: int) -> Solution:
        part = now.parts[p]
        for cut in self._cuts(part):
            for option in self._options:
                for left, right in dict.fromkeys(((part.option, option), (option, part.option))):
                    found = self._replace(now, p, 1, Part(part.start, cut, left), Part(cut, part.stop, right))
                    if found is not now:
                        return found
        return now

    def _cuts(self, part: Part) -> list[int]:
        """Returns positions to split a part at: all if short, else quarters of bytes and time, and near its ends."""
        if part.stop - part.start <= 9:
            return list(range(part.start + 1, part.stop))
        found = {part.start + 1, part.stop - 1}
        for sums in (self._prices.bytes, self._prices.ready):
            for share in (0.25, 0.5, 0.75):
                goal = sums[part.start] + share * (sums[part.stop] - sums[part.start])
                found.add(bisect_left(sums, goal, part.start + 1, part.stop - 1))
        return sorted(found)

    def _group(self, now: Solution, p: int) -> Solution:
        """Returns `now` with another option for part `p` and next ones of the same option, if faster; else `now`."""
        for option in self._options:
            for wanted in (2, 3, 4, 6, 8, 12, 16, 24, 32):
                old = now.parts[p].option
                changed = [
                    place
                    for place, part in enumerate(now.parts)
                    if place >= p and part.option == old and self._may(part.start, part.stop, option)
                ][:wanted]
                if option == old or len(changed) < wanted:
                    break
                parts = list(now.parts)
                for place in changed:
                    parts[place] = Part(parts[place].start, parts[place].stop, option)
                now = self._better(now, parts)
        return now

    def _redrawn(self) -> Solution | None:
        """Returns the best plan with some neighbouring parts cut anew and given options at random, even if slower.

        None if no plan was found before, or if a new part is not allowed: its items, their number or its option.
        """
        best = self._best.parts
        if not best:
            return None
        window = 1 + self._draw(min(len(best), WINDOW))
        first = self._draw(len(best) - window + 1)
        start, end = best[first].start, best[first + window - 1].stop
        parts = list(best[:first])
        while start < end:
            stop = start + 1 + self._draw(end - start)
            option = self._options[self._draw(len(self._options))]
            if not self._may(start, stop, option):
                return None
            parts.append(Part(start, stop, option))
            start = stop
        return self._played((*parts, *best[first + window :]))

    def _draw(self, count: int) -> int:
        """Returns a pseudo-random number below `count`; the sequence is the same on every rank."""
        self._random = (self._random * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._random >> 33) % count


def _kept(candidates: list[_Label], width: int, *, last: bool) -> list[_Label]:
    """Returns up to `width` labels (partial plans) with the lowest scores.

    Unless `last` (the plans are complete), leaves out a label if all times of a chosen one are as early or earlier.
    """
    chosen: list[_Label] = []
    for label in sorted(candidates, key=lambda label: label.score):
        if len(chosen) == width:
            break
        if last or not any(other.before(label) for other in chosen):
            chosen.append(label)
    return chosen


def _parts(label: _Label, places: Sequence[int]) -> list[Part]:
    parts: list[Part] = []
    stop = places[-1]
    while label.parent is not None:
        parts.append(Part(places[label.origin], stop, label.option))
        stop, label = places[label.origin], label.parent
    return parts[::-1]


def lower_bound(problem: Problem, upper_s: float, max_items: int) -> float:
    """Returns a lower bound, in seconds, of the training step with any plan; `upper_s` at most.

    For each item (gradient), one list of lower bounds of times is kept, which holds for all plans of the items up to
    it.

    `max_items`: most items of a bucket.
    """
    if not problem.size:
        return problem.rest_s
    bound = _Bound(problem, upper_s, max_items)
    least: list[list[float] | None] = [[0.0] * bound.width]
    for stop in range(1, problem.size + 1):
        reached = [
            label
            for start in reversed(range(max(stop - max_items, 0), stop))
            if (source := least[start]) is not None
            for option in range(len(problem.options))
            if bound.prices.may(start, stop, option)
            if (label := bound.step(source, start, stop, option))[bound.end] < upper_s
        ]
        least.append([min(values) for values in zip(*reached, strict=True)] if reached else None)
    last = least[-1]
    return upper_s if last is None else min(upper_s, last[bound.end])


BACKWARD, WORK = 0, 1  # indices of a label's coordinates; links, `follow` and `end` come after these


class _Bound:
    """Computes labels: lower bounds of the times when a plan's first parts are done with backward, links and so on.

    They hold for a relaxed machine, where tasks on COMPUTE never wait; `joint.lower_bound` explains a label's entries.
    """

    def __init__(self, problem: Problem, upper_s: float, max_items: int) -> None:
        self._problem, self._max_items = problem, max_items
        self.prices = _Prices(problem)
        self._weights = weights_of(problem)
        self._turn_at: dict[tuple[Resource, int], int] = {}
        self._load_at: dict[Resource, int] = {}
        width = WORK + 1
        for resource in list(Resource)[1:]:
            chains = [[demand.resource for demand in option.chain].count(resource) for option in problem.options]
            for turn in range(max(chains)):
                self._turn_at[resource, turn] = self._load_at[resource] = width
                width += 1
            if max(chains) > 1:
                self._load_at[resource] = width
                width += 1
        self._follow, self.end = width, width + 1
        self.width = width + 2
        self._lasts = [self._last_link(option) for option in problem.options]
        seen = [
            (option.chain[last].resource, turns[last])
            for option, turns, last in zip(problem.options, self.prices.turns, self._lasts, strict=True)
            if 0 <= last < len(option.chain) - 1
        ]
        self._followed = max(seen, key=lambda link: (seen.count(link), link), default=None)
        self._whole_s = self.prices.ready[-1] + problem.rest_s
        self._look_ahead()

    @staticmethod
    def _last_link(option: Option) -> int:
        links = [place for place, demand in enumerate(option.chain) if demand.resource is not Resource.COMPUTE]
        return links[-1] if links else -1

    def _look_ahead(self) -> None:
        """Sets `_last_s`, a last part's least seconds, and `_ahead`, by item the least load of it and later items.

        The load, one for each row of weights, is the seconds of these items' tasks, each times its resource's weight.
        """
        size, prices = self._problem.size, self.prices
        self._ahead = [[NEVER] * len(self._weights) for _ in range(size)] + [[0.0] * len(self._weights)]
        self._last_s = NEVER
        for start in reversed(range(size)):
            for stop in range(start + 1, min(size, start + self._max_items) + 1):
                for option in range(len(self._problem.options)):
                    if not prices.may(start, stop, option):
                        continue
                    load, seconds = [0.0] * len(Resource), prices.of(option, start, stop)
                    for demand, taken in zip(self._problem.options[option].chain, seconds, strict=True):
                        load[demand.resource] += taken
                    if stop == size:
                        self._last_s = min(self._last_s, sum(seconds))
                    for w, row in enumerate(self._weights):
                        cost = self._ahead[stop][w] + sum(map(float.__mul__, row, load))
                        self._ahead[start][w] = min(self._ahead[start][w], cost)

    def step(self, label: Sequence[float], start: int, stop: int, number: int) -> list[float]:
        """Returns the label (lower bounds of times) after one more part, items [start, stop) by option `number`."""
        prices, option = self.prices, self._problem.options[number]
        lead, turns, last = prices.leads[number], prices.turns[number], self._lasts[number]
        seconds = prices.of(number, start, stop)
        gap = prices.ready[stop] - prices.ready[start]
        after = list(label)
        after[BACKWARD] = at = label[BACKWARD] + gap + sum(seconds[:lead])
        after[WORK] += gap
        for place, (demand, taken) in enumerate(zip(option.chain, seconds, strict=True)):
            resource, turn = demand.resource, turns[place]
            if resource is Resource.COMPUTE:
                after[WORK] += taken
                at += taken if place >= lead else 0.0
                continue
            begin = max(after[self._turn_at[resource, turn]], at)
            load = self._load_at[resource]
            if load != self._turn_at[resource, turn] and (resource, 1) in self._turn_at:
                after[load] = (after[load] if turn else max(after[load], at)) + taken
            after[self._turn_at[resource, turn]] = at = begin + taken
            if place == last and (resource, turn) == self._followed and place + 1 < len(seconds):
                after[self._follow] = max(after[self._follow], at) + sum(seconds[place + 1 :])
        end = max(label[self.end], at, after[self._follow])
        if stop < self._problem.size:
            end = max(end, after[BACKWARD] + prices.ready[-1] - prices.ready[stop] + self._last_s)
        work = after[WORK] + self._whole_s - prices.ready[stop]
        for row, least in zip(self._weights, self._ahead[stop], strict=True):
            loads = (row[resource] * after[place] for resource, place in self._load_at.items())
            end = max(end, row[Resource.COMPUTE] * work + least + sum(loads))
        after[self.end] = end
        # A later part reaches a link only after backward has made it ready: earlier times no longer matter.
        after[WORK + 1 : self._follow] = [max(value, after[BACKWARD]) for value in after[WORK + 1 : self._follow]]
        return after
