"""Flat buckets on nodes of several ranks: sums inside nodes come first only where that is predicted to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsync.comm import LocalGroup, run_local
from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import Compute
from gradsync.planner import default_plan, default_plans
from gradsync.planner.default.flat import dense_schemes, element_schemes, flat_scheme, is_dense
from gradsync.planner.default.network import INSIDE_NODES, Network
from gradsync.planner.default.revise import revised
from gradsync.planner.pieces import Pieces, at_once
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    Hierarchical,
    ReduceScatter,
    Scheme,
    SparseReduceScatter,
)
from gradsync.schemes.selection import CHANGE_MARGIN, TOLERANCE
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile
from gradsync.tuning import kernels
from gradsync.tuning.default import measured_network
from gradsync.tuning.kernels import kernel_costs

NODES = Placement.regular(2, 2)
COST = CostModel(alpha_s=1e-4, bandwidth_bytes_per_s=25e6, intra=Link(2e9, 1e-5), stage_s=1e-3)
NETWORK = Network(COST, NODES)
NEARLY_AS_SLOW = Network(replace(COST, intra=Link(68e6, 1e-5)), NODES)
ONE_A_NODE = Network(COST, Placement.one_per_node(4))
SPARSE_INSIDE = dict.fromkeys(("scatter_elements", "sum_scattered", "gather_elements"), KernelCost(0.0, 5e-9))
SLOW_KERNELS = Network(replace(COST, kernels=SPARSE_INSIDE), NODES)
OVER_NODES = Hierarchical(ReduceScatter(), AllReduce(), 2)
NUMEL = 1 << 20


def dense(name: str, numel: int = NUMEL, dtype: torch.dtype = torch.float32, position: int = 0) -> ParameterProfile:
    return ParameterProfile(name, TensorSpec((numel,), dtype), sparse=False, position=position)


def sampled(name: str, density: float) -> ParameterProfile:
    """Returns a profile with this density, whose ranks have some of their non-zero elements in common."""
    growth = {2: 1.4, 4: 2.0} if density < 0.4 else {2: 1.0, 4: 1.0}
    return replace(dense(name), elements=DensityProfile(NUMEL, density * NUMEL, growth, most_rows=density * NUMEL))


def seconds(scheme: Scheme[Any], profile: ParameterProfile, network: Network) -> float:
    known = () if profile.elements is None else (profile.elements,)
    spec = TensorSpec((profile.tensor.numel,), profile.tensor.dtype)
    return network.cost.total_s(scheme.planned_for(known).steps((spec,), known, network.placement), network.placement)


def schemes_of(plan: Plan) -> list[Scheme[Any]]:
    return [bucket.scheme for bucket in plan.buckets]


def test_a_dense_bucket_is_summed_inside_nodes_first_where_links_are_fast_there() -> None:
    """Each node's link carries three halves of the bucket, or the whole bucket once."""
    assert schemes_of(default_plan([dense("w")], 4, NETWORK)) == [OVER_NODES]
    assert seconds(OVER_NODES, dense("w"), NETWORK) < 0.75 * seconds(AllReduce(), dense("w"), NETWORK)


@pytest.mark.parametrize(
    ("profile", "network"),
    [
        (dense("w"), Network(replace(COST, intra=None), NODES)),  # no faster inside: the way there costs as much
        (dense("w", 1000), NETWORK),  # three stages have more latency than one
        (dense("w", dtype=torch.bfloat16), NETWORK),  # float32 between the nodes, not to round twice
        (dense("w"), NEARLY_AS_SLOW),  # saves a little, but no tenth
        (dense("w"), ONE_A_NODE),
        (dense("w"), Network(COST, Placement((0, 0, 0, 1)))),
        (dense("w"), None),
    ],
)
def test_a_dense_bucket_is_left_to_the_transport_where_nodes_save_no_tenth(
    profile: ParameterProfile, network: Network | None
) -> None:
    assert schemes_of(default_plan([profile], 4, network)) == [AllReduce()]


def test_a_little_saved_is_no_reason_to_leave_the_plain_scheme() -> None:
    share = seconds(OVER_NODES, dense("w"), NEARLY_AS_SLOW) / seconds(AllReduce(), dense("w"), NEARLY_AS_SLOW)
    assert 1 - CHANGE_MARGIN < share < 1 / (1 + TOLERANCE)  # else the first of nearly equal ones was taken anyway


