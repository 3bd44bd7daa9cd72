"""Streams of an accelerator are torch's, which are faked here; the CPU has none."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from gradsync.devices.streams import (
    COMMUNICATION,
    OFFLOAD,
    AcceleratorStreams,
    NoStreams,
    is_capturing,
    settle,
    streams_of,
    use_device,
)

CARD = torch.device("cuda", 1)


class FakeStream:
    """A stream, and for each thread the one that is current."""

    here = threading.local()

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority, self.waited_for = device, priority, False

    def synchronize(self) -> None:
        self.waited_for = True


class FakeEvent:
    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        self.device, self.is_timed = device, enable_timing
        self.recorded: Any = None
        self.waits: list[Any] = []
        self.has_passed = False  # when somebody has waited for it

    def record(self, stream: FakeStream) -> None:
        self.recorded = stream

    def wait(self, stream: FakeStream) -> None:
        self.waits.append(stream)

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.has_passed = True

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.is_timed and later.is_timed and self.has_passed and later.has_passed
        return 250.0


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """Fakes the parts of torch that need a device, and returns the default stream of `CARD`."""
    stream = FakeStream(CARD)
    FakeStream.here = threading.local()
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch, "Event", FakeEvent)

    def current(device: torch.device) -> FakeStream:
        assert device == CARD
        return getattr(FakeStream.here, "stream", stream)

    monkeypatch.setattr(torch.accelerator, "current_stream", current)
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda each: setattr(FakeStream.here, "stream", each))
    return stream


def test_the_device_decides_and_not_the_build_of_torch(default: FakeStream) -> None:
    assert isinstance(streams_of(torch.device("cpu")), NoStreams)
    assert isinstance(streams_of(CARD), AcceleratorStreams)


def test_streams_of_a_name_are_one_and_ahead_of_the_user_s(default: FakeStream) -> None:
    ours = streams_of(CARD)
    found = []
    for name in (COMMUNICATION, OFFLOAD, COMMUNICATION):
        with ours.on(name):
            found.append(torch.accelerator.current_stream(CARD))
    assert found[0] is found[2] and len({*found, default}) == 3
    assert all(stream.priority < default.priority and stream.device == CARD for stream in found)
    assert torch.accelerator.current_stream(CARD) is default


def test_threads_that_are_on_one_stream_at_once_each_go_back_to_their_own(default: FakeStream) -> None:
    """torch keeps the stream before it on the object that a `with` statement enters, for whichever thread leaves it."""
    ours, theirs = streams_of(CARD), FakeStream(CARD)
    entered, left = threading.Event(), threading.Event()
    found: list[Any] = []

    def work() -> None:
        torch.accelerator.set_stream(theirs)
        with ours.on(COMMUNICATION):
            entered.set()
            left.wait(10)
        found.append(torch.accelerator.current_stream(CARD))

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(10)
    with pytest.raises(RuntimeError, match="inside"), ours.on(COMMUNICATION):
        raise RuntimeError("inside")
    found.append(torch.accelerator.current_stream(CARD))
    left.set()
    thread.join()
    assert found == [default, theirs]


def test_events_are_between_the_streams_that_are_current(default: FakeStream) -> None:
    ours = streams_of(CARD)
    event: Any = ours.record()
    with ours.on(COMMUNICATION):
        event.wait()
        inside: Any = torch.accelerator.current_stream(CARD)
    assert event._event.recorded is default and event._event.waits == [inside]


def test_moments_are_noted_by_the_device_and_waited_for_where_times_are_asked_for(default: FakeStream) -> None:
    ours = streams_of(CARD)
    first: Any = ours.moment()
    with ours.on(COMMUNICATION):
        second: Any = ours.work_moment()
        assert second._event.recorded is torch.accelerator.current_stream(CARD)
    assert first._event.recorded is default and not second.has_passed
    assert second.since(first) == 0.25
    assert first.has_passed and second.has_passed


def test_moments_of_the_cpu_are_the_host_s_clock_or_the_thread_s() -> None:
    ours = streams_of(torch.device("cpu"))
    slept, worked = ours.moment(), ours.work_moment()
    time.sleep(0.02)
    assert slept.has_passed and ours.moment().since(slept) >= 0.02
    assert 0 <= ours.work_moment().since(worked) < 0.02


def test_a_copy_to_the_host_is_waited_for_where_its_values_are_asked_for(
    default: FakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    copies = [each.to_host(torch.tensor([2.0, 0.5])) for each in (streams_of(CARD), streams_of(torch.device("cpu")))]
    assert [copy.has_arrived for copy in copies] == [False, True]
    assert [copy.tolist() for copy in copies] == [[2.0, 0.5]] * 2
    assert copies[0].has_arrived


def test_what_is_kept_lives_until_it_is_released(default: FakeStream) -> None:
    for streams, lives in ((streams_of(CARD), True), (streams_of(torch.device("cpu")), False)):
        gone = Kept.weakly(streams)
        assert (gone() is not None) == lives
        streams.release()
        assert gone() is None


def test_memory_of_another_stream_is_known_to_the_current_one(default: FakeStream) -> None:
    ours, tensor = streams_of(CARD), Mock()
    ours.share(tensor)
    with ours.on(COMMUNICATION):
        ours.share(tensor)
        current = torch.accelerator.current_stream(CARD)
    assert tensor.record_stream.call_args_list == [call(default), call(current)] and current is not default
    streams_of(torch.device("cpu")).share(tensor)
    assert tensor.record_stream.call_count == 2


class Kept:
    @classmethod
    def weakly(cls, streams: Any) -> Any:
        made = cls()
        streams.keep(1, made)
        return weakref.ref(made)


def test_what_is_cached_is_waited_for_once(default: FakeStream) -> None:
    settle(torch.device("cpu"))
    settle(CARD)
    assert default.waited_for


def test_a_thread_uses_the_device_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    use_device(torch.device("cpu"))
    use_device(CARD)
    assert used == [CARD]


@pytest.mark.parametrize("captures", [False, True])
def test_only_cuda_captures_graphs(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert is_capturing(CARD) == captures
    assert not is_capturing(torch.device("cpu"))
