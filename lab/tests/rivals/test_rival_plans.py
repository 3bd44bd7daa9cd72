"""Rivals' plans for a measured job fit the model, compress the right gradients, and cut as their papers do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch

from gradsync.compressors import BlockInt, Compressor, ErrorFeedback, SharedBlockInt, TopK, dgc
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.planner.default.network import Network
from gradsync.planner.search.candidates import Search
from gradsync.planner.search.job import Job
from gradsync.planner.search.predict import predict
from gradsync.planner.search.ways import Constraints
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CoarseGrained, HalfPrecision, PowerSGD, Route, Scheme
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile
from gradsync_lab.rivals.rival_plans import (
    CountedCuts,
    FreeRatio,
    LazyPlans,
    best_cuts_plans,
    bytecomp_plans,
    byteps_plans,
    layerwise_plans,
    mergecomp_plans,
    mg_wfbp_plans,
    secopa_plans,
)

FEEDBACK, TOP = ErrorFeedback(BlockInt(8)), ErrorFeedback(TopK(0.01))
SHARED = ErrorFeedback(SharedBlockInt(4))
HALF = HalfPrecision(values="bfloat16")
LAYERS = 6
COMPRESSORS = (FEEDBACK, TOP, SHARED, dgc(0.01, momentum=0.0))
KERNELS = dict.fromkeys(
    [
        *(of.kernel(what) for what in ("observe", "compress", "decompress") for of in COMPRESSORS),
        *("scale", "round_values", "widen_values", "low_rank_rows", "low_rank_columns", "low_rank_product"),
        *("take_chunks", "put_chunks"),
    ],
    KernelCost(2e-4, 1e-9),
)


def dense(name: str, position: int, *shape: int) -> ParameterProfile:
    return ParameterProfile(name, TensorSpec(shape, torch.float32), sparse=False, position=position)


def job(placement: Placement | None = None, bandwidth_bytes_per_s: float = 25e6, stage_s: float = 1e-3) -> Job:
    """Returns a job of weights with a bias before each, the last ones first, and a table in the middle."""
    profiles = [
        p
        for layer in range(LAYERS)
        for p in (
            dense(f"{layer}.bias", 2 * layer + (layer >= LAYERS // 2), 128),
            dense(f"{layer}.weight", 2 * layer + 1 + (layer >= LAYERS // 2), 128, 256),
        )
    ]
    rows = DensityProfile(1000, 10.0, {4: 2.0}, "same", 10.0)
    spec = TensorSpec((1000, 8), torch.float32)
    profiles.append(ParameterProfile("table", spec, sparse=True, density=rows, position=LAYERS))
    ready_s = {p.name: 1e-3 * (p.position + 1) for p in profiles}
    cost = CostModel(3e-4, bandwidth_bytes_per_s, kernels=KERNELS, stage_s=stage_s)
    return Job(tuple(profiles), ready_s, 0.015, Network(cost, placement or Placement.one_per_node(4)))


def only(search: Search, lossy: Compressor | Scheme, here: Job, *, always: bool = True, **settings: bool) -> Plan:
    (plan,) = search(here, Constraints((lossy,), always=always, **settings))
    plan.check({p.name: p.tensor for p in here.profiles}, here.world_size)
    assert predict(plan, here).seconds >= 0.015
    return plan


def compressed(plan: Plan) -> list[list[str]]:
    """Returns the names in each lossy bucket."""
    return [bucket.names for bucket in plan.buckets if not bucket.scheme.traits.exact]


@pytest.mark.parametrize("lossy", [TOP, HalfPrecision(), PowerSGD(2)], ids=str)
def test_layer_wise_each_gradient_that_may_be_is_compressed_in_a_bucket_of_its_own(
    lossy: Compressor | Scheme,
) -> None:
    names = compressed(only(layerwise_plans, lossy, job()))
    assert sorted(names) == sorted([[f"{layer}.{what}"] for layer in range(LAYERS) for what in ("bias", "weight")])


@pytest.mark.parametrize("count", [1, 2, 5, LAYERS])
@pytest.mark.parametrize("matrices_only", [True, False])
def test_there_are_as_many_buckets_of_compressed_gradients_as_asked_for(count: int, matrices_only: bool) -> None:
    plan = only(CountedCuts(count), TOP, job(), matrices_only=matrices_only)
    names = compressed(plan)
    assert len(names) == count
    assert sum(map(len, names)) == (LAYERS if matrices_only else 2 * LAYERS)
    in_ready_order = [name for bucket in names for name in bucket]
    assert in_ready_order == sorted(in_ready_order), "buckets of gradients that are ready one after another"
    biases = [bucket.names for bucket in plan.buckets if bucket.scheme == AllReduce()]
    assert sum(map(len, biases)) == (LAYERS if matrices_only else 0), "which part no buckets of what is compressed"


def test_the_best_cuts_are_the_best_of_all_numbers_of_buckets() -> None:
    here = job(stage_s=4e-3)
    curve = [only(CountedCuts(count), FEEDBACK, here) for count in range(1, 2 * LAYERS + 1)]
    seconds = [predict(plan, here).seconds for plan in curve]
    best = predict(only(best_cuts_plans, FEEDBACK, here), here).seconds
    assert min(seconds) <= best < 1.05 * min(seconds), "by the model of the cuts, which predictions know more than"
    assert best < seconds[-1], "each bucket waits for all ranks"


def test_as_many_buckets_as_there_are_no_gradients_for_are_refused() -> None:
    with pytest.raises(ValueError, match=f"7 buckets .* asked for; there are {LAYERS} gradients to compress"):
        only(CountedCuts(7), TOP, job(), matrices_only=True)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        CountedCuts(0)
    with pytest.raises(ValueError, match="no gradient of the job may be compressed; allowed is nothing"):
        layerwise_plans(job(), Constraints())


def test_mergecomp_gathers_few_buckets_of_everything() -> None:
    here = job(stage_s=4e-3)
    plan = only(mergecomp_plans, TOP, here)
    names = compressed(plan)
    assert 1 <= len(names) <= 4 and sum(map(len, names)) == 2 * LAYERS
    assert {b.scheme.name for b in plan.buckets if b.names in names} == {"compressed_all_gather"}
    shared = only(mergecomp_plans, SHARED, here)
    assert {b.scheme.name for b in shared.buckets if len(b.names) > 1} == {"compressed_all_reduce"}


def test_mg_wfbp_merges_as_latency_asks_for_and_loses_nothing() -> None:
    numbers = []
    for stage_s in (0.0, 5e-4, 1.0):
        (plan,) = mg_wfbp_plans(job(stage_s=stage_s, bandwidth_bytes_per_s=1e12), Constraints((TOP,), always=True))
        assert not compressed(plan)
        numbers.append(sum(bucket.scheme == AllReduce() for bucket in plan.buckets))
    assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1] == 1


def test_lazy_buckets_are_larger_where_latency_is_and_lose_what_is_asked_for() -> None:
    for lossy, scheme in (((), AllReduce()), ((HALF,), HALF)):
        numbers = []
        for stage_s in (0.0, 5e-4, 1.0):
            here = job(stage_s=stage_s, bandwidth_bytes_per_s=1e9)
            (plan,) = LazyPlans()(here, Constraints(lossy, always=bool(lossy)))
            numbers.append(sum(bucket.scheme == scheme for bucket in plan.buckets))
        assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1] == 1


@pytest.mark.parametrize(("nbytes", "buckets"), [(0.0, LAYERS * 2), (inf, 1)])
def test_lazy_buckets_are_of_one_gradient_or_all_of_them(nbytes: float, buckets: int) -> None:
    (plan,) = LazyPlans(nbytes)(job(), Constraints())
    assert sum(bucket.scheme == AllReduce() for bucket in plan.buckets) == buckets
    with pytest.raises(ValueError, match="LazyPlans.nbytes must be a number from 0 on or None, got -1"):
        LazyPlans(-1)


def test_the_share_of_chunks_is_what_travels_for_free() -> None:
    """All chunks are sent, without loss, where the link is fast, and the least share allowed where the link is slow."""
    chunks = CoarseGrained(ratio=0.1, chunk=64)
    allowed = Constraints((chunks,))
    shares: list[Any] = []
    for bandwidth in (1e12, 4e8, 2e8, 1e4):
        (plan,) = FreeRatio()(job(bandwidth_bytes_per_s=bandwidth), allowed)
        schemes = [bucket.scheme for bucket in plan.buckets]
        shares.append(min([s.ratio for s in schemes if isinstance(s, CoarseGrained)], default=None))
    assert shares[0] is None and shares[-1] <= 0.15, "of few chunks these are as many"
    assert 1 > shares[1] > shares[2] >= shares[3]
    for wrong in (Constraints(), Constraints((chunks, HALF))):
        with pytest.raises(ValueError, match="FreeRatio needs CoarseGrained as the one lossy way"):
            FreeRatio()(job(), wrong)
    with pytest.raises(ValueError, match=r"FreeRatio.ratios must be in \(0, 1\]"):
        FreeRatio(ratios=(2.0,))


def test_mg_wfbp_does_not_look_for_zeros() -> None:
    here = job()
    rows = DensityProfile(128, 2.0, {4: 3.0}, "rows", 2.0)
    here = replace(here, profiles=tuple(replace(p, density=rows) if p.name == "1.weight" else p for p in here.profiles))
    (plan,) = mg_wfbp_plans(here, Constraints())
    (bucket,) = (bucket for bucket in plan.buckets if "1.weight" in bucket.names)
    assert bucket.scheme == AllReduce()


def test_what_was_found_sparse_by_rows_is_compressed_by_nobody() -> None:
    """Gradients found to be sparse by rows travel as tables, without residuals."""
    rows = DensityProfile(128, 2.0, {4: 3.0}, "rows", 2.0)
    here = job()
    here = replace(here, profiles=tuple(replace(p, density=rows) if p.name == "1.weight" else p for p in here.profiles))
    for search in (layerwise_plans, best_cuts_plans, CountedCuts(2), mergecomp_plans):
        assert sum(map(len, compressed(only(search, TOP, here)))) == 2 * LAYERS - 1
        assert not any("1.weight" in names for names in compressed(only(search, TOP, here)))
    for search in (secopa_plans, byteps_plans, bytecomp_plans):
        assert not any("1.weight" in names for names in compressed(only(search, TOP, here, always=False)))


def test_hipress_rule_compresses_what_costs_more_to_send_than_to_code() -> None:
    slow = compressed(only(secopa_plans, FEEDBACK, job(bandwidth_bytes_per_s=5e6), always=False))
    assert slow == [[f"{layer}.weight"] for layer in range(LAYERS)], "each alone, and no biases"
    assert not compressed(only(secopa_plans, FEEDBACK, job(bandwidth_bytes_per_s=1e10), always=False))


@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_byteps_codes_on_other_cores_whatever_has_64_kib(nodes: tuple[int, ...]) -> None:
    plan = only(byteps_plans, FEEDBACK, job(Placement(nodes), bandwidth_bytes_per_s=1e15), always=False)
    assert compressed(plan) == [[f"{layer}.weight"] for layer in range(LAYERS)]
    for bucket in plan.buckets:
        scheme = bucket.scheme
        if isinstance(scheme, Route):
            assert [word for word in scheme.tasks if "@" in word] == ["compress@offload", "decompress@offload"] * 2
            assert (scheme.tasks[0], scheme.ranks_per_node) == (
                ("reduce_scatter", 2) if nodes[0] == nodes[1] else ("compress@offload", 1)
            )


def test_bytecomp_takes_a_leaf_for_each_gradient_alone_where_that_shortens_the_step() -> None:
    for bandwidth_bytes_per_s, compresses in ((5e6, True), (1e15, False)):
        here = job(bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        plan = only(bytecomp_plans, FEEDBACK, here, always=False)
        assert all(len(bucket.names) == 1 for bucket in plan.buckets)
        assert bool(compressed(plan)) is compresses
        for bucket in plan.buckets:
            scheme = bucket.scheme
            if isinstance(scheme, Route) and not scheme.traits.exact:
                devices = {word.partition("@")[2] for word in scheme.tasks if "@" in word}
                assert len(devices) == 1, "a leaf is offloaded as a whole"


def test_routes_carry_one_compressor_whose_payloads_they_can() -> None:
    for search in (secopa_plans, byteps_plans, bytecomp_plans):
        with pytest.raises(ValueError, match="takes one compressor, .* Constraints.lossy is"):
            search(job(), Constraints((HalfPrecision(),)))
        with pytest.raises(ValueError, match="all-reduce"):
            search(job(), Constraints((SHARED,)))


def test_turns_come_in_the_order_in_which_buckets_are_ready() -> None:
    here = job()
    plan = only(CountedCuts(3), TOP, here, matrices_only=True)
    last_s = [max(here.ready_s[name] for name in bucket.names) for bucket in plan.buckets]
    assert all(before <= after for before, after in pairwise(last_s))