def test_elements_are_summed_inside_nodes_first_unless_they_are_very_few() -> None:
    (few,) = schemes_of(default_plan([sampled("w", 0.002)], 4, NETWORK))
    assert few.planned_for(()) == BalancedElements()
    profile = sampled("w", 0.05)
    (scheme,) = schemes_of(default_plan([profile], 4, NETWORK))
    assert scheme.planned_for(()) == Hierarchical(SparseReduceScatter(), BalancedElements(), 2)
    assert scheme.has_room_for([profile.elements] if profile.elements else [])
    rivals = {s: seconds(s, profile, NETWORK) for s in (*element_schemes(NODES), *dense_schemes(NODES))}
    assert rivals[scheme.planned_for(())] == min(rivals.values())


def test_many_elements_are_summed_inside_nodes_densely_where_kernels_cost_more_than_bytes() -> None:
    """Zen always does so: the link inside a node is so fast that sending less over it saves nothing."""
    profile = sampled("w", 0.1)
    assert profile.elements is not None
    network = Network(replace(SLOW_KERNELS.cost, intra=Link(1e11, 1e-6)), NODES)
    flat = TensorSpec((NUMEL,), torch.float32)
    chosen = flat_scheme(element_schemes(NODES), flat, (profile.elements,), network)
    assert chosen.planned_for(()) == Hierarchical(ReduceScatter(), BalancedElements(), 2)


def test_elements_must_save_half_of_what_the_better_dense_scheme_takes() -> None:
    """Half of an all-reduce is not enough where hierarchical sums take two thirds of an all-reduce."""
    for density in (0.2, 0.3, 0.35, 0.4):
        profile = sampled("w", density)
        sparse_s = min(seconds(s, profile, NETWORK) for s in element_schemes(NODES))
        (scheme,) = schemes_of(default_plan([profile], 4, NETWORK))
        assert is_dense(scheme) == (sparse_s > 0.5 * seconds(OVER_NODES, profile, NETWORK)), density
    between = sampled("w", 0.3)
    assert seconds(OVER_NODES, between, NETWORK) > min(seconds(s, between, NETWORK) for s in element_schemes(NODES))


def test_the_plain_schemes_are_tried_too_where_others_are_expected_to_be_faster() -> None:
    profiles = [dense("w", 6 * NUMEL, position=1), sampled("found", 0.05)]
    plans = default_plans(profiles, 4, NETWORK)
    over_nodes = [[isinstance(scheme, Hierarchical) for scheme in schemes_of(plan)] for plan in plans]
    assert all(over_nodes[0])
    assert [False] * len(over_nodes[0]) in over_nodes
    assert len(default_plans(profiles, 4, ONE_A_NODE)) < len(plans), "nothing more to try without nodes"
    assert not any(isinstance(s, Hierarchical) for p in default_plans(profiles, 4, ONE_A_NODE) for s in schemes_of(p))


def test_a_dense_bucket_crosses_between_nodes_before_the_next_one_is_ready() -> None:
    profiles = [dense(name, position=position) for position, name in enumerate("abc")]
    plan = default_plan(profiles, 4, NETWORK, bucket_bytes=1)
    push, across, pull = OVER_NODES.stages(4)
    assert plan.order == (
        ("0", push),
        ("0", across),
        ("1", push),
        ("1", across),
        ("0", pull),
        ("2", push),
        ("2", across),
        ("1", pull),
        ("2", pull),
    )


def test_tables_keep_their_turns_between_dense_buckets_that_go_over_nodes() -> None:
    density = DensityProfile(1000, 300.0, {2: 1.0, 4: 1.0})
    words = ParameterProfile("words", TensorSpec((1000, 16), torch.float32), sparse=True, density=density, position=1)
    plan = default_plan([dense("late", position=2), words, dense("early")], 4, NETWORK)
    assert [bucket.names for bucket in plan.buckets] == [["early"], ["words"], ["late"]]
    tables = [f"words {stage}" for stage in plan.buckets[1].scheme.stages(4)]
    push, across, pull = OVER_NODES.stages(4)
    turns = [f"{plan.buckets[int(bucket)].names[0]} {stage}" for bucket, stage in plan.order]
    assert [turn for turn in turns if turn.startswith("words")] == tables
    assert turns[:4] == [f"early {push}", f"early {across}", tables[0], f"early {pull}"]
    assert turns[-3:] == [f"late {push}", f"late {across}", f"late {pull}"]


def planned(profile: ParameterProfile, scheme: Scheme[Any]) -> Plan:
    known = [profile.elements] if profile.elements is not None else []
    return Plan.make({"w": profile.tensor}, 4, [(["w"], scheme.planned_for(known))])


