"""The steps of a scheme as data: its computations and transfers with their bytes, beside `Scheme.synchronize`.

A scheme lists its `Compute` and `Transfer` steps in order; cost model, planner, simulator, documentation and the byte
contract read the same list. Bytes are payload bytes handed to the transport, without its headers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from .transport import DEFAULT_TRANSPORT, Transport
from .transport import Pattern as Pattern  # noqa: PLC0414  schemes describe their steps by this module alone

FINISH = "finish"  # the turn in which a bucket's scheme goes on after its last transfer
COMPUTE, OFFLOAD = "compute", "offload"  # devices of `Compute`: backward's own thread or device, and a core of the host


@dataclass(frozen=True)
class Compute:
    """A computation of a scheme on one rank.

    Attributes:
        kernel: the name under which the kernel's cost was measured.
        nbytes: the bytes that all calls together read and write.
        device: where an awaited computation runs: on backward's thread or device ("compute"), or on another core or the
            host ("offload").
        calls: the number of kernel calls.
        awaited: whether the scheme awaits it like a transfer, as a stage of its own (`gradsync.comm.Work`); else the
            thread that issues collectives computes it between transfers.
        fetched_bytes, sent_bytes: bytes that offloaded work copies from an accelerator to the host, and back.
    """

    kernel: str
    nbytes: float
    device: str = COMPUTE
    calls: float = 1.0
    awaited: bool = False
    fetched_bytes: float = 0.0
    sent_bytes: float = 0.0

    @property
    def is_copied(self) -> bool:
        """Whether the host does this computation for an accelerator, so that tensors are copied there and back."""
        return self.fetched_bytes > 0 or self.sent_bytes > 0


@dataclass(frozen=True)
class Transfer:
    """One collective of a scheme, or several that run at once, with the bytes of each member of the process group.

    `part_bytes` are, by `pattern`:

    - `ALL_REDUCE`: the size of the whole buffer, the same for every member;
    - `ALL_GATHER`: the bytes that each member contributes; `BROADCAST`: entry 0 is the buffer;
    - `ALL_TO_ALL`: the bytes that each member receives from each other member;
    - `MESSAGES`: the bytes that each member sends in all; `messages` says to whom.

    With `groups` there are as many collectives at once, each among the members of one group, as inside each node of a
    cluster; members of no group take no part. `rounds` (messages one after another), `sent_bytes` and `busiest_bytes`
    are for gloo's way to carry collectives (`DEFAULT_TRANSPORT`); `carried_by` has them for any other.

    Attributes:
        stage: that part of a scheme's exchange, such as "push".
        pattern: the type of the collective.
        part_bytes: bytes, one entry for each member, as above.
        messages: (source, destination, bytes) of each message, for `MESSAGES`.
        groups: the members of each collective; (): all members are one group.
    """

    stage: str
    pattern: Pattern
    part_bytes: tuple[float, ...]
    messages: tuple[tuple[int, int, float], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_messages(cls, stage: str, size: int, messages: Sequence[tuple[int, int, float]]) -> Transfer:
        """Returns the transfer of these single messages, which are in flight together among `size` members of a group.

        Args:
            stage: the name of this part of the scheme's exchange.
            messages: (source, destination, bytes) of each message; members are numbered from 0.
        """
        sent = [sum(nbytes for source, _, nbytes in messages if source == member) for member in range(size)]
        return cls(stage, Pattern.MESSAGES, tuple(sent), tuple(messages))

    @classmethod
    def at_once(cls, stage: str, size: int, groups: Sequence[tuple[int, ...]], each: Sequence[Transfer]) -> Transfer:
        """Merges transfers of one pattern that happen at once, each within its own group of members, into one.

        Args:
            stage: the name of this part of the scheme's exchange.
            size: the number of all members.
            groups: the members of each group.
            each: the transfer of each group, which numbers the group's members from 0.
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
        """The number of members, including those that take no part in the transfer."""
        return len(self.part_bytes)

    def collectives(self) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Yields (members, bytes of each member) for each of the collectives that run at once in this transfer."""
        if not self.groups:
            yield tuple(range(self.size)), self.part_bytes
        for group in self.groups:
            yield group, tuple(self.part_bytes[member] for member in group)

    def carried_by(self, transport: Transport) -> Traffic:
        """Returns the messages and rounds in which a backend with this transport carries the transfer."""
        return Traffic(self, transport)

    @property
    def rounds(self) -> int:
        """The number of messages that follow one another on a member's link, if the backend works as gloo does."""
        return self.carried_by(DEFAULT_TRANSPORT).rounds

    @property
    def busiest_bytes(self) -> float:
        """The most bytes that one member sends or receives, if the backend works as gloo does."""
        return self.carried_by(DEFAULT_TRANSPORT).busiest_bytes

    def sent_bytes(self, member: int) -> float:
        """Returns the bytes that the member sends, if the backend works as gloo does."""
        return self.carried_by(DEFAULT_TRANSPORT).sent_bytes(member)


