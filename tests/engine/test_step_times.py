"""Times of steps are read when the device has ended them; a device that hangs keeps nobody."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.comm import LocalGroup, Span
from gradsync.devices.streams import HostMoment
from gradsync.engine.bucket_run import BucketRuns
from gradsync.engine.engine import Engine
from gradsync.engine.step_times import MOST_UNREAD, Step, TimedSteps
from gradsync.planner import default_plan


class Later:
    """A moment to which the device gets when a test says so."""

    def __init__(self, at_s: float) -> None:
        self.at_s, self.has_passed, self.asked = at_s, False, False

    def since(self, earlier: Any) -> float:
        self.asked = True
        return self.at_s - float(earlier)


def step(began_s: float) -> Step:
    ends = [Later(began_s + seconds) for seconds in (1.0, 2.0, 3.0)]
    spans = [Span("0", "push", "link", HostMoment(began_s + 0.5), ends[1], 8.0)]
    return Step(HostMoment(began_s), ends[0], ends[2], {"0": HostMoment(began_s + 0.5)}, spans)


def test_a_step_is_read_when_the_device_has_ended_it() -> None:
    times, first, second = TimedSteps(), step(0.0), step(10.0)
    times.step_ended(first, BucketRuns())
    assert not times.timeline and not first.ended.asked  # type: ignore[attr-defined]
    first.ended.has_passed = True  # type: ignore[misc]
    times.step_ended(second, BucketRuns())
    assert not times.timeline, "nobody has asked"
    times.read_ended()
    assert [(task.name, task.start_s, task.end_s) for task in times.timeline] == [
        ("backward", 0.0, 1.0),
        ("0:push", 0.5, 2.0),
        ("wait", 1.0, 3.0),
    ]
    assert times.ready_s == {"0": 0.5} and not second.ended.asked  # type: ignore[attr-defined]
    times.read()
    assert second.ended.asked  # type: ignore[attr-defined]


def test_steps_that_nobody_asks_for_do_not_pile_up() -> None:
    times = TimedSteps()
    steps = [step(10.0 * number) for number in range(MOST_UNREAD)]
    for each in steps:
        each.ended.has_passed = True  # type: ignore[misc]
        assert not times.timeline
        times.step_ended(each, BucketRuns())
    assert all(each.ended.asked for each in steps)  # type: ignore[attr-defined]
    assert len(times.timeline) == 3


def test_a_closed_engine_tells_the_times_of_the_steps_that_the_device_had_ended() -> None:
    engine = Engine({"w": torch.nn.Parameter(torch.ones(2))}, LocalGroup.world(1)[0], default_plan, timeout_s=5.0)
    ended = step(0.0)
    ended.ended.has_passed = True  # type: ignore[misc]
    engine.running_plan.times.step_ended(ended, BucketRuns())
    engine.close()
    assert ended.ended.asked  # type: ignore[attr-defined]


def test_an_engine_closes_without_waiting_for_a_device_that_hangs() -> None:
    engine = Engine({"w": torch.nn.Parameter(torch.ones(2))}, LocalGroup.world(1)[0], default_plan, timeout_s=5.0)
    hanging = step(0.0)
    engine.running_plan.times.step_ended(hanging, BucketRuns())
    engine.close()
    assert not hanging.ended.asked  # type: ignore[attr-defined]
    assert engine.running_plan.statistics()[0].steps == 0
