"""Issuing: everything a step sends goes out in the total order the plan fixes, by one thread at a time.

Where is the event loop? There is none. A scheme is a coroutine whose every `await` is on a `Pending`; the wait for one
`Pending` is one *stage* of the scheme. A `Synchronization` holds the order of (bucket, stage) turns of a step. At a
bucket's turn whoever issues waits for what the bucket awaits, resumes the coroutine up to its next `await`, and goes on
to the next turn while that operation is in flight. So operations of several buckets overlap, yet every rank issues them
in the same order whatever the timing: two threads on one communicator, or an order decided by timing, would make ranks
read each other's messages.

Who issues? The communication thread, as far as buckets are ready while backward goes on; the thread that waits for the
end does the rest itself. Handing over costs two changes of threads, which many small steps would feel. A lock, the
`turn`, makes it one at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from ..steps import FINISH
from ..timeline import Task
from .group import GroupError, Pending
from .threads import JobThread

logger = logging.getLogger(__name__)

T = TypeVar("T")


def drive(coroutine: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Runs one scheme's coroutine to its end, blocking at every await."""
    try:
        pending: Pending[Any] = coroutine.send(None)
        while True:
            pending = coroutine.send(pending.wait(timeout_s))
    except StopIteration as done:
        result: T = done.value
        return result


def drive_in_turns(coroutines: Sequence[Coroutine[Any, Any, T]]) -> tuple[list[T], list[float]]:
    """Runs the coroutines of all ranks of a `LocalGroup` to their ends, in one thread: each up to its next await.

    Returns their results, and seconds of processor time before the first await, between awaits and behind the last,
    mean over the ranks.
    """
    results: dict[int, T] = {}
    arrived: list[Any] = [None] * len(coroutines)
    found: list[float] = []
    while len(results) < len(coroutines):
        pending: list[Pending[Any]] = []
        began_s = time.thread_time()
        for rank, (coroutine, value) in enumerate(zip(coroutines, arrived, strict=True)):
            try:
                pending.append(coroutine.send(value))
            except StopIteration as done:
                results[rank] = done.value
        found.append((time.thread_time() - began_s) / len(coroutines))
        arrived = [each.wait(0.0) for each in pending]
    return [results[rank] for rank in range(len(coroutines))], found


class CancelledStepError(RuntimeError):
    """The step was given up before all of its buckets were ready."""


class Synchronization:
    """What one step synchronises: coroutines by bucket, their readiness, their results.

    `start(bucket)` makes the bucket's coroutine, at the bucket's first turn. `turn` is held by whoever uses the group.
    `where(bucket, stage)` names both for error messages. Unless `early`, nothing is issued before `wait`.
    """

    def __init__(
        self,
        order: Sequence[tuple[str, str]],
        start: Callable[[str], Coroutine[Any, Any, Any]],
        *,
        where: Callable[[str, str], str],
        timeout_s: float,
        turn: threading.Lock,
        thread: JobThread,
        early: bool = True,
    ) -> None:
        self._order = order
        self._start = start
        self._where = where
        self._timeout_s = timeout_s
        self._turn = turn
        self._thread = thread
        self._early = early
        self._on_cuda = thread.device is not None and thread.device.type == "cuda"
        self._buckets = {bucket for bucket, _ in order}
        self.ready_s: dict[str, float] = {}  # when each bucket's data was complete
        self._position = 0  # in the order
        self._coroutines: dict[str, Coroutine[Any, Any, Any]] = {}
        self._pending: dict[str, tuple[Pending[Any], str, float]] = {}
        self._events: dict[str, torch.cuda.Event] = {}
        self._issued: torch.cuda.Event | None = None  # what was issued so far, perhaps on another thread's stream
        self._cancelled = False
        self._ended = False
        self._error: BaseException | None = None
        self.results: dict[str, Any] = {}
        self.began_s = time.perf_counter()
        self.tasks: list[Task] = []

    def mark_ready(self, bucket: str) -> None:
        """The bucket's data is complete; called on the thread that produced it."""
        if self._on_cuda:
            event = torch.cuda.Event()
            event.record()
            self._events[bucket] = event
        self.ready_s[bucket] = time.perf_counter() - self.began_s
        if len(self.ready_s) == len(self._buckets):
            return  # all are: `wait` is about to be called
        position = self._position
        if self._early and position < len(self._order) and self._order[position][0] in self.ready_s:
            self._thread.submit(self.advance)

    def cancel(self) -> None:
        """Gives the step up: what was not issued yet never is."""
        self._cancelled = True

    def wait(self) -> None:
        """Issues what is left, blocks until every bucket is synchronised, raises what went wrong."""
        self.advance()
        if not self._ended:
            raise CancelledStepError("the step was given up before all of its buckets were ready")
        if self._issued is not None:  # perhaps on the other thread's stream
            self._issued.wait(torch.cuda.current_stream())
        if self._error is not None:
            raise self._error

    def advance(self) -> None:
        """Issues the turns of all buckets that are ready, up to the first that is not; to the end if all are."""
        with self._turn, torch.no_grad():
            if self._ended or self._cancelled:
                return
            if self._issued is not None:
                self._issued.wait(torch.cuda.current_stream())
            try:
                self._ended = self._run_turns()
            except BaseException as error:  # handed to the thread that waits
                self._error, self._ended = error, True
            if self._on_cuda:
                self._issued = torch.cuda.Event()
                self._issued.record()

    def _run_turns(self) -> bool:
        """Whether all turns are over."""
        while self._position < len(self._order):
            bucket, stage = self._order[self._position]
            if bucket not in self.ready_s or self._cancelled:
                return False
            if bucket not in self._coroutines:
                if bucket in self._events:
                    self._events[bucket].wait(torch.cuda.current_stream())
                self._coroutines[bucket] = self._start(bucket)
                self._resume(bucket, stage)
            elif bucket in self._pending:  # else it had fewer stages than planned, as in a group of one
                self._resume(bucket, stage)
            self._position += 1
        # Whatever is still in flight, and rounds beyond the planned stages, end in bucket order on every rank.
        for bucket in self._coroutines:
            while bucket in self._pending:
                self._resume(bucket, FINISH)
        return True

    def _resume(self, bucket: str, stage: str) -> None:
        value = None
        current = stage
        try:
            if bucket in self._pending:
                operation, current, issued_s = self._pending.pop(bucket)
                value = operation.wait(self._timeout_s)
                self._record(f"{bucket}:{current}", "link", issued_s, operation.sent_bytes)
                current = stage
            resumed_s = time.perf_counter()
            try:
                operation = self._coroutines[bucket].send(value)
            except StopIteration as done:
                self.results[bucket] = done.value
                self._record(f"{bucket}:{FINISH}", "kernel", resumed_s)
                return
            self._record(f"{bucket}:{stage}", "kernel", resumed_s)
            self._pending[bucket] = (operation, stage, time.perf_counter())
        except GroupError as error:
            raise GroupError(f"{self._where(bucket, current)}: {error}") from None
        except Exception as error:
            error.add_note(f"while synchronising {self._where(bucket, current)}")
            raise

    def _record(self, name: str, stream: str, start_s: float, nbytes: float = 0.0) -> None:
        now_s = time.perf_counter()
        self.tasks.append(Task(name, stream, start_s - self.began_s, now_s - self.began_s, nbytes))
