"""Real faults in small jobs: they strike, are judged, and leave no process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gradsync_lab.cluster import Lab
from gradsync_lab.cluster.keeper import CLONE_NEWNET, CLONE_NEWUSER
from gradsync_lab.faults.cases import Fault, Frontend, Phase
from gradsync_lab.faults.judge import Ending, judge
from gradsync_lab.faults.run import NotPossibleError, run_case
from gradsync_lab.faults.strike import Striker
from lab.tests.cluster.conftest import allows
from lab.tests.faults.events import case

PATIENT_S = 20.0  # timeout of ranks where other tests have the cores


def ranks_left() -> list[str]:
    """Returns the processes below this one that are stopped, as a victim is that nobody killed."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        pid, state = text.split(" ", 1)[0], text.rpartition(") ")[2][0]
        if state == "T" and "forkserver" in (path.parent / "cmdline").read_text():
            found.append(pid)
    return found


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({"fault": Fault.KILL, "phase": Phase.BACKWARD}, Ending.CLEAR),
        ({"fault": Fault.EXCEPTION, "phase": Phase.BACKWARD, "frontend": Frontend.HOOK}, Ending.CLEAR),
        (
            {"fault": Fault.SLOW, "phase": Phase.FORWARD, "frontend": Frontend.DROP_IN, "timeout_s": 10.0},
            Ending.WENT_ON,
        ),
    ],
)
def test_a_fault_strikes_and_survivors_end_well(changes: dict[str, Any], ending: Ending) -> None:
    struck = case(**{"timeout_s": PATIENT_S, "size": 2, **changes})
    found = judge(struck, run_case(struck))
    assert found.struck and found.ending is ending, found
    assert found.again and found.alike and not found.threads_left, found


def test_an_error_of_ddps_own_collective_is_told_from_ours() -> None:
    """DDP broadcasts its buckets anew in the second forward, for which a rank that left after one step is missing."""
    fewer = case(fault=Fault.FEWER, phase=Phase.DETACH, frontend=Frontend.HOOK, size=2, step=1, timeout_s=PATIENT_S)
    found = judge(fewer, run_case(fewer))
    assert found.ending is Ending.DDPS and not found.good and found.again, found


def test_a_stopped_victim_is_killed_in_the_end() -> None:
    stopped = case(fault=Fault.STOP, phase=Phase.FORWARD, size=2, timeout_s=8.0)
    events = run_case(stopped)
    assert judge(stopped, events).ending in (Ending.CLEAR, Ending.LATE)
    assert events[-1]["what"] == "ended" and events[-1]["codes"][0] == 0
    assert not ranks_left()


@pytest.mark.skipif(not allows(CLONE_NEWNET) and not allows(CLONE_NEWUSER | CLONE_NEWNET), reason="no namespaces here")
def test_a_job_goes_on_after_its_link_was_down_for_a_second() -> None:
    down = case(fault=Fault.LINK_PAUSE, phase=Phase.ANY, size=2, steps=40, step=5, timeout_s=PATIENT_S)
    found = judge(down, run_case(down))
    assert found.struck and found.ending is Ending.WENT_ON and found.good, found


def test_a_kernel_that_drops_no_packets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("NetlinkError: (95, 'Operation not supported')")

    from gradsync_lab.faults import run

    monkeypatch.setattr(Lab, "set_loss", refuse)
    with pytest.raises(NotPossibleError, match="nftables for bridges: NetlinkError"):
        run._strike_link(Lab.__new__(Lab), case(fault=Fault.LINK_LOSS, phase=Phase.ANY))


def test_only_the_victim_is_struck_once_and_in_the_step_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    said: list[str] = []
    striker = Striker(case(), is_victim=True, say=said.append)
    for step in range(8):
        striker.step = step
        striker.at(Phase.FORWARD)
        striker.at(Phase.BACKWARD)
        assert bool(sent) is (step >= 4)
    assert sent == [signal.SIGKILL] and said == ["fault"]
    other = Striker(case(), is_victim=False, say=said.append)
    other.step = 4
    other.at(Phase.BACKWARD)
    assert said == ["fault"]
