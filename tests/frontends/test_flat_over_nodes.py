"""Flat buckets on nodes of several ranks, from the first step through a revision; ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gradsync.comm import Group, LocalGroup, run_local
from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel
from gradsync.engine import plan_control
from gradsync.engine.bucket_run import BucketStatistics
from gradsync.engine.engine import Engine
from gradsync.planner.default.flat import is_dense
from gradsync.planner.default.network import Network
from gradsync.schemes import AllReduce, BalancedElements, Hierarchical, ReduceScatter, Scheme, SparseReduceScatter
from gradsync.tensors.density import DensityProfile, ParameterProfile
from gradsync.tuning.default import MeasuringPlanner

SHAPES = {"first": (300, 100), "few": (120_000,), "last": (70_000,)}
NODES = Placement.regular(2, 2)
LOOK_STEPS = 3


class SlowNetwork(MeasuringPlanner):
    """A planner that takes the network's costs as measured, and tries no plans."""

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Any:
        return super().__call__(profiles, world_size)[0]

    def measure(self, group: Group, timeout_s: float) -> Iterator[None]:
        cost = CostModel(alpha_s=1e-4, bandwidth_bytes_per_s=10e6, intra=Link(2e9, 1e-5), stage_s=1e-4)
        self.network = Network(cost, group.placement)
        return iter(())


def gradients(rank: int, step: int, density: float) -> dict[str, Tensor]:
    """Returns small whole numbers, whose mean over four ranks is exact; each rank fills other elements of `few`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    found = {name: torch.randint(-8, 9, shape, generator=generator).float() for name, shape in SHAPES.items()}
    found["few"] *= torch.rand(SHAPES["few"], generator=generator) < density
    return found


Schemes = dict[str, Scheme[Any]]  # by the names in a bucket


def train(group: LocalGroup, densities: Sequence[float]) -> tuple[list[Schemes], list[BucketStatistics]]:
    """Trains and compares each gradient with the mean; returns the schemes, and the bytes sent and predicted."""
    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    running = Engine(parameters, group, SlowNetwork(), timeout_s=20)
    schemes = []
    for step, density in enumerate(densities):
        running.begin()
        mine = gradients(group.rank, step, density)
        for name in reversed(SHAPES):
            running.load(name, mine[name])
        running.finish()
        everyone = [gradients(rank, step, density) for rank in range(group.size)]
        for name in SHAPES:
            mean = torch.stack([each[name] for each in everyone]).mean(dim=0)
            assert torch.equal(running.unload(name, None, sparse=False), mean), (name, step)
        schemes.append({" ".join(b.names): b.scheme for b in running.plan.buckets})
    statistics = running.running_plan.statistics()
    running.close()
    return schemes, statistics


def test_flat_buckets_are_summed_inside_nodes_first_and_give_the_mean_in_the_bytes_predicted() -> None:
    expected = {
        "last first": Hierarchical(ReduceScatter(), AllReduce(), 2),
        "few": Hierarchical(SparseReduceScatter(), BalancedElements(), 2),
    }
    for schemes, statistics in run_local(4, lambda group: train(group, [0.05] * 6), placement=NODES):
        assert {names: scheme.planned_for(()) for names, scheme in schemes[-1].items()} == expected
        for bucket in statistics:
            assert bucket.predicted_bytes is not None and bucket.steps > 0
            tolerance = 0.05 if bucket.names == ("few",) else 0.0
            assert bucket.sent_bytes == pytest.approx(bucket.predicted_bytes, rel=tolerance)


def test_a_bucket_that_fills_up_is_planned_anew_on_all_ranks_alike() -> None:
    jump = 6
    with mock.patch.object(plan_control, "LOOK_STEPS", LOOK_STEPS):
        everyone = run_local(4, lambda group: train(group, [0.05] * jump + [1.0] * 7), placement=NODES)
    histories = [schemes for schemes, _ in everyone]
    assert all(history == histories[0] for history in histories)
    before, after = histories[0][jump - 1]["few"], histories[0][-1]["few"]
    full = [DensityProfile(120_000, 120_000.0, {4: 1.0})]
    assert not before.has_room_for(full)
    assert is_dense(after) or after.has_room_for(full)


def test_a_dense_model_is_planned_by_costs_where_nodes_have_several_ranks() -> None:
    for placement, over_nodes in ((NODES, True), (Placement.one_per_node(4), False)):
        for schemes, _ in run_local(4, lambda group: train(group, [1.0] * 4), placement=placement):
            assert {isinstance(scheme, Hierarchical) for scheme in schemes[-1].values()} == {over_nodes}
