"""`Group`: the ranks to talk to. Every operation starts at the call and returns a `Pending` to await.

Buffers are one-dimensional and contiguous. `TorchGroup` is the real one, on a communicator of its own: the user's code
may use its process group from another thread meanwhile, and two threads on one communicator read each other's messages.
"""

from __future__ import annotations

import ctypes
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURE_POLL_S = 1.0  # how often a waiting rank asks whether another one has announced a failure


class GroupError(RuntimeError):
    """A collective that did not complete: a rank died, stopped answering, or announced a failure."""


class Pending(Generic[T]):
    """An operation under way. `await` it inside a scheme, or `wait` for it outside of one."""

    def __init__(self, wait: Callable[[float], T]) -> None:
        self._wait = wait

    def wait(self, timeout_s: float) -> T:
        """Blocks until the result is there; call it once.

        Raises:
            GroupError: after `timeout_s`, or when the operation failed.
        """
        return self._wait(timeout_s)

    def __await__(self) -> Generator[Pending[T], T, T]:
        return (yield self)


def completed(value: T) -> Pending[T]:
    """A `Pending` whose result is already there."""
    return Pending(lambda _: value)


class Group(ABC):
    """Members are global ranks in order; `rank` is this process' place among them."""

    rank: int
    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    @abstractmethod
    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        """The sum over the members, in place: overwrites and returns `buffer`."""

    @abstractmethod
    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        """Every member's buffer, in order. `sizes`: their lengths in elements where they differ."""

    @abstractmethod
    def all_to_all(self, buffer: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending[list[Tensor]]:
        """Hands consecutive parts of `buffer` (`sent[j]` elements to member j), returns what each member sent here."""

    @abstractmethod
    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        """Member 0's buffer, in place on all others."""

    @abstractmethod
    def announce_failure(self, text: str) -> None:
        """Tells the other members, without a collective, that this one cannot go on."""

    @abstractmethod
    def close(self) -> None:
        """Releases the communicator; the group is not used afterwards."""


class TorchGroup(Group):
    """The members of a `torch.distributed` process group, over a new communicator with the same backend.

    Creating one is collective over the members. Operations are issued by one thread at a time (the caller's duty).
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float) -> None:
        self.members = tuple(dist.get_process_group_ranks(process_group))
        self.rank = dist.get_rank(process_group)
        self.backend = dist.get_backend(process_group)
        self._own = _new_communicator(process_group, self.members, self.rank, timedelta(seconds=timeout_s))
        # The store outlives a broken connection between two ranks, so failures are told through it.
        self._store = distributed_c10d._get_default_store()
        self._board_name = f"gradsync/{self._own.group_name}"
        self._board: distributed_c10d.Store | None = None
        self._asking: threading.Thread | None = None
        self._in_flight: dict[int, Any] = {}
        # The store may outlive the job, and group names start anew with the next one: its failures are not ours.
        device = torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")
        nonce = torch.tensor([secrets.randbits(62)], device=device)
        self._board_name += f"/{int(self.broadcast(nonce).wait(timeout_s))}"

    def all_reduce(self, buffer: Tensor) -> Pending[Tensor]:
        return self._pending(dist.all_reduce(buffer, group=self._own, async_op=True), lambda: buffer)

    def all_gather(self, buffer: Tensor, sizes: Sequence[int] | None = None) -> Pending[list[Tensor]]:
        if sizes is None or len(set(sizes)) == 1:
            gathered = buffer.new_empty(self.size * buffer.numel())
            work = _all_gather_single(gathered, buffer, self._own)
            return self._pending(work, lambda: split(gathered, [buffer.numel()] * self.size))
        # gloo gathers equal lengths only; sending the buffer to each member moves exactly the bytes needed.
        return self.all_to_all(buffer.repeat(self.size), [buffer.numel()] * self.size, sizes)

    def all_to_all(self, buffer: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending[list[Tensor]]:
        output = buffer.new_empty(sum(received))
        work = dist.all_to_all_single(output, buffer, list(received), list(sent), group=self._own, async_op=True)
        # The input must live until the work is done: the closure keeps it.
        return self._pending(work, lambda: split(output, received, keep=buffer))

    def broadcast(self, buffer: Tensor) -> Pending[Tensor]:
        work = dist.broadcast(buffer, src=self.members[0], group=self._own, async_op=True)
        return self._pending(work, lambda: buffer)

    def announce_failure(self, text: str) -> None:
        # The first announcement stays: later ones are its consequences.
        mine = f"rank {self.members[self.rank]}: {text}"
        if self._ask(lambda board: board.compare_set("failure", "", mine)) is None:
            logger.warning("could not tell the other ranks of a failure here, the store does not answer: %s", text)

    def close(self) -> None:
        if not dist.is_initialized():
            return  # the user's destroy_process_group() has ended all communicators
        dist.destroy_process_group(self._own)
        if any(not work.is_completed() for work in self._in_flight.values()):
            # gloo cannot cancel them: the destructor would wait until they time out, in whatever line collects garbage
            # or at exit. So it never runs; the process' end releases what is left.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._own))
        self._in_flight.clear()

    def _announced(self) -> str | None:
        text = self._ask(lambda board: board.get("failure") if board.check(["failure"]) else None)
        return text.decode() if text is not None else None

    def _ask(self, question: Callable[[distributed_c10d.Store], bytes | None]) -> bytes | None:
        """The store's answer; None without one within a poll: its host may be the process that stopped or died."""
        if self._asking is not None:
            self._asking.join(FAILURE_POLL_S)
            if self._asking.is_alive():
                return None
        answers: list[bytes | None] = []

        def ask() -> None:
            with suppress(RuntimeError):
                if self._board is None:
                    # A connection of its own, as both may block: the user's is for others.
                    store = self._store.clone()  # type: ignore[attr-defined]  # torch does not declare it
                    self._board = distributed_c10d.PrefixStore(self._board_name, store)
                answers.append(question(self._board))

        self._asking = threading.Thread(target=ask, name="gradsync store", daemon=True)
        self._asking.start()
        self._asking.join(FAILURE_POLL_S)
        return answers[0] if answers else None

    def _completes(self, work: Any, patience_s: float) -> bool:
        """Waits so long for the work; whether it is done. Raises GroupError when it failed."""
        try:
            work.wait(timedelta(seconds=patience_s))
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait()  # completed, perhaps well and just after our patience ended: now it tells
            return True
        except RuntimeError as error:
            raise GroupError(self._announced() or f"a connection broke ({_first_line(error)})") from None

    def _pending(self, work: Any, result: Callable[[], T]) -> Pending[T]:
        self._in_flight[id(work)] = work

        def wait(timeout_s: float) -> T:
            if self.backend == "nccl":  # orders the stream; its own watchdog ends a job that hangs
                work.wait()
                del self._in_flight[id(work)]
                return result()
            deadline = time.monotonic() + timeout_s
            while not self._completes(work, min(FAILURE_POLL_S, max(deadline - time.monotonic(), 0.001))):
                if announced := self._announced():
                    raise GroupError(announced)
                if time.monotonic() >= deadline:
                    raise GroupError(f"no answer from at least one rank within {timeout_s:.0f} s")
            del self._in_flight[id(work)]
            return result()

        return Pending(wait)


def _new_communicator(
    process_group: dist.ProcessGroup | None, members: tuple[int, ...], rank: int, timeout: timedelta
) -> dist.ProcessGroup:
    """A process group of the same members and backend, which only they need to call for."""
    backend = dist.get_backend(process_group)
    if len(members) == dist.get_world_size():
        whole: dist.ProcessGroup = dist.new_group(members, timeout=timeout, backend=backend)
        return whole
    # new_group(use_local_synchronization=True) names the group by how many groups a rank is in: members of different
    # numbers of groups would wait for each other. So this is its end, with a name that the members share.
    assert process_group is not None
    store = distributed_c10d._get_default_store()
    parent = process_group.group_name
    name = f"gradsync {parent} {store.add(f'gradsync {parent} of {rank}', 1)}"
    made: dist.ProcessGroup
    made, _ = distributed_c10d._new_process_group_helper(
        len(members),
        rank,
        list(members),
        backend,
        store,
        name,  # type: ignore[arg-type]  # a NewType of str in some versions
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[made] = {member: place for place, member in enumerate(members)}
    return made


def split(buffer: Tensor, sizes: Sequence[int], keep: Tensor | None = None) -> list[Tensor]:
    """Consecutive views of `sizes` elements. `keep` is held alive by whoever will call this."""
    return list(torch.split(buffer, list(sizes)))


def _all_gather_single(output: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> Any:
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, buffer, group=group, async_op=True)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
