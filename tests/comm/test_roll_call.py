"""`RollCall`: how long this process stood still, and that ranks that stood still with it are not taken for lost."""

from __future__ import annotations

import time

import pytest

from gradsync.comm import roll_call
from gradsync.comm.roll_call import CALL_S, LOOK_S, RollCall

ANSWER = b"{}".hex()


def test_the_longest_stand_of_late_counts_if_the_others_cannot_have_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    call, state = RollCall.__new__(RollCall), roll_call._State()
    call._state = state

    def late_by(seconds: float) -> None:
        monkeypatch.setattr(state.ended, "wait", lambda _: now.__setitem__(0, now[0] + seconds))
        state.wait()

    late_by(0.5)
    assert call.stood_still_s(10.0) == 0.0
    late_by(20.0)
    late_by(2.5)  # still slow after it resumed
    assert call.stood_still_s(10.0) == 20.0
    assert call.stood_still_s(40.0) == 0.0, "the others wait for longer"
    late_by(0.5)
    now[0] += 25.0
    assert call.stood_still_s(10.0) == 0.0, "long ago"


class StoreOf:
    """Stands for the connection to a store in which rank 0's answer stands from `answers_s` on by the `clock`."""

    def __init__(self, clock: list[float], answers_s: float) -> None:
        self.clock, self.answers_s = clock, answers_s

    def ask(self, question: object, *, urgent: bool) -> bool:
        return urgent

    def read(self, key: str) -> str:
        return f"1:{ANSWER} " + (f"0:{ANSWER} " if self.clock[0] >= self.answers_s else "")


@pytest.mark.parametrize(
    ("stands_still_s", "late_s", "answered"),
    [(0.0, CALL_S - LOOK_S, {0, 1}), (30.0, LOOK_S, {0, 1}), (0.0, 60.0, {1}), (30.0, 60.0, {1})],
)
def test_time_in_which_the_whole_machine_stands_still_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, stands_still_s: float, late_s: float, answered: set[int]
) -> None:
    """A machine may be suspended for seconds, the caller with it: the others answer once they go on again."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds + (stands_still_s if clock[0] == 0.0 else 0.0)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    call = RollCall.__new__(RollCall)
    call._state, call._name, call.silent = roll_call._State(), "name", frozenset()
    call._store = StoreOf(clock, stands_still_s + late_s)  # type: ignore[assignment]
    assert call.answers([0, 1]).keys() == answered
    assert call.silent == {0, 1} - answered
    assert clock[0] <= stands_still_s + CALL_S + LOOK_S, "and a lost rank is not waited for any longer"
