"""`Survivors`: agreement, through the store, on the ranks that are left after others died or stopped answering.

A failed collective does not show who is left: a broken connection says nothing of third ranks, and a rank in a long
computation is as silent as a dead one. So a thread of each rank increments a heartbeat in the store of
`torch.distributed`. A rank that finds others lost calls all ranks through the store. The survivors are the ranks that
answer before the call ends: when no other rank has had a heartbeat for some seconds, or at the timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from concurrent import futures
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .communicators import backend_for, is_open, new_communicator
from .errors import GroupError, ranks_in_words
from .store import ANSWER_S, NO_STORE, by_rank, from_json
from .threads import ended_with

BEAT_S = 1.0  # between two beats of a rank
SILENT_S = 15.0  # a rank without a beat for so long is lost; at most half of the timeout
POLL_S = 0.1  # between two looks of a rank that waits for others


@dataclass(frozen=True)
class Survival:
    """The outcome of an agreement after ranks were lost: the ranks that are left, and how far they are.

    Attributes:
        ranks: the global ranks that are left, ascending.
        steps: the most training steps that any of them has made.
    """

    ranks: tuple[int, ...]
    steps: int


class Survivors:
    """The ranks of a process group that are still alive, with a thread that sends this rank's heartbeats.

    Args:
        name: the prefix of the keys in the store: the same on all ranks, used by nothing else.
        process_group: the ranks at the start; None: all.
        timeout_s: seconds that `agree` waits for a rank that is alive but does not call it.

    Attributes:
        called: whether some rank has found that ranks were lost, and waits in `agree`.
    """

    def __init__(self, name: str, process_group: dist.ProcessGroup | None, *, timeout_s: float) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.called = False
        self._rank = dist.get_rank()
        self._name, self._timeout_s = name, timeout_s
        self._backend = backend_for(process_group, torch.device("cpu"))
        self._silent_s = min(SILENT_S, timeout_s / 2)
        self._calls = 0  # the number of agreements so far
        self._asked: tuple[int, futures.Future[Survival]] | None = (
            None  # by `agree`: the steps, and the answer it waits for
        )
        self._group: dist.ProcessGroup | None = None
        self._store_lost = ""  # why, if it is
        self._ended, self._woken = threading.Event(), threading.Event()
        # A connection of its own, made while the store's host is alive: connecting to a dead host is tried for minutes.
        own = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # torch does not declare it
        self._store = distributed_c10d.PrefixStore(name, own)
        self._thread = threading.Thread(target=self._watch, name="gradsync survivors", daemon=True)
        self._thread.start()
        self._end = ended_with(self, self._thread, self._ended, self._woken)

    def agree(self, steps: int) -> Survival:
        """Agrees through the store on the ranks that are left after some were lost; all living ranks must call this.

        Ranks that still send heartbeats but do not call are waited for until the timeout, then they are left out too.

        Args:
            steps: the training steps that this rank has made.

        Raises:
            GroupError: where the store does not answer, and on a rank that the others have left out.
        """
        answer: futures.Future[Survival] = futures.Future()
        self._asked = steps, answer
        self._woken.set()
        if self._store_lost:
            raise GroupError(f"ranks were lost, and {self._store_lost}")
        try:
            found = answer.result(self._timeout_s + self._silent_s + ANSWER_S)
        except futures.TimeoutError:
            raise GroupError(f"ranks were lost, and {NO_STORE}") from None
        if self._rank not in found.ranks:
            raise GroupError(
                f"{ranks_in_words(found.ranks)} went on without this one, rank {self._rank}, which they could not wait "
                "for any longer: end it here; a new job may go on from a checkpoint"
            )
        return found

    def new_group(self) -> dist.ProcessGroup:
        """Makes a process group of the ranks that `agree` found to be left; all of these ranks must call this.

        The process group that an earlier call returned is destroyed.
        """
        self._destroy_group()
        own, name = self.ranks.index(self._rank), f"{self._name} {self._calls}"
        self._group = new_communicator(self._backend, self.ranks, own, self._timeout_s, name)
        return self._group

    def close(self) -> None:
        """Ends the heartbeat thread, and destroys the process group that `new_group` made last."""
        self._end()
        self._destroy_group()

    def _destroy_group(self) -> None:
        if self._group is not None and is_open(self._group):
            dist.destroy_process_group(self._group)
        self._group = None

    # On the thread, as calls of the store block where its host has stopped.

    def _watch(self) -> None:
        beat_s = min(BEAT_S, self._silent_s / 10)
        store = self._store
        try:
            while not self._ended.is_set():
                self._woken.clear()
                store.add(f"beat {self._rank}", 1)
                if self._asked is not None:
                    steps, answer = self._asked
                    found = self._agreed(store, steps)
                    self.called, self._asked = False, None
                    answer.set_result(found)
                self.called = store.check([f"here {self._calls}"])
                self._woken.wait(beat_s)
        except RuntimeError as error:
            self._store_lost = str(error) if isinstance(error, GroupError) else NO_STORE
            if self._asked is not None:
                self._asked[1].set_exception(GroupError(f"ranks were lost, and {self._store_lost}"))

    def _agreed(self, store: distributed_c10d.Store, steps: int) -> Survival:
        here, left = f"here {self._calls}", f"left {self._calls}"
        store.append(here, f"{self._rank}:{steps} ")  # type: ignore[attr-defined]  # torch does not declare it
        began_s = time.monotonic()
        # Ranks that have not come: the number of their beats, and since when there was no further one.
        beats: dict[int, tuple[int, float]] = {}
        while not store.check([left]):
            if self._ended.wait(POLL_S):
                raise GroupError("this rank gives up")
            came = _steps(store, here)
            now_s = time.monotonic()
            for rank in (rank for rank in self.ranks if rank not in came):
                beat = store.add(f"beat {rank}", 0)
                if rank not in beats or beats[rank][0] != beat:
                    beats[rank] = beat, now_s
            alive = self._alive(beats, came, now_s)
            if not alive or now_s - began_s > self._timeout_s:
                ranks = " ".join(f"{rank}:{came[rank]}" for rank in sorted(came))
                store.compare_set(left, "", ranks)  # the first rank's list counts
        found = _steps(store, left)
        if self._rank in found:
            self._calls += 1
            self.ranks = tuple(found)
        return Survival(tuple(found), max(found.values()))

    def _alive(self, beats: dict[int, tuple[int, float]], came: Collection[int], now_s: float) -> list[int]:
        """Returns the ranks that have not called `agree` but still send heartbeats, by `beats`: (count, since when)."""
        return [rank for rank, (_, since_s) in beats.items() if rank not in came and now_s - since_s < self._silent_s]


def _steps(store: distributed_c10d.Store, key: str) -> dict[int, int]:
    return by_rank(key, store.get(key).decode(errors="replace"), partial(from_json, int))
