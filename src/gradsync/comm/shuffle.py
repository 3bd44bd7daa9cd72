"""Group schedules: lists of which ranks average their values with each other in each round, and their properties.

After DS-Sync (Wang et al., 2020 and 2022): in each round the ranks are divided into groups and each group averages on
its own. The groups change from round to round, so that after a few rounds all values have mixed. The papers show a grid
of 2 x 2 ranks, and do not say how larger schedules are made; those here are our own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import chain
from typing import Annotated

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from ..costs.cluster import MOST_RANKS, Placement
from ..inputs.settings import Decay, FewInt, PositiveInt, SeveralInt, argument, check, shown

Matrix = NDArray[np.float64]
"""A matrix, (n, n) float64, by which a schedule multiplies the values of n ranks."""

RankGroup = tuple[int, ...]
"""The global ranks of a group, ascending."""

NumRanks = Annotated[int, Interval(ge=1, le=MOST_RANKS)]
Relaxation = Annotated[float, Interval(gt=0, lt=2)]

EXACT = 1e-9  # entries of matrix products that differ by less count as equal
DOUBLINGS = 60  # of the number of cycles that a spread is summed over: a cycle may leave nearly all of a disagreement


@dataclass(frozen=True)
class Round:
    """One round of averaging: the ranks are partitioned into groups, and each value moves to the mean of its group.

    Attributes:
        groups: global ranks of each group; each rank from 0 on is in one group.
        relaxations: for each group the share of the way to the mean that values move, in (0, 2); empty: 1 each. Beyond
            1, values pass the mean; `exact` uses this to average parts of unequal numbers of ranks.

    Raises:
        ValueError: for groups that do not partition the ranks from 0 on, or relaxations out of range.
    """

    groups: tuple[RankGroup, ...]
    relaxations: tuple[Relaxation, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        members = sorted(chain.from_iterable(self.groups))
        if not members or not all(self.groups) or members != list(range(len(members))):
            raise ValueError(
                f"Round.groups must have each rank from 0 on once, and no empty group, got {list(self.groups)}"
            )
        relaxations = self.relaxations or (1.0,) * len(self.groups)
        if len(relaxations) != len(self.groups):
            raise ValueError(f"Round.relaxations must be one for each of {len(self.groups)} groups, got {relaxations}")
        ordered = sorted((tuple(sorted(group)), share) for group, share in zip(self.groups, relaxations, strict=True))
        object.__setattr__(self, "groups", tuple(group for group, _ in ordered))
        shares = (float(share) if len(group) > 1 else 1.0 for group, share in ordered)  # who is alone moves nowhere
        object.__setattr__(self, "relaxations", tuple(shares))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.groups))

    @property
    def parts(self) -> tuple[tuple[RankGroup, float], ...]:
        """Pairs of each group and its relaxation, the share of the way to the group's mean that values move."""
        return tuple(zip(self.groups, self.relaxations, strict=True))

    def group_of(self, rank: int) -> RankGroup:
        """Returns the group of `rank` in this round, itself included."""
        return next(group for group in self.groups if rank in group)

    @property
    def rests(self) -> bool:
        """Whether every rank is a group of its own, so that nothing is averaged."""
        return len(self.groups) == self.size

    @property
    def mixing(self) -> Matrix:
        """The symmetric matrix, (n, n) float64, by which this round multiplies the ranks' values; its rows sum to 1."""
        w = np.eye(self.size)
        for group, share in self.parts:
            w[np.ix_(group, group)] += share * (1 / len(group) - np.eye(len(group)))
        return w


