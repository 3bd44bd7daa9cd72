"""Selection by actual bytes, latency and work: the crossovers of Zen's equations 1 and 2; no scheme is left lightly."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.schemes import AGSparse, AllReduce, BalancedParallelism, ElementPoint, Scheme, select
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile

fastest = partial(select, tolerance=0.0)
BYTES_ONLY = CostModel(alpha_s=0.0, bandwidth_bytes_per_s=1e9, memory_bytes_per_s=1e30)
ELEMENTS = 10_000_000
DOUBLING_IN_LISTS = ElementPoint(
    communication="hierarchy",
    partition="centralization",
    balance=None,
    push_format="list",
    pull_format="list",
)
BALANCED_IN_LISTS = ElementPoint(push_format="list", pull_format="list")
ZEN_AS_BUILT = ElementPoint(push_format="list", pull_format="bitmap")


def popular(density: float, overlap: float, ranks: int) -> DensityProfile:
    """Elements of one popularity: k ranks together touch (1 - (1 - o)^k) / o times as many as one."""
    powers = [1 << j for j in range(1, ranks.bit_length())]
    growth = {k: (1 - (1 - overlap) ** k) / overlap for k in powers}
    return DensityProfile(ELEMENTS, density * ELEMENTS, growth)


def chosen(schemes: list[Scheme[Any]], density: float, overlap: float, ranks: int) -> Scheme[Any]:
    flat = (TensorSpec((ELEMENTS,), torch.float32),)
    profile = (popular(density, overlap, ranks),)
    return fastest(schemes, flat, profile, Placement.one_per_node(ranks), BYTES_ONLY).chosen.scheme


@pytest.mark.parametrize(("ranks", "crossover"), [(4, 0.274), (8, 0.058), (16, 0.0131), (32, 0.0031)])
def test_balanced_parallelism_wins_above_the_crossover_overlap(ranks: int, crossover: float) -> None:
    rivals: list[Scheme[Any]] = [DOUBLING_IN_LISTS, BALANCED_IN_LISTS]
    assert chosen(rivals, 0.001, 0.97 * crossover, ranks) == DOUBLING_IN_LISTS
    assert chosen(rivals, 0.001, 1.03 * crossover, ranks) == BALANCED_IN_LISTS


@pytest.mark.parametrize("overlap", [0.001, 0.3, 0.9])
def test_two_ranks_exchange_directly(overlap: float) -> None:
    assert chosen([DOUBLING_IN_LISTS, BALANCED_IN_LISTS], 0.001, overlap, 2) == DOUBLING_IN_LISTS


@pytest.mark.parametrize(
    ("ranks", "density", "won", "lost"),
    [
        (4, 0.001, [], [0.001, 0.1, 0.5, 0.9]),
        (4, 0.01, [], [0.001, 0.3, 0.9]),
        (4, 0.03, [0.001, 0.3, 0.999], []),
        (8, 0.001, [], [0.001, 0.1, 0.5, 0.9]),
        (8, 0.005, [0.03, 0.2, 0.44], [0.01, 0.47, 0.9]),
        (8, 0.01, [0.001, 0.3, 0.999], []),
        (16, 0.001, [], [0.001, 0.03, 0.1, 0.9]),
        (16, 0.005, [0.001, 0.3, 0.86], [0.91]),
        (32, 0.001, [0.02, 0.07], [0.005, 0.1]),
        (32, 0.005, [0.001, 0.5, 0.999], []),
    ],
)
def test_zen_as_built_wins_in_an_interval_of_overlaps(
    ranks: int, density: float, won: list[float], lost: list[float]
) -> None:
    """Zen's flat bitmap costs a bit an element at any density: by actual bytes it loses where little is sent."""
    rivals: list[Scheme[Any]] = [DOUBLING_IN_LISTS, ZEN_AS_BUILT]
    assert [chosen(rivals, density, overlap, ranks) for overlap in won] == [ZEN_AS_BUILT] * len(won)
    assert [chosen(rivals, density, overlap, ranks) for overlap in lost] == [DOUBLING_IN_LISTS] * len(lost)


TABLE = (TensorSpec((100_000, 64), torch.float32),)


