"""The latency-bandwidth model returns the parameters from which the measurements were made."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest

from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import Compute, Pattern, Transfer
from gradsync.costs.transport import RingOrDirect

TRUTH = CostModel(alpha_s=40e-6, bandwidth_bytes_per_s=125e6, memory_bytes_per_s=5e9)


def samples(model: CostModel, noise: float = 0.0) -> list[tuple[int, float, float]]:
    dice = random.Random(3)
    grid = [(rounds, float(nbytes)) for rounds in (1, 3, 6) for nbytes in (100, 10_000, 1_000_000, 100_000_000)]
    return [
        (r, b, (r * model.alpha_s + b / model.bandwidth_bytes_per_s) * (1 + dice.uniform(-noise, noise)))
        for r, b in grid
    ]


def test_fit_recovers_latency_and_bandwidth() -> None:
    fitted = CostModel.fit(samples(TRUTH), memory_bytes_per_s=5e9)
    assert fitted.alpha_s == pytest.approx(TRUTH.alpha_s, rel=1e-6)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(TRUTH.bandwidth_bytes_per_s, rel=1e-6)
    assert fitted.memory_bytes_per_s == 5e9


def test_fit_keeps_small_and_large_messages_equally_in_mind_under_noise() -> None:
    fitted = CostModel.fit(samples(TRUTH, noise=0.05))
    assert fitted.alpha_s == pytest.approx(TRUTH.alpha_s, rel=0.05)
    assert fitted.bandwidth_bytes_per_s == pytest.approx(TRUTH.bandwidth_bytes_per_s, rel=0.05)


def test_fit_never_gives_a_negative_latency() -> None:
    fitted = CostModel.fit([(1, 1000.0, 1.0e-3), (1, 2000.0, 2.1e-3), (1, 4000.0, 4.3e-3)])
    assert fitted.alpha_s == 0.0


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ([], "at least 2 samples of different size, got 0"),
        ([(1, 10.0, 1.0)], "at least 2 samples of different size, got 1"),
        ([(1, 10.0, 1.0), (2, 20.0, 2.0)], "do not separate latency from bandwidth"),
        ([(1, 10.0, 2.0), (1, 20.0, 1.0)], "do not separate latency from bandwidth"),
    ],
)
def test_samples_that_tell_nothing_are_refused(measured: list[tuple[int, float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel.fit(measured)


def test_seconds_are_rounds_times_latency_plus_the_busiest_link_or_memory_traffic() -> None:
    gather = Transfer("gather", Pattern.ALL_GATHER, (1e6, 2e6, 0.0))
    assert TRUTH.seconds(gather) == pytest.approx(2 * 40e-6 + 4e6 / 125e6)
    assert TRUTH.seconds(Compute("pack", 1e7)) == pytest.approx(2e-3)
    assert TRUTH.total_s([gather, Compute("pack", 1e7)]) == pytest.approx(2 * 40e-6 + 4e6 / 125e6 + 2e-3)


SHARED = CostModel(alpha_s=1e-3, bandwidth_bytes_per_s=1e6, intra=Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6))
TWO_BY_TWO = Placement.regular(2, 2)
MB = 1e6


@pytest.mark.parametrize("pattern", list(Pattern))
def test_one_rank_a_node_costs_what_it_costs_without_a_placement(pattern: Pattern) -> None:
    step = Transfer(
        pattern, pattern, (3 * MB,) * 4, ((0, 1, 2 * MB), (0, 2, MB)) if pattern is Pattern.MESSAGES else ()
    )
    assert SHARED.seconds(step, Placement.one_per_node(4)) == SHARED.seconds(step)


@pytest.mark.parametrize(
    ("step", "messages", "node_bytes"),
    [
        (Transfer("", Pattern.ALL_TO_ALL, (MB,) * 4), 2, 4 * MB),  # two ranks send to two each
        (Transfer("", Pattern.ALL_REDUCE, (4 * MB,) * 4), 6, 6 * MB),  # one of two ring neighbours is on the node
        (Transfer("", Pattern.ALL_GATHER, (MB,) * 4), 3, 3 * MB),  # a ring as well: what crosses does so once
        (Transfer("", Pattern.ALL_GATHER, (10.0, 20.0, 30.0, 40.0)), 2, 140),  # direct: rank 2 and 3 to two each
        (Transfer("", Pattern.BROADCAST, (MB, 0.0, 0.0, 0.0)), 2, 2 * MB),
        (Transfer.of_messages("", 4, [(0, 2, MB), (1, 3, MB), (3, 2, 9 * MB)]), 1, 2 * MB),
        (Transfer.at_once("", 4, [(0, 2), (1, 3)], [Transfer("", Pattern.ALL_TO_ALL, (MB,) * 2)] * 2), 1, 2 * MB),
    ],
)
def test_the_ranks_of_a_node_share_its_link(step: Transfer, messages: int, node_bytes: float) -> None:
    crossing_s = messages * 1e-3 + node_bytes / 1e6
    assert SHARED.seconds(step, TWO_BY_TWO) == pytest.approx(crossing_s, abs=5e-6)


@pytest.mark.parametrize(
    ("at_once_bytes", "messages", "node_bytes"),
    [(3 * MB - 1, 3, 3 * MB), (3 * MB, 2, 4 * MB)],  # round a ring: three rounds; at once: two ranks send to two each
)
def test_an_all_gather_costs_what_its_way_through_the_transport_does(
    at_once_bytes: float, messages: int, node_bytes: float
) -> None:
    gather = Transfer("", Pattern.ALL_GATHER, (MB,) * 4)
    crossing_s = messages * 1e-3 + node_bytes / 1e6
    model = replace(SHARED, transport=RingOrDirect(at_once_bytes))
    assert model.seconds(gather, TWO_BY_TWO) == pytest.approx(crossing_s, abs=5e-6)


def test_what_stays_inside_nodes_does_not_load_their_links() -> None:
    each = Transfer("", Pattern.ALL_TO_ALL, (MB,) * 2)
    inside = Transfer.at_once("", 4, [(0, 1), (2, 3)], [each] * 2)
    assert SHARED.seconds(inside, TWO_BY_TWO) == pytest.approx(1e-6 + MB / 1e9)
    alike = CostModel(alpha_s=1e-3, bandwidth_bytes_per_s=1e6)
    assert alike.seconds(inside, TWO_BY_TWO) == pytest.approx(1e-3 + MB / 1e6)


def test_a_transfer_among_other_ranks_than_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="among 3 ranks, the placement has 4"):
        SHARED.seconds(Transfer("", Pattern.ALL_GATHER, (1.0,) * 3), TWO_BY_TWO)


def test_a_kernel_takes_what_was_measured_of_it_and_others_what_the_memory_allows() -> None:
    model = CostModel(0.0, 1.0, 1e9, {"sum_rows": KernelCost(call_s=1e-4, byte_s=1e-8)})
    assert model.seconds(Compute("sum_rows", 1e6, calls=3)) == pytest.approx(3e-4 + 1e-2)
    assert model.seconds(Compute("join_rows", 1e6, calls=3)) == pytest.approx(1e-3)


def test_a_model_survives_its_way_through_json() -> None:
    model = CostModel(1e-4, 1e8, 1e9, {"sum_rows": KernelCost(1e-4, 1e-8)})
    assert CostModel.of(json.loads(json.dumps(asdict(model)))) == model


def test_every_transfer_has_a_cost_of_its_own_beside_its_messages_and_bytes() -> None:
    model = CostModel(1e-3, 1e6, stage_s=5e-3)
    one = Transfer.of_messages("push", 3, [(0, 1, 1000.0)])
    two = Transfer.of_messages("push", 3, [(0, 1, 500.0), (0, 2, 500.0)])
    assert model.seconds(one) == pytest.approx(5e-3 + 1e-3 + 1e-3)
    assert model.seconds(two) == pytest.approx(5e-3 + 2e-3 + 1e-3)
    measured = [(r, b, 5e-3 + r * 1e-3 + b / 1e6) for r, b in ((3, 0.0), (1, 1e6), (1, 4e6))]
    fitted = CostModel.fit(measured, stage_s=5e-3)
    assert (fitted.alpha_s, fitted.bandwidth_bytes_per_s) == (pytest.approx(1e-3), pytest.approx(1e6))