@dataclass(frozen=True)
class GroupSchedule:
    """A schedule of averaging: which ranks average in which round; step t does `rounds[t % len(rounds)]`.

    A cycle is all rounds once.

    Attributes:
        rounds: the rounds of one cycle, of the same ranks.

    Raises:
        ValueError: for rounds of different numbers of ranks, or if the groups never connect some ranks with others,
            whose values would drift apart for ever.
    """

    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        check(self)
        if len(sizes := {each.size for each in self.rounds}) != 1:
            raise ValueError(
                f"GroupSchedule.rounds must be one or more, of the same ranks, got {sorted(sizes)} of them"
            )
        if len(apart := self._parts()) > 1:
            raise ValueError(
                "GroupSchedule.rounds must mix all ranks with each other in the end, but these never meet: "
                f"{' and '.join(map(str, map(list, apart)))}"
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.rounds[0].size

    def round(self, step: int) -> Round:
        """Returns the round that training step `step` does."""
        return self.rounds[step % len(self.rounds)]

    def group_of(self, rank: int, step: int) -> RankGroup:
        """Returns the group of `rank` in training step `step`, itself included."""
        return self.round(step).group_of(rank)

    @cached_property
    def distinct(self) -> tuple[RankGroup, ...]:
        """The different groups of more than one rank, sorted, so that all ranks make process groups in one order."""
        return tuple(sorted({group for each in self.rounds for group in each.groups if len(group) > 1}))

    def product(self, start: int = 0, rounds: int | None = None) -> Matrix:
        """Returns the matrix, (n, n) float64, by which `rounds` rounds of averaging multiply the values of the n ranks.

        Args:
            start: the number of the first round.
            rounds: how many rounds; None: all rounds of the schedule once.
        """
        steps = range(start, start + (len(self.rounds) if rounds is None else rounds))
        return reduce(lambda done, step: self.round(step).mixing @ done, steps, np.eye(self.size))

    @property
    def is_exact(self) -> bool:
        """Whether all rounds, done once, bring the values of all ranks to their common mean, up to rounding."""
        return bool(np.abs(self.product() - 1 / self.size).max() < EXACT)

    @property
    def left(self) -> float:
        """The largest share of the ranks' squared distances to their mean that all rounds, done once, can leave."""
        return float(np.linalg.norm(self.product() - 1 / self.size, 2) ** 2)

    def spread(self, momentum: float = 0.0, *, averaged: bool = False) -> float:
        """Returns how far apart averaging leaves the ranks: the sum of their expected squared distances to their mean.

        Each rank adds noise of variance 1 to its values before each round. The sum is taken after a round, in steady
        state, and is a mean over all rounds.

        Args:
            momentum: the factor by which SGD accumulates the noise, as it accumulates gradients.
            averaged: whether momenta are averaged with the values; else each rank keeps its own.

        Raises:
            ValueError: for a momentum outside [0, 1).
        """
        return float(np.mean(self.spreads(momentum, averaged=averaged)))

    def spreads(self, momentum: float = 0.0, *, averaged: bool = False) -> list[float]:
        """Returns, for each round, the sum of the ranks' expected squared distances to their mean after it.

        Each rank adds noise of variance 1 to its values before each round; the sums are those of steady state.

        Args:
            momentum: the factor by which SGD accumulates the noise, as it accumulates gradients.
            averaged: whether momenta are averaged with the values; else each rank keeps its own.

        Raises:
            ValueError: for a momentum outside [0, 1).
        """
        argument("momentum", momentum, Decay)
        n, kinds = self.size, 2 if momentum else 1
        apart = np.eye(n) - 1 / n
        steps = []  # a round's matrices of the state (values, then momenta) and of the noise
        for each in self.rounds:
            w, own = each.mixing, each.mixing if averaged else np.eye(n)
            if momentum:
                steps.append((np.block([[w, momentum * w], [np.zeros((n, n)), momentum * own]]), np.vstack([w, own])))
            else:
                steps.append((w, w))
        cycle, noise = np.eye(kinds * n), np.zeros((kinds * n, kinds * n))
        for move, spill in steps:
            cycle, noise = move @ cycle, move @ noise @ move.T + spill @ apart @ spill.T
        cycle = cycle @ np.kron(np.eye(kinds), apart)
        covariance = noise  # after one cycle, then two, four, ...
        for _ in range(DOUBLINGS):
            covariance, cycle = covariance + cycle @ covariance @ cycle.T, cycle @ cycle
            if np.abs(cycle).max() < EXACT:
                break
        found = []
        for move, spill in steps:
            covariance = move @ covariance @ move.T + spill @ apart @ spill.T
            found.append(float(np.trace(covariance[:n, :n])))
        return found

    def with_ranks(self, ranks: Sequence[int]) -> GroupSchedule:
        """Returns this schedule of averaging with rank r replaced by rank `ranks[r]` in all groups of all rounds.

        Raises:
            ValueError: if `ranks` is no permutation of all ranks.
        """
        _check_order(ranks, self.size)
        moved = [tuple(tuple(ranks[rank] for rank in group) for group in each.groups) for each in self.rounds]
        return GroupSchedule(
            tuple(Round(groups, each.relaxations) for groups, each in zip(moved, self.rounds, strict=True))
        )

    def _parts(self) -> list[list[int]]:
        """Returns the connected components of the ranks, where ranks in one group of any round are connected."""
        towards = list(range(self.size))  # for each rank another one of its part, in the end the first one (union-find)

        def first(rank: int) -> int:
            while towards[rank] != rank:
                towards[rank] = rank = towards[towards[rank]]
            return rank

        for group in self.distinct:
            known = sorted(map(first, group))
            for rank in known:
                towards[rank] = known[0]
        parts: dict[int, list[int]] = {}
        for rank in range(self.size):
            parts.setdefault(first(rank), []).append(rank)
        return list(parts.values())


def together(size: int) -> GroupSchedule:
    """Returns the schedule of averaging in which all `size` ranks are one group in every round.

    Raises:
        ValueError: for no ranks, or more than `MOST_RANKS`.
    """
    argument("size", size, NumRanks)
    return GroupSchedule((Round((tuple(range(size)),)),))


def grid(radices: Sequence[int], ranks: Sequence[int] | None = None) -> GroupSchedule:
    """Returns a schedule that averages along one dimension of a grid of ranks in each round.

    All rounds, one for each dimension, bring all ranks to the mean, whichever comes first. `grid((2,) * d)` is a
    hypercube of pairs.

    Args:
        radices: the length of each dimension, which is the size of the groups in its round.
        ranks: the rank at each place of the grid in row-major order; None: 0, 1, 2 and so on.

    Raises:
        ValueError: for radices that are no integers from 2 on, or of more than `MOST_RANKS` ranks, or `ranks` that are
            not all ranks below their product.
    """
    argument("radices", radices, tuple[SeveralInt, ...])
    size = math.prod(radices)
    argument("the product of the radices", size, NumRanks)
    if ranks is None:
        ranks = range(size)
    else:
        _check_order(ranks, size)
    places = np.array(ranks).reshape(radices)
    rounds = [np.moveaxis(places, digit, -1).reshape(-1, radix) for digit, radix in enumerate(radices)]
    return GroupSchedule(tuple(Round(tuple(map(tuple, groups.tolist()))) for groups in rounds))


def crossing(racks: Sequence[Sequence[int]], budget: int, *, keep_apart: bool = False) -> GroupSchedule:
    """Returns a schedule that averages inside racks in the first round, then in groups of at most one rank per rack.

    Rounds follow until every rank has been in such a group; ranks of racks smaller than the largest may be in several.
    A rack of fewer ranks than `budget` is missing in some groups, so a group may be of a single rank. The remaining
    ranks of each rack average inside it meanwhile.

    Args:
        racks: the ranks in each rack.
        budget: the most groups across racks in a round.
        keep_apart: whether in a rack the ranks that have crossed and those that have not are separate groups. All
            rounds together then bring all ranks to the mean; else they are one group, which keeps the ranks' values
            closer between rounds.

    Raises:
        ValueError: for fewer than two racks, an empty one, or no budget; with `keep_apart` also for racks of different
            sizes, or a budget that does not divide them.
    """
    argument("budget", budget, PositiveInt)
    sizes = sorted(set(map(len, racks)))
    if len(racks) < 2 or sizes[0] < 1:
        raise ValueError(f"crossing needs two racks with ranks, got {racks}")
    if keep_apart and (len(sizes) > 1 or sizes[0] % budget):
        raise ValueError(
            "who crossed can be kept apart if all racks have as many ranks, and the budget divides them, got racks of "
            f"{', '.join(map(str, sizes))} and a budget of {budget}"
        )
    rounds = [Round(tuple(map(tuple, racks)))]
    for first in range(0, sizes[-1], budget):
        columns = [
            tuple(rack[place % len(rack)] for rack in racks if place - first < len(rack))
            for place in range(first, min(first + budget, sizes[-1]))
        ]
        crossed = set(chain.from_iterable(columns))
        stay = [[[rank for rank in rack if rank not in crossed]] for rack in racks]
        if keep_apart:
            stay = [[list(rack[:first]), list(rack[first + budget :])] for rack in racks]
        rounds.append(Round((*columns, *(tuple(group) for parts in stay for group in parts if group))))
    return GroupSchedule(tuple(rounds))


def exact(size: int, most: int) -> GroupSchedule:
    """Returns a schedule with groups of up to `most` ranks, whose rounds, done once, bring `size` ranks to the mean.

    It is a `grid`, averaging one dimension per round, where the prime factors of `size` allow one: with the fewest
    rounds and the most equal dimensions. Else the ranks are divided into parts that have grids, each at least as large
    as all later parts together. Each part first averages over its own grid. Then each part but the last, in turn, has a
    round that brings its mean to that of all ranks: every rank of any later part is in a group of its own with some
    ranks of this part. Then a part averages over its grid again, while the next parts have their rounds. (After the
    Base-(k+1) graphs of Takezawa et al., 2023, whose parts are the digits of the size.)

    Raises:
        ValueError: for no ranks, more than `MOST_RANKS`, or `most` below 2.
    """
    argument("size", size, NumRanks)
    argument("most", most, SeveralInt)
    parts = _parts(size, most)
    if len(parts) == 1:
        return grid(_radices(size, most) or ()) if size > 1 else together(1)
    grids = [grid(radices).rounds if (radices := _radices(part, most)) else () for part in parts]
    starts = [sum(parts[:place]) for place in range(len(parts) + 1)]
    apart = max(map(len, grids))
    rounds: list[dict[RankGroup, float]] = [{} for _ in range(apart + _num_rounds_after(parts, most))]
    for place, (part, own, start) in enumerate(zip(parts, grids, starts, strict=False)):
        spreads_from = apart + place + 1
        for first, todo in ((0, own), (spreads_from, own if place < len(parts) - 1 else ())):
            for number, each in enumerate(todo, first):
                rounds[number] |= {tuple(start + rank for rank in group): 1.0 for group in each.groups}
        after = range(start + part, size)
        if after:
            share = min(most - 1, part // len(after))  # ranks of the part that each later rank meets
            relaxation = part * (share + 1) / ((size - start) * share)
            for number, rank in enumerate(after):
                of_part = range(start + number * share, start + (number + 1) * share)
                rounds[apart + place][(*of_part, rank)] = relaxation
    return GroupSchedule(tuple(_with_all(each, size) for each in rounds))


def _with_all(groups: Mapping[RankGroup, float], size: int) -> Round:
    """Returns the averaging round of these groups, in which all other ranks below `size` are alone.

    `groups` maps each to its relaxation: the share of the way to the group's mean that its ranks' values move.
    """
    alone = set(range(size)).difference(chain.from_iterable(groups))
    return Round((*groups, *((rank,) for rank in alone)), (*groups.values(), *(1.0 for _ in alone)))


def with_ranks_absent(schedule: GroupSchedule, ranks: Collection[int], every: int) -> GroupSchedule:
    """Returns the schedule in which these ranks join their groups in only one of `every` rounds, and else are alone.

    The other members of their groups average without them. Which round they join differs from pass to pass through the
    schedule, so that over `every` passes they join each round once. Even if one pass brought all ranks to the mean
    before, it need not do so now.

    Raises:
        ValueError: for ranks outside the schedule, or `every` below 2.
    """
    argument("every", every, Annotated[int, Interval(ge=2, le=1000)])
    _check_ranks(ranks)
    if not ranks or not set(ranks) <= set(range(schedule.size)):
        raise ValueError(f"some of {schedule.size} ranks can sit out rounds, got {sorted(ranks)}")
    joined = one_of(every, len(schedule.rounds))
    rounds = []
    for step in range(every * len(schedule.rounds)):
        each = schedule.round(step)
        if step in joined:
            rounds.append(each)
            continue
        left = {tuple(rank for rank in group if rank not in ranks): share for group, share in each.parts}
        rounds.append(_with_all({group: share for group, share in left.items() if group}, schedule.size))
    return GroupSchedule(tuple(rounds))


def one_of(every: int, length: int) -> frozenset[int]:
    """Selects one of each `every` consecutive rounds in `every` passes through `length` rounds; returns their numbers.

    Each of the `length` rounds is selected in one pass only: the numbers modulo `length` are all different.
    """
    shared = math.gcd(every, length)
    return frozenset(every * turn + turn * shared // length for turn in range(length))


def with_local_steps(schedule: GroupSchedule, every: int) -> GroupSchedule:
    """Returns a schedule with `every` - 1 rounds without averaging inserted before each of its rounds (local SGD).

    If one pass through all rounds brought all ranks to their common mean, it still does; in the inserted rounds the
    ranks' values drift apart.

    Raises:
        ValueError: for `every` below 1.
    """
    argument("every", every, FewInt)
    alone = [_alone(schedule.size)] * (every - 1)
    return GroupSchedule(tuple(each for meets in schedule.rounds for each in (*alone, meets)))


def thinned(schedule: GroupSchedule, every: int) -> GroupSchedule:
    """Returns the schedule that keeps one in `every` of its averaging rounds; in the others all ranks are alone.

    Raises:
        ValueError: for `every` below 1.
    """
    argument("every", every, FewInt)
    meetings = tuple(each for each in schedule.rounds if not each.rests)
    if every == 1 or not meetings:
        return schedule
    left = iter(with_ranks_absent(GroupSchedule(meetings), range(schedule.size), every).rounds)
    return GroupSchedule(tuple(each if each.rests else next(left) for each in schedule.rounds * every))


def of_ranks(schedule: GroupSchedule, placement: Placement) -> GroupSchedule:
    """Returns the schedule of averaging by which ranks follow a schedule of their nodes.

    A group of nodes becomes the group of all their ranks. So the ranks of a node that is alone average among
    themselves: no other node waits for that. But in a round in which every node is alone, every rank is.

    Args:
        schedule: says which nodes average in which round; nodes are numbered in the order of their first ranks.
        placement: the node of each rank.
    """
    ranks_of = [placement.within(placement.nodes.index(node)) for node in dict.fromkeys(placement.nodes)]
    rounds = []
    for each in schedule.rounds:
        groups = tuple(tuple(chain.from_iterable(ranks_of[node] for node in group)) for group in each.groups)
        rounds.append(_alone(placement.size) if each.rests else Round(groups, each.relaxations))
    return GroupSchedule(tuple(rounds))


def of_nodes(schedule: GroupSchedule, placement: Placement) -> GroupSchedule | None:
    """Returns the schedule of nodes that the ranks follow by `schedule`, as `of_ranks` made it.

    It is None for a schedule in which ranks of a node are in different groups while other ranks average.

    Args:
        schedule: says which ranks average in which round.
        placement: the node of each rank.
    """
    order = {node: place for place, node in enumerate(dict.fromkeys(placement.nodes))}
    rounds = []
    for each in schedule.rounds:
        groups = tuple(tuple({order[placement.nodes[rank]] for rank in group}) for group in each.groups)
        if sum(map(len, groups)) > len(order) and not each.rests:
            return None
        rounds.append(_alone(len(order)) if each.rests else Round(groups, each.relaxations))
    return GroupSchedule(tuple(rounds))


def _alone(size: int) -> Round:
    return Round(tuple((rank,) for rank in range(size)))


def _check_ranks(ranks: Collection[int]) -> None:
    argument("ranks", list(ranks) if isinstance(ranks, Collection) else ranks, tuple[int, ...])


def _check_order(ranks: Sequence[int], size: int) -> None:
    _check_ranks(ranks)
    if sorted(ranks) != list(range(size)):
        raise ValueError(f"ranks must be those from 0 to {size - 1} in any order, got {shown(list(ranks))}")


@lru_cache(maxsize=4096)
def _radices(size: int, most: int) -> tuple[int, ...] | None:
    """Returns the fewest, most equal factors of `size`, none above `most`, largest first; None if there are none."""
    if size == 1:
        return ()
    rests = ((radix, _radices(size // radix, most)) for radix in range(2, min(most, size) + 1) if size % radix == 0)
    found = [(radix, *rest) for radix, rest in rests if rest is not None and radix >= max(rest, default=0)]
    return min(found, key=lambda radices: (len(radices), radices), default=None)


@lru_cache(maxsize=4096)
def _parts(size: int, most: int) -> tuple[int, ...]:
    """Divides `size` ranks into parts that form grids of sides up to `most`, for few rounds; returns their sizes."""
    if _radices(size, most) is not None:
        return (size,)
    largest = (part for part in range(-(-size // 2), size) if _radices(part, most) is not None)
    return min(((part, *_parts(size - part, most)) for part in largest), key=lambda parts: _cost(parts, most))


def _cost(parts: tuple[int, ...], most: int) -> tuple[int, int]:
    """Returns the sort key of a division of ranks into parts of these sizes: (averaging rounds, number of parts)."""
    return max(_depth(part, most) for part in parts) + _num_rounds_after(parts, most), len(parts)


def _num_rounds_after(parts: Sequence[int], most: int) -> int:
    """Returns how many rounds bring all ranks to one mean, once each part, a grid of ranks, has averaged within itself.

    Part i, of `parts[i]` ranks, averages with later parts in round i, then again over its grid, one round per dimension
    of at most `most` ranks. The last part needs no more: it has all ranks' mean after its groups with all other parts.
    """
    return max(place + 1 + _depth(part, most) for place, part in enumerate(parts[:-1]))


def _depth(part: int, most: int) -> int:
    radices = _radices(part, most)
    assert radices is not None
    return len(radices)
