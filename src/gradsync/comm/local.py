"""`LocalGroup`: a group whose ranks are threads of one process, without sockets; a collective takes about 0.2 ms."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..costs.cluster import Placement
from .board import Failure
from .errors import GroupError
from .framing import split, swapped, with_lengths
from .group import Group, Pending

T = TypeVar("T")


class _SharedMemory:
    """Memory shared by the threads of one group: each member's input to each collective, by the collective's number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.brought: dict[int, dict[int, Any]] = {}
        self.taken: dict[int, int] = {}
        self.failure: Failure | None = None
        self._meetings: dict[tuple[int, ...], _SharedMemory] = {}  # of subgroups, by their places

    def of(self, places: tuple[int, ...]) -> _SharedMemory:
        """Returns the shared memory of the subgroup of the members at these places, made at the first call."""
        with self.changed:
            meeting = self._meetings.setdefault(places, _SharedMemory(len(places)))
            meeting.failure = meeting.failure or self.failure
            return meeting

    def fail(self, failure: Failure) -> None:
        with self.changed:
            self.failure = failure
            self.changed.notify_all()
            for meeting in self._meetings.values():
                meeting.fail(failure)

    def bring(self, number: int, rank: int, what: Any) -> None:
        with self.changed:
            brought = self.brought.setdefault(number, {})
            brought[rank] = what
            if len(brought) == self.size:  # a thread woken before would only wait again
                self.changed.notify_all()

    def collect(self, number: int, timeout_s: float) -> list[Any]:
        with self.changed:
            complete = self.changed.wait_for(
                lambda: self.failure is not None or len(self.brought.get(number, {})) == self.size, timeout_s
            )
            if self.failure is not None:
                raise self.failure.error()
            if not complete:
                missing = sorted(set(range(self.size)) - set(self.brought.get(number, {})))
                raise GroupError(f"no answer from rank {missing[0]} within {timeout_s:.0f} s")
            everything = [self.brought[number][rank] for rank in range(self.size)]
            self.taken[number] = self.taken.get(number, 0) + 1
            if self.taken[number] == self.size:
                del self.brought[number], self.taken[number]
            return everything


