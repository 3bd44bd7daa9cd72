"""Candidates, ours and those of others: which of them the selection takes, by density and by the links of nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel
from gradsync.schemes import AllReduce, Hierarchical, Scheme
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import DensityProfile
from gradsync_lab.rivals.candidates import candidates
from tests.schemes.test_selection import ELEMENTS, TABLE, fastest, popular, rows

FAST_INSIDE = CostModel(1e-5, 1e9, memory_bytes_per_s=1e30, intra=Link(100e9, 1e-6))
SLOW_INSIDE = CostModel(1e-5, 1e9, memory_bytes_per_s=1e30, intra=Link(1e9, 1e-5))
NODES = Placement.regular(4, 4)


@pytest.mark.parametrize("layout", Layout)
def test_every_candidate_can_be_timed_and_the_fastest_is_taken(layout: Layout) -> None:
    specs = TABLE if layout is Layout.ROWS else (TensorSpec((100_000,), torch.float32),)
    profiles = (rows(1000.0),)
    schemes = candidates(layout, profiles, Placement.one_per_node(8))
    assert len(schemes) > 18
    assert all(scheme.traits.layout is layout for scheme in schemes)
    cost = CostModel(1e-4, 1e8)
    selection = fastest(schemes, specs, profiles, Placement.one_per_node(8), cost)
    seconds = [choice.seconds for choice in selection.choices]
    assert len(seconds) == len(schemes)
    assert seconds == sorted(seconds)
    assert selection.chosen is selection.choices[0]
    for choice in selection.choices:
        assert choice.seconds == cost.total_s(choice.scheme.steps(specs, profiles, Placement.one_per_node(8)))


def test_dense_gradients_are_all_reduced() -> None:
    flat, full = (TensorSpec((1 << 20,), torch.float32),), (DensityProfile(1 << 20, float(1 << 20)),)
    schemes = candidates(Layout.FLAT, full, Placement.one_per_node(8))
    assert fastest(schemes, flat, full, Placement.one_per_node(8), CostModel(1e-4, 1e8)).chosen.scheme == AllReduce()


def chosen_on_nodes(density: float, cost: CostModel) -> Scheme[Any]:
    flat, profile = (TensorSpec((ELEMENTS,), torch.float32),), (popular(density, max(density, 0.3), 16),)
    return fastest(candidates(Layout.FLAT, profile, NODES), flat, profile, NODES, cost).chosen.scheme


def test_where_links_inside_nodes_are_fast_sums_are_taken_there_first() -> None:
    """Dense or sparse in either stage, by density: nodes together are denser than their ranks."""
    found = {density: chosen_on_nodes(density, FAST_INSIDE) for density in (0.001, 0.1, 1.0)}
    assert all(isinstance(scheme, Hierarchical) for scheme in found.values())
    stages = {density: (s.intra.name, s.inter.name) for density, s in found.items() if isinstance(s, Hierarchical)}
    assert stages[1.0] == ("reduce_scatter", "all_reduce")
    assert stages[0.1] == ("sparse_reduce_scatter", "balanced_elements")
    assert stages[0.001][0] == "sparse_reduce_scatter"
    assert stages[0.001][1] != "all_reduce"


def test_where_links_inside_nodes_are_no_faster_a_dense_bucket_goes_round_one_ring() -> None:
    assert chosen_on_nodes(1.0, SLOW_INSIDE) == AllReduce()


def test_tables_are_summed_inside_nodes_first_where_that_saves_bytes_between_them() -> None:
    profiles = (DensityProfile(100_000, 5000.0, {2: 1.2, 4: 1.5, 8: 1.8, 16: 2.0}, most_rows=5000.0),)

    def chosen_for(cost: CostModel) -> Scheme[Any]:
        return fastest(candidates(Layout.ROWS, profiles, NODES), TABLE, profiles, NODES, cost).chosen.scheme

    assert isinstance(chosen_for(FAST_INSIDE), Hierarchical)
    assert not isinstance(chosen_for(SLOW_INSIDE), Hierarchical)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 0, 0, 0), (0, 0, 0, 1)])
def test_without_several_ranks_on_several_nodes_there_is_no_hierarchy_to_choose(
    layout: Layout, nodes: tuple[int, ...]
) -> None:
    found = candidates(layout, (rows(10.0),), Placement(nodes))
    assert not any(isinstance(scheme, Hierarchical) for scheme in found)


@pytest.mark.parametrize("layout", Layout)
def test_hierarchies_differ_by_title_and_can_be_timed(layout: Layout) -> None:
    profiles = (rows(1000.0),)
    specs = TABLE if layout is Layout.ROWS else (TensorSpec((100_000,), torch.float32),)
    found = [s for s in candidates(layout, profiles, NODES) if isinstance(s, Hierarchical)]
    assert len({scheme.title for scheme in found}) == len(found) >= 3
    assert all("sizes" not in stage for s in found for stage in s.stages(16)), "there is room for what they bring"
    assert all(FAST_INSIDE.total_s(s.steps(specs, profiles, NODES), NODES) > 0 for s in found)


@pytest.mark.parametrize("layout", Layout)
def test_candidates_differ_by_title(layout: Layout) -> None:
    titles = [scheme.title for scheme in candidates(layout, (), Placement.one_per_node(4))]
    assert len(set(titles)) == len(titles)


def test_candidates_for_16_bits_are_lossy() -> None:
    found = candidates(Layout.ROWS, (), Placement.one_per_node(4), values="bfloat16")
    assert not any(scheme.traits.exact for scheme in found)
