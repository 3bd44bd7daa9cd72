"""`Group`: a set of ranks with their collectives. Each starts at the call and returns a `Pending` to await.

Buffers are one-dimensional and contiguous. `TorchGroup` runs on a communicator of its own: the user's code may use the
process group from another thread meanwhile, and two threads on one communicator read each other's messages. Collectives
are the backend's own; where these are slow, a subclass replaces them (`gloo.py`).
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..costs.cluster import Placement
from ..costs.transport import DIRECT_BYTES, RingOrDirect, Transport
from ..tensors import allocator as memory
from . import communicators
from .board import Board, Failure, purpose, require_one_purpose
from .errors import GroupError, ranks_in_words
from .rendezvous import meet
from .roll_call import Progress, RollCall
from .store import NO_STORE, StoreClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

BARRIER_POLL_S = (
    0.002,
    0.2,
)  # pauses of a rank at a barrier between two looks for the others: the first and the longest
POLL_S = 1.0  # seconds between two looks at the board of a rank that waits
WARNING_S = 30.0  # a rank that waits longer logs, once, for whom
LENGTH_BYTES = 8  # of the length at the start of a message whose length only its sender knows


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
    """Ranks that communicate by collectives: `members` are global ranks, `rank` is this process' index among them."""

    rank: int
    members: tuple[int, ...]
    alpha_s: float | None = None  # measured seconds of each further message of an operation
    stage_s: float = 0.0  # measured seconds of an operation beside its messages and bytes
    bytes_per_s: float | None = None  # measured rate of a member's link in each direction
    _placement: Placement | None = None

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def at_once_bytes(self) -> float:
        """The most bytes that a member sends in an all-gather that starts all messages at once; above, it is a ring."""
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
    def placement(self) -> Placement:
        """The node of each member; each member is on a node of its own where nothing is known."""
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
        It stays until this group is closed, or `renewed` closes it. All members must issue the operations on this group
        and its subgroups in one common order.
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
        """Destroys the communicator; the group must not be used afterwards."""