@dataclass(frozen=True)
class Traffic:
    """The traffic of one transfer: the bytes and messages with which a backend of this transport carries it.

    Attributes:
        transfer: the transfer.
        transport: the backend's way to carry it.
    """

    transfer: Transfer
    transport: Transport

    @property
    def rounds(self) -> int:
        """The number of messages that follow one another on a member's link, each of which takes the latency."""
        if self.transfer.pattern is Pattern.MESSAGES:
            ends = [place for message in self.transfer.messages for place in (("from", message[0]), ("to", message[1]))]
            return max(Counter(ends).values(), default=0)
        return max(self.transport.rounds(self.transfer.pattern, parts) for _, parts in self.transfer.collectives())

    @property
    def is_forwarded(self) -> bool:
        """Whether members pass on what they receive, in rounds that wait for one another, as in a ring."""
        pattern = self.transfer.pattern
        if pattern is Pattern.MESSAGES:
            return False
        return any(self.transport.passes_on(pattern, parts) for _, parts in self.transfer.collectives())

    def messages(self) -> Iterator[tuple[int, int, float]]:
        """Yields (source, destination, bytes) of all messages; what a ring forwards counts for each sender."""
        if self.transfer.pattern is Pattern.MESSAGES:
            yield from self.transfer.messages
            return
        for group, parts in self.transfer.collectives():
            for place, member in enumerate(group):
                for peer, nbytes in self.transport.sends(self.transfer.pattern, parts, place):
                    yield member, group[peer], nbytes

    def sent_bytes(self, member: int) -> float:
        """Returns the bytes that `member` sends in the transfer, those that it forwards in a ring included."""
        if self.transfer.pattern is Pattern.MESSAGES:
            return sum(nbytes for source, _, nbytes in self.transfer.messages if source == member)
        for group, parts in self.transfer.collectives():
            if member in group:
                sends = self.transport.sends(self.transfer.pattern, parts, group.index(member))
                return sum(nbytes for _, nbytes in sends)
        return 0

    @property
    def busiest_bytes(self) -> float:
        """The most bytes that one member sends or receives, if every member has a link of its own."""
        return busiest(self.messages())


def busiest(messages: Iterable[tuple[int, int, float]]) -> float:
    """Returns the most bytes that one source sends or one destination receives in all.

    `messages`: (source, destination, bytes) of each message.
    """
    sent: dict[int, float] = defaultdict(float)
    received: dict[int, float] = defaultdict(float)
    for source, to, nbytes in messages:
        sent[source] += nbytes
        received[to] += nbytes
    return max(chain(sent.values(), received.values()), default=0.0)


Step = Compute | Transfer
"""One step of a scheme: a computation, or a transfer."""


def transfers(steps: Iterable[Step]) -> list[Transfer]:
    """Returns only the transfers of a scheme's list of computations and transfers, in order."""
    return [step for step in steps if isinstance(step, Transfer)]
