"""Streams and events of a device, which fix the order in which it runs what host threads submit.

A host thread submits an operation to the *current stream* of the device and goes on before it has run. Operations on
one stream run in order. Those on two streams run in any order, unless one stream waits for an event that was recorded
on the other. Each `Engine` has a communication stream, beside the streams on which the user's code runs. On the CPU an
operation has run when its call returns: there are no streams, and nothing to wait for.

Memory of a tensor goes back to the stream on which it was allocated, whichever stream read it last. So a tensor that
crosses streams lives until the streams have waited for each other: `keep` holds it, `release` lets it go.

This is the only module that calls the device modules of torch (`torch.accelerator`, `torch.Stream`, `torch.Event`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

StreamName = Literal["communication", "offload"]
COMMUNICATION: Literal["communication"] = "communication"
OFFLOAD: Literal["offload"] = "offload"


class Event(Protocol):
    """An event as CUDA's: a point of a stream, reached when the device has run all that was submitted before."""

    def wait(self) -> None:
        """Makes this thread's current stream wait for the event; the host goes on at once."""


class HostCopy(Protocol):
    """A copy of a small tensor from an accelerator to the host, under way while the host goes on."""

    @property
    def has_arrived(self) -> bool:
        """Whether the copy is complete, so that `tolist` returns at once."""

    def tolist(self) -> list[Any]:
        """Returns the tensor's values as numbers; waits for the copy, but not for what was submitted behind it."""


class Moment(Protocol):
    """A time that a device notes when it has run all that a stream was given before, as by a timing event of CUDA."""

    @property
    def has_passed(self) -> bool:
        """Whether the device has reached this moment, so that `since` returns at once."""

    def since(self, earlier: Any) -> float:
        """Returns the seconds from an `earlier` moment of the same device to this one; waits until both have passed."""


class Streams(ABC):
    """The streams of one device that an engine uses: its own ones, and those current on the user's threads.

    The engine's own are called "communication" and "offload".
    """

    @abstractmethod
    def on(self, name: StreamName) -> AbstractContextManager[object]:
        """Returns a context manager that makes the engine's stream `name` this thread's current stream."""

    @abstractmethod
    def record(self) -> Event:
        """Records an event on this thread's current stream, and returns it."""

    @abstractmethod
    def moment(self) -> Moment:
        """Returns the moment when the device has run what this thread's current stream was given, to measure time."""

    def work_moment(self) -> Moment:
        """Returns a moment by which to time computations: `moment()`, but on the CPU in this thread's CPU time."""
        return self.moment()

    @abstractmethod
    def to_host(self, tensor: Tensor) -> HostCopy:
        """Begins to copy a 1-D tensor to the host, on this thread's current stream, and returns the copy under way."""

    @abstractmethod
    def share(self, tensor: Tensor) -> None:
        """Lets a tensor of any shape, of another stream's memory, be used on this thread's current stream.

        When the tensor is gone, its memory is used anew behind what the current stream was given by then.
        """

    @abstractmethod
    def keep(self, *objects: object) -> None:
        """Keeps objects and their tensors alive until `release`, as another stream than their own still uses them."""

    @abstractmethod
    def release(self) -> None:
        """Drops the objects that `keep` holds, whose memory may then be used again.

        The streams must have waited for each other since, or will before they go on.
        """


class NoStreams(Streams):
    """The streams of the CPU, which has none: an operation has run when its call returns, so nothing needs to wait."""

    def on(self, name: StreamName) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return _NOW

    def moment(self) -> Moment:
        return HostMoment(time.perf_counter())

    def work_moment(self) -> Moment:
        return HostMoment(time.thread_time())

    def to_host(self, tensor: Tensor) -> HostCopy:
        return _Here(tensor)

    def share(self, tensor: Tensor) -> None:
        pass

    def keep(self, *objects: object) -> None:
        pass

    def release(self) -> None:
        pass


