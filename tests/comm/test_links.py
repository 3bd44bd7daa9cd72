"""Exchanges move what their transfers say, and a short look at links tells latency, stage and rate apart."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from gradsync.comm import LocalGroup, RecordingGroup, run_local
from gradsync.comm.links import PATTERNS, Exchange, latencies, measured_link
from gradsync.comm.record import Ledger
from gradsync.costs.steps import Pattern

TIMEOUT_S = 20.0
LARGE = 1 << 20  # an all-reduce of less does not go round
ALPHA_S, STAGE_S, BYTE_S = 1e-4, 1e-3, 1e-8


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_exchange_moves_what_its_transfer_says(pattern: Pattern, size: int) -> None:
    def rank(group: LocalGroup) -> tuple[float, float]:
        ledger = Ledger()
        exchange = Exchange.of(RecordingGroup(group, ledger), pattern, LARGE, range(1, size))
        exchange.issue().wait(TIMEOUT_S)
        return ledger.sent_bytes, exchange.transfer.sent_bytes(group.rank)

    for sent, told in run_local(size, rank):
        assert sent == told == pytest.approx(LARGE, rel=0.01)


def test_broadcasts_are_not_measured() -> None:
    with pytest.raises(ValueError, match="broadcast is not measured"):
        Exchange.of(LocalGroup.world(2)[0], Pattern.BROADCAST, 4096)


def test_messages_between_some_members_reach_only_these() -> None:
    def rank(group: LocalGroup) -> tuple[float, float]:
        ledger = Ledger()
        exchange = Exchange.of_messages(RecordingGroup(group, ledger), {0: [2], 2: [0]}, LARGE)
        exchange.issue().wait(TIMEOUT_S)
        return ledger.sent_bytes, exchange.transfer.sent_bytes(group.rank)

    assert run_local(3, rank) == [(LARGE, LARGE), (0.0, 0.0), (LARGE, LARGE)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_short_look_tells_latency_stage_and_rate_of_the_slowest_member(size: int) -> None:
    runs = dict.fromkeys(range(size), 0)

    def seconds(exchange: Exchange, group: LocalGroup, timeout_s: float) -> float:
        runs[group.rank] += 1
        disturbed = 1 + runs[group.rank] % 2
        moved = exchange.transfer.busiest_bytes if exchange.transfer.pattern is Pattern.ALL_TO_ALL else 0.0
        usual_s = STAGE_S + exchange.transfer.rounds * ALPHA_S + moved * BYTE_S
        return disturbed * usual_s / (1 if group.rank else 2)

    def rank(group: LocalGroup) -> tuple[float, float, float]:
        return measured_link(group, lambda nbytes: Exchange.of(group, Pattern.ALL_TO_ALL, nbytes), TIMEOUT_S)

    with patch.object(Exchange, "seconds", seconds):
        found = run_local(size, rank)
    assert found == [found[0]] * size
    alpha_s, stage_s, bytes_per_s = found[0]
    assert bytes_per_s == pytest.approx(1 / BYTE_S)
    small_s = 4096 * BYTE_S  # is part of the latency
    assert stage_s + (size - 1) * alpha_s == pytest.approx(STAGE_S + (size - 1) * ALPHA_S + small_s, rel=1e-3)
    if size > 2:
        assert alpha_s == pytest.approx(ALPHA_S + small_s / (size - 2), rel=1e-3)


def test_of_one_message_a_stage_is_part_of_the_latency() -> None:
    assert latencies(3e-3, 0.0, 1) == (3e-3, 0.0)
    assert latencies(3e-3, 1e-3, 3) == pytest.approx((1e-3, 0.0))
    assert latencies(1e-3, 2e-3, 3) == (0.0, 1e-3)
