"""Nodes get equal shares of processors, and processes started within a share stay there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gradsync_lab.cluster import Lab, Scenario
from gradsync_lab.cluster.processors import confined, share_out, shares_of_nodes

PRINT_OWN = "import os; print(*sorted(os.sched_getaffinity(0)))"


@pytest.mark.parametrize(
    ("processors", "nodes", "expected"),
    [
        ({0, 1}, 1, [(0, 1)]),
        ({0, 1}, 2, [(0,), (1,)]),
        ({0, 1}, 4, [(0,), (1,), (0,), (1,)]),
        ({7, 2, 5, 3}, 2, [(2, 3), (5, 7)]),
        ({4}, 3, [(4,), (4,), (4,)]),
        ({0, 1}, 3, None),
        ({0, 1, 2}, 2, None),
    ],
)
def test_nodes_get_equal_shares_or_none(
    processors: set[int], nodes: int, expected: list[tuple[int, ...]] | None
) -> None:
    assert share_out(processors, nodes) == expected


def test_what_is_started_inside_stays_there_and_the_starter_does_not() -> None:
    before = os.sched_getaffinity(0)
    shares = [(max(before),), (min(before),)]
    with confined(shares, 0):
        found = subprocess.run([sys.executable, "-c", PRINT_OWN], check=True, capture_output=True, text=True).stdout
    assert found.split() == [str(max(before))]
    assert os.sched_getaffinity(0) == before
    with confined(None, 0):
        assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("namespaces")
def test_ranks_run_on_the_share_of_their_node() -> None:
    with Lab(Scenario(nodes=2, ranks_per_node=2)) as lab:
        ranks = [
            lab.spawn(rank, [sys.executable, "-c", PRINT_OWN], stdout=subprocess.PIPE, text=True) for rank in range(4)
        ]
        found = [tuple(map(int, rank.communicate(timeout=60)[0].split())) for rank in ranks]
        described = lab.describe()["processors_of_nodes"]
    shares = shares_of_nodes(2)
    everything = tuple(sorted(os.sched_getaffinity(0)))
    assert described == shares
    expected = shares or [everything, everything]
    assert found == [expected[0], expected[0], expected[1], expected[1]]