class LocalGroup(Group):
    """One rank of a group whose ranks are threads of one process; `LocalGroup.world(size)` makes all ranks."""

    def __init__(self, rank: int, meeting: _SharedMemory, members: tuple[int, ...], placement: Placement) -> None:
        self.rank = rank
        self.members = members
        self._placement = placement
        self._meeting = meeting
        self._number = 0
        self._subgroups: dict[tuple[int, ...], LocalGroup] = {}

    @classmethod
    def world(cls, size: int, placement: Placement | None = None) -> list[LocalGroup]:
        """Makes a group of `size` ranks that are threads of this process, and returns each rank's `LocalGroup`.

        `placement`: the node of each rank; None: each on a node of its own.
        """
        meeting, members = _SharedMemory(size), tuple(range(size))
        return [cls(rank, meeting, members, placement or Placement.one_per_node(size)) for rank in members]

    def subgroup(self, places: tuple[int, ...]) -> Group:
        if len(places) == self.size:
            return self
        if places not in self._subgroups:
            members = tuple(self.members[place] for place in places)
            meeting, placement = self._meeting.of(places), self.placement.of(places)
            self._subgroups[places] = LocalGroup(places.index(self.rank), meeting, members, placement)
        return self._subgroups[places]

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        if self.size == 1:
            return self._operation("all_reduce", None, lambda _: buffer)

        def total(brought: list[Any]) -> Tensor:
            result = brought[0].clone()
            for other in brought[1:]:
                result += other
            return buffer.copy_(result)

        return self._operation("all_reduce", buffer.clone(), total)

    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        expected = list(sizes) if sizes is not None else [buffer.numel()] * self.size

        def gathered(brought: list[Any]) -> list[Tensor]:
            if [part.numel() for part in brought] != expected:
                raise GroupError(f"all_gather expected {expected} elements, got {[p.numel() for p in brought]}")
            return [part.clone() for part in brought]

        return self._operation("all_gather", buffer.clone(), gathered)

    def all_to_all(
        self, buffer: Tensor, sent: Sequence[int], received: Sequence[int], *, largest: int | None = None
    ) -> Pending[list[Tensor]]:
        def taken(brought: list[Any]) -> list[Tensor]:
            parts = [parts[self.rank] for parts in brought]
            if [part.numel() for part in parts] != list(received):
                raise GroupError(f"all_to_all expected {list(received)} elements, got {[p.numel() for p in parts]}")
            return [part.clone() for part in parts]

        return self._operation("all_to_all", split(buffer.clone(), sent), taken)

    def exchange(self, messages: Sequence[Tensor], bounds: Sequence[int]) -> Pending[list[Tensor]]:
        outgoing = [message.clone() for message in with_lengths(messages, bounds)]

        def taken(brought: list[Any]) -> list[Tensor]:
            if any(theirs != list(bounds) for theirs, _ in brought):
                raise GroupError(f"exchange expected the bounds {list(bounds)}, got {[b for b, _ in brought]}")
            arrived = [parts[self.rank].clone() for _, parts in brought]
            return [messages[peer] if peer == self.rank else part for peer, part in enumerate(arrived)]

        return self._operation("exchange", (list(bounds), outgoing), taken)

    def swap(
        self,
        outgoing: Mapping[int, Tensor],
        origins: Collection[int],
        bound: int,
        device: torch.device,
        *,
        in_pairs: bool = False,
    ) -> Pending[dict[int, Tensor]]:
        messages = {peer: message.clone() for peer, message in swapped(outgoing, bound).items()}

        def taken(brought: list[Any]) -> dict[int, Tensor]:
            if any(theirs != bound for theirs, _ in brought):
                raise GroupError(f"swap expected the bound {bound}, got {[theirs for theirs, _ in brought]}")
            arrived = {peer: sent[self.rank] for peer, (_, sent) in enumerate(brought) if self.rank in sent}
            if set(arrived) != set(origins):
                raise GroupError(f"swap expected messages of {sorted(origins)}, got those of {sorted(arrived)}")
            return arrived

        return self._operation("swap", (bound, messages), taken)

    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        return self._operation("broadcast", buffer.clone(), lambda brought: buffer.copy_(brought[0]))

    def barrier(self, what: str, timeout_s: float, *, detail: str = "") -> None:
        """Does nothing, as threads need no barrier: an operation raises an error where members issue different ones."""

    def announce_failure(self, text: str, ranks: Collection[int] | None = None) -> None:
        own = self.members[self.rank]
        self._meeting.fail(Failure(own, tuple([own] if ranks is None else ranks), text))

    def close(self) -> None:
        """Does nothing: a group of threads has no communicator to release."""

    def _operation(self, name: str, what: Any, result: Callable[[list[Any]], T]) -> Pending[T]:
        number, self._number = self._number, self._number + 1
        self._meeting.bring(number, self.rank, (name, what))

        def wait(timeout_s: float) -> T:
            brought = self._meeting.collect(number, timeout_s)
            names = {name for name, _ in brought}
            if len(names) > 1:
                raise GroupError(f"the ranks issued different operations: {', '.join(sorted(names))}")
            return result([what for _, what in brought])

        return Pending(wait)


def run_local(
    size: int,
    rank_main: Callable[[LocalGroup], T],
    *,
    placement: Placement | None = None,
    timeout_s: float = 60.0,
) -> list[T]:
    """Runs `rank_main(group)` on `size` threads and returns the results by rank.

    Args:
        size: the number of ranks.
        rank_main: the function that each rank runs, called with the rank's group.
        placement: the node of each rank; None: each on a node of its own.
        timeout_s: seconds to wait for each thread.

    Raises:
        GroupError: when a rank does not end in time.
        BaseException: the exception of a rank; of several rather the cause than other ranks' GroupError.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    groups = LocalGroup.world(size, placement)

    def body(group: LocalGroup) -> None:
        try:
            results[group.rank] = rank_main(group)
        except BaseException as error:  # raised in the calling thread below
            errors[group.rank] = error
            group.announce_failure(str(error))

    threads = [threading.Thread(target=body, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        # A rank that failed makes the others fail with GroupError: show the cause, not the echo.
        raise min(errors.items(), key=lambda item: (isinstance(item[1], GroupError), item[0]))[1]
    hung = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if hung:
        raise GroupError(f"ranks {hung} did not finish within {timeout_s:.0f} s")
    return [results[rank] for rank in range(size)]
