"""`TorchGroup`: the ranks of a process group of `torch.distributed`, on a communicator of their own.

The user's code may use the process group from another thread meanwhile, and two threads on one communicator read each
other's messages. Collectives are the backend's own; where these are slow, a subclass replaces them (`gloo.py`).
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..costs.cluster import Placement
from ..devices import host
from ..tensors import allocator as memory
from . import communicators
from .errors import GroupError
from .forks import inert_in_children
from .framing import cut_to_lengths, split, swapped, with_lengths
from .group import Group, Pending
from .links import Exchange, measured_link
from .rendezvous import WARNING_S, meet
from .store import StoreClient
from .whereabouts import Whereabouts

logger = logging.getLogger(__name__)

T = TypeVar("T")

_of_parents: list[TorchGroup] = []  # groups of the ranks that this process was forked from

POLL_S = 1.0  # seconds between two looks at the board of a rank that waits
LEAST_S = 0.01  # of a wait for an operation: torch takes less than a millisecond for no limit
_WITHOUT_WAITING = dist.AllreduceOptions()
_WITHOUT_WAITING.asyncOp = True


class TorchGroup(Group):
    """The members of a `torch.distributed` process group, with a new communicator of the same backend.

    All members must make it together. Callers must ensure that only one thread at a time issues operations.

    Args:
        process_group: the members; None: all ranks.
        timeout_s: seconds to wait for the other members, and that making each communicator may take; operations have
            their own timeout.
        device: the device of the tensors that the members will exchange; None: the CPU.
        placement: the node of each member, the same on all members; None: the members find it out together.
        what: what the members come together for, the same on all members, for error messages.
        parent: the group that this one is a subgroup of, if it is one.
        places: the members' indices in `parent`.
        on_calling_thread: whether only the thread that calls issues operations; where these run on streams, then on
            the process group itself, with the user's own.
        measures: whether to measure the links now; the same on all members.

    Raises:
        GroupError: where another member does not come in time, came for something else, died or stopped.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float,
        device: torch.device | None = None,
        placement: Placement | None = None,
        what: str = "a group of gradsync",
        parent: TorchGroup | None = None,
        places: tuple[int, ...] | None = None,
        on_calling_thread: bool = False,
        measures: bool = True,
    ) -> None:
        self.on_calling_thread, self._measures = on_calling_thread, measures
        everyone = tuple(dist.get_process_group_ranks(process_group)) if parent is None else parent.members
        self.members = everyone if places is None else tuple(everyone[place] for place in places)
        self.rank = self.members.index(dist.get_rank())
        self._process_group, self._timeout_s, self._parent = process_group, timeout_s, parent
        self._device = torch.device("cpu") if device is None else device
        self._backend = communicators.backend_for(process_group, self._device)
        self._devices = communicators.gloo_devices(process_group, self._device)
        self._placement = placement if parent is None or places is None else parent.placement.of(places)
        if placement is not None and placement.size != len(self.members):
            raise ValueError(f"the placement is of {placement.size} ranks, the group has {len(self.members)}")
        self._subgroups: dict[tuple[int, ...], TorchGroup] = {}
        self._asked_for: set[tuple[int, ...]] = set()  # subgroups that were asked for since `renewed` began
        self._made: Counter[tuple[int, ...]] = Counter()  # how often each subgroup was made
        self._in_flight: dict[int, tuple[Any, Tensor | None]] = {}  # works, and inputs that must live until they end
        self._store: StoreClient
        self._whereabouts: Whereabouts
        self._keys: list[str] = []  # of communicators in the store
        # Callbacks that undo what was made so far, called with whether an operation may hang.
        self._releases: list[Callable[[bool], None]] = []
        inert_in_children(self)
        self._meet(what, places)
        try:
            self._open(process_group, timeout_s)
        except BaseException as error:  # nobody will get the group, to close it
            self.announce_failure(f"{what}: {error}", error.ranks if isinstance(error, GroupError) else None)
            self._close(hanging=True)
            raise
        self._lasting = frozenset(self._subgroups)

    def _meet(self, what: str, places: tuple[int, ...] | None) -> None:
        """Waits for the other members in the store, through which they tell each other that they failed or left.

        Names in the store are new in each group, as the store may outlive the job. A subgroup's members have met in its
        parent.
        """
        around: Whereabouts | None = None
        if self._parent is not None and places is not None:
            self._store, around = self._parent._store, self._parent._whereabouts
            name = self._parent._name_of(places)
        else:
            meeting = meet(self._process_group, what, self._timeout_s)
            self._store, self._placement = meeting.store, self._placement or meeting.placement
            name = meeting.name
        own = self.members[self.rank]
        self._whereabouts = Whereabouts(self._store, name, self.members, own, self._timeout_s, around)

    def _name_of(self, places: tuple[int, ...]) -> str:
        """Returns the name of a new subgroup: the same on its members, and used for no other."""
        self._made[places] += 1
        return f"{self._whereabouts.name}/{hashlib.sha256(str(places).encode()).hexdigest()[:12]}/{self._made[places]}"

    def _open(self, process_group: dist.ProcessGroup | None, timeout_s: float) -> None:
        """Makes the communicators; functions that undo what was made are appended to `_releases`."""
        self._own = self._communicator()

    @property
    def payload_device(self) -> torch.device:
        return self._device

    def _measure_links(self, all_to_all: Callable[[int], Exchange], timeout_s: float) -> None:
        """Measures latency and rate of the links if asked to, unless the rate was given: `measured_link`. Collective.

        Makes the groups within and across nodes now, as plans need the measurements of their links, and must be the
        same on all ranks: all ranks take the slowest one's figures.
        """
        if not self._measures:
            return
        if self.bytes_per_s is None and self.size > 1:
            self.alpha_s, self.stage_s, self.bytes_per_s = measured_link(self, all_to_all, timeout_s)
        if not self.placement.is_hierarchy:
            return
        kinds = (self.within_node(), self.across_nodes())
        found = [(g.alpha_s, g.stage_s, 1 / g.bytes_per_s) for g in kinds if g.alpha_s is not None and g.bytes_per_s]
        if found:
            slowest = torch.tensor(found, device=self.device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self._own)
            for group, (alpha_s, stage_s, s_per_byte) in zip(kinds, slowest.tolist(), strict=True):
                group.alpha_s, group.stage_s, group.bytes_per_s = alpha_s, stage_s, 1 / s_per_byte

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
        return type(self)(
            self._process_group,
            timeout_s=self._timeout_s,
            device=self._device,
            parent=self,
            places=places,
            measures=self._measures,
        )

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        # Not by `dist.all_reduce`, whose checks in Python take longer than a small sum.
        return self._pending(self._own.allreduce([buffer], _WITHOUT_WAITING), lambda: buffer)

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
        ahead = host.numbers([nbytes for nbytes in sent if nbytes], device, torch.int64)
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
        if self.size > 1:
            self._whereabouts.meet(what, timeout_s, detail=detail)

    def announce_failure(self, text: str, ranks: Collection[int] | None = None) -> None:
        self._whereabouts.announce_failure(text, ranks)

    def forked(self) -> None:
        """Keeps the group for good, as this process was forked from a member's: a destructor would wait for threads."""
        _of_parents.append(self)

    def close(self) -> None:
        if self not in _of_parents:
            self._close(hanging=False)

    def _close(self, *, hanging: bool) -> None:
        """Closes subgroups, undoes all that `_open` made, and deletes what the members wrote into the store.

        The last member that closes the group deletes it. `hanging`: operations may not have ended, also others than
        those in flight.
        """
        hanging = hanging or any(not work.is_completed() for work, _ in list(self._in_flight.values()))
        self._whereabouts.leave()
        while self._subgroups:
            self._subgroups.popitem()[1]._close(hanging=hanging)
        is_last = self._whereabouts.all_left()
        while self._releases:
            self._releases.pop()(hanging)
        self._in_flight.clear()
        self.__dict__.pop("_own", None)  # its sockets close now, not when garbage is collected
        if is_last:
            self._store.delete(*self._keys)
        self._whereabouts.close(clear=is_last)
        if self._parent is None:
            self._store.close()

    def _communicator(self) -> dist.ProcessGroup:
        name = f"{self._whereabouts.name}/{len(self._keys)}"
        self._keys += communicators.keys_of(name, self.size)
        try:
            made = communicators.new_communicator(
                self._backend, self.members, self.rank, self._timeout_s, name, self._devices
            )
        except RuntimeError as error:
            raise self._whereabouts.why_broken(0, f"the members did not connect: {_reason(error)}") from None
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
            raise self._whereabouts.why_broken(number, f"a connection broke: {_reason(error)}") from None

    def _pending(self, work: Any, result: Callable[[], T], keep: Tensor | None = None) -> Pending[T]:
        number = self._whereabouts.issued
        self._whereabouts.issued += 1
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
        waited_s, warned = 0.0, False
        while not self._completes(work, number, max(min(POLL_S, timeout_s / 4, timeout_s - waited_s), LEAST_S)):
            waited_s = time.monotonic() - began_s
            if waited_s >= timeout_s:
                raise self._whereabouts.why_broken(number, f"no answer within {timeout_s:.0f} s")
            if told := self._whereabouts.told(number):
                raise told
            waited_s = time.monotonic() - began_s
            if not warned and waited_s >= WARNING_S:
                logger.warning("waiting for %.0f s by now: %s", waited_s, self._whereabouts.who_is_missing(number))
                warned = True


def _all_gather_single(output: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, buffer, group=group, async_op=True)


def _reason(error: Exception) -> str:
    """Returns the reason that the backend gives, without the place in its sources and its advice."""
    text = re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] *", "", str(error)).partition(". This ")[0].partition(", keys: ")[0]
    return text.splitlines()[0] if text else type(error).__name__
