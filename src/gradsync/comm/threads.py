"""Threads of gradsync, which run jobs in the order in which they were given."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

import torch

_running: weakref.WeakSet[JobThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stops all job threads at exit: one that is inside of C++ code when the interpreter ends would abort the process.

    A message that hangs fails once the rank at its other end has exited, so each thread gets some seconds to end.
    """
    for thread in list(_running):
        thread.stop(patience_s=2.0)


class JobThread:
    """A daemon thread that runs jobs one after the other.

    Args:
        name: of the thread.
        device: the CUDA device of its jobs, if they have one.
        torch_threads: the number of threads for one operation of torch in its jobs; None: torch's setting.
    """

    def __init__(self, name: str, device: torch.device | None = None, *, torch_threads: int | None = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.device = device
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        _running.add(self)
        if torch_threads is not None:
            self._set_torch_threads(torch_threads)

    def submit(self, job: Callable[[], None]) -> None:
        """Queues a job; a job keeps its own errors for the thread that waits for it.

        Raises:
            RuntimeError: after `stop`, as nobody would run the job.
        """
        if self._stopped:
            raise RuntimeError(f"the thread {self._thread.name!r} was stopped")
        self._jobs.put(job)

    def stop(self, patience_s: float = 5.0) -> None:
        """Ends the thread after the queued jobs; a job that hangs is left behind as a daemon, until exit."""
        self._stopped = True
        self._jobs.put(None)
        if self._thread is not threading.current_thread():  # garbage may be collected on any thread
            self._thread.join(patience_s)
        if not self._thread.is_alive():
            _running.discard(self)

    def _set_torch_threads(self, number: int) -> None:
        """Sets torch's number of threads for this thread alone.

        torch applies the last setting to all threads to come, so the usual one is set back.
        """
        usual, done = torch.get_num_threads(), threading.Event()

        def set_there() -> None:
            torch.set_num_threads(number)
            done.set()

        self.submit(set_there)
        done.wait()
        torch.set_num_threads(usual)

    def _loop(self) -> None:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        while (job := self._jobs.get()) is not None:
            job()
            del job  # else the ended job would keep its tensors alive while the thread waits
