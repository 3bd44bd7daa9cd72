"""The communication thread: one thread issues everything, in the total order the plan fixes.

Where is the event loop? There is none. A scheme is a coroutine whose every `await` is on a `Pending`; the wait for one
`Pending` is one *stage* of the scheme. An `Exchange` holds the order of (bucket, stage) turns of a step. At a bucket's
turn the thread waits for what the bucket awaits (or, at its first turn, until the bucket is ready), resumes the
coroutine up to its next `await`, and goes on to the next turn while that operation is in flight. So operations of
several buckets overlap, yet every rank issues them in the same order whatever the timing: two threads on one
communicator, or an order decided by timing, would make ranks read each other's messages.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from ..timeline import Task
from .group import GroupError, Pending

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


class CancelledStepError(RuntimeError):
    """The step was given up before all of its buckets were ready."""


class Exchange:
    """What one step synchronises: coroutines by bucket, their readiness, their results.

    `start(bucket)` makes the bucket's coroutine; it runs on the communication thread, at the bucket's first turn.
    `where(bucket, stage)` names both for error messages.
    """

    def __init__(
        self,
        order: Sequence[tuple[str, str]],
        start: Callable[[str], Coroutine[Any, Any, Any]],
        *,
        where: Callable[[str, str], str],
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self._order = order
        self._start = start
        self._where = where
        self._timeout_s = timeout_s
        self._device = device
        self._ready = {bucket: threading.Event() for bucket, _ in order}
        self._events: dict[str, torch.cuda.Event] = {}
        self._cancelled = False
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.results: dict[str, Any] = {}
        self.began_s = time.perf_counter()
        self.tasks: list[Task] = []
        self._stream_event: torch.cuda.Event | None = None

    def mark_ready(self, bucket: str) -> None:
        """The bucket's data is complete; called on the thread that produced it."""
        if self._device is not None and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[bucket] = event
        self._ready[bucket].set()

    def cancel(self) -> None:
        """Gives the step up: what was not issued yet never is."""
        self._cancelled = True
        for event in self._ready.values():
            event.set()

    def wait(self) -> None:
        """Blocks until every bucket is synchronised; raises what went wrong."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._stream_event is not None:
            self._stream_event.wait(torch.cuda.current_stream(self._device))

    def run(self) -> None:
        """The communication thread's part."""
        try:
            with torch.no_grad():
                self._run_turns()
            if self._device is not None and self._device.type == "cuda":
                self._stream_event = torch.cuda.Event()
                self._stream_event.record(torch.cuda.current_stream(self._device))
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._done.set()

    def _run_turns(self) -> None:
        coroutines: dict[str, Coroutine[Any, Any, Any]] = {}
        pending: dict[str, tuple[Pending[Any], str, float]] = {}
        for bucket, stage in self._order:
            if bucket not in coroutines:
                self._await_readiness(bucket)
                coroutines[bucket] = self._start(bucket)
            elif bucket not in pending:
                continue  # fewer stages than planned, as in a group of one
            self._resume(bucket, stage, coroutines[bucket], pending)
        # Whatever is still in flight, and rounds beyond the planned stages, end in bucket order on every rank.
        for bucket, coroutine in coroutines.items():
            while bucket in pending:
                self._resume(bucket, "finish", coroutine, pending)

    def _await_readiness(self, bucket: str) -> None:
        self._ready[bucket].wait()
        if self._cancelled:
            raise CancelledStepError(f"the step ended before {self._where(bucket, 'start')} was ready")
        if bucket in self._events:
            self._events[bucket].wait(torch.cuda.current_stream(self._device))

    def _resume(
        self,
        bucket: str,
        stage: str,
        coroutine: Coroutine[Any, Any, Any],
        pending: dict[str, tuple[Pending[Any], str, float]],
    ) -> None:
        value = None
        current = stage
        try:
            if bucket in pending:
                operation, current, issued_s = pending.pop(bucket)
                value = operation.wait(self._timeout_s)
                self._record(f"{bucket}:{current}", "link", issued_s, operation.sent_bytes)
                current = stage
            resumed_s = time.perf_counter()
            try:
                operation = coroutine.send(value)
            except StopIteration as done:
                self.results[bucket] = done.value
                self._record(f"{bucket}:finish", "kernel", resumed_s)
                return
            self._record(f"{bucket}:{stage}", "kernel", resumed_s)
            pending[bucket] = (operation, stage, time.perf_counter())
        except GroupError as error:
            raise GroupError(f"{self._where(bucket, current)}: {error}") from None
        except Exception as error:
            error.add_note(f"while synchronising {self._where(bucket, current)}")
            raise

    def _record(self, name: str, stream: str, start_s: float, nbytes: float = 0.0) -> None:
        now_s = time.perf_counter()
        self.tasks.append(Task(name, stream, start_s - self.began_s, now_s - self.began_s, nbytes))


class IssueThread:
    """A daemon thread that runs jobs one after the other: the only one that touches its group."""

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._device = device
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job; a job keeps its own errors for whoever waits for it.

        Raises:
            RuntimeError: after `stop`: nobody would run it.
        """
        if self._stopped:
            raise RuntimeError(f"the thread {self._thread.name!r} was stopped")
        self._jobs.put(job)

    def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the thread, waits, and returns its result or raises its error."""
        box: list[T] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def job() -> None:
            try:
                box.append(function())
            except BaseException as error:  # raised again below, on the caller's thread
                errors.append(error)
            finally:
                done.set()

        self.submit(job)
        done.wait()
        if errors:
            raise errors[0]
        return box[0]

    def stop(self, patience_s: float = 5.0) -> None:
        """Ends the thread after the queued jobs; a job that hangs is left behind as a daemon."""
        self._stopped = True
        self._jobs.put(None)
        if self._thread is not threading.current_thread():  # garbage may be collected on any thread
            self._thread.join(patience_s)

    def _loop(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            job()
