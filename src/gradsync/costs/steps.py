"""What a scheme does, as data: the second interpreter beside `Scheme.synchronize`.

A scheme lists its `Compute` and `Transfer` steps in order; cost model, planner, simulator, documentation and the byte
contract read the same list. Bytes are payload bytes handed to the transport, without its headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

FINISH = "finish"  # the turn in which a bucket does what is left to do behind its last transfer
COMPUTE, OFFLOAD = "compute", "offload"  # devices: backward's own thread or device, and another core
DIRECT_BYTES = 256 << 10  # a collective in which a member sends no more goes straight to every other member


class Pattern(StrEnum):
    """Who sends what to whom in one collective."""

    ALL_REDUCE = "all_reduce"  # small: the buffer to every other member; else a ring, 2(n-1)/n of it to the successor
    ALL_GATHER = "all_gather"  # member i's part reaches every other member
    ALL_TO_ALL = "all_to_all"  # every other member sends part j to member j
    BROADCAST = "broadcast"  # the part of member 0 reaches every other member
    MESSAGES = "messages"  # whichever there are between any two


@dataclass(frozen=True)
class Compute:
    """Local work: `nbytes` are the bytes the algorithm must read plus those it must write, in so many `calls`.

    `awaited`: as `Work`, which has a turn of its own and is done on its device; else whoever issues does it.
    """

    kernel: str
    nbytes: float
    device: str = COMPUTE
    calls: float = 1.0
    awaited: bool = False


@dataclass(frozen=True)
class Transfer:
    """One collective of a stage. `part_bytes` has one entry a member:

    - `ALL_REDUCE`: the size of the whole buffer, the same for every member;
    - `ALL_GATHER`: what each member contributes; `BROADCAST`: entry 0 is the buffer;
    - `ALL_TO_ALL`: what each member receives from each of the others;
    - `MESSAGES`: what each member sends in all; `messages` says to whom.

    With `groups` it is as many collectives at once, each among the members of one group, as in all nodes of a cluster;
    members of none have no part in it.
    """

    stage: str
    pattern: Pattern
    part_bytes: tuple[float, ...]
    messages: tuple[tuple[int, int, float], ...] = ()  # (source, destination, bytes)
    groups: tuple[tuple[int, ...], ...] = ()  # none: all members are one

    @classmethod
    def of_messages(cls, stage: str, size: int, messages: Sequence[tuple[int, int, float]]) -> Transfer:
        """Single messages that are in flight together among `size` members."""
        sent = [sum(nbytes for source, _, nbytes in messages if source == member) for member in range(size)]
        return cls(stage, Pattern.MESSAGES, tuple(sent), tuple(messages))

    @classmethod
    def at_once(cls, stage: str, size: int, groups: Sequence[tuple[int, ...]], each: Sequence[Transfer]) -> Transfer:
        """`each` of these, which are of one pattern, in its own group of the `size` members, at the same time.

        Groups of these are within theirs.
        """
        (pattern,) = {transfer.pattern for transfer in each}
        part_bytes = [0.0] * size
        messages = []
        apart: list[tuple[int, ...]] = []
        for group, transfer in zip(groups, each, strict=True):
            for member, nbytes in zip(group, transfer.part_bytes, strict=True):
                part_bytes[member] = nbytes
            messages += [(group[source], group[to], nbytes) for source, to, nbytes in transfer.messages]
            apart += [tuple(group[place] for place in inner) for inner in transfer.groups] or [group]
        return cls(stage, pattern, tuple(part_bytes), tuple(messages), tuple(apart))

    @property
    def size(self) -> int:
        """Members of all groups."""
        return len(self.part_bytes)

    @property
    def direct(self) -> bool:
        """Whether it is small enough for messages that all start at once: there latency counts, not the order."""
        if self.pattern is Pattern.ALL_REDUCE:
            return not any(map(self._rings, self._groups))
        return self.busiest_bytes <= DIRECT_BYTES

    @property
    def rounds(self) -> int:
        """Messages that follow one another on a member's link: the factor of the latency."""
        if self.pattern is Pattern.MESSAGES:
            ends = [place for message in self.messages for place in (("from", message[0]), ("to", message[1]))]
            return max(Counter(ends).values(), default=0)
        return max((2 if self._rings(group) else 1) * (len(group) - 1) for group in self._groups)

    def group_of(self, member: int) -> tuple[int, ...]:
        """The members that this one talks to, itself among them."""
        return next((group for group in self._groups if member in group), (member,))

    def peers(self, member: int) -> Iterator[tuple[int, float]]:
        """(peer, bytes) of every message `member` sends. The forwarding of a ring counts as its successor's."""
        group = self.group_of(member)
        n = len(group)
        if n == 1:
            return
        match self.pattern:
            case Pattern.ALL_REDUCE if self._rings(group):
                yield group[(group.index(member) + 1) % n], 2 * (n - 1) / n * self.part_bytes[member]
            case Pattern.ALL_REDUCE | Pattern.ALL_GATHER:
                yield from ((peer, self.part_bytes[member]) for peer in group if peer != member)
            case Pattern.ALL_TO_ALL:
                yield from ((peer, self.part_bytes[peer]) for peer in group if peer != member)
            case Pattern.BROADCAST:
                if member == group[0]:
                    yield from ((peer, self.part_bytes[member]) for peer in group[1:])
            case Pattern.MESSAGES:
                yield from ((to, nbytes) for source, to, nbytes in self.messages if source == member)

    def hops(self, at_once_bytes: float = DIRECT_BYTES) -> Iterator[tuple[int, int, float]]:
        """(source, destination, bytes) of what passes between two members; what a ring forwards counts every time.

        `at_once_bytes`: what a member sends in an all-gather at most for its messages to go straight to the others.
        """
        if self.pattern is Pattern.MESSAGES:
            yield from self.messages
            return
        for group in self._groups:
            if self._gathers_round(group, at_once_bytes):
                passed_on = (len(group) - 1) * self.part_bytes[group[0]]
                yield from zip(group, [*group[1:], group[0]], [passed_on] * len(group), strict=True)
            else:
                yield from ((member, peer, nbytes) for member in group for peer, nbytes in self.peers(member))

    def goes_round(self, at_once_bytes: float = DIRECT_BYTES) -> bool:
        """Whether members pass on what they get, in rounds that wait for one another; for the bytes see `hops`."""
        return any(self._rings(group) or self._gathers_round(group, at_once_bytes) for group in self._groups)

    def sent_bytes(self, member: int) -> float:
        return sum(nbytes for _, nbytes in self.peers(member))

    def received_bytes(self, member: int) -> float:
        group = self.group_of(member)
        n = len(group)
        match self.pattern:
            case Pattern.ALL_REDUCE if self._rings(group):
                return 2 * (n - 1) / n * self.part_bytes[member]
            case Pattern.ALL_REDUCE | Pattern.ALL_GATHER:
                return sum(self.part_bytes[peer] for peer in group) - self.part_bytes[member]
            case Pattern.ALL_TO_ALL:
                return (n - 1) * self.part_bytes[member]
            case Pattern.BROADCAST:
                return 0.0 if member == group[0] else self.part_bytes[group[0]]
            case Pattern.MESSAGES:
                return sum(nbytes for _, to, nbytes in self.messages if to == member)

    @property
    def total_bytes(self) -> float:
        """Bytes that all members send together."""
        return sum(self.sent_bytes(member) for member in range(self.size))

    @property
    def busiest_bytes(self) -> float:
        """Bytes on the busiest link direction, if every member has a link of its own."""
        if self.pattern is Pattern.MESSAGES:  # many, perhaps: one look at each
            return busiest(self.messages)
        members = range(self.size)
        return max(max(self.sent_bytes(m), self.received_bytes(m)) for m in members)

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        return self.groups or (tuple(range(self.size)),)

    def _rings(self, group: tuple[int, ...]) -> bool:
        """Whether this group's all-reduce is large enough for a ring."""
        large = (len(group) - 1) * self.part_bytes[group[0]] > DIRECT_BYTES
        return self.pattern is Pattern.ALL_REDUCE and large

    def _gathers_round(self, group: tuple[int, ...], at_once_bytes: float) -> bool:
        """Whether this group's all-gather goes round a ring: large parts do where they are equal."""
        parts = {self.part_bytes[member] for member in group}
        return self.pattern is Pattern.ALL_GATHER and len(parts) == 1 and (len(group) - 1) * max(parts) > at_once_bytes


def busiest(hops: Iterable[tuple[int, int, float]]) -> float:
    """The most bytes that leave one place, or reach one; `hops` are (source, destination, bytes)."""
    links: dict[tuple[str, int], float] = {}
    for source, to, nbytes in hops:
        links["from", source] = links.get(("from", source), 0.0) + nbytes
        links["to", to] = links.get(("to", to), 0.0) + nbytes
    return max(links.values(), default=0.0)


Step = Compute | Transfer


def transfers(steps: Iterable[Step]) -> list[Transfer]:
    """The transfers of a list of steps, in order."""
    return [step for step in steps if isinstance(step, Transfer)]
