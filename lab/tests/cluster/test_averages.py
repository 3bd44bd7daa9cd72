"""Averages in groups on limited links: bytes between racks are as tabulated, and groups follow the links."""

from __future__ import annotations

import subprocess

import pytest

from gradsync.comm.shuffle import crossing, grid, together, with_local_steps
from gradsync.costs.cluster import Cluster, Link
from gradsync_lab.cluster import Lab, Scenario
from lab.tests.cluster import programs
from lab.tests.cluster.programs import python
from tests.planner.averaging.test_grouping import uplink_loads

pytestmark = pytest.mark.usefixtures("namespaces")

NBYTES = 4 * 1024 * 512
CYCLES = 4
SCHEDULES = {
    "together(4)": together(4),
    "grid((2, 2))": grid((2, 2)),
    "crossing([[0, 1], [2, 3]], 1)": crossing([[0, 1], [2, 3]], 1),
    "with_local_steps(together(4), 2)": with_local_steps(together(4), 2),
}
HEADERS = 1.08  # allowance for packet headers and other messages


def said(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """Returns the next line of each rank."""
    return [rank.stdout.readline().strip() for rank in ranks if rank.stdout is not None]


def let_go_on(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def ended(ranks: list[subprocess.Popen[str]]) -> list[int]:
    """Returns the exit code of each rank, within the remaining time."""
    for rank in ranks:
        rank.communicate(timeout=30)
    return [rank.returncode for rank in ranks]


def start(lab: Lab, code: str, env: dict[str, str] | None = None) -> list[subprocess.Popen[str]]:
    """Starts ranks with pipes for input and output."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [lab.spawn(rank, python(code), env, **pipes) for rank in range(lab.scenario.world_size)]


def test_uplinks_carry_what_groups_are_expected_to_send() -> None:
    links = Cluster(4, Link(1.25e8), rack_size=2, trunk=Link(1.25e8))
    with Lab(Scenario(nodes=4, link="1gbit", rack_size=2, trunk="1gbit")) as lab:
        ranks = start(lab, programs.AVERAGES, {"SCHEDULES": ";".join(SCHEDULES), "CYCLES": str(CYCLES)})
        for name, schedule in SCHEDULES.items():
            assert said(ranks) == ["ready"] * 4
            before = lab.uplink_bytes()
            let_go_on(ranks)
            assert said(ranks) == ["done"] * 4
            after = lab.uplink_bytes()
            let_go_on(ranks)
            loads = [
                sum(loads) for loads in zip(*(uplink_loads(r.groups, links) for r in schedule.rounds), strict=True)
            ]
            for rack, load in enumerate(loads):
                expected = CYCLES * load * NBYTES
                for direction in (0, 1):
                    seen = after[rack][direction] - before[rack][direction]
                    assert expected <= seen <= HEADERS * expected, (name, rack, direction)
        assert ended(ranks) == [0] * 4


def test_a_node_whose_link_has_become_slow_sits_out_from_the_next_consensus_on() -> None:
    with Lab(Scenario(nodes=4, link="500mbit")) as lab:
        ranks = start(lab, programs.REMAPPED)
        (before,) = set(said(ranks))
        lab.set_rate(3, "50mbit")
        let_go_on(ranks)
        (after,) = set(said(ranks))
        let_go_on(ranks)
        assert ended(ranks) == [0] * 4
    assert float(before) < 0.5 <= float(after)


def test_one_rack_has_no_uplink() -> None:
    with Lab(Scenario(nodes=2)) as lab:
        assert lab.uplink_bytes() == []