class AcceleratorStreams(Streams):
    """The streams of an accelerator that an engine uses; its own have a higher priority than those of the user."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[StreamName, torch.Stream] = {}
        self._making = threading.Lock()
        self._kept: list[object] = []

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        # Not `with stream`: that keeps the stream before it on the object, which several threads use.
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream(name))
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def _stream(self, name: StreamName) -> torch.Stream:
        with self._making:
            if name not in self._streams:
                self._streams[name] = torch.Stream(self._device, priority=-1)
            return self._streams[name]

    def record(self) -> Event:
        return _AcceleratorEvent(self._recorded(), self._device)

    def moment(self) -> Moment:
        return _AcceleratorMoment(self._recorded(enable_timing=True))

    def _recorded(self, *, enable_timing: bool = False) -> torch.Event:
        event = torch.Event(self._device, enable_timing=enable_timing)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def to_host(self, tensor: Tensor) -> HostCopy:
        arriving = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        arriving.copy_(tensor, non_blocking=True)
        return _Arriving(arriving, self._recorded())

    def share(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.accelerator.current_stream(self._device))

    def keep(self, *objects: object) -> None:
        self._kept += objects

    def release(self) -> None:
        self._kept = []


class _Now:
    """An event that has passed when it is recorded, as all events have on the CPU."""

    def wait(self) -> None:
        pass


_NOW = _Now()


class _AcceleratorEvent:
    """An event of torch together with the device on whose current stream it waits."""

    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        self._event.wait(torch.accelerator.current_stream(self._device))


class HostMoment(float):
    """A time in seconds by a clock of the host: on the CPU an operation has run when its call returns."""

    has_passed = True

    def since(self, earlier: HostMoment) -> float:
        return self - earlier


class _AcceleratorMoment:
    """An event of torch, whose time the device notes when it gets there."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    @property
    def has_passed(self) -> bool:
        return self._event.query()

    def since(self, earlier: _AcceleratorMoment) -> float:
        for each in (earlier, self):
            each._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


class _Here:
    """A copy of a tensor of the CPU: its values, as they are now."""

    has_arrived = True

    def __init__(self, tensor: Tensor) -> None:
        self._values: list[Any] = tensor.tolist()

    def tolist(self) -> list[Any]:
        return self._values


class _Arriving:
    """A copy in pinned memory, with the event behind which it is complete."""

    def __init__(self, tensor: Tensor, event: torch.Event) -> None:
        self._tensor, self._event = tensor, event

    @property
    def has_arrived(self) -> bool:
        return self._event.query()

    def tolist(self) -> list[Any]:
        self._event.synchronize()
        values: list[Any] = self._tensor.tolist()
        return values


def streams_of(device: torch.device) -> Streams:
    """Returns new streams of a device for an engine: `NoStreams` for the CPU, `AcceleratorStreams` for all others."""
    return NoStreams() if device.type == "cpu" else AcceleratorStreams(device)


def settle(device: torch.device) -> None:
    """Blocks until this thread's current stream has run what it was given; for tensors made once and cached.

    Any stream may read such tensors from then on, without an event.
    """
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def require(holds: Tensor, expected: str, got: Callable[[], object]) -> None:
    """Checks a condition on tensors' values, without waiting for an accelerator.

    Args:
        holds: the condition, one bool of shape ().
        expected: the condition in words, for the error.
        got: returns what was found instead; called on the CPU only.

    Raises:
        ValueError: on the CPU. An accelerator stops with an assertion that has the words, and a later call raises.
    """
    if holds.device.type != "cpu":
        torch._assert_async(holds, expected)
    elif not bool(holds):
        raise ValueError(f"{expected}, got {got()}")


def is_capturing(device: torch.device) -> bool:
    """Whether this thread's current stream records a CUDA graph, instead of running what is submitted."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def use_device(device: torch.device) -> None:
    """Makes the device this thread's current one, as `torch.cuda.set_device` does; does nothing for the CPU."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
