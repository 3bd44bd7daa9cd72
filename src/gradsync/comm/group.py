"""`Group`: a set of ranks with their collectives. Each starts at the call and returns a `Pending` to await.

Buffers are one-dimensional and contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..costs.cluster import Placement
from ..costs.transport import DIRECT_BYTES, RingOrDirect, Transport
from ..devices.streams import Moment

T = TypeVar("T")

_place: ContextVar[Callable[[], str]] = ContextVar("place", default=lambda: "outside of steps")


@contextmanager
def waiting_at(place: Callable[[], str]) -> Iterator[None]:
    """Sets, inside the `with` block, what waits of this thread are for, as `place_of_wait` tells it in error messages.

    `place`: returns the words, such as a bucket, stage and step.
    """
    before = _place.set(place)
    try:
        yield
    finally:
        _place.reset(before)


def place_of_wait() -> str:
    """Returns in words what this thread's waits for operations are a part of, such as a bucket, stage and step."""
    return _place.get()()


class Pending(Generic[T]):
    """The handle of an operation under way: a scheme's coroutine awaits it, other code calls `wait`."""

    sent_bytes = 0.0  # payload that this rank sends in it, where a ledger counts

    def __init__(self, wait: Callable[[float], T]) -> None:
        self._wait = wait

    def wait(self, timeout_s: float) -> T:
        """Blocks until the operation has ended and returns its result; may be called once.

        Raises:
            GroupError: after `timeout_s`, or when the operation failed.
        """
        return self._wait(timeout_s)

    def __await__(self) -> Generator[Pending[T], T, T]:
        return (yield self)


