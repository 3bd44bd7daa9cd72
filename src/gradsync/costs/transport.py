"""The messages and rounds in which a backend carries a collective, and how many collectives are in flight together.

The cost model, the forecast and the ledger ask a `Transport`, which `Group.transport` returns; nothing else in `costs/`
knows a backend. A new backend needs a group class with one line in `comm/backends.py` and, where it carries
collectives otherwise, a `Transport` for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

DIRECT_BYTES = 256 << 10  # a collective in which a member sends no more goes straight to every other member
# The most bytes of an all-reduce by recursive doubling, among 2^k members, and of one that goes straight to all others;
# larger ones go in a ring. No measurement decides, as the order of a sum decides its last bits, except of two.
# Doubling wins up to 16 KiB among 4 members at 200 Mbit, to 64 KiB among 8 or at 1 Gbit: docs/concepts/collectives.md
DOUBLED_BYTES, SUMMED_BYTES = 64 << 10, 32 << 10


class Pattern(StrEnum):
    """The types of collectives, such as all-reduce: which member sends what to which.

    Attributes:
        ALL_REDUCE: every member ends with the sum of all buffers, which have one size.
        ALL_GATHER: member i's part reaches every other member.
        ALL_TO_ALL: every other member sends part j to member j.
        BROADCAST: the part of member 0 reaches every other member.
        MESSAGES: single messages between any two members, as the scheme lists them.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    MESSAGES = "messages"


class Transport(ABC):
    """The way in which a backend of `torch.distributed`, such as gloo, carries collectives: in which messages.

    A transport answers for a collective among n members, numbered from 0. `part_bytes` has n entries, as in `Transfer`.
    Single messages (`Pattern.MESSAGES`) go as they are on every transport: only `queue_of` is asked about them.
    Subclasses are frozen dataclasses: cost models are compared and written to JSON.

    `queues`: how many transfers each queue of the backend carries at a time.
    """

    queues: ClassVar[tuple[int, ...]] = (1,)
    """How many transfers each queue of the backend carries at the same time, in the order in which they are issued."""

    def queue_of(self, pattern: Pattern) -> int:
        """Returns which of the backend's queues carries transfers of this pattern, as an index in `queues`."""
        return 0

    @abstractmethod
    def passes_on(self, pattern: Pattern, part_bytes: Sequence[float]) -> bool:
        """Whether members pass on what they receive, in rounds that wait for the slowest link, as in a ring.

        Args:
            pattern: the type of collective.
            part_bytes: bytes for each member, as in `costs.steps.Transfer`.
        """

    @abstractmethod
    def rounds(self, pattern: Pattern, part_bytes: Sequence[float]) -> int:
        """Returns the number of messages that follow one another on a member's link, each of which takes the latency.

        Args:
            pattern: the type of collective.
            part_bytes: bytes for each member, as in `costs.steps.Transfer`.
        """

    @abstractmethod
    def sends(self, pattern: Pattern, part_bytes: Sequence[float], member: int) -> Iterator[tuple[int, float]]:
        """Yields (peer, bytes) for all that `member` sends in a collective, what it forwards in a ring included.

        Args:
            pattern: the type of collective.
            part_bytes: bytes for each member, as in `costs.steps.Transfer`.
            member: the sender, from 0.
        """


@dataclass(frozen=True)
class RingOrDirect(Transport):
    """A transport that sends large all-reduces and large all-gathers of equal parts in a ring, and all else directly.

    Small all-reduces among 2^k members are sums by recursive doubling: k rounds of one message each.

    gloo carries collectives like this (docs/concepts/collectives.md). Backends without a transport of their own are
    priced the same way. `at_once_bytes`: most bytes that a member sends in an all-gather whose messages all start at
    once; above, it is a ring.
    """

    at_once_bytes: float = float(DIRECT_BYTES)
    """The most bytes that a member sends in an all-gather whose messages all start at once."""

    queues: ClassVar[tuple[int, ...]] = (1, 2)  # gradsync's thread for messages in rounds, gloo's two threads

    def queue_of(self, pattern: Pattern) -> int:
        return 0 if pattern in (Pattern.ALL_TO_ALL, Pattern.MESSAGES) else 1

    def passes_on(self, pattern: Pattern, part_bytes: Sequence[float]) -> bool:
        others = len(part_bytes) - 1
        if pattern is Pattern.ALL_REDUCE:
            if others > 1 and _is_power_of_2(len(part_bytes)):
                return part_bytes[0] > DOUBLED_BYTES
            return others * part_bytes[0] > DIRECT_BYTES or (others > 1 and part_bytes[0] > SUMMED_BYTES)
        if pattern is Pattern.ALL_GATHER:  # gloo's ring takes equal parts only
            return len(set(part_bytes)) == 1 and others * part_bytes[0] > self.at_once_bytes
        return False

    def doubles(self, pattern: Pattern, part_bytes: Sequence[float]) -> bool:
        """Whether members sum by recursive doubling: in round k with the member whose number differs in bit k."""
        small = pattern is Pattern.ALL_REDUCE and not self.passes_on(pattern, part_bytes)
        return small and _is_power_of_2(len(part_bytes))

    def rounds(self, pattern: Pattern, part_bytes: Sequence[float]) -> int:
        if self.doubles(pattern, part_bytes):
            return len(part_bytes).bit_length() - 1
        passes = 2 if pattern is Pattern.ALL_REDUCE and self.passes_on(pattern, part_bytes) else 1
        return passes * (len(part_bytes) - 1)

    def sends(self, pattern: Pattern, part_bytes: Sequence[float], member: int) -> Iterator[tuple[int, float]]:
        n, own = len(part_bytes), part_bytes[member]
        others = (peer for peer in range(n) if peer != member)
        if self.passes_on(pattern, part_bytes):
            share = 2 * (n - 1) / n if pattern is Pattern.ALL_REDUCE else n - 1
            yield (member + 1) % n, share * own
        elif self.doubles(pattern, part_bytes):
            yield from ((member ^ 1 << k, own) for k in range(n.bit_length() - 1))
        elif pattern is Pattern.ALL_TO_ALL:
            yield from ((peer, part_bytes[peer]) for peer in others)
        elif pattern is not Pattern.BROADCAST or member == 0:
            yield from ((peer, own) for peer in others)


def _is_power_of_2(members: int) -> bool:
    return members & (members - 1) == 0


DEFAULT_TRANSPORT = RingOrDirect()