class TorchGroup(Group):
    """The members of a `torch.distributed` process group, with a new communicator of the same backend.

    All members must make it together. Callers must ensure that only one thread at a time issues operations.

    Args:
        process_group: the members; None: all ranks.
        timeout_s: seconds to wait for the other members, and that making each communicator may take; operations have
            their own timeout.
        placement: the node of each member, the same on all members; None: the members find it out together.
        what: what the members come together for, the same on all members, for error messages.
        parent: the group that this one is a subgroup of, if it is one.
        places: the members' indices in `parent`.

    Raises:
        GroupError: where another member does not come in time, came for something else, died or stopped.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float,
        placement: Placement | None = None,
        what: str = "a group of gradsync",
        parent: TorchGroup | None = None,
        places: tuple[int, ...] | None = None,
    ) -> None:
        everyone = tuple(dist.get_process_group_ranks(process_group)) if parent is None else parent.members
        self.members = everyone if places is None else tuple(everyone[place] for place in places)
        self.rank = self.members.index(dist.get_rank())
        self._process_group, self._timeout_s, self._parent = process_group, timeout_s, parent
        self._placement = placement if parent is None or places is None else parent.placement.of(places)
        if placement is not None and placement.size != len(self.members):
            raise ValueError(f"the placement is of {placement.size} ranks, the group has {len(self.members)}")
        self._subgroups: dict[tuple[int, ...], TorchGroup] = {}
        self._asked_for: set[tuple[int, ...]] = set()  # subgroups that were asked for since `renewed` began
        self._made: Counter[tuple[int, ...]] = Counter()  # how often each subgroup was made
        self._in_flight: dict[int, tuple[Any, Tensor | None]] = {}  # works, and inputs that must live until they end
        self._issued = 0
        self._barriers = 0  # the number of barriers that this member has come to
        self._store: StoreClient
        self._roll_call: RollCall
        self._keys: list[str] = []  # of communicators in the store
        # Callbacks that undo what was made so far, called with whether an operation may hang.
        self._releases: list[Callable[[bool], None]] = []
        self._meet(what, places)
        try:
            self._open(process_group, timeout_s)
        except BaseException as error:  # nobody will get the group, to close it
            self.announce_failure(f"{what}: {error}", error.ranks if isinstance(error, GroupError) else None)
            self._close(hanging=True)
            raise
        self._lasting = frozenset(self._subgroups)

    def _meet(self, what: str, places: tuple[int, ...] | None) -> None:
        """Waits for the other members in the store, and makes the board for notices there.

        By notices members tell each other that they came to a barrier, failed or left. Their names are new in each
        group, as the store may outlive the job. A subgroup's members have met in its parent.
        """
        if self._parent is not None and places is not None:
            self._store, self._roll_call = self._parent._store, self._parent._roll_call
            self._board = Board(self._store, self._parent._name_of(places))
            return
        meeting = meet(self._process_group, what, self._timeout_s)
        self._store, self._placement = meeting.store, self._placement or meeting.placement
        self._board = Board(self._store, meeting.name)
        self._roll_call = RollCall(self._store, meeting.name, self.members[self.rank], self._progress)

    def _name_of(self, places: tuple[int, ...]) -> str:
        """Returns the name of a new subgroup: the same on its members, and used for no other."""
        self._made[places] += 1
        return f"{self._board.name}/{hashlib.sha256(str(places).encode()).hexdigest()[:12]}/{self._made[places]}"

    def _progress(self) -> Progress:
        """Returns the number of operations issued so far, of this group and its subgroups, by the group's name."""
        found = {self._board.name: self._issued}
        for made in list(self._subgroups.values()):
            found.update(made._progress())
        return found

    def _open(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        """Makes the communicators; functions that undo what was made are appended to `_releases`."""
        self._own = self._communicator(process_group)

    def subgroup(self, places: tuple[int, ...]) -> Group:
        if len(places) == self.size:
            return self
        self._asked_for.add(places)
        if places not in self._subgroups:
            self._subgroups[places] = self._make_subgroup(places)
        return self._subgroups[places]

    @contextmanager
    def renewed(self) -> Iterator[None]:
        self._asked_for = set(self._lasting)
        with ExitStack() as within:
            for made in self._subgroups.values():
                within.enter_context(made.renewed())
            yield
        for places in sorted(self._subgroups.keys() - self._asked_for):  # in one order on all members
            self._subgroups.pop(places).close()

    def _make_subgroup(self, places: tuple[int, ...]) -> TorchGroup:
        return type(self)(self._process_group, timeout_s=self._timeout_s, parent=self, places=places)

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        return self._pending(dist.all_reduce(buffer, group=self._own, async_op=True), lambda: buffer)

    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        lengths = list(sizes) if sizes is not None else [buffer.numel()] * self.size
        if len(set(lengths)) > 1:
            # Backends gather equal lengths only; sending the buffer to each member moves exactly the bytes needed.
            return self._all_to_all(buffer.repeat(self.size), [buffer.numel()] * self.size, lengths)
        output = memory.empty(sum(lengths), buffer.dtype, buffer.device)
        work = _all_gather_single(output, buffer, self._own)
        return self._pending(work, lambda: split(output, lengths), keep=buffer)

    def all_to_all(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], *, largest: int | None = None
    ) -> Pending[list[Tensor]]:
        return self._all_to_all(buffer, sent, received)

    def exchange(self, messages: Sequence[Tensor], bounds: Sequence[int]) -> Pending[list[Tensor]]:
        # Backends want both ends to name the same length, which is the bound, whatever the message is.
        outgoing = with_lengths(messages, bounds)
        sent = [0 if peer == self.rank else bound for peer, bound in enumerate(bounds)]
        buffer = outgoing[0].new_empty(sum(sent))
        for room, message in zip(split(buffer, sent), outgoing, strict=True):
            room[: len(message)].copy_(message[: len(room)])  # the own message has no room, and is not sent
        return self._exchange_at_once(buffer, sent, messages[self.rank], bounds[self.rank])

    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        origins: Collection[int],
        bound: int,
        device: torch.device,
        *,
        in_pairs: bool = False,
    ) -> Pending[dict[int, Tensor]]:
        # Backends want both ends to name the same length: the lengths travel first, as bounds may be far above them.
        messages = swapped(outgoing, bound)
        sent = [len(messages[peer]) if peer in messages else 0 for peer in range(self.size)]
        ahead = torch.tensor([nbytes for nbytes in sent if nbytes], dtype=torch.int64, device=device)
        ones = [int(peer in origins) for peer in range(self.size)]
        lengths = self._all_to_all(ahead, [int(nbytes > 0) for nbytes in sent], ones)
        parts = [messages[peer] for peer in sorted(messages)]
        buffer = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)

        def wait(timeout_s: float) -> dict[int, Tensor]:
            received = [
                int(length) if len(length) else 0 for length in lengths.wait(timeout_s)
            ]  # the host must know the lengths to make room
            arrived = self._all_to_all(buffer, sent, received).wait(timeout_s)
            return {peer: arrived[peer] for peer in origins}

        return Pending(wait)

    def _exchange_at_once(self, buffer: Tensor, sent: Sequence[int], own: Tensor, bound: int) -> Pending[list[Tensor]]:
        """Sends `sent[j]` bytes of `buffer` to member j; returns received messages (up to `bound` bytes) and `own`."""
        arrived = self._all_to_all(buffer, sent, [0 if peer == self.rank else bound for peer in range(self.size)])
        return Pending(lambda timeout_s: cut_to_lengths(arrived.wait(timeout_s), self.rank, own))

    def _all_to_all(self, buffer: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending[list[Tensor]]:
        output = memory.empty(sum(received), buffer.dtype, buffer.device)
        work = dist.all_to_all_single(output, buffer, list(received), list(sent), group=self._own, async_op=True)
        return self._pending(work, lambda: split(output, received), keep=buffer)

    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        work = dist.broadcast(buffer, src=self.members[0], group=self._own, async_op=True)
        return self._pending(work, lambda: buffer)

    def barrier(self, what: str, timeout_s: float, *, detail: str = "") -> None:
        if self.size == 1:
            return
        barrier, pause_s, warned, text = self._barriers, BARRIER_POLL_S[0], False, purpose(what, detail)
        self._note_arrival(what, detail)
        began_s = answered_s = time.monotonic()
        while missing := sorted(set(self.members) - (here := self._board.arrivals(barrier)).keys()):
            if self.members[self.rank] in missing:  # the store did not take the note while it owed an answer
                self._board.note_arrival(barrier, self.members[self.rank], self._issued, what, detail)
            gone = self._board.left_before(self._issued)
            if failure := self._announced_failure():  # read last, as in `_told`
                raise failure.error()
            if gone:
                raise GroupError(f"{ranks_in_words(gone)} detached before {text}, which all ranks must come to", gone)
            now_s = time.monotonic()
            answered_s = now_s if here else answered_s  # at least one member is there
            if now_s - answered_s >= min(WARNING_S, timeout_s):
                raise GroupError(f"{NO_STORE}; the ranks meet there for {text}")
            if now_s - began_s >= timeout_s:
                self._roll_call.answers(self.members)  # so that all know who is lost
                raise GroupError(
                    f"{ranks_in_words(missing)} did not come to {text} within {timeout_s:.0f} s: all ranks must",
                    missing,
                )
            if not warned and now_s - began_s >= WARNING_S:
                logger.warning(
                    "waiting for %.0f s by now for %s to come to %s", WARNING_S, ranks_in_words(missing), text
                )
                warned = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, BARRIER_POLL_S[1])
        require_one_purpose(here)

    def _note_arrival(self, what: str, detail: str) -> None:
        """Writes this member's arrival at a barrier to the store, for members of this group and of its subgroups."""
        barrier, self._barriers = self._barriers, self._barriers + 1
        self._board.note_arrival(barrier, self.members[self.rank], self._issued, what, detail)
        for made in self._subgroups.values():
            made._note_arrival(what, detail)

    def announce_failure(self, text: str, ranks: Collection[int] | None = None) -> None:
        own = self.members[self.rank]
        failure = Failure(own, tuple([own] if ranks is None else ranks), text, tuple(self._roll_call.silent))
        if not self._board.announce_failure(failure):
            logger.warning("could not tell the other ranks of a failure here, the store does not answer: %s", text)

    def close(self) -> None:
        self._close(hanging=False)

    def _close(self, *, hanging: bool) -> None:
        """Closes subgroups, undoes all that `_open` made, and deletes what the members wrote into the store.

        The last member that closes the group deletes it. `hanging`: operations may not have ended, also others than
        those in flight.
        """
        hanging = hanging or any(not work.is_completed() for work, _ in list(self._in_flight.values()))
        self._board.note_left(self.members[self.rank], self._issued)
        while self._subgroups:
            self._subgroups.popitem()[1]._close(hanging=hanging)
        is_last = self._is_last()
        while self._releases:
            self._releases.pop()(hanging)
        self._in_flight.clear()
        self.__dict__.pop("_own", None)  # its sockets close now, not when garbage is collected
        if is_last:
            self._board.clear(self._barriers)
            self._store.delete(*self._keys)
        if self._parent is None:
            self._roll_call.close(clear=is_last)
            self._store.close()

    def _is_last(self) -> bool:
        """Whether all other members have closed the group, or are lost."""
        try:
            failure, left = self._announced_failure(), self._board.left()
        except GroupError:  # they cannot be read: not this group's to delete
            return False
        return left.keys() | self._roll_call.silent | set(failure.lost if failure else ()) >= set(self.members)

    def _communicator(self, process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        name = f"{self._board.name}/{len(self._keys)}"
        self._keys += communicators.keys_of(name, self.size)
        try:
            made = communicators.new_communicator(process_group, self.members, self.rank, self._timeout_s, name)
        except RuntimeError as error:
            raise self._broken(0, f"the members did not connect: {_reason(error)}") from None
        communicators.set_patience(made, self._patience_s(self._timeout_s))
        self._releases.append(lambda hanging: communicators.destroy(made, hanging=hanging))
        return made

    def _patience_s(self, timeout_s: float) -> float:
        """Returns the seconds until the backend aborts an operation: above `timeout_s`, when `_wait` raises."""
        return 1.5 * timeout_s + 5.0  # later than `_wait`, which says who is missing

    def _completes(self, work: Any, number: int, patience_s: float) -> bool:
        """Waits for a `torch.distributed` work for at most `patience_s`, and returns whether it has ended.

        Raises:
            GroupError: when the operation failed.
        """
        try:
            work.wait(timedelta(seconds=patience_s))
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # perhaps it succeeded just after our patience ended: this raises only if it failed
            return True
        except RuntimeError as error:
            raise self._broken(number, f"a connection broke: {_reason(error)}") from None

    def _pending(self, work: Any, result: Callable[[], T], keep: Tensor | None = None) -> Pending[T]:
        number = self._issued
        self._issued += 1
        self._in_flight[number] = (work, keep)

        def wait(timeout_s: float) -> T:
            self._wait(work, number, timeout_s)
            self._in_flight.pop(number, None)
            return result()

        return Pending(wait)

    def _wait(self, work: Any, number: int, timeout_s: float) -> None:
        """Blocks until operation `number` has ended, and reads other members' notices in the store meanwhile.

        Raises:
            GroupError: after `timeout_s`, when the operation failed, or when a notice says why it cannot end.
        """
        began_s = time.monotonic()
        poll_s = min(POLL_S, timeout_s / 4)
        warned = False
        while not self._completes(work, number, poll_s):
            if told := self._told(number):
                raise told
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                raise self._broken(number, f"no answer within {timeout_s:.0f} s")
            if not warned and waited_s >= WARNING_S:
                logger.warning("waiting for %.0f s by now: %s", waited_s, self._who_is_missing(number))
                warned = True

    def _told(self, number: int) -> GroupError | None:
        """Returns why operation `number` cannot end, by the notices of other members; None if they say nothing."""
        gone = self._board.left_before(number)
        if failure := self._announced_failure():  # read last: who leaves because of a failure has announced it before
            return failure.error()
        if gone:
            return GroupError(
                f"{ranks_in_words(gone)} detached before this; in training every rank must make the same number of "
                "steps (DistributedSampler(drop_last=True) does)",
                gone,
            )
        elsewhere = {r: came for r, came in self._board.arrivals(self._barriers).items() if came.operations <= number}
        if elsewhere:
            what = next(iter(elsewhere.values()))
            return GroupError(
                f"{what} began on {ranks_in_words(sorted(elsewhere))} while others train: all ranks must come to it, "
                "between the same two steps",
                elsewhere,
            )
        return None

    def _announced_failure(self) -> Failure | None:
        """Returns the failure that a member of this group or its parent announced; None if there is none.

        A failed rank outside a subgroup can keep the subgroup's members waiting too.
        """
        whole = self._parent._announced_failure() if self._parent is not None else None
        return whole or self._board.failure()

    def _broken(self, number: int, why: str) -> GroupError:
        """Returns the error of operation `number`, which failed: by notices, else by the members that are missing."""
        if told := self._told(number):
            return told
        missing = self._who_is_missing(number)
        # The others may have found out meanwhile, or have left because of it.
        return self._told(number) or GroupError(f"{missing} ({why})", missing.ranks)

    def _who_is_missing(self, number: int) -> GroupError:
        """Calls the roll, and returns an error that names the members that are lost or behind operation `number`."""
        answers = self._roll_call.answers(self.members)
        if self.members[self.rank] not in answers:
            return GroupError(NO_STORE)
        came = {rank: issued.get(self._board.name, 0) for rank, issued in answers.items()} | self._board.left()
        silent = [rank for rank in self.members if rank not in came]
        if len(silent) == self.size - 1 > 1:
            return GroupError("no other rank answers: they have ended, or have gone on without this rank")
        if silent:
            words = "does not answer: it has died, was stopped, or is blocked"
            if len(silent) > 1:
                words = "do not answer: they have died, were stopped, or are blocked"
            return GroupError(f"{ranks_in_words(silent)} {words}", silent)
        behind = [rank for rank, issued in sorted(came.items()) if issued <= number]
        if behind:
            return GroupError(
                f"{ranks_in_words(behind)} did not come this far: still at work, or a loop of fewer steps there", behind
            )
        return GroupError("every rank waits, so a connection between two of them is stuck")


def gather_bytes(group: Group, content: bytes, timeout_s: float) -> list[bytes]:
    """Gathers each rank's `content`, at least one byte each, and returns them by rank. Collective."""
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(group.device)
    sizes = group.all_gather(torch.tensor([mine.numel()], device=group.device)).wait(timeout_s)
    parts = group.all_gather(mine, [int(size) for size in sizes]).wait(timeout_s)
    return [part.cpu().numpy().tobytes() for part in parts]


def split(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Splits `buffer`, (elements,), into consecutive views, the first of shape (sizes[0],), and so on."""
    return list(torch.split(buffer, list(sizes)))


def with_lengths(messages: Sequence[Tensor], bounds: Sequence[int], peers: Iterable[int] | None = None) -> list[Tensor]:
    """Overwrites the first `LENGTH_BYTES` of each message with the message's length, and returns the messages.

    Args:
        messages: the messages to `peers`, each (bytes,) uint8.
        bounds: the most bytes of each message.
        peers: the destinations, for error messages; None: all members, in order.

    Raises:
        ValueError: for a message that has no room for its length, or is longer than its bound.
    """
    to = range(len(messages)) if peers is None else peers
    for peer, message, bound in zip(to, messages, bounds, strict=True):
        if not LENGTH_BYTES <= len(message) <= bound:
            raise ValueError(
                f"the message to member {peer} has {len(message)} bytes; expected {LENGTH_BYTES} (for its length) to "
                f"{bound}, the bound that all members know"
            )
    for message in messages:
        message[:LENGTH_BYTES].copy_(torch.tensor([len(message)]).view(torch.uint8))
    return list(messages)


def length_of(message: Tensor) -> int:
    """Returns the length in bytes that `with_lengths` wrote into a message, (bytes,) uint8."""
    return int.from_bytes(
        message[:LENGTH_BYTES].cpu().numpy().tobytes(), sys.byteorder
    )  # the host must know the length to cut the message


def cut_to_lengths(arrived: Sequence[Tensor], rank: int, own: Tensor) -> list[Tensor]:
    """Cuts the messages received in an `exchange` to the lengths that they begin with.

    Args:
        arrived: for each member the received buffer, (bound,) uint8, which may be longer than the message.
        rank: this member's index.
        own: the message of this member to itself, (bytes,) uint8, which was not sent.
    """
    return [own if peer == rank else part[: length_of(part)] for peer, part in enumerate(arrived)]


def swapped(outgoing: Mapping[int, Tensor], bound: int) -> dict[int, Tensor]:
    """Writes the length of each message for `swap`, (bytes,) uint8, at its start; returns messages by destination."""
    messages = with_lengths(list(outgoing.values()), [bound] * len(outgoing), outgoing)
    return dict(zip(outgoing, messages, strict=True))


def cut_messages(arrived: Sequence[Tensor], origins: Collection[int]) -> dict[int, Tensor]:
    """Cuts the messages received in a `swap` to the lengths that they begin with, and returns them by origin.

    `arrived` has for each member the received buffer, (bound,) uint8, which may be longer than the message.
    """
    return {peer: arrived[peer][: length_of(arrived[peer])] for peer in origins}


def _all_gather_single(output: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, buffer, group=group, async_op=True)


def _reason(error: Exception) -> str:
    """Returns the reason that the backend gives, without the place in its sources and its advice."""
    text = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] *", "", str(error)).partition(". This ")[0].partition(", keys: ")[0]
    return text.splitlines()[0] if text else type(error).__name__
