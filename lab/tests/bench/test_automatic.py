"""Names of planning methods are split into a lossy way and a search, or give a clear error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsync.compressors import Cast, ErrorFeedback, MomentumCorrection, SharedBlockInt, TopK
from gradsync.planner import candidate_plans
from gradsync.planner.default.named import fit_optimizer
from gradsync.planner.search.ways import Constraints
from gradsync.schemes import CoarseGrained, HalfPrecision
from gradsync.schemes.coarse_names import MOMENTUM, coarse
from gradsync_lab.bench.automatic import AUTOMATIC, NameParts, automatic, parted
from gradsync_lab.bench.methods import METHODS, method
from gradsync_lab.rivals.rival_plans import LazyPlans, best_cuts_plans, bytecomp_plans, layerwise_plans, mergecomp_plans
from lab.tests.rivals.test_rival_plans import compressed, job

CHUNKS = CoarseGrained(ratio=0.1, scoring="agreement", freeze=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16_cuts", NameParts("bf16", "cuts")),
        ("dgc0.01_cuts3", NameParts("dgc0.01", "cuts", 3)),
        ("topk0.01_no_feedback_layerwise", NameParts("topk0.01_no_feedback", "layerwise")),
        ("int8_shared_mergecomp", NameParts("int8_shared", "mergecomp")),
        ("randomk_own0.05_bytecomp", NameParts("randomk_own0.05", "bytecomp")),
        ("powersgd2_cuts12", NameParts("powersgd2", "cuts", 12)),
        ("topk0.01", None),
        ("int8_shared", None),
        ("randomk_own0.01", None),
        ("topk0.01_no_feedback", None),
        ("ddp_bf16", None),
        ("nothing_cuts", None),
        ("cuts", None),
    ],
)
def test_a_name_is_a_lossy_way_and_a_search(name: str, expected: NameParts | None) -> None:
    assert parted(name) == expected


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("topk0.01_cutz", "unknown search 'cutz' in the method 'topk0.01_cutz'; there are NAME_layerwise, NAME_cuts"),
        ("topk0.01_cuts0", "a whole number of buckets from 1 on, got '0'"),
        ("topk0.01_cuts2.5", "a whole number of buckets from 1 on, got '2.5'"),
        ("topk0.01_cuts-1", "a whole number of buckets from 1 on, got '-1'"),
        ("topk7_cuts", r"TopK.ratio must be in \(0, 1\], got 7"),
        (
            "signum_secopa",
            "signum needs a learning rate for votes, which does not suit the gradients that secopa leaves dense",
        ),
        ("powersgd2_bytecomp", "powersgd2 is a scheme without payloads; bytecomp needs a compressor"),
        ("nothing_cuts", r"unknown method 'nothing_cuts'; .* searches: NAME_layerwise, .* NAME_cutsY with exactly Y"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_what_there_is(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method(name)


@pytest.mark.parametrize(
    ("name", "search", "constraints"),
    [
        ("bf16_cuts", candidate_plans, Constraints((HalfPrecision(values="bfloat16"),), always=True)),
        ("bf16_mergecomp", mergecomp_plans, Constraints((HalfPrecision(values="bfloat16"),), always=True)),
        ("lazy_bf16", LazyPlans(), Constraints((HalfPrecision(values="bfloat16"),), always=True)),
        ("csc0.1_lazy", LazyPlans(), Constraints((CHUNKS,), always=True)),
        ("topk0.01_layerwise", layerwise_plans, Constraints((ErrorFeedback(TopK(0.01)),), always=True)),
        ("bf16_bytecomp", bytecomp_plans, Constraints((Cast("bfloat16"),))),
        ("int8_shared_cuts", candidate_plans, Constraints((ErrorFeedback(SharedBlockInt(3)),), always=True)),
    ],
)
def test_what_a_name_plans_by(name: str, search: Any, constraints: Constraints) -> None:
    found = automatic(name)
    assert found is not None and not method(name).exact
    planner = found.planner(3)
    assert (planner.search, planner.constraints, planner.must_plan) == (search, constraints, True)


def test_every_name_without_a_compressor_is_a_method_of_its_own() -> None:
    assert AUTOMATIC.keys() <= METHODS.keys()
    assert METHODS["mg_wfbp"].exact and METHODS["auto"].exact and not METHODS["auto_lossy"].exact


def test_momentum_is_the_compressors_and_vectors_keep_the_optimizers() -> None:
    way = method("dgc0.01_cuts")
    weight, bias = torch.nn.Parameter(torch.zeros(4, 4)), torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9)
    assert way.lossy == "dgc0.01" and fit_optimizer(way.lossy, optimizer) == 0.9
    found = automatic("dgc0.01_cuts", momentum=0.9)
    assert found is not None
    planner = found.planner(4)
    (lossy,) = planner.constraints.lossy
    assert isinstance(lossy, MomentumCorrection) and lossy.momentum == 0.9
    assert planner.constraints.matrices_only and planner.search is best_cuts_plans, "vectors part no buckets"


def test_a_number_of_buckets_is_planned_for() -> None:
    found = automatic("dgc0.01_cuts3")
    assert found is not None
    planner = found.planner(4)
    (plan,) = planner.search(job(), planner.constraints)
    assert len(compressed(plan)) == 3


def test_a_compressor_with_momentum_is_refused_where_only_some_gradients_are_compressed() -> None:
    found = automatic("dgc0.01_secopa")
    assert found is not None
    with pytest.raises(ValueError, match="keeps momentum, .* automatic plans cannot try it"):
        found.planner(4)


def test_words_behind_a_ratio_of_chunks_change_what_they_say() -> None:
    assert coarse("csc0.1", 0.0) == CHUNKS
    assert coarse("csc0.25_bf16_exact", 0.0) == replace(
        CHUNKS, ratio=0.25, scheme=HalfPrecision(values="bfloat16"), choice="exact"
    )
    assert coarse("csc0.1_warm", 0.0) == replace(CHUNKS, warmup=(1.0, 0.5, 0.25), steps_per_ratio=20)
    assert coarse("csc0.1_unmasked", 0.5) == replace(CHUNKS, freeze=False, momentum=0.5, masking=False)
    assert coarse("csc0.1_cuts", 0.0) is coarse("csc", 0.0) is coarse("topk0.1", 0.0) is None
    with pytest.raises(ValueError, match=r"must be in \(0, 1\], got 2"):
        method("csc2")


@pytest.mark.parametrize(("name", "taken"), [("csc0.1", 0.0), ("csc0.1_dgc", MOMENTUM)])
def test_momentum_is_taken_from_what_travels_in_chunks(name: str, taken: float) -> None:
    large, small = torch.nn.Parameter(torch.zeros(200, 200)), torch.nn.Parameter(torch.zeros(80))
    optimizer = torch.optim.SGD([large, small], lr=0.1, momentum=MOMENTUM)
    assert fit_optimizer(name, optimizer) == taken
    momenta = {id(p): group["momentum"] for group in optimizer.param_groups for p in group["params"]}
    assert momenta == {id(large): MOMENTUM - taken, id(small): MOMENTUM}
