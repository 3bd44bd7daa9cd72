"""Steps of schemes as data: every byte that one rank sends another one receives."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gradsync.costs.steps import DIRECT_BYTES, Compute, Pattern, Transfer, transfers
from gradsync.costs.timeline import Task, covered_s

EQUAL_PARTS = {Pattern.ALL_REDUCE}  # one buffer length for all

part_bytes = st.lists(st.integers(0, 4 * DIRECT_BYTES).map(float), min_size=1, max_size=9)


def transfer(pattern: Pattern, parts: list[float]) -> Transfer:
    return Transfer("stage", pattern, tuple(parts[:1] * len(parts) if pattern in EQUAL_PARTS else parts))


@pytest.mark.parametrize("pattern", list(Pattern))
@given(parts=part_bytes)
def test_sent_and_received_bytes_are_the_same_messages(pattern: Pattern, parts: list[float]) -> None:
    step = transfer(pattern, parts)
    received = [0.0] * step.size
    for member in range(step.size):
        for peer, nbytes in step.peers(member):
            assert peer != member
            received[peer] += nbytes
    assert received == pytest.approx([step.received_bytes(member) for member in range(step.size)])
    assert step.total_bytes == pytest.approx(sum(received))
    assert step.busiest_bytes >= max(received)


@pytest.mark.parametrize("pattern", list(Pattern))
def test_a_group_of_one_moves_nothing(pattern: Pattern) -> None:
    step = transfer(pattern, [100.0])
    assert (step.rounds, step.total_bytes, step.busiest_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("pattern", "parts", "total", "busiest", "rounds"),
    [
        (Pattern.ALL_REDUCE, [12.0] * 4, 12 * 12, 36, 3),  # small: to every other member
        (Pattern.ALL_REDUCE, [4.0 * DIRECT_BYTES] * 4, 24 * DIRECT_BYTES, 6 * DIRECT_BYTES, 6),  # ring: 2 (n-1)/n
        (Pattern.ALL_GATHER, [1.0, 2.0, 3.0, 4.0], 3 * 10, 12, 3),  # member 3 sends 3 x 4
        (Pattern.ALL_TO_ALL, [1.0, 2.0, 3.0, 4.0], 3 * 10, 12, 3),  # member 3 receives 3 x 4
        (Pattern.BROADCAST, [5.0, 0.0, 0.0, 0.0], 15, 15, 3),
    ],
)
def test_bytes_and_rounds_of_each_pattern(
    pattern: Pattern, parts: list[float], total: float, busiest: float, rounds: int
) -> None:
    step = transfer(pattern, parts)
    assert (step.total_bytes, step.busiest_bytes, step.rounds) == (total, busiest, rounds)


def test_transfers_keeps_the_order_and_leaves_computations_out() -> None:
    push, pull = transfer(Pattern.ALL_TO_ALL, [1.0, 1.0]), transfer(Pattern.ALL_GATHER, [1.0, 1.0])
    assert transfers([Compute("pack", 8), push, Compute("sum_rows", 8), pull]) == [push, pull]


def test_time_covered_counts_overlapping_tasks_once_and_only_inside_the_window() -> None:
    tasks = [Task("b", "link", 2.0, 5.0), Task("a", "link", 0.0, 3.0), Task("c", "link", 3.0, 4.0)]
    assert covered_s(tasks, 0.0, 10.0) == 5.0
    assert covered_s(tasks, 1.0, 2.5) == 1.5
    assert covered_s([*tasks, Task("d", "link", 7.0, 8.0)], 0.0, 7.5) == 5.5
    assert covered_s(tasks, 6.0, 7.0) == 0.0
    assert covered_s([], 0.0, 1.0) == 0.0
    assert tasks[0].duration_s == 3.0


@pytest.mark.parametrize("pattern", list(Pattern))
@given(parts=part_bytes, others=part_bytes)
def test_transfers_at_once_are_those_of_each_group(pattern: Pattern, parts: list[float], others: list[float]) -> None:
    """Groups transfer in parallel while both have ranks left; one rank belongs to no group."""
    each = [transfer(pattern, parts), transfer(pattern, others)]
    if pattern is Pattern.MESSAGES:
        each = [
            Transfer.of_messages("stage", t.size, [(m, (m + 1) % t.size, b) for m, b in enumerate(t.part_bytes)])
            for t in each
        ]
    places = sorted(range(len(parts) + len(others)), key=lambda place: (place % 2, place))
    groups = (tuple(sorted(places[: len(parts)])), tuple(sorted(places[len(parts) :])))
    both = Transfer.at_once("both", len(places) + 1, groups, each)
    for group, alone in zip(groups, each, strict=True):
        for place, member in enumerate(group):
            assert both.sent_bytes(member) == alone.sent_bytes(place)
            assert both.received_bytes(member) == alone.received_bytes(place)
            assert list(both.peers(member)) == [(group[peer], nbytes) for peer, nbytes in alone.peers(place)]
    assert both.sent_bytes(len(places)) == both.received_bytes(len(places)) == 0
    assert both.busiest_bytes == max(alone.busiest_bytes for alone in each)
    assert pattern is Pattern.MESSAGES or both.rounds == max(alone.rounds for alone in each)


def test_what_a_ring_forwards_passes_every_member() -> None:
    large = Transfer("gather", Pattern.ALL_GATHER, (2.0 * DIRECT_BYTES,) * 3)
    assert list(large.hops()) == [(m, (m + 1) % 3, 4.0 * DIRECT_BYTES) for m in range(3)]
    assert list(large.hops(4.0 * DIRECT_BYTES)) == [
        (m, p, 2.0 * DIRECT_BYTES) for m in range(3) for p in range(3) if p != m
    ]
    uneven = Transfer("gather", Pattern.ALL_GATHER, (2.0 * DIRECT_BYTES, 2.0 * DIRECT_BYTES, 1.0))
    assert not uneven.goes_round() and len(list(uneven.hops())) == 6
    small = Transfer("gather", Pattern.ALL_GATHER, (1.0, 2.0, 3.0))
    assert list(small.hops()) == [(m, peer, m + 1.0) for m in range(3) for peer in range(3) if peer != m]
