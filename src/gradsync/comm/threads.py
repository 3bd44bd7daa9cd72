"""Threads of our own: two threads on one communicator would read each other's messages, so each has exactly one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class JobThread:
    """A daemon thread that runs jobs one after the other: the only one that touches its communicator."""

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
