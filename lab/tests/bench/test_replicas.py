"""Replicas in one process learn as ranks that average parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from gradsync import attach
from gradsync.comm.shuffle import grid, together, with_local_steps
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.planner import AveragingPlanner
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, Shuffled, to_expression
from gradsync_lab.bench.averaging import averaging_method
from gradsync_lab.bench.converge import planner_of, training
from gradsync_lab.bench.methods import method
from gradsync_lab.bench.reach import Learner
from gradsync_lab.bench.replicas import ALIKE_BYTES_PER_S, Replicas, mixings_of, rests_of
from gradsync_lab.workloads import load
from tests.world import Ranks

OPTIONS: dict[str, Any] = {"data": "digits", "batch_size": 8, "learning_rate": 0.01}
STEPS = 6


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def after_steps(name: str, ranks: int, **given: Any) -> Tensor:
    steps = training(load("alexnet", **OPTIONS), name, seed=3, ranks=ranks, **given)
    return parameters(next(islice(steps, STEPS - 1, None)))


def trained_by_ranks(name: str) -> Tensor:
    """Returns the mean model of ranks that average by the method."""
    task, rank, size = load("alexnet", **OPTIONS), dist.get_rank(), dist.get_world_size()
    model = task.model(sparse=False, seed=3)
    optimizer = task.optimizer(model)
    averages = averaging_method(name)
    assert averages is not None
    plan = averages.plan(model, size)
    if isinstance(plan, AveragingPlanner):  # the test's ranks share a node, replicas do not
        alike = Cluster(size, Link(ALIKE_BYTES_PER_S))
        plan = replace(plan, schedule=plan.schedule or plan.grouping(alike, 1e6).schedule)
    handle = attach(model, optimizer, plan, timeout=30)
    for batch in islice(task.batches(rank, size, 3), STEPS):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    handle.consensus()
    handle.detach()
    return parameters(model)


@pytest.mark.parametrize(
    "name", ["ds_sync_m0", "ds_sync_m2", "ds_sync_h1_m1", "ds_sync_h1_m2_bf16", "one_peer_exponential"]
)
def test_replicas_learn_what_ranks_do(name: str, world: Callable[[int], Ranks]) -> None:
    """Momenta travel in 16 bits, while replicas keep all."""
    found = world(4).run(trained_by_ranks, name)
    start, simulated = parameters(load("alexnet", **OPTIONS).model(sparse=False, seed=3)), after_steps(name, ranks=4)
    assert float((found[0] - simulated).norm()) < 2e-3 * float((simulated - start).norm())


def test_replicas_that_always_average_are_one_model() -> None:
    torch.testing.assert_close(after_steps("local_sgd1", ranks=3), after_steps("dense", ranks=3), atol=1e-5, rtol=1e-4)
    apart = after_steps("local_sgd3", ranks=3) - after_steps("dense", ranks=3)
    assert float(apart.abs().max()) > 1e-4


def test_the_scheme_of_a_timed_run_is_the_one_that_learns() -> None:
    scheme = Shuffled.by(grid((2, 2), [0, 3, 1, 2]))
    learner = Learner.of("ds_sync_h1_m0", to_expression(scheme))
    assert Learner.of("ds_sync_early_h1_m0", to_expression(scheme)) == learner
    assert learner != Learner.of("ds_sync_h1_m0") and learner.mixes_by is not None
    given = after_steps("ds_sync_h1_m0", ranks=4, mixes_by=scheme)
    assert float((given - after_steps("ds_sync_h1_m0", ranks=4)).abs().max()) > 1e-6, "others are in a group"


def test_ranks_of_nodes_mix_as_their_plan_says() -> None:
    nodes, placement = with_local_steps(together(2), 2), Placement.regular(2, 2)
    model = nn.Linear(3, 2)
    plan = AveragingPlanner(schedule=nodes).plan(model, SGD(model.parameters(), lr=0.1), placement)
    first, second = mixings_of(plan.buckets[0].scheme, 4)
    np.testing.assert_allclose(first, np.eye(4))
    np.testing.assert_allclose(second, np.full((4, 4), 0.25))
    assert rests_of(plan.buckets[0].scheme) == [True, False]
    with pytest.raises(ValueError, match="mixes no parameters"):
        mixings_of(AllReduce(), 4)


def test_momenta_take_turns_as_the_plan_has_them() -> None:
    """Replicas mix momenta in the rounds in which the plan's groups have several members."""
    task = load("alexnet", **OPTIONS)
    model = task.model(sparse=False, seed=0)
    for schedule, every in product(
        (grid((2, 2)), with_local_steps(grid((2, 2)), 2), with_local_steps(together(4), 3)), (1, 2, 3, 4)
    ):
        planner = AveragingPlanner(schedule=schedule, momentum_every=every)
        plan = planner.plan(model, task.optimizer(model), Placement.one_per_node(4))
        assert isinstance(plan, Plan)
        momenta = plan.buckets[-1].scheme
        assert isinstance(momenta, Shuffled)
        rounds = momenta.schedule.rounds
        mixed = [len(each.groups) < 4 for each in rounds]
        averages = averaging_method(f"ds_sync_m{every}")
        assert averages is not None
        replicas = Replicas.of(averages, task, seed=0, ranks=4, scheme=Shuffled.by(schedule))
        assert [replicas.mixes_momenta(step) for step in range(2 * len(rounds))] == 2 * mixed


def test_ablations_are_worse_and_only_simulated() -> None:
    """Static groups drift apart, and averages of the parameters before a step leave the step unaveraged."""

    def spread(name: str) -> float:
        made = averaging_method(name)
        assert made is not None
        replicas = Replicas.of(made, load("alexnet", **OPTIONS), seed=3, ranks=4, scheme=None)
        next(islice(replicas.train(), 2 * STEPS - 1, None))
        return replicas.spread

    shuffled, static, stale = map(spread, ("ds_sync_h1_m0", "ds_sync_h1_m0_static", "ds_sync_h1_m0_stale"))
    assert static > 2 * shuffled and stale > 1.5 * shuffled
    assert spread("ds_sync_h1_m1") < shuffled, "momenta in step keep replicas together"
    with pytest.raises(ValueError, match="ds_sync_static is for `gradsync bench converge` only"):
        method("ds_sync_static")


def test_what_is_no_such_method_is_said() -> None:
    assert averaging_method("bf16") is None and averaging_method("ds_synchronous") is None
    with pytest.raises(ValueError, match="unknown ending _fast of 'ds_sync_fast'; there are"):
        averaging_method("ds_sync_fast")
    with pytest.raises(ValueError, match="averages parameters, and has no plan of gradients"):
        planner_of("ds_sync")