def test_a_bucket_over_nodes_goes_dense_and_back() -> None:
    sparse, full = sampled("w", 0.05), sampled("w", 0.9)
    plan = planned(sparse, Hierarchical(SparseReduceScatter(), BalancedElements(), 2))
    to_dense = revised(plan, [sparse], [full], SLOW_KERNELS)
    assert schemes_of(to_dense) == [OVER_NODES]
    to_dense.check({"w": sparse.tensor}, 4)
    back = revised(to_dense, [full], [sparse], SLOW_KERNELS)
    assert schemes_of(back) == schemes_of(default_plan([sparse], 4, SLOW_KERNELS))
    assert not is_dense(schemes_of(back)[0])


def test_a_dense_bucket_over_nodes_becomes_sparse_only_for_half_of_its_time() -> None:
    full, thinner = sampled("w", 0.9), sampled("w", 0.3)
    ways = [seconds(s, thinner, NETWORK) for s in element_schemes(NODES)]
    assert 0.5 < min(ways) / seconds(OVER_NODES, full, NETWORK) < 1 - CHANGE_MARGIN
    plan = planned(full, OVER_NODES)
    assert revised(plan, [full], [thinner], NETWORK) == plan


@pytest.mark.parametrize("scheme", [*element_schemes(NODES), *dense_schemes(NODES)], ids=lambda scheme: scheme.title)
def test_without_a_change_a_flat_bucket_on_nodes_keeps_its_scheme(scheme: Scheme[Any]) -> None:
    """The scheme may be any that a trial has left."""
    known = sampled("w", 0.05)
    plan = planned(known, scheme)
    assert revised(plan, [known], [known], NETWORK) == plan


def test_elements_that_outgrow_their_room_across_nodes_get_more() -> None:
    before, now = sampled("w", 0.05), sampled("w", 0.1)
    plan = default_plan([before], 4, NETWORK)
    (roomier,) = schemes_of(revised(plan, [before], [now], NETWORK))
    assert roomier.planned_for(()) == schemes_of(plan)[0].planned_for(())
    assert roomier != schemes_of(plan)[0] and roomier.has_room_for([now.elements] if now.elements else [])


@pytest.mark.parametrize("placement", [NODES, Placement.one_per_node(4)])
def test_what_is_computed_inside_nodes_is_measured_where_plans_may_need_it(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(schemes: Sequence[Scheme[Any]], *_: object) -> Pieces[dict[str, KernelCost]]:
        yield
        return {scheme.name: KernelCost(0.0, 1e-9) for scheme in schemes}

    monkeypatch.setattr(kernels, "kernel_costs", costs)

    def rank_main(group: LocalGroup) -> set[str]:
        for each in (group, group.within_node(), group.across_nodes()):
            each.alpha_s, each.bytes_per_s = 1e-4, 1e8  # as if measured
        network = at_once(measured_network(group, 20.0))
        assert network is not None
        return set(network.cost.kernels)

    inside = {"reduce_scatter", "sparse_reduce_scatter"}
    for rehearsed in run_local(4, rank_main, placement=placement):
        assert rehearsed & inside == (inside if placement.is_hierarchy else set())
        assert {"all_reduce", "balanced_elements"} <= rehearsed


def test_rehearsals_tell_all_kernels_of_flat_plans_over_nodes() -> None:
    schemes = (*dense_schemes(ONE_A_NODE.placement), *element_schemes(ONE_A_NODE.placement), *INSIDE_NODES)
    known = at_once(kernel_costs(schemes, list))
    profile = sampled("w", 0.05)
    assert profile.elements is not None
    spec = (TensorSpec((NUMEL,), torch.float32),)
    for scheme in (*dense_schemes(NODES), *element_schemes(NODES)):
        steps = scheme.steps(spec, (profile.elements,), NODES)
        assert {step.kernel for step in steps if isinstance(step, Compute)} <= set(known), scheme.title


def test_tables_on_nodes_are_planned_as_before() -> None:
    density = DensityProfile(10_000, 500.0, {2: 1.0, 4: 1.0})
    words = ParameterProfile("words", TensorSpec((10_000, 16), torch.float32), sparse=True, density=density)
    for one_level in (False, True):
        (scheme,) = schemes_of(default_plan([words], 4, NETWORK, one_level=one_level))
        assert isinstance(scheme, Hierarchical) and isinstance(scheme.intra, BalancedParallelism)
