"""Disturbances last as long as the lab, and leave neither a flow nor a stopped rank behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradsync_lab.cluster import Scenario
from gradsync_lab.cluster.disturb import disturbances

PATIENCE_S = 30.0
BRIEF_S = 1e-3
FOR_EVER_S = 1e4  # the test does not wait so long


class Lab:
    """A lab that records calls."""

    def __init__(self, scenario: Scenario, running: Callable[[int], bool] = lambda rank: True) -> None:
        self.scenario = scenario
        self.done: list[tuple[str, Any]] = []
        self._running = running
        self._changed = threading.Condition()

    def start_background(self, source: int, target: int, rate: str) -> None:
        self._note("start", (source, target, rate))

    def stop_background(self, source: int, target: int) -> None:
        self._note("stop", (source, target))

    def pause(self, rank: int) -> None:
        if not self._running(rank):
            self._note("missed", rank)
            raise KeyError(rank)
        self._note("pause", rank)

    def resume(self, rank: int) -> None:
        self._note("resume", rank)

    def wait_for(self, what: str, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(what)) >= times, PATIENCE_S), self.done

    def of(self, what: str) -> list[Any]:
        return [about for named, about in self.done if named == what]

    def _note(self, what: str, about: Any) -> None:
        with self._changed:
            self.done.append((what, about))
            self._changed.notify_all()


def test_nothing_happens_where_nothing_was_asked_for() -> None:
    lab, threads = Lab(Scenario(nodes=4, background=((0, 1, "1mbit"),))), threading.active_count()
    with disturbances(lab):
        assert threading.active_count() <= threads
    assert lab.done == []


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_one_flow_at_a_time_moves_to_another_pair_each_time_and_is_stopped_at_the_end(nodes: int) -> None:
    lab = Lab(Scenario(nodes=nodes, moving_background=("3mbit", BRIEF_S)))
    with disturbances(lab):
        lab.wait_for("start", 12)
    flows = lab.of("start")
    assert [what for what, _ in lab.done] == ["start", "stop"] * len(flows)
    assert lab.of("stop") == [(source, target) for source, target, _ in flows]
    assert all(before != after for before, after in zip(flows, flows[1:], strict=False))
    for source, target, rate in flows:
        assert source != target and {source, target} <= set(range(nodes)) and rate == "3mbit"


def test_the_flow_that_runs_when_the_lab_ends_is_stopped_at_once() -> None:
    lab = Lab(Scenario(nodes=3, moving_background=("3mbit", FOR_EVER_S)))
    with disturbances(lab):
        lab.wait_for("start", 1)
        assert lab.of("stop") == []
    ((source, target, _),) = lab.of("start")
    assert lab.of("stop") == [(source, target)]


def test_the_flow_keeps_off_pairs_that_have_traffic_of_their_own() -> None:
    taken = ((0, 1, "1mbit"), (1, 0, "1mbit"), (2, 0, "1mbit"), (0, 2, "1mbit"))
    lab = Lab(Scenario(nodes=3, background=taken, moving_background=("3mbit", BRIEF_S)))
    with disturbances(lab):
        lab.wait_for("start", 6)
    assert set(lab.of("start")) == {(1, 2, "3mbit"), (2, 1, "3mbit")}
    lab = Lab(Scenario(nodes=2, background=taken[:1], moving_background=("3mbit", BRIEF_S)))
    with disturbances(lab):
        lab.wait_for("start", 3)
    assert set(lab.of("start")) == {(1, 0, "3mbit")}


def test_one_rank_at_a_time_stalls_and_each_goes_on_again() -> None:
    lab = Lab(Scenario(nodes=2, ranks_per_node=2, stalls=(BRIEF_S, BRIEF_S)))
    with disturbances(lab):
        lab.wait_for("resume", 30)
    stalled = lab.of("pause")
    assert [what for what, _ in lab.done] == ["pause", "resume"] * len(stalled)
    assert lab.of("resume") == stalled and set(stalled) == {0, 1, 2, 3}


def test_a_rank_that_stalls_when_the_lab_ends_goes_on_at_once() -> None:
    lab = Lab(Scenario(nodes=2, stalls=(FOR_EVER_S, BRIEF_S)))
    with disturbances(lab):
        lab.wait_for("pause", 1)
        assert lab.of("resume") == []
    assert lab.of("resume") == lab.of("pause") and len(lab.of("pause")) == 1


def test_a_rank_that_stalls_when_the_job_fails_goes_on_at_once() -> None:
    lab = Lab(Scenario(nodes=2, stalls=(FOR_EVER_S, BRIEF_S), moving_background=("1mbit", FOR_EVER_S)))
    with pytest.raises(RuntimeError, match="on purpose"), disturbances(lab):
        lab.wait_for("pause", 1)
        lab.wait_for("start", 1)
        raise RuntimeError("on purpose")
    assert lab.of("resume") == lab.of("pause") and len(lab.of("stop")) == len(lab.of("start")) == 1


def test_ranks_that_have_not_begun_are_passed_over() -> None:
    lab = Lab(Scenario(nodes=3, stalls=(BRIEF_S, BRIEF_S)), running=lambda rank: rank == 1)
    with disturbances(lab):
        lab.wait_for("missed", 2)
        lab.wait_for("resume", 3)
    assert set(lab.of("resume")) == set(lab.of("pause")) == {1}


def test_pairs_and_ranks_are_drawn_by_the_seed() -> None:
    def drawn(seed: int) -> tuple[list[Any], list[Any]]:
        lab = Lab(Scenario(nodes=9, stalls=(BRIEF_S, BRIEF_S), moving_background=("1mbit", BRIEF_S), seed=seed))
        with disturbances(lab):
            lab.wait_for("start", 8)
            lab.wait_for("pause", 8)
        return lab.of("start")[:8], lab.of("pause")[:8]

    assert drawn(1) == drawn(1) and drawn(1)[0] != drawn(2)[0] and drawn(1)[1] != drawn(2)[1]


def test_what_cannot_go_on_says_so_at_the_end() -> None:
    class Full(Lab):
        def start_background(self, source: int, target: int, rate: str) -> None:
            super().start_background(source, target, rate)
            raise ValueError("no room for a flow")

    lab = Full(Scenario(nodes=3, stalls=(BRIEF_S, BRIEF_S), moving_background=("1mbit", BRIEF_S)))
    with pytest.raises(ValueError, match="no room for a flow"), disturbances(lab):
        lab.wait_for("start", 1)
        lab.wait_for("resume", 1)
    assert len(lab.of("resume")) == len(lab.of("pause"))
