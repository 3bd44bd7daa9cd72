"""`Work`: what a scheme has to compute, awaited like an operation, so that whoever issues decides who does it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from .group import GroupError, Pending

T = TypeVar("T")


class WorkGivenUpError(RuntimeError):
    """The step was given up before anybody had begun the work."""


class Work(Pending[T]):
    """Work of this rank alone, for a device by its name. It is done once, by whoever is first to `run` it.

    Who waits for it does it on the spot, unless it was handed to another thread. What it raises is raised there.
    """

    def __init__(self, function: Callable[[], T], device: str, name: str) -> None:
        super().__init__(self._result_of)
        self.device = device
        self.name = name
        self.start_s = self.end_s = 0.0  # by `time.perf_counter`, once it has ended
        self._function: Callable[[], T] | None = function
        self._handed = False
        self._inputs: torch.cuda.Event | None = None
        self._begun = threading.Lock()  # taken for good by whoever does it
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def follow_this_stream(self) -> None:
        """What it needs is being made on this thread's CUDA stream, and who waits for it may be on any."""
        self._inputs = torch.cuda.Event()
        self._inputs.record()

    def hand_to(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Leaves it to the thread that `submit` gives jobs to."""
        self._handed = True
        submit(self.run)

    def run(self) -> None:
        """Does it on this thread, unless somebody has begun."""
        if not self._begun.acquire(blocking=False):
            return
        self.start_s = time.perf_counter()
        function, self._function = self._function, None
        assert function is not None
        try:
            with torch.no_grad():
                if self._inputs is not None:
                    self._inputs.wait(torch.cuda.current_stream())
                self._result = function()
                if self._inputs is not None:
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self.end_s = time.perf_counter()
        del function  # what it holds goes now, not when the step is forgotten
        self._ended.set()

    def give_up(self) -> None:
        """It is not begun any more; who waits for it is told."""
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
        result, self._result = self._result, None
        return result  # type: ignore[return-value]  # T may be None itself
