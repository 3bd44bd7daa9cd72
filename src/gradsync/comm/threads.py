"""`JobThread`: a background thread that runs functions (jobs) in the order in which they are submitted.

`CallingThread` stands for it where no other thread may run them.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from ..devices.streams import use_device
from .forks import finalizer

EXIT_S = 2.0  # for which the end of the process waits for a thread that is inside of C++ code

_running: weakref.WeakSet[JobThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops all job threads at exit: one that runs C++ code when the interpreter ends would abort the process.

    A hanging send or receive fails once its peer has exited, so each thread gets two seconds to end.
    """
    for thread in list(_running):
        thread.stop(patience_s=2.0)


def ended_with(owner: object, thread: threading.Thread, *events: threading.Event) -> weakref.finalize[..., object]:
    """Returns a finalizer of `owner` that ends a thread: sets `events`, which the thread waits for, and joins it.

    It runs when `owner` is collected, or at exit: a daemon thread that is inside of C++ code when the interpreter ends
    would abort the process.
    """
    return finalizer(owner, _end, thread, events)


def _end(thread: threading.Thread, events: tuple[threading.Event, ...]) -> None:
    for event in events:
        event.set()
    if thread is not threading.current_thread():  # garbage may be collected on any thread
        thread.join(EXIT_S)


class CallingThread:
    """A substitute for `JobThread` that runs each job at once, on the thread that submits it."""

    def submit(self, job: Callable[[], None]) -> None:
        """Runs the job on this thread, before it returns; the job must catch its own exceptions."""
        job()

    def stop(self) -> None:
        """Does nothing: every job has run when `submit` returned, and there is no thread to end."""


class JobThread:
    """A daemon thread that runs jobs, which are functions without arguments, one after the other.

    Args:
        name: the thread's name.
        device: the thread's current device, where it is an accelerator; None: none is set.
        torch_threads: torch's intra-op threads for the jobs; None: torch's own setting.
        owner: the thread is stopped when this object is collected, even if its constructor was interrupted, as by
            Ctrl-C.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | None = None,
        *,
        torch_threads: int | None = None,
        owner: object | None = None,
    ) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.device = device
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        if owner is not None:
            finalizer(owner, self.stop).atexit = False
        _running.add(self)
        self._thread.start()
        if torch_threads is not None:
            self._set_torch_threads(torch_threads)

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job for the thread. The job must catch its own exceptions: one that escapes ends the thread.

        Raises:
            RuntimeError: after `stop`, as the job would never run.
        """
        if self._stopped:
            raise RuntimeError(f"the thread {self._thread.name!r} was stopped")
        self._jobs.put(job)

    def stop(self, patience_s: float = 5.0) -> None:
        """Stops the thread after its queued jobs; returns after `patience_s` even if one hangs and runs on."""
        self._stopped = True
        self._jobs.put(None)
        has_started = self._thread.ident is not None
        if has_started and self._thread is not threading.current_thread():  # garbage may be collected on any thread
            self._thread.join(patience_s)
        if not self._thread.is_alive():
            _running.discard(self)

    def _set_torch_threads(self, number: int) -> None:
        """Sets torch's number of intra-op threads for this thread alone.

        torch applies the last setting to all threads that start later, so the usual one is restored at once.
        """
        usual, done = torch.get_num_threads(), threading.Event()

        def set_there() -> None:
            torch.set_num_threads(number)
            done.set()

        self.submit(set_there)
        done.wait()
        torch.set_num_threads(usual)

    def _loop(self) -> None:
        if self.device is not None:
            use_device(self.device)
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else the ended job would keep its tensors alive while the thread waits