class Group(ABC):
    """The ranks of a process group with their collectives, each of which returns a `Pending` to await or wait for.

    `members` are global ranks, `rank` is this process's index among them.
    """

    rank: int
    members: tuple[int, ...]
    alpha_s: float | None = None  # measured seconds of each further message of an operation
    stage_s: float = 0.0  # measured seconds of an operation beside its messages and bytes
    bytes_per_s: float | None = None  # measured rate of a member's link in each direction
    # Whether only the thread that calls may issue operations, as other operations of the job must not overtake them.
    on_calling_thread: bool = False
    _placement: Placement | None = None

    @cached_property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.members)

    @property
    def at_once_bytes(self) -> float:
        """The most bytes that a member sends in an all-gather that starts all messages at once; above: a ring."""
        return float(DIRECT_BYTES)

    @property
    def transport(self) -> Transport:
        """The model of the messages that the backend sends for each collective, by which cost models estimate times."""
        return RingOrDirect(self.at_once_bytes)

    @property
    def device(self) -> torch.device:
        """The device on which to allocate small control tensors, such as sizes that ranks exchange."""
        return torch.device("cpu")

    @property
    def payload_device(self) -> torch.device:
        """The device of the gradients that the members exchange."""
        return self.device

    @property
    def placement(self) -> Placement:
        """The node of each member; where nothing is known, each member counts as on a node of its own."""
        return self._placement or Placement.one_per_node(self.size)

    def within_node(self) -> Group:
        """Returns the group of the members on this member's node."""
        return self.subgroup(self.placement.within(self.rank))

    def across_nodes(self) -> Group:
        """Returns the group of one member per node: those with the same index on their nodes as this member.

        Raises:
            ValueError: on every member, where nodes have different numbers of members.
        """
        return self.subgroup(self.placement.across(self.rank))

    @abstractmethod
    def subgroup(self, places: tuple[int, ...]) -> Group:
        """Returns the group of the members at these indices, which include this member's; for all indices, this group.

        The first call makes the subgroup: all of its members must make it at the same point between their operations.
        It stays until this group is closed, or a `with renewed()` block closes it. All members must issue the
        operations on this group and its subgroups in one common order.
        """

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Closes, at the end of the `with` block, all subgroups for which `subgroup` was not called inside the block.

        Without this, subgroups of former plans would pile up. Subgroups of subgroups are closed too. All members must
        enter the block between the same operations. Groups within and across nodes made with this group stay.
        `TorchGroup` does all this; other groups close nothing.
        """
        yield

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        """Sums `buffer` over the members in place and returns it; all members have the same shape and dtype."""

    @abstractmethod
    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """Returns every member's buffer, in the order of the members.

        Args:
            buffer: this member's, (elements,), of one dtype on all members.
            sizes: the number of elements of each member's buffer, where they differ.
        """

    @abstractmethod
    def all_to_all(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], *, largest: int | None = None
    ) -> Pending[list[Tensor]]:
        """Sends consecutive parts of `buffer`, one to each member, and returns the parts that the members sent here.

        Args:
            buffer: the parts, end to end, (elements,), of one dtype on all members.
            sent: elements for each member; their sum is the length of `buffer`.
            received: elements that each member sends here.
            largest: a bound of the elements of any part on any member, the same number on all members. It allows a
                quicker method for small parts.
        """

    @abstractmethod
    def exchange(self, messages: Sequence[Tensor], bounds: Sequence[int]) -> Pending[list[Tensor]]:
        """Sends `messages[j]` to member j and returns the received messages; receivers know only bounds of the lengths.

        The group overwrites the first `LENGTH_BYTES` of each message with the message's length. This member's own
        message is returned as it is. With bounds that are multiples of 8, any element type can be viewed from the start
        of a message.

        Args:
            messages: one for each member, (bytes,) uint8.
            bounds: the most bytes of a message to each member, the same numbers on all members.

        Raises:
            ValueError: for a message that is longer than its bound; nothing was sent then.
        """

    @abstractmethod
    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        origins: Collection[int],
        bound: int,
        device: torch.device,
        *,
        in_pairs: bool = False,
    ) -> Pending[dict[int, Tensor]]:
        """Sends single messages between some of the members; all members call it, also those without a message.

        Args:
            outgoing: the message for each destination, (bytes,) uint8; its first `LENGTH_BYTES` are overwritten with
                its length.
            origins: the members that send a message to this one.
            bound: the most bytes of a message, the same number on all members.
            device: the device of the messages, outgoing and received.
            in_pairs: whether each member sends and receives at most one message, so that none needs to wait for
                another; the same on all members.

        Returns:
            the received message of each origin, (bytes,) uint8, its length included.

        Raises:
            ValueError: for a message that is longer than `bound`; nothing was sent then.
        """

    @abstractmethod
    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        """Overwrites `buffer`, 1-D, with member 0's buffer, which has the same shape and dtype, and returns it."""

    def reach(self, moment: Moment, timeout_s: float) -> None:  # noqa: B027  waiting for an operation is enough
        """Blocks the host until the device has reached `moment`, which was recorded behind operations of this group.

        Waiting for an operation may only make a stream wait for it; this call waits for the device. It does nothing in
        groups whose operations run on the host.

        Raises:
            GroupError: where an operation does not end within `timeout_s`; only in groups whose operations run on
                streams.
        """

    @abstractmethod
    def barrier(self, what: str, timeout_s: float, *, detail: str = "") -> None:
        """Blocks until all members have called this for the same purpose, between the same two operations.

        It uses no collective. It guards work that only some members might begin: their collectives would meet other
        collectives of the other members, with other lengths, which ends the process in some backends. Members that wait
        in a collective instead raise too.

        Args:
            what: the purpose, the same on all members.
            timeout_s: seconds to wait for the other members.
            detail: details of this member, for error messages.

        Raises:
            GroupError: on all members that came in time, where one came for another purpose, is in a collective, has
                left, has failed, or does not come in time.
        """

    @abstractmethod
    def announce_failure(self, text: str, ranks: Collection[int] | None = None) -> None:
        """Makes the other members raise an error with this text when they next wait; uses no collective.

        `ranks`: the global ranks that are the cause; None: this member itself.
        """

    @abstractmethod
    def close(self) -> None:
        """Destroys the process groups made for this group and its subgroups; it must not be used afterwards."""


def gather_numbers(group: Group, mine: Tensor, timeout_s: float) -> list[Tensor]:
    """Gathers each rank's few numbers, 1-D of one shape and dtype, and returns all by rank, on `group.device`.

    Collective. `mine`: this rank's numbers, on any device.
    """
    return group.all_gather(mine.to(group.device)).wait(timeout_s)


def gather_bytes(group: Group, content: bytes, timeout_s: float) -> list[bytes]:
    """Gathers each rank's `content`, at least one byte, and returns all by rank; all members must call it."""
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(group.device)
    sizes = group.all_gather(torch.tensor([mine.numel()], device=group.device)).wait(timeout_s)
    parts = group.all_gather(mine, [int(size) for size in sizes]).wait(timeout_s)
    return [part.cpu().numpy().tobytes() for part in parts]
