"""Turns: a computation that can run during a transfer is not delayed by the plan's order."""

from __future__ import annotations

import torch

from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import FINISH
from gradsync.planner.default.network import Network
from gradsync.planner.search.job import Job
from gradsync.planner.search.predict import predict
from gradsync.planner.search.turns import with_best_turns
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CompressedAllGather
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import ParameterProfile

CODED = CompressedAllGather(ErrorFeedback(BlockInt(8)))
SPEC = TensorSpec((1 << 20,), torch.float32)
SLOW = {CODED.compressor.kernel(kernel): KernelCost(1e-5, 2e-8) for kernel in ("compress", "decompress")}


def job() -> Job:
    profiles = tuple(ParameterProfile(name, SPEC, sparse=False, position=n) for n, name in enumerate("abc"))
    network = Network(CostModel(3e-4, 25e6, kernels=SLOW), Placement.one_per_node(4))
    return Job(profiles, {"a": 0.01, "b": 0.02, "c": 0.03}, 0.03, network)


def test_encoding_goes_on_while_others_are_on_their_way() -> None:
    specs = {p.name: p.tensor for p in job().profiles}
    one_by_one = Plan.make(
        specs,
        4,
        [([name], CODED) for name in "abc"],
        [(str(number), stage) for number in range(3) for stage in (*CODED.stages(4), FINISH)],
    )
    better = with_best_turns(one_by_one, job())
    better.check(specs, 4)
    assert better.buckets == one_by_one.buckets and sorted(better.order) == sorted(one_by_one.order)
    assert predict(better, job()).seconds < 0.85 * predict(one_by_one, job()).seconds


def test_an_order_that_cannot_be_shortened_stays() -> None:
    specs = {p.name: p.tensor for p in job().profiles}
    plan = Plan.make(specs, 4, [([name], AllReduce()) for name in "abc"])
    assert with_best_turns(plan, job()) == plan
