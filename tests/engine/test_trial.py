"""Candidates of a trial take turns, their first steps do not count, and only a clear winner replaces the first one."""

from __future__ import annotations

import pytest

from gradsync.devices.streams import HostMoment
from gradsync.engine.trial import CLOSE, FAR, MOST_OF_FIRST, RUN_OFF_ROUNDS, TURN_STEPS, Trial, slowest


def run(trial: Trial[int], step_s: list[float], *, first_s: float = 100.0) -> list[int]:
    """Runs a stage of the trial with these step times, the first of each turn longer; returns each step's candidate."""
    now_s, ran = 0.0, []
    while not trial.waits:
        first = not ran or len(ran) % TURN_STEPS == 0
        ran.append(trial.current)
        now_s += first_s if first else step_s[trial.current]
        trial.step_ended(HostMoment(now_s))
    return ran


def turns(trial: Trial[int], *step_s: list[float]) -> list[list[int]]:
    """Runs the stages of a trial, one for each list of step times; returns the candidate of each turn, by stage."""
    found = []
    for times_s in step_s:
        ran = run(trial, times_s)
        found.append(ran[::TURN_STEPS])
        assert len(ran) == TURN_STEPS * len(found[-1])
        goes_on = trial.go_on(times_s)
        assert goes_on != trial.waits
    return found


def test_candidates_run_there_and_back() -> None:
    assert turns(Trial([0, 1, 2]), [1.0, 1.2, 1.2], [1.0, 1.2, 1.2]) == [[0, 1, 2], [2, 1, 0]]


def test_those_far_behind_take_no_second_turn() -> None:
    trial = Trial([0, 1, 2, 3])
    times_s = [1.2, FAR + 0.01, 1.0, FAR - 0.01]
    assert turns(trial, times_s, times_s) == [[0, 1, 2, 3], [3, 2, 0]]
    assert trial.waits and trial.fastest(times_s) == 2


def test_the_best_guess_is_known_to_win_after_one_turn() -> None:
    trial = Trial([0, 1, 2])
    times_s = [1.0, FAR + 0.01, 2.0]
    assert turns(trial, times_s) == [[0, 1, 2]]
    assert trial.waits and trial.fastest(times_s) == 0


def test_the_best_guess_takes_a_second_turn_whatever_its_first_met() -> None:
    trial = Trial([0, 1, 2])
    assert turns(trial, [9.0, 1.0, 2.0], [1.0, 1.2, 2.0]) == [[0, 1, 2], [1, 0]]
    assert trial.fastest([1.0, 1.2, 2.0]) == 0


def test_times_of_nothing_end_too() -> None:
    trial = Trial([0, 1])
    zeros = [0.0, 0.0]
    assert turns(trial, zeros, zeros, zeros) == [[0, 1], [1, 0], [0, 1, 1, 0, 0, 1, 1, 0]]
    assert trial.waits and not trial.go_on(zeros)


def test_a_candidate_that_was_dropped_is_not_kept_though_the_others_got_slower() -> None:
    trial = Trial([0, 1, 2])
    first, second = [1.0, 1.5, 1.2], [2.0, 1.5, 2.4]
    turns(trial, first, second)
    assert trial.fastest(second) == 0


def test_a_turn_that_was_interrupted_begins_anew() -> None:
    trial = Trial([0, 1])
    for now_s in (0.0, 1.0, 2.0):
        assert not trial.step_ended(HostMoment(now_s))
    trial.interrupt()  # other steps lie between
    ends = [trial.step_ended(HostMoment(1000.0 + now_s)) for now_s in range(TURN_STEPS)]
    assert ends == [False] * (TURN_STEPS - 1) + [True]
    assert trial.current == 1 and trial._times_s[0] == [1.0] * (TURN_STEPS - 1)


def test_the_first_step_of_a_turn_is_not_counted() -> None:
    trial = Trial([0, 1, 2])
    run(trial, [3.0, 1.0, 2.0], first_s=1000.0)
    assert trial.medians_s == [3.0, 1.0, 2.0]


def test_one_long_pause_of_the_training_loop_changes_nothing() -> None:
    trial = Trial([0, 1])
    now_s = 0.0
    for step in range(2 * TURN_STEPS):
        now_s += 1000.0 if step == TURN_STEPS + 2 else 1.0
        trial.step_ended(HostMoment(now_s))
    assert trial.medians_s == [1.0, 1.0]


@pytest.mark.parametrize(
    ("times_s", "two"),
    [
        ([1.0, 1.05, 0.97], [0, 2]),
        ([1.3, 1.0, 1.0 + 0.9 * (CLOSE - 1)], [1, 2]),
        ([1.3, 1.0, 1.0 + 1.1 * (CLOSE - 1)], []),
    ],
)
def test_the_best_two_run_off_once_if_they_are_close(times_s: list[float], two: list[int]) -> None:
    trial = Trial([0, 1, 2])
    turns(trial, times_s, times_s)
    assert trial.waits != bool(two)
    after = [3.0, 3.0, 3.0]
    ran = run(trial, after)
    assert ran[::TURN_STEPS] == [*two, *two[::-1]] * (RUN_OFF_ROUNDS // 2)
    assert two == [] or not trial.go_on(after)
    assert [len(times) for times in trial._times_s] == [
        (2 + RUN_OFF_ROUNDS * (number in two)) * (TURN_STEPS - 1) for number in range(3)
    ]


def test_a_candidate_is_as_slow_as_on_its_slowest_rank() -> None:
    assert slowest([[1.0, 0.5, 0.8], [1.0, 1.5, 0.8]]) == [1.0, 1.5, 0.8]


@pytest.mark.parametrize(
    ("times_s", "kept"), [([1.0, 0.5, 0.6], 1), ([1.0, MOST_OF_FIRST + 0.005, 1.0], 0), ([1.0, 1.5, 0.8], 2)]
)
def test_the_fastest_is_kept_if_clearly_faster_than_the_first(times_s: list[float], kept: int) -> None:
    assert Trial([0, 1, 2]).fastest(times_s) == kept


@pytest.mark.parametrize(
    ("times_s", "after", "kept"),
    [
        ([1.04, 1.00, 1.02], [1.04, 1.06, 1.08], 1),  # the first had lost before the machine got slower
        ([1.00, 1.02, 1.03], [1.06, 1.08, 1.03], 0),  # so had the last one
        ([1.00, 1.02, 1.03], [1.06, 1.04, 1.03], 1),
    ],
)
def test_after_a_run_off_one_of_the_two_is_kept(times_s: list[float], after: list[float], kept: int) -> None:
    trial = Trial([0, 1, 2])
    turns(trial, times_s, times_s, after)
    assert trial.fastest(after) == kept
