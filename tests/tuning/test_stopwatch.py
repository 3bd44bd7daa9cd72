"""The parts of a step add up to its time, whatever happens in it."""

from __future__ import annotations

import pytest

from gradsync.devices.streams import HostMoment
from gradsync.tuning.stopwatch import StepTimes, Stopwatch

At = HostMoment


def total_s(step: StepTimes) -> float:
    return step.forward_s + step.backward_s + step.exchange_s + step.optimizer_s + step.other_s


def test_a_step_is_told_part_by_part() -> None:
    watch = Stopwatch()
    watch.resume(At(100.0))
    watch.backward_returned(At(100.5))  # of the step before
    watch.optimizer_began(At(101.0))
    watch.optimizer_ended(At(103.0))
    watch.forward_began(At(104.0))
    watch.forward_began(At(105.0))  # a second forward for one backward
    watch.backward_began(At(108.0))
    watch.began(At(109.0))
    watch.ready("b", At(109.0))
    watch.ready("a", At(111.0))
    watch.backward_ended(At(112.0))
    step = watch.step_ended(At(115.0)).times()
    parts = (step.forward_s, step.backward_s, step.exchange_s, step.optimizer_s, step.other_s)
    assert parts == (4.0, 4.0, 3.0, 2.0, 2.0)
    assert step.ready_s == {"b": 1.0, "a": 3.0}
    assert (step.began_s, step.ended_s) == (8.0, 12.0)
    watch.resume(At(120.0))  # what lies between is of no step
    watch.backward_began(At(121.0))
    watch.began(At(122.0))
    watch.backward_ended(At(123.0))
    assert total_s(watch.step_ended(At(124.0)).times()) == 4.0


def test_where_no_forward_is_seen_it_begins_behind_the_optimizer() -> None:
    watch = Stopwatch()
    watch.resume(At(0.0))
    watch.optimizer_began(At(1.0))
    watch.optimizer_began(At(1.5))  # of a wrapper
    watch.optimizer_ended(At(2.5))
    watch.optimizer_ended(At(3.0))
    watch.backward_began(At(5.0))
    watch.backward_ended(At(6.0))
    step = watch.step_ended(At(7.0)).times()
    assert (step.optimizer_s, step.forward_s, total_s(step)) == (2.0, 2.0, 7.0)


def test_backwards_without_an_exchange_are_other_time() -> None:
    watch = Stopwatch()
    watch.resume(At(0.0))
    watch.forward_began(At(1.0))
    watch.backward_began(At(2.0))
    watch.backward_returned(At(4.0))
    watch.forward_began(At(5.0))
    watch.backward_began(At(7.0))
    watch.backward_ended(At(8.0))
    step = watch.step_ended(At(8.0)).times()
    assert (step.forward_s, step.backward_s, step.other_s) == (2.0, 1.0, 5.0)
    assert total_s(step) == 8.0


@pytest.mark.parametrize("seen", [True, False])
def test_a_backward_that_was_not_seen_begins_with_its_first_gradient(seen: bool) -> None:
    watch = Stopwatch()
    watch.resume(At(0.0))
    watch.forward_began(At(1.0))
    if seen:
        watch.backward_began(At(2.0))
    watch.began(At(3.0))
    watch.ready("a", At(3.0))
    watch.backward_ended(At(4.0))
    step = watch.step_ended(At(5.0)).times()
    assert (step.backward_s, step.forward_s) == ((2.0, 1.0) if seen else (1.0, 2.0))
    assert total_s(step) == 5.0
