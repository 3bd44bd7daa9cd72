"""`RollCall`: how long this process stood still, by the clock of the thread that answers calls."""

from __future__ import annotations

import time

import pytest

from gradsync.comm import roll_call
from gradsync.comm.roll_call import RollCall


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
