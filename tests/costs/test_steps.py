"""Steps of schemes as data: every byte that one rank sends another one receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel
from gradsync.costs.forecast import forecast
from gradsync.costs.steps import Compute, Pattern, Transfer, transfers
from gradsync.costs.timeline import covered_s
from gradsync.costs.transport import (
    DEFAULT_TRANSPORT,
    DIRECT_BYTES,
    DOUBLED_BYTES,
    SUMMED_BYTES,
    RingOrDirect,
    Transport,
)

EQUAL_PARTS = {Pattern.ALL_REDUCE}  # one buffer length for all

part_bytes = st.lists(st.integers(0, 4 * DIRECT_BYTES).map(float), min_size=1, max_size=9)


def transfer(pattern: Pattern, parts: list[float]) -> Transfer:
    return Transfer("stage", pattern, tuple(parts[:1] * len(parts) if pattern in EQUAL_PARTS else parts))


def messages(step: Transfer) -> list[tuple[int, int, float]]:
    return list(step.carried_by(DEFAULT_TRANSPORT).messages())


def total_bytes(step: Transfer) -> float:
    return sum(step.sent_bytes(member) for member in range(step.size))


@pytest.mark.parametrize("pattern", list(Pattern))
@given(parts=part_bytes)
def test_sent_and_received_bytes_are_the_same_messages(pattern: Pattern, parts: list[float]) -> None:
    step = transfer(pattern, parts)
    n, parts = step.size, list(step.part_bytes)
    sent, received = [0.0] * n, [0.0] * n
    for source, to, nbytes in messages(step):
        assert source != to
        sent[source] += nbytes
        received[to] += nbytes
    assert sent == pytest.approx([step.sent_bytes(member) for member in range(n)])
    every = [n * part for part in parts] if pattern is Pattern.ALL_TO_ALL else [sum(parts)] * n
    if pattern is Pattern.BROADCAST:
        every = [parts[0] + parts[member] if member else parts[0] for member in range(n)]
    due = [whole - part for whole, part in zip(every, parts, strict=True)]
    if pattern is Pattern.ALL_REDUCE and step.carried_by(DEFAULT_TRANSPORT).is_forwarded:
        due = [2 * (n - 1) / n * part for part in parts]
    elif pattern is Pattern.ALL_REDUCE and n in (2, 4, 8):
        due = [{2: 1, 4: 2, 8: 3}[n] * part for part in parts]
    assert received == pytest.approx([0.0] * n if pattern is Pattern.MESSAGES else due)
    assert step.busiest_bytes == pytest.approx(max([*sent, *received]))


@pytest.mark.parametrize("pattern", list(Pattern))
def test_a_group_of_one_moves_nothing(pattern: Pattern) -> None:
    step = transfer(pattern, [100.0])
    assert (step.rounds, total_bytes(step), step.busiest_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("pattern", "parts", "total", "busiest", "rounds"),
    [
        (Pattern.ALL_REDUCE, [12.0] * 4, 8 * 12, 24, 2),  # small: swapped with two other members
        (Pattern.ALL_REDUCE, [12.0] * 5, 20 * 12, 48, 4),  # no power of two: to every other member
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
    assert (total_bytes(step), step.busiest_bytes, step.rounds) == (total, busiest, rounds)


@pytest.mark.parametrize(
    ("members", "nbytes", "is_ring"),
    [
        (2, DIRECT_BYTES, False),  # to the only other member: a ring would send as much
        (2, DIRECT_BYTES + 4, True),
        (4, DOUBLED_BYTES, False),
        (4, DOUBLED_BYTES + 4, True),
        (64, DOUBLED_BYTES, False),
        (3, SUMMED_BYTES, False),
        (3, SUMMED_BYTES + 4, True),
        (33, DIRECT_BYTES // 32, False),
        (33, DIRECT_BYTES // 32 + 4, True),
    ],
)
def test_an_all_reduce_is_a_ring_by_its_bytes_and_members_alone(members: int, nbytes: int, is_ring: bool) -> None:
    reduced = transfer(Pattern.ALL_REDUCE, [float(nbytes)] * members)
    for at_once_bytes in (0.0, 1e9):
        assert reduced.carried_by(RingOrDirect(at_once_bytes)).is_forwarded == is_ring


def test_transfers_keeps_the_order_and_leaves_computations_out() -> None:
    push, pull = transfer(Pattern.ALL_TO_ALL, [1.0, 1.0]), transfer(Pattern.ALL_GATHER, [1.0, 1.0])
    assert transfers([Compute("pack", 8), push, Compute("sum_rows", 8), pull]) == [push, pull]


def test_time_covered_counts_overlapping_intervals_once_and_only_inside_the_window() -> None:
    intervals = [(2.0, 5.0), (0.0, 3.0), (3.0, 4.0)]
    assert covered_s(intervals, 0.0, 10.0) == 5.0
    assert covered_s(intervals, 1.0, 2.5) == 1.5
    assert covered_s([*intervals, (7.0, 8.0)], 0.0, 7.5) == 5.5
    assert covered_s(intervals, 6.0, 7.0) == 0.0
    assert covered_s([], 0.0, 1.0) == 0.0


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
    moved = [
        (group[source], group[to], nbytes)
        for group, alone in zip(groups, each, strict=True)
        for source, to, nbytes in messages(alone)
    ]
    assert sorted(messages(both)) == sorted(moved)
    assert both.sent_bytes(len(places)) == 0
    assert both.busiest_bytes == max(alone.busiest_bytes for alone in each)
    assert pattern is Pattern.MESSAGES or both.rounds == max(alone.rounds for alone in each)


def test_what_a_ring_forwards_passes_every_member() -> None:
    large = Transfer("gather", Pattern.ALL_GATHER, (2.0 * DIRECT_BYTES,) * 3)
    assert messages(large) == [(m, (m + 1) % 3, 4.0 * DIRECT_BYTES) for m in range(3)]
    assert list(large.carried_by(RingOrDirect(4.0 * DIRECT_BYTES)).messages()) == [
        (m, p, 2.0 * DIRECT_BYTES) for m in range(3) for p in range(3) if p != m
    ]
    uneven = Transfer("gather", Pattern.ALL_GATHER, (2.0 * DIRECT_BYTES, 2.0 * DIRECT_BYTES, 1.0))
    assert not uneven.carried_by(DEFAULT_TRANSPORT).is_forwarded and len(messages(uneven)) == 6
    small = Transfer("gather", Pattern.ALL_GATHER, (1.0, 2.0, 3.0))
    assert messages(small) == [(m, peer, m + 1.0) for m in range(3) for peer in range(3) if peer != m]


@dataclass(frozen=True)
class ByMember0(Transport):
    """A transport of another kind: everything goes to member 0 and back."""

    def passes_on(self, pattern: Pattern, part_bytes: Sequence[float]) -> bool:
        return True

    def rounds(self, pattern: Pattern, part_bytes: Sequence[float]) -> int:
        return 2

    def sends(self, pattern: Pattern, part_bytes: Sequence[float], member: int) -> Iterator[tuple[int, float]]:
        yield from ((peer, part_bytes[0]) for peer in (range(1, len(part_bytes)) if member == 0 else (0,)))


def test_another_transport_is_priced_by_the_messages_and_rounds_that_it_says() -> None:
    reduce = Transfer("reduce", Pattern.ALL_REDUCE, (1e6,) * 4)
    model = CostModel(1e-3, 1e6, intra=Link(1e9, 1e-6), transport=ByMember0())
    assert model.seconds(reduce) == pytest.approx(2e-3 + 3.0)
    assert model.seconds(reduce, Placement.regular(2, 2)) == pytest.approx(2e-3 + 2.0)  # two ranks are elsewhere
    ready_s = {"first": 0.0, "second": 0.0}
    order = [(bucket, "reduce") for bucket in ready_s]
    ends_s = [task.end_s for task in forecast(order, {b: [reduce] for b in ready_s}, ready_s, model)]
    assert ends_s == pytest.approx([3.002, 6.004])  # it carries one transfer at a time
