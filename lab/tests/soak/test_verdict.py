"""The verdict on a soak, by hand-made lines of its record; each aim can be missed."""

from __future__ import annotations

from typing import Any

import pytest

from gradsync_lab.faults.cases import Fault, Phase
from gradsync_lab.soak.journal import Line, Outcome
from gradsync_lab.soak.settings import Strike
from gradsync_lab.soak.verdict import FEWEST, verdict

COUNTS = {"rss_kib": 400_000, "tasks": 12, "fds": 20, "keys": 6, "own_keys": 0}


def strike(fault: Fault = Fault.KILL) -> Strike:
    return Strike(number=0, step=10, fault=fault, victim=1, point=Phase.FORWARD)


def struck(fault: Fault = Fault.KILL, *, restarted: bool = True, text: str = "GroupError: rank 1 died") -> Line:
    outcome = Outcome(restarted=restarted, seconds=9.0, errors={0: text, 1: "ValueError: own"} if restarted else {})
    return Line(kind="struck", strike=strike(fault), outcome=outcome)


def life(rank: int = 0, name: str = "0.0", n: int = 40, growth: float = 0.0, more: dict[str, int] | None = None) -> Any:
    """Returns `n` censuses of a life in which memory grows by this share from its middle on, and counts by `more`."""
    lines = []
    for number in range(n):
        grown = number >= n // 2
        counts = {what: value + (more or {}).get(what, 0) * grown for what, value in COUNTS.items()}
        counts["rss_kib"] = round(COUNTS["rss_kib"] * (1 + growth * grown))
        lines.append(Line(kind="census", rank=rank, life=name, step=20 * number, counts=counts))
    return lines


def soak(*lines: Any, clean: str = "a", final: str = "a") -> list[Line]:
    return [Line(kind="clean", digest=clean), struck(), *life(), *lines, Line(kind="final", digest=final)]


def test_a_soak_without_fault_is_good() -> None:
    found = verdict(soak(), planned=1)
    assert found.good and found.same_bits and found.restarts == 1 and found.slowest_s == 9.0
    assert found.names_victim == (1, 1) and found.memory_growth == 0.0 and not found.left


@pytest.mark.parametrize(
    ("lines", "planned"),
    [
        (soak(final="b"), 1),
        (soak()[:-1], 1),
        (soak(), 2),
        (soak(struck(restarted=False)), 2),
        (soak(struck(Fault.SLOW, restarted=True)), 2),
        (soak(*life(1, growth=0.02)), 1),
        (soak(*life(1, more={"fds": 1})), 1),
        (soak(*life(1, more={"tasks": 2})), 1),
        (soak(*life(1, more={"keys": 3})), 1),
    ],
    ids=["bits", "not ended", "faults missing", "no restart", "restart", "memory", "descriptors", "threads", "keys"],
)
def test_each_aim_can_be_missed(lines: list[Line], planned: int) -> None:
    assert not verdict(lines, planned).good


def test_what_is_right_where_the_job_may_go_on() -> None:
    right = [struck(fault, restarted=False) for fault in (Fault.PAUSE, Fault.SLOW, Fault.LINK_PAUSE, Fault.LINK_RATE)]
    right += [struck(Fault.LINK_LOSS, restarted=restarted) for restarted in (False, True)]
    assert verdict(soak(*right), planned=7).good


def test_growth_is_that_of_the_longest_life_and_not_of_the_first_fifth() -> None:
    warming = life(1, "0.1", n=60)
    for line in warming[:10]:
        line.counts["rss_kib"] //= 2
    found = verdict(soak(*life(1, "0.0", growth=0.5), *warming), planned=1)
    assert found.good and [growth.rank for growth in found.growths] == [0, 1]
    assert found.growths[1].counts == 60 and found.growths[1].steps == 20 * 59
    assert verdict(soak(*life(2, n=FEWEST - 1, growth=0.5)), planned=1).good, "too short to tell"


def test_the_agent_grows_with_its_restarts_and_is_no_aim() -> None:
    found = verdict(soak(*life(-1, growth=0.5)), planned=1)
    assert found.good and found.growths[0].memory == pytest.approx(0.5)


def test_errors_that_do_not_name_the_victim_are_counted() -> None:
    found = verdict(soak(struck(text="GroupError: a connection broke")), planned=2)
    assert found.names_victim == (1, 2)