def rows(count: float) -> DensityProfile:
    return DensityProfile(100_000, count, {2: 1.9, 4: 3.4, 8: 5.6}, most_rows=count)


def test_latency_decides_where_little_travels() -> None:
    slow_start = CostModel(alpha_s=1e-3, bandwidth_bytes_per_s=1e8)
    rivals = [BalancedParallelism(), AGSparse()]
    few, many = (rows(10.0),), (rows(20_000.0),)
    placement = Placement.one_per_node(8)
    assert fastest(rivals, TABLE, few, placement, slow_start).chosen.scheme == AGSparse(), "one stage less"
    assert fastest(rivals, TABLE, many, placement, slow_start).chosen.scheme == BalancedParallelism()


def test_a_present_scheme_is_left_only_for_a_gain_above_the_margin() -> None:
    rivals: list[Scheme[Any]] = [BALANCED_IN_LISTS, DOUBLING_IN_LISTS]
    flat, placement = (TensorSpec((ELEMENTS,), torch.float32),), Placement.one_per_node(8)
    slightly_better, far_better = (popular(0.001, 0.07, 8),), (popular(0.001, 0.5, 8),)
    present = DOUBLING_IN_LISTS
    assert fastest(rivals, flat, slightly_better, placement, BYTES_ONLY).chosen.scheme == BALANCED_IN_LISTS
    kept = fastest(rivals, flat, slightly_better, placement, BYTES_ONLY, current=present)
    assert kept.chosen.scheme == present
    assert kept.choices[0].scheme == BALANCED_IN_LISTS, "it is still said which would be faster"
    assert fastest(rivals, flat, far_better, placement, BYTES_ONLY, current=present).chosen.scheme == BALANCED_IN_LISTS
    no_margin = fastest(rivals, flat, slightly_better, placement, BYTES_ONLY, current=present, margin=0.0)
    assert no_margin.chosen.scheme == BALANCED_IN_LISTS
    unknown = fastest(rivals, flat, slightly_better, placement, BYTES_ONLY, current=AllReduce())
    assert unknown.chosen.scheme == BALANCED_IN_LISTS


def test_the_margin_holds_while_rows_drift() -> None:
    """The same scheme planned for other rows is the same scheme; without that every step would choose anew."""
    cost, placement = CostModel(alpha_s=1.75e-4, bandwidth_bytes_per_s=1e8), Placement.one_per_node(8)

    def choose(count: float, current: Scheme[Any] | None) -> Scheme[Any]:
        profiles = (rows(count),)
        rivals = [scheme.planned_for(profiles) for scheme in (BalancedParallelism(), AGSparse())]
        return fastest(rivals, TABLE, profiles, placement, cost, current=current).chosen.scheme

    names, drifting, present = set(), set(), choose(350.0, None)
    for count in (350.0, 450.0, 351.0, 451.0, 350.0):
        drifting.add(choose(count, None).name)
        present = choose(count, present)
        names.add(present.name)
    assert len(drifting) == 2, "the case must tell: without a margin the choice changes"
    assert len(names) == 1


def test_a_choice_among_nothing_and_a_margin_that_is_no_share_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one scheme"):
        fastest([], TABLE, (rows(1.0),), Placement.one_per_node(2), BYTES_ONLY)
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 1"):
        fastest([AGSparse()], TABLE, (rows(1.0),), Placement.one_per_node(2), BYTES_ONLY, margin=1)


def test_of_schemes_that_are_about_as_fast_the_first_is_taken() -> None:
    placement, known = Placement.one_per_node(4), (rows(50.0),)
    first, second = BalancedParallelism(), AGSparse()
    times = [choice.seconds for choice in select([first, second], TABLE, known, placement, BYTES_ONLY).choices]
    apart = times[1] / times[0] - 1
    assert apart > 0.001
    slower = select([first, second], TABLE, known, placement, BYTES_ONLY).choices[1].scheme
    faster = second if slower == first else first
    for tolerance, expected in ((0.0, faster), (0.9 * apart, faster), (1.1 * apart, slower)):
        chosen = select([slower, faster], TABLE, known, placement, BYTES_ONLY, tolerance=tolerance).chosen.scheme
        assert chosen == expected
