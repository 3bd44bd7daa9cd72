"""Plans are revised when densities have changed and revising pays; only default schemes are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.planner.default import plan as planning
from gradsync.planner.default.network import Network
from gradsync.planner.default.plan import default_plan, default_plans, timed_schemes
from gradsync.planner.default.revise import revised
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    PARAMETER_SERVER_OF_ROWS,
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    Hierarchical,
    Scheme,
)
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile
from gradsync.tuning.default import MeasuringPlanner

WORLD = 8
SLOW = Network(CostModel(alpha_s=1e-4, bandwidth_bytes_per_s=25e6), Placement.one_per_node(WORLD))
ROWS = 10_000


def table(rows: float, overlap: str, most: float = 0.0) -> ParameterProfile:
    """Returns the profile of a table whose ranks have the same rows, or each its own."""
    growth = {"same rows": {WORLD: 1.0}, "own rows": {WORLD: float(WORLD)}}[overlap]
    density = DensityProfile(ROWS, rows, growth, "a", most or rows)
    return ParameterProfile("t", TensorSpec((ROWS, 16), torch.float32), sparse=True, density=density)


def flat(density: float) -> ParameterProfile:
    elements = DensityProfile(1 << 20, density * (1 << 20), {WORLD: 1.5})
    return ParameterProfile("w", TensorSpec((1 << 20,), torch.float32), sparse=False, elements=elements)


def plan_of(profiles: Sequence[ParameterProfile], schemes: Sequence[Scheme[Any]]) -> Plan:
    specs = {p.name: p.tensor for p in profiles}
    return Plan.make(specs, WORLD, [([p.name], s) for p, s in zip(profiles, schemes, strict=True)])


def schemes_of(plan: Plan, profiles: Sequence[ParameterProfile]) -> list[Scheme[Any]]:
    plan.check({p.name: p.tensor for p in profiles}, WORLD)
    return [bucket.scheme for bucket in plan.buckets]


def fitting(scheme: Scheme[Any], profile: ParameterProfile) -> Scheme[Any]:
    assert profile.density is not None
    return scheme.planned_for([profile.density])


def test_rows_that_ranks_come_to_share_are_summed_by_owners() -> None:
    apart, shared = table(500, "own rows"), table(500, "same rows")
    plan = default_plan([apart], WORLD, SLOW)
    assert schemes_of(plan, [apart])[0].planned_for(()) != BalancedParallelism()
    (scheme,) = schemes_of(revised(plan, [apart], [shared], SLOW), [shared])
    assert scheme == fitting(BalancedParallelism(), shared)


def test_what_is_nearly_as_good_stays() -> None:
    known = table(500, "own rows")
    plan = plan_of([known], [fitting(AGSparse(), known)])
    ways = [price for _, price in prices(known)]
    assert 0 < min(ways) <= dict(prices(known))["agsparse"] < min(ways) / 0.9  # or there would be nothing to resist
    assert revised(plan, [known], [known], SLOW) == plan


def prices(profile: ParameterProfile) -> list[tuple[str, float]]:
    assert profile.density is not None
    return [
        (s.title, SLOW.cost.total_s(s.steps((profile.tensor,), (profile.density,), SLOW.placement)))
        for s in (fitting(s, profile) for s in timed_schemes(SLOW.placement))
    ]


@pytest.mark.parametrize("most", [500.0, 900.0])
def test_room_that_rows_have_outgrown_is_made_anew(most: float) -> None:
    before, now = table(400, "same rows"), table(450, "same rows", most)
    plan = plan_of([before], [fitting(BalancedParallelism(), before)])
    (scheme,) = schemes_of(revised(plan, [before], [now], SLOW), [now])
    had_room = most <= 400 * 1.5 + 16
    assert scheme == fitting(BalancedParallelism(), before if had_room else now)


@pytest.mark.parametrize("density", [0.012, 0.02])
def test_room_that_elements_have_outgrown_is_made_anew(density: float) -> None:
    known: list[Scheme[Any]] = []
    for each in (flat(0.01), flat(density)):
        assert each.elements is not None
        known.append(BalancedElements().planned_for([each.elements]))
    plan = plan_of([flat(0.01)], known[:1])
    (scheme,) = schemes_of(revised(plan, [flat(0.01)], [flat(density)], SLOW), [flat(density)])
    assert scheme == known[density > 0.015]


def test_a_bucket_found_sparse_goes_dense_and_back() -> None:
    sparse, dense = flat(0.01), flat(0.9)
    plan = plan_of([sparse], [BalancedElements()])
    to_dense = revised(plan, [sparse], [dense], SLOW)
    assert schemes_of(to_dense, [dense]) == [AllReduce()]
    (again,) = schemes_of(revised(to_dense, [dense], [sparse], SLOW), [sparse])
    assert again.planned_for(()) == BalancedElements().planned_for(())


def test_what_a_user_has_planned_otherwise_stays() -> None:
    shared = table(500, "same rows")
    for scheme in (PARAMETER_SERVER_OF_ROWS, BalancedElements(seed=3)):
        profile = shared if scheme is PARAMETER_SERVER_OF_ROWS else flat(0.9)
        plan = plan_of([profile], [scheme])
        assert revised(plan, [profile], [profile], SLOW) == plan


def test_flat_buckets_of_many_or_cut_parameters_stay() -> None:
    dense, specs = flat(0.001), {"w": flat(0.001).tensor}
    halves = [[("w", 0, 1 << 19)], [("w", 1 << 19, 1 << 20)]]
    plan = Plan.make(specs, WORLD, [(half, AllReduce()) for half in halves])
    assert revised(plan, [flat(0.9)], [dense], SLOW) == plan


def test_other_buckets_keep_their_turns() -> None:
    apart, profiles = [table(500, "own rows"), flat(0.9)], [table(500, "same rows"), flat(0.9)]
    plan = plan_of(apart, [fitting(AGSparse(), apart[0]), AllReduce()])
    assert plan.order == (("0", "gather"), ("1", "all_reduce"))
    changed = revised(plan, apart, profiles, SLOW)
    schemes_of(changed, profiles)  # a legal plan
    assert changed.order == (("0", "push"), ("0", "pull"), ("1", "all_reduce"))
    back = revised(changed, profiles, apart, SLOW)
    assert [bucket for bucket, _ in back.order if bucket == "1"] == ["1"]


def with_kernels(kernels: dict[str, KernelCost]) -> Network:
    return replace(SLOW, cost=replace(SLOW.cost, kernels=kernels))


def test_where_nodes_have_several_ranks_their_sums_are_among_the_rivals() -> None:
    known = table(500, "same rows")
    fast_inside = replace(SLOW.cost, intra=Link(1e12, 0.0))
    network = Network(fast_inside, Placement((0, 0, 0, 0, 1, 1, 1, 1)))
    (scheme,) = schemes_of(default_plan([known], WORLD, network), [known])
    assert isinstance(scheme, Hierarchical)  # else the link carries the rows of four ranks
    grown = table(5000, "same rows")
    made = default_plan([known], WORLD, network)
    (roomier,) = schemes_of(revised(made, [known], [grown], network), [grown])
    assert roomier == fitting(scheme.planned_for(()), grown)


def test_what_a_trial_left_is_not_taken_up_again_without_a_change() -> None:
    known = table(500, "same rows")
    best, *_, worst = [s for s, _ in sorted(prices(known), key=lambda priced: priced[1])]
    (slower,) = [s for s in timed_schemes(SLOW.placement) if s.title == worst]
    plan = plan_of([known], [fitting(slower, known)])
    assert dict(prices(known))[worst] > 1.2 * dict(prices(known))[best]
    assert revised(plan, [known], [known], SLOW) == plan


def test_kernels_that_take_long_change_what_is_planned() -> None:
    known = table(500, "same rows")
    by_bytes = MeasuringPlanner()([known], WORLD)[0]
    slow_sums = {name: KernelCost(0.5, 0.0) for name in ("stripe_rows", "sum_stripes", "join_stripes")}
    by_time = MeasuringPlanner(with_kernels(slow_sums))([known], WORLD)[0]
    assert schemes_of(by_bytes, [known])[0].planned_for(()) == BalancedParallelism()
    assert schemes_of(by_time, [known])[0].planned_for(()) != BalancedParallelism()


@pytest.mark.parametrize(("call_s", "worth", "tried"), [(0.0, 1.5, 2), (0.5, 1.5, 1), (0.0, 100.0, 3)])
def test_the_next_two_schemes_are_tried_where_they_are_not_far_off(
    call_s: float, worth: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "WORTH_A_TRIAL", worth)
    known = table(500, "same rows")
    slow = {name: KernelCost(call_s, 1e-10) for name in ("sum_rows", "sum_tables")}
    plans = default_plans([known], WORLD, with_kernels(slow))
    assert len({str(plan.buckets[0].scheme.planned_for(())) for plan in plans}) == tried
