"""Legs of a route: the ranges and payloads that each rank holds before and after every task of a route; no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..costs.cluster import Placement
from .dense import even_ranges
from .tree import Kind, Leaf, RouteTask, Scope

Piece = tuple[int, int]  # elements [start, stop) with a payload of their own


@dataclass(frozen=True)
class Held:
    """Elements [start, stop) of a flat bucket that a rank holds in the midst of an exchange.

    `pieces` are ranges of these elements, each of which is held as a compressed payload; () if the elements are dense.
    """

    start: int
    stop: int
    pieces: tuple[Piece, ...] = ()  # none while dense

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Leg:
    """One task of a scheme that runs a sequence of tasks (`Route`), with the data on each rank before and after it.

    A task is a compression, a decompression or a collective.

    Attributes:
        task: the task.
        groups: the ranks of each process group in which the collective runs; none for a local task.
        members: the number of ranks in each group.
        before, after: for each rank the elements that it holds; None if the root of its group holds them instead.
        point: the number of the latest compression up to this task, from 0; -1 before the first.
        bundle: how many payloads a rank has for each piece (range of elements) before the task; 0 while dense.
        added: how many ranks' payloads were added to make each payload before the task.
        adds: the payloads of a piece that a rank gets in this collective are added to one.
        scales: the sum is multiplied in this task by the `scale` of `synchronize`.
        keep_fp32, keep_fp32_after: dense numbers before, or after, the task have the dtype of sums (float32, or float64
            for float64), not the bucket's.
        copies: how many ranks compress the same tensor, a sum over all ranks.
        idle: the collective is left out, because each of its groups is one rank.
    """

    task: RouteTask
    groups: tuple[tuple[int, ...], ...]
    members: int
    before: tuple[Held | None, ...]
    after: tuple[Held | None, ...]
    point: int
    bundle: int
    added: int
    adds: bool
    scales: bool
    keep_fp32: bool
    keep_fp32_after: bool
    copies: int = 1
    idle: bool = False

    @property
    def carries_flags(self) -> bool:
        """Whether the task also sends the flags behind a bucket's elements, such as: did a rank use a parameter?

        An all-gather that completes a reduce-scatter or all-to-all does not, as those have sent the flags to the same
        ranks.
        """
        return not self.task.kind.is_second or self.task.rooted

    def group_of(self, rank: int) -> tuple[int, ...]:
        return next(group for group in self.groups if rank in group)


@lru_cache(maxsize=1024)
def legs_of(leaf: Leaf, numel: int, placement: Placement, most_added: float) -> tuple[Leg, ...]:
    """Returns one `Leg` for each task of a `leaf` (sequence of tasks): what each rank holds before and after it.

    Args:
        leaf: the compressions, decompressions and collectives by which a flat bucket is summed.
        numel: the number of elements of the bucket.
        placement: the node of each rank.
        most_added: how many of the compressor's payloads can be added to one.

    Raises:
        ValueError: if an all-reduce of payloads would add more than `most_added`.
    """
    n = placement.size
    groups = _groups(leaf, placement)
    lively = [place for place, task in enumerate(leaf) if task.scope and len(groups[task.scope][0]) > 1]
    lively = lively or [next(place for place, task in enumerate(leaf) if task.scope)]
    decodes = [place for place, task in enumerate(leaf) if task.kind is Kind.DECOMP]
    scaling = decodes[-1] if decodes else 0
    held: tuple[Held | None, ...] = (Held(0, numel),) * n
    opened: list[tuple[Held | None, ...]] = []
    point, bundle, added, summed, keep_fp32, scaled = -1, 0, 1, 1, False, False
    legs = []
    for place, task in enumerate(leaf):
        among = groups[task.scope] if task.scope else ()
        members = len(among[0]) if among else 1
        before, bundle_before, added_before, kept_fp32_before, adds = held, bundle, added, keep_fp32, False
        scaled = scaled or place == scaling
        match task.kind:
            case Kind.COMP:
                point, bundle, added = point + 1, 1, 1
                sizes = [len(groups[move.scope][0]) for move in _pushes(leaf[place + 1 :]) if move.scope]
                held = tuple(h and Held(h.start, h.stop, tuple(_cut(h, sizes))) for h in held)
            case Kind.DECOMP:
                bundle, held = 0, tuple(h and Held(h.start, h.stop) for h in held)
            case kind if kind.is_second:
                held = _gathered(held, opened.pop(), among)
            case kind:
                if kind.is_first:
                    opened.append(held)
                    held = _pushed(held, among, rooted=task.rooted)
                summed *= members
                if kind.of_payloads:
                    goes_on = not leaf[place + 1].kind.is_local or kind is Kind.COMM_L
                    adds = goes_on and added * members <= most_added and bundle == 1
                    if kind is Kind.COMM_L and not adds:
                        raise ValueError(f"{added * members} payloads are added, at most {most_added:.0f} can be")
                    bundle, added = (1, added * members) if adds else (bundle * members, added)
        if task.kind in (Kind.DECOMP, Kind.COMM, Kind.COMM_1):
            keep_fp32 = not (scaled and summed == n)
        copies = before.count(before[0]) if task.kind is Kind.COMP and summed == n else 1
        is_idle = bool(task.scope) and place not in lively
        legs.append(
            Leg(
                task,
                among,
                members,
                before,
                held,
                point,
                bundle_before,
                added_before,
                adds,
                place == scaling,
                kept_fp32_before,
                keep_fp32,
                copies,
                is_idle,
            )
        )
    return tuple(legs)


def pieces_of_member(held: Held, member: int, members: int, *, divided: bool) -> slice:
    """Returns which of a rank's pieces (`held.pieces`) it sends to one member of its group, as a slice of them.

    Args:
        held: what the rank holds.
        member: the place of the receiver in the group.
        members: the number of ranks in the group.
        divided: whether each member gets an equal share, as in an all-to-all; else each gets all pieces.
    """
    count = len(held.pieces) // members if divided else len(held.pieces)
    return slice(member * count, (member + 1) * count) if divided else slice(0, count)


def _groups(leaf: Leaf, placement: Placement) -> dict[Scope, tuple[tuple[int, ...], ...]]:
    ranks = range(placement.size)
    if all(task.scope in (None, Scope.ALL) for task in leaf):
        return {Scope.ALL: (tuple(ranks),)}
    within = tuple(dict.fromkeys(map(placement.within, ranks)))
    return {Scope.NODE: within, Scope.ACROSS: tuple(map(placement.across, within[0]))}


def _pushes(tasks: Sequence[RouteTask]) -> Iterator[RouteTask]:
    """Yields the collectives among `tasks`, up to a decompression, that divide payloads among the ranks of a group."""
    for task in tasks:
        if task.kind is Kind.DECOMP:
            return
        if task.kind.is_first and not task.rooted:
            yield task


def _cut(held: Held, sizes: Sequence[int]) -> Iterator[Piece]:
    """Yields pieces of the range `held`, divided into `sizes[0]` shares, each of them into `sizes[1]`, and so on."""
    if not sizes:
        yield held.start, held.stop
        return
    first, *others = sizes
    for part in shares(held, first):
        yield from _cut(part, others)


def shares(held: Held, members: int) -> list[Held]:
    """Returns equal consecutive shares of the range `held`, one for each member, the last ones shorter or empty."""
    ends = [held.start]
    for length in even_ranges(held.numel, members):
        ends.append(ends[-1] + length)
    return [Held(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def _pushed(held: Sequence[Held | None], groups: Sequence[tuple[int, ...]], *, rooted: bool) -> tuple[Held | None, ...]:
    """Returns the elements that each rank holds after a reduce-scatter or all-to-all: its share of the former range.

    After a reduce or gather (`rooted`) the first rank of each group holds the whole range, and the others None.
    """
    after: list[Held | None] = [None] * len(held)
    for group in groups:
        for member, rank in enumerate(group):
            mine = held[rank]
            if mine is None or (rooted and member):
                continue
            if rooted:
                after[rank] = mine
                continue
            share = shares(mine, len(group))[member]
            pieces = mine.pieces[pieces_of_member(mine, member, len(group), divided=True)]
            after[rank] = Held(share.start, share.stop, pieces)
    return tuple(after)


def _gathered(
    held: Sequence[Held | None], opened: Sequence[Held | None], groups: Sequence[tuple[int, ...]]
) -> tuple[Held | None, ...]:
    """Returns the elements each rank holds after an all-gather or broadcast, with all payloads of its process group.

    `opened` has the ranges before the reduce-scatter, reduce, all-to-all or gather that this collective completes.
    """
    after: list[Held | None] = [None] * len(held)
    for group in groups:
        pieces = tuple(piece for rank in group if (h := held[rank]) is not None for piece in h.pieces)
        for rank in group:
            if (whole := opened[rank]) is not None:
                after[rank] = Held(whole.start, whole.stop, pieces)
    return tuple(after)
