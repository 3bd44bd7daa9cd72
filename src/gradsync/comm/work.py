"""`Work`: a computation that a scheme awaits like a collective, so that the engine can choose its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from ..devices.streams import Event, NoStreams, Streams
from .errors import GroupError
from .group import Pending

T = TypeVar("T")


class WorkGivenUpError(RuntimeError):
    """An error of threads that wait for `Work` whose training step was cancelled before the work had begun."""


class Work(Pending[T]):
    """A local computation that a scheme's coroutine awaits like a collective; it runs once, on one thread.

    `device` names the thread meant for it: `COMPUTE` (the thread of backward) or `OFFLOAD`. A thread that waits for the
    result does the work itself, unless `submit_to` gave it to another thread. Errors of the computation are raised to
    the waiting thread. `touched` returns the objects with tensors that the work reads, or leaves to be read, as they
    are when it is called: on an accelerator they are kept, because the work runs on another stream than what is before
    and behind it.
    """

    def __init__(
        self, function: Callable[[], T], device: str, name: str, touched: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(self._result_of)
        self.device = device
        self.name = name
        self._function: Callable[[], T] | None = function
        self._touched = touched
        self._handed = False
        self._streams: Streams = NoStreams()
        self.began = self.finished = self._streams.moment()  # of the work, once it has ended
        self._inputs: Event = self._streams.record()
        self._done = self._inputs
        self._begun = threading.Lock()  # taken for good by the thread that does the work
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether the work is done, has failed, or was given up."""
        return self._ended.is_set()

    def follow(self, streams: Streams) -> None:
        """Makes the work run after all that this thread's current stream was given so far, which makes its inputs."""
        self._streams, self._inputs = streams, streams.record()

    def submit_to(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Hands the work to another thread by `submit(self.run)`; a thread that waits then no longer runs it itself."""
        self._handed = True
        submit(self.run)

    def run(self) -> None:
        """Runs the computation on this thread, unless a thread has begun it already."""
        if not self._begun.acquire(blocking=False):
            return
        function, self._function = self._function, None
        assert function is not None
        try:
            with torch.no_grad():
                self._streams.keep(self._touched())
                self._inputs.wait()
                self.began = self._streams.moment()
                self._result = function()
                self.finished = self._streams.moment()
                self._done = self._streams.record()
                self._streams.keep(self._touched(), self._result)
        except BaseException as error:  # raised where the work is waited for
            self._error = error
        del function  # frees its tensors now, not when the step is forgotten
        self._ended.set()

    def give_up(self) -> None:
        """Cancels the work unless a thread has begun it; a thread that waits for it then gets `WorkGivenUpError`."""
        if self._begun.acquire(blocking=False):
            self._function = None
            self._error = WorkGivenUpError(f"{self.name} was given up with its step")
            self._ended.set()

    def _result_of(self, timeout_s: float) -> T:
        if not self._handed:
            self.run()
        if not self._ended.wait(timeout_s):
            raise GroupError(f"{self.name} did not end on this rank within {timeout_s:.0f} s")
        if self._error is not None:
            raise self._error
        self._done.wait()
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # T may be None itself
