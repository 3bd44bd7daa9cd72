"""Drift is found when steps take clearly more or less time for long enough."""

from __future__ import annotations

import pytest

from gradsync.devices.streams import HostMoment
from gradsync.engine.drift import LOOK_STEPS, WINDOW_STEPS, Drift


def looks(drift: Drift, seconds: float, steps: int) -> list[bool]:
    """Returns the verdicts of all looks at `steps` steps of `seconds` each."""
    verdicts = []
    for _ in range(steps):
        if drift.step_ended(HostMoment(0.0), HostMoment(seconds)):
            verdicts.append(drift.judge(drift.median_s))
    return verdicts


def test_steps_as_usual_are_no_change() -> None:
    drift = Drift()
    assert looks(drift, 0.1, WINDOW_STEPS) == [False]
    assert looks(drift, 0.12, 3 * LOOK_STEPS) == [False] * 3
    assert not any(looks(drift, 0.09, 3 * LOOK_STEPS))


@pytest.mark.parametrize("seconds", [0.2, 0.05])
def test_longer_or_shorter_steps_are_a_change_at_the_second_look(seconds: float) -> None:
    drift = Drift()
    looks(drift, 0.1, WINDOW_STEPS)
    assert looks(drift, seconds, LOOK_STEPS) == [False]
    assert looks(drift, seconds, WINDOW_STEPS) == [True]


def test_what_passes_is_no_change() -> None:
    drift = Drift()
    looks(drift, 0.1, WINDOW_STEPS)
    assert looks(drift, 0.3, LOOK_STEPS) == [False]
    assert looks(drift, 0.1, WINDOW_STEPS) == [False]
    assert looks(drift, 0.3, LOOK_STEPS) == [False], "a look without a change lies between"


def test_a_single_slow_step_is_not_seen() -> None:
    drift = Drift()
    looks(drift, 0.1, WINDOW_STEPS)
    looks(drift, 0.1, LOOK_STEPS - 1)
    assert drift.step_ended(HostMoment(0.0), HostMoment(50.0)) and not drift.judge(drift.median_s)
    assert drift.median_s == 0.1


def test_what_a_checkpoint_says_is_usual_is_compared_with_from_the_first_look_on() -> None:
    first = Drift()
    looks(first, 0.1, WINDOW_STEPS)
    assert not any(looks(Drift(first.usual_s), 0.1, 2 * LOOK_STEPS))
    assert looks(Drift(first.usual_s), 0.2, 2 * WINDOW_STEPS) == [False, True]
