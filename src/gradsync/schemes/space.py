"""Zen's design space of sparse schemes as data: 18 points, each with a schedule of messages (OSDI 2025, section 3).

Four choices make a point. A tensor travels whole (centralization), or in parts, each with an owner that sums the part
(push) and hands the sum to all (parallelism; pull). Messages go round a ring, along a hierarchy of pairs, or straight
to their destination. Ranks add tensors as they arrive (incremental), or once, after all have arrived (one-shot). The
parts of owners are about equally dense (balanced) or not.

A `Schedule` lists rounds of messages. A message carries *partial sums*: pairs (block, ranks), the sum over these ranks
of one block of the tensor. `points.py` runs schedules and predicts their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..inputs.settings import Word


class Communication(Word):
    """The path that messages take.

    Attributes:
        RING: round a ring.
        HIERARCHY: between pairs at distances 1, 2, 4, ...: recursive doubling and halving.
        POINT_TO_POINT: straight to the destination.
    """

    RING = "ring"
    HIERARCHY = "hierarchy"
    POINT_TO_POINT = "point_to_point"


class Aggregation(Word):
    """The time at which a rank adds the tensors that it gets.

    Attributes:
        INCREMENTAL: as each arrives.
        ONE_SHOT: once, after all have arrived.
    """

    INCREMENTAL = "incremental"
    ONE_SHOT = "one_shot"


class Partition(Word):
    """The choice to send tensors whole or in parts.

    Attributes:
        CENTRALIZATION: tensors travel whole.
        PARALLELISM: tensors travel in parts, each of which one rank sums.
    """

    CENTRALIZATION = "centralization"
    PARALLELISM = "parallelism"


class Balance(Word):
    """The choice whether the parts that ranks sum have about equally many non-zeros.

    Attributes:
        BALANCED: about equally many.
        IMBALANCED: parts are cut evenly, whatever they contain.
    """

    BALANCED = "balanced"
    IMBALANCED = "imbalanced"


@dataclass(frozen=True)
class Point:
    """A combination of the four choices that make a sparse exchange in Zen's design space.

    Attributes:
        communication: the path of messages.
        aggregation: when a rank adds what arrives.
        partition: whether tensors travel whole or in parts, each of which one rank sums.
        balance: whether the parts have about equally many non-zeros; None for tensors sent whole.
    """

    communication: Communication
    aggregation: Aggregation
    partition: Partition
    balance: Balance | None = None

    def __post_init__(self) -> None:
        if (self.partition is Partition.PARALLELISM) != (self.balance is not None):
            raise ValueError(
                f"balance must be {' or '.join(Balance)} for parallelism, None for centralization; got {self.balance} "
                f"for {self.partition}"
            )

    def __str__(self) -> str:
        choices = (self.communication, self.aggregation, self.partition, self.balance)
        return " ".join(choice for choice in choices if choice is not None)


def _points() -> Iterator[Point]:
    for communication in Communication:
        for aggregation in Aggregation:
            yield Point(communication, aggregation, Partition.CENTRALIZATION)
            for balance in Balance:
                yield Point(communication, aggregation, Partition.PARALLELISM, balance)


POINTS = tuple(_points())
"""All 18 points of the design space: the combinations of its four choices that make sense."""

Ranks = tuple[int, ...]  # ascending
PartialSum = tuple[int, Ranks]  # the sum over these ranks of one block


@dataclass(frozen=True)
class Message:
    """A message from one rank to another, which carries sums of blocks of the tensor over some of the ranks."""

    source: int
    destination: int
    partials: tuple[PartialSum, ...]


@dataclass(frozen=True)
class Merge:
    """An addition on one rank: it replaces partial sums of a block by their sum, added in this order.

    A partial sum is (block, ranks): the sum of one block of the tensor over these ranks.
    """

    rank: int
    partials: tuple[PartialSum, ...]

    @property
    def sum(self) -> PartialSum:
        return self.partials[0][0], tuple(sorted(rank for _, ranks in self.partials for rank in ranks))


@dataclass(frozen=True)
class Round:
    """Messages that are in flight together; a rank waits for its incoming messages, then makes its additions."""

    stage: str
    messages: tuple[Message, ...]
    merges: tuple[Merge, ...] = ()

    @property
    def in_pairs(self) -> bool:
        """Whether each rank sends at most one message, and receives at most one."""
        ends = ([m.source for m in self.messages], [m.destination for m in self.messages])
        return all(len(set(ranks)) == len(ranks) for ranks in ends)


@dataclass(frozen=True)
class Schedule:
    """Rounds of messages and additions after which each of `size` ranks has the sum of the tensor over all ranks.

    The tensor is cut into `blocks` blocks.
    """

    size: int
    blocks: int  # parts of the tensor, of about equal length; rank i owns block i; 1: the tensor is not split
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class _Hop:
    """A transfer, from one rank to another, of all partial sums that the source holds of some blocks."""

    source: int
    destination: int
    blocks: tuple[int, ...]


@lru_cache(maxsize=256)
def schedule(point: Point, size: int, pull_by: Communication | None = None) -> Schedule:
    """Returns the rounds of messages and additions by which `size` ranks, any number, sum a tensor as `point` says.

    All ranks end with the same bits. If all partial sums went round a ring at once, every rank would add in another
    order; so one chain of sums runs from rank 0 to the last rank, and the total goes round the ring. If ranks exchange
    in pairs and their number is no power of two, the ranks beyond the largest power first send their values to a
    partner, and get the result in the end (Thakur et al., 2005).

    Args:
        point: the path of messages, the time of additions, and whether tensors travel whole or in parts.
        size: the number of ranks.
        pull_by: the path of complete sums from owners (each sums one part) to all ranks; None: that of `point`.
    """
    parallel = point.partition is Partition.PARALLELISM
    if size == 1:  # one round without messages
        return Schedule(1, 1, (Round("push" if parallel else "gather", (), (Merge(0, ((0, (0,)),)),)),))
    if parallel:
        return _owned(point, size, pull_by or point.communication)
    whole = [(0, (rank,)) for rank in range(size)]
    match point.communication, point.aggregation:
        case communication, Aggregation.ONE_SHOT:
            *others, last = _gather("gather", communication, whole)
            merges = tuple(Merge(rank, tuple(whole)) for rank in range(size))
            rounds = [*others, Round(last.stage, last.messages, merges)]
        case Communication.POINT_TO_POINT, _:
            rounds = [_announce(rank, size) for rank in range(size)]
        case Communication.RING, _:
            held = _Held(size, 1)
            rounds = [held.play("reduce", [_Hop(r, r + 1, (0,))], hands_over=True) for r in range(size - 1)]
            total = ((0, tuple(range(size))),)
            rounds += [Round("broadcast", (Message((r - 1) % size, r, total),)) for r in range(size - 1)]
        case _:
            rounds = _doubling(size)
    return Schedule(size, 1, tuple(rounds))


def _owned(point: Point, size: int, pull_by: Communication) -> Schedule:
    """Returns the rounds that bring parts to owners (push) by `point`'s path, sums to all ranks (pull) by `pull_by`.

    If `point`'s path is the hierarchy of pairs, the number of owners is the largest power of two up to `size`.
    """
    hierarchy = point.communication is Communication.HIERARCHY
    owners = _core(size) if hierarchy else size
    held = _Held(size, owners, at_once=point.aggregation is Aggregation.ONE_SHOT)
    rounds = [held.play("push", hops, hands_over=True) for hops in _push(point, size)]
    sums = [(block, tuple(range(size))) for block in range(owners)]
    rounds += _gather("pull", pull_by, sums)
    if owners < size:
        rounds.append(Round("pull", tuple(Message(r - owners, r, tuple(sums)) for r in range(owners, size))))
    return Schedule(size, owners, tuple(rounds))


def _core(size: int) -> int:
    """Returns the largest power of two up to `size`."""
    return 1 << (size.bit_length() - 1)


def _push(point: Point, size: int) -> Iterator[list[_Hop]]:
    """Yields the transfers of each push round; after the last, every owner has its block from all ranks."""
    ranks = range(size)
    match point.communication, point.aggregation:
        case Communication.POINT_TO_POINT, Aggregation.ONE_SHOT:
            yield [_Hop(r, owner, (owner,)) for r in ranks for owner in ranks if owner != r]
        case Communication.POINT_TO_POINT, _:  # one message a round, added on arrival
            for k in range(1, size):
                yield [_Hop(r, (r + k) % size, ((r + k) % size,)) for r in ranks]
        case Communication.RING, _:  # a block starts at the rank after its owner, and passes all ranks
            for k in range(1, size):
                yield [_Hop(r, (r + 1) % size, ((r - k) % size,)) for r in ranks]
        case Communication.HIERARCHY, _:  # a rank sends its partner the partner's half of its blocks
            core = _core(size)
            if core < size:
                yield [_Hop(r, r - core, tuple(range(core))) for r in range(core, size)]
            while core > 1:
                core //= 2
                yield [_Hop(r, r ^ core, _side(r ^ core, core)) for r in range(_core(size))]


def _side(rank: int, length: int) -> tuple[int, ...]:
    """Returns the `length` consecutive blocks, from a multiple of `length` on, among which block `rank` is."""
    start = rank // length * length
    return tuple(range(start, start + length))


def _gather(stage: str, communication: Communication, partials: Sequence[PartialSum]) -> list[Round]:
    """Returns the rounds of an all-gather among `len(partials)` ranks, to which rank i contributes `partials[i]`."""
    size = len(partials)
    ranks = range(size)
    rounds: list[tuple[Message, ...]] = []
    match communication:
        case Communication.POINT_TO_POINT:
            rounds = [tuple(Message(r, other, (partials[r],)) for r in ranks for other in ranks if other != r)]
        case Communication.RING:
            for k in range(size - 1):
                rounds.append(tuple(Message(r, (r + 1) % size, (partials[(r - k) % size],)) for r in ranks))
        case Communication.HIERARCHY:  # Bruck et al., 1997: any number of ranks
            distance = 1
            while distance < size:
                count = min(distance, size - distance)
                runs = [tuple(partials[(r + i) % size] for i in range(count)) for r in ranks]
                rounds.append(tuple(Message(r, (r - distance) % size, runs[r]) for r in ranks))
                distance *= 2
    return [Round(stage, messages) for messages in rounds if messages]


def _announce(rank: int, size: int) -> Round:
    """Returns the round in which `rank` sends its tensor to all, and all add it to the sum over lower ranks."""
    own: PartialSum = (0, (rank,))
    merged = (((0, tuple(range(rank))), own),) if rank else ()
    messages = tuple(Message(rank, other, (own,)) for other in range(size) if other != rank)
    return Round("gather", messages, tuple(Merge(each, partials) for each in range(size) for partials in merged))


def _doubling(size: int) -> list[Round]:
    """Returns rounds in which partners at distances 1, 2, 4, ... swap partial sums (recursive doubling)."""
    core, held = _core(size), _Held(size, 1)
    rounds = []
    if core < size:
        rounds.append(held.play("double", [_Hop(r, r - core, (0,)) for r in range(core, size)], hands_over=True))
    for distance in (1 << j for j in range(core.bit_length() - 1)):
        rounds.append(held.play("double", [_Hop(r, r ^ distance, (0,)) for r in range(core)]))
    if core < size:
        total = ((0, tuple(range(size))),)
        rounds.append(Round("double", tuple(Message(r - core, r, total) for r in range(core, size))))
    return rounds


class _Held:
    """A simulation of a schedule: which partial sums of each block every rank holds, round by round.

    With `at_once` a rank adds partial sums only when they cover all ranks.
    """

    def __init__(self, size: int, blocks: int, *, at_once: bool = False) -> None:
        self._everyone = tuple(range(size))
        self._at_once = at_once
        self._of: list[dict[int, list[Ranks]]] = [{b: [(rank,)] for b in range(blocks)} for rank in range(size)]

    def play(self, stage: str, hops: Sequence[_Hop], *, hands_over: bool = False) -> Round:
        """Simulates these transfers; returns their round. With `hands_over`, senders do not keep the partial sums."""
        messages = tuple(Message(hop.source, hop.destination, self._partials(hop)) for hop in hops)
        for hop in hops if hands_over else ():
            self._of[hop.source].update({block: [] for block in hop.blocks})
        for message in messages:
            for block, ranks in message.partials:
                self._of[message.destination][block].append(ranks)
        return Round(stage, messages, tuple(self._merges()))

    def _partials(self, hop: _Hop) -> tuple[PartialSum, ...]:
        return tuple((block, ranks) for block in hop.blocks for ranks in sorted(self._of[hop.source][block]))

    def _merges(self) -> Iterator[Merge]:
        for rank, blocks in enumerate(self._of):
            for block, parts in blocks.items():
                merge = Merge(rank, tuple((block, ranks) for ranks in sorted(parts)))
                if len(parts) > 1 and (not self._at_once or merge.sum[1] == self._everyone):
                    blocks[block] = [merge.sum[1]]
                    yield merge
