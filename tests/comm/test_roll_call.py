"""`RollCall`: how long this process stood still, and that ranks that stood still with it are not taken for lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from gradsync.comm import roll_call
from gradsync.comm.roll_call import CALL_S, LOOK_S, RollCall
from gradsync.comm.store import ANSWER_S

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
    """Stands for the connection to a store in which rank 0's answer stands from `answers_s` on by the `clock`.

    It takes a call, and is silent from `silent_s` on: each question then waits for a second.
    """

    def __init__(self, clock: list[float], answers_s: float, silent_s: float = math.inf) -> None:
        self.clock, self.answers_s, self.silent_s = clock, answers_s, silent_s

    def ask(self, question: object, *, urgent: bool = False) -> bool | str | None:
        if self.clock[0] >= self.silent_s:
            self.clock[0] += ANSWER_S
            return None
        return urgent or f"1:{ANSWER} " + (f"0:{ANSWER} " if self.clock[0] >= self.answers_s else "")


def new_call(monkeypatch: pytest.MonkeyPatch, store: StoreOf, sleep: Callable[[float], None]) -> RollCall:
    monkeypatch.setattr(time, "monotonic", lambda: store.clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    call = RollCall.__new__(RollCall)
    call._state, call._name, call.silent = roll_call._State(), "name", frozenset()
    call._store = store  # type: ignore[assignment]
    return call


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

    call = new_call(monkeypatch, StoreOf(clock, stands_still_s + late_s), sleep)
    assert call.answers([0, 1]).keys() == answered
    assert call.silent == {0, 1} - answered
    assert clock[0] <= stands_still_s + CALL_S + LOOK_S, "and a lost rank is not waited for any longer"


@pytest.mark.parametrize(("silent_s", "lost"), [(0.0, None), (0.5, None), (1.5, {0})])
def test_no_rank_is_taken_for_lost_because_the_store_was_silent(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, lost: set[int] | None
) -> None:
    """The store asks for the name of each new client's address, and serves nobody until a name server answers."""
    clock = [0.0]
    call = new_call(
        monkeypatch, StoreOf(clock, 60.0, silent_s), lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    call.silent = frozenset({1})
    assert call.answers([0, 1]).keys() == (set() if lost is None else {1})
    assert call.silent == (lost or set())
