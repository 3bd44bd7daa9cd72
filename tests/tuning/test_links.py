"""Collectives are timed by all ranks alike: the same sizes and points, and none that takes too long."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from gradsync.comm import LocalGroup, run_local
from gradsync.comm.links import PATTERNS, Exchange, highest_over
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Pattern
from gradsync.planner.pieces import at_once
from gradsync.plans.profile import LinkPoint, Span
from gradsync.tuning import links
from gradsync.tuning.links import (
    FEWEST_SIZES,
    REPEATS,
    SIZES,
    measured_links,
    measured_points,
)

TIMEOUT_S = 20.0
ONCE = patch.object(links, "REPEATS", (1, 1))  # where it takes the same time whenever it is repeated


def slow_exchange(stage_s: float, byte_s: float) -> object:
    """Returns an exchange that takes `stage_s` and `byte_s` per byte, and on rank 1 half as long."""

    def seconds(exchange: Exchange, group: LocalGroup, timeout_s: float) -> float:
        exchange.issue().wait(timeout_s)
        usual_s = stage_s + exchange.transfer.rounds * 1e-4 + exchange.transfer.busiest_bytes * byte_s
        return usual_s if group.rank else usual_s / 2

    return patch.object(Exchange, "seconds", seconds)


def points(share_s: float, byte_s: float) -> list[list[LinkPoint]]:
    def rank(group: LocalGroup) -> list[LinkPoint]:
        highest = highest_over(group, TIMEOUT_S)
        return at_once(measured_points(group, Pattern.ALL_TO_ALL, highest, TIMEOUT_S, share_s))

    with slow_exchange(1e-3, byte_s):
        return run_local(3, rank)


def test_all_ranks_get_the_points_of_the_slowest() -> None:
    each = points(share_s=1e3, byte_s=1e-8)
    assert each[0] == each[1] == each[2]
    assert len(each[0]) == len(SIZES)
    for nbytes, point in zip(SIZES, each[0], strict=True):
        assert point.rounds == 2 and point.busiest_bytes == pytest.approx(nbytes, rel=0.01)
        assert point.seconds.value == pytest.approx(1e-3 + 2e-4 + point.busiest_bytes * 1e-8)


def test_sizes_that_a_slow_link_has_no_time_for_are_left_out() -> None:
    slow = points(share_s=1.0, byte_s=1e-6)[0]  # a second for 1 MiB
    assert len(slow) == FEWEST_SIZES
    few = points(share_s=1.0, byte_s=5e-8)[0]
    assert FEWEST_SIZES < len(few) < len(SIZES)
    fewest, _ = REPEATS
    assert (1 + fewest) * few[-1].seconds.value < 1.0


def test_links_of_all_of_nodes_and_across_them_are_told() -> None:
    def rank(group: LocalGroup) -> list[tuple[Span, int]]:
        found = at_once(measured_links(group, TIMEOUT_S))
        for link in found:
            assert list(link.collectives) == list(PATTERNS)
            assert link.link.bandwidth_bytes_per_s.value == pytest.approx(1e8, rel=1e-3)
        return [(link.span, link.size) for link in found]

    with slow_exchange(0.0, 1e-8), ONCE:
        hierarchy = run_local(4, rank, placement=Placement.regular(2, 2))
        flat = run_local(3, rank)
        uneven = run_local(3, rank, placement=Placement((0, 0, 1)))
    assert hierarchy == [[(Span.ALL, 4), (Span.INSIDE, 2), (Span.ACROSS, 2)]] * 4
    assert flat == uneven == [[(Span.ALL, 3)]] * 3
    assert run_local(1, lambda group: at_once(measured_links(group, TIMEOUT_S))) == [()]


def test_what_a_message_costs_is_told_from_what_an_operation_does() -> None:
    with slow_exchange(2e-3, 1e-8), ONCE:
        (found,) = run_local(4, lambda group: at_once(measured_links(group, TIMEOUT_S)))[0]
    assert found.link.alpha_s.value == pytest.approx(1e-4, rel=1e-3)
    for fit in found.collectives.values():
        assert fit.link.stage_s.value == pytest.approx(2e-3, rel=1e-3)
