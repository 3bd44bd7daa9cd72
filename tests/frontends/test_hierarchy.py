"""Hierarchical plans in the engine, on processes whose environment says that they are two nodes of two ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from gradsync.comm import TorchGroup, drive, torch_group
from gradsync.comm.network_cost import network_cost
from gradsync.costs.cluster import Placement
from gradsync.plans.plan import Plan
from gradsync.schemes import AGSparse, AllReduce, BalancedElements, BalancedParallelism, Hierarchical, ReduceScatter
from gradsync.tensors.bucket import Bucket, Segment, TensorSpec
from tests.frontends.models import Tables
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

PER_NODE = 2


@contextmanager
def node_of(rank: int) -> Iterator[None]:
    """Sets, inside, the environment variable by which torchrun tells this rank its node."""
    os.environ["GROUP_RANK"] = str(rank // PER_NODE)
    try:
        yield
    finally:
        del os.environ["GROUP_RANK"]


def hierarchical_plan(model: torch.nn.Module, per_node: int = PER_NODE) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    tables = [name for name in specs if name.startswith(("words", "bags"))]
    first, *others = [name for name in specs if name not in tables]
    by_columns = BalancedParallelism(owners="table_stripe")
    buckets = [
        ([first], Hierarchical(ReduceScatter(), BalancedElements(), per_node)),
        (others, Hierarchical(ReduceScatter(), AllReduce(), per_node)),
        (tables, Hierarchical(by_columns, AGSparse(), per_node)),
    ]
    return Plan.make(specs, dist.get_world_size(), buckets)


def loss_of(model: Tables, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    loss: Tensor = model(torch.randint(30, (4, 3), generator=g)).square().mean()
    return loss


def train() -> tuple[list[tuple[float, float | None]], bool]:
    """Takes two steps and compares each with the mean; returns bytes sent and predicted, and whether threads ended."""
    rank, before = dist.get_rank(), threading.active_count()
    torch.manual_seed(0)
    model, alone = Tables(), Tables()
    with node_of(rank):
        handle = gradsync.attach(model, plan=hierarchical_plan(model), timeout=20)
    alone.load_state_dict(model.state_dict())
    for step in range(2):
        model.zero_grad()
        alone.zero_grad()
        loss_of(model, 10 * step + rank).backward()
        for other in range(dist.get_world_size()):
            (loss_of(alone, 10 * step + other) / dist.get_world_size()).backward()
        expected = dict(alone.named_parameters())
        for name, parameter in model.named_parameters():
            ours, theirs = parameter.grad, expected[name].grad
            assert ours is not None and theirs is not None, name
            torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), msg=name)
        assert_same_on_all_ranks({name: p.grad.to_dense() for name, p in model.named_parameters()})
    sent = [(s.sent_bytes, s.predicted_bytes) for s in handle.statistics()]
    handle.detach()
    return sent, threading.active_count() <= before + 1  # the board asks the store once more


def test_a_hierarchical_plan_gives_the_mean_and_leaves_no_thread(world: Callable[[int], Ranks]) -> None:
    for sent, ended in world(4).run(train, limit_s=40):
        _, dense, _ = sent
        assert dense[0] == dense[1] > 0, "a dense bucket's bytes are known beforehand"
        assert ended


def raise_in_backward() -> str:
    """Raises in rank 3's backward; all others are told, though some share no group with it."""
    rank = dist.get_rank()
    model = Tables()
    with node_of(rank):
        handle = gradsync.attach(model, plan=hierarchical_plan(model), timeout=60)

    def fail(gradient: Tensor) -> None:
        raise ValueError("a bad sample")

    failing = next(model.parameters()).register_hook(fail) if rank == 3 else None
    text = ""
    try:
        loss_of(model, rank).backward()
    except (ValueError, gradsync.GroupError) as error:
        text = str(error)
    dist.barrier()
    if failing is not None:
        failing.remove()
    handle.detach()
    return text


def test_a_rank_that_fails_is_heard_of_on_all_nodes(world: Callable[[int], Ranks]) -> None:
    *others, failed = world(4).run(raise_in_backward, limit_s=30)
    assert failed == "a bad sample"
    assert all("rank 3: " in text for text in others), others


def attach_with_other_nodes() -> str:
    """Attaches a plan for two ranks a node where all ranks are on one node."""
    model = Tables()
    plan = hierarchical_plan(model)
    try:
        gradsync.attach(model, plan=plan, timeout=20)
    except ValueError as error:
        return str(error)
    raise AssertionError("attached")


def test_a_plan_for_other_nodes_is_refused_on_every_rank(world: Callable[[int], Ranks]) -> None:
    expected = "Hierarchical is planned for 2 ranks on each node, the nodes have 4; make a plan for this placement"
    assert world(4).run(attach_with_other_nodes, limit_s=30) == [expected] * 4


def measure() -> tuple[object, ...]:
    with node_of(dist.get_rank()):
        group = torch_group(timeout_s=20)
    node, across = group.within_node(), group.across_nodes()
    cost = network_cost(group)
    total = float(node.all_reduce(across.all_reduce(torch.tensor([1.0 + group.rank])).wait(10)).wait(10))
    group.close()
    return cost, node.members, across.members, total


def test_groups_of_nodes_are_found_and_measured_alike_on_all_ranks(world: Callable[[int], Ranks]) -> None:
    costs, nodes, across, totals = zip(*world(4).run(measure, limit_s=30), strict=True)
    assert all(cost == costs[0] for cost in costs)
    assert costs[0].intra is not None
    assert nodes == ((0, 1), (0, 1), (2, 3), (2, 3))
    assert across == ((0, 2), (1, 3), (0, 2), (1, 3))
    assert totals == (10.0,) * 4


def sum_on_other_backends() -> list[float]:
    """Sums on a backend whose groups measure nothing: groups of nodes open when a scheme asks for them."""
    with pytest.raises(ValueError, match="the placement is of 6 ranks, the group has 4"):
        TorchGroup(timeout_s=20, placement=Placement.regular(3, 2))
    group = TorchGroup(timeout_s=20, placement=Placement.regular(2, 2))
    scheme = Hierarchical(ReduceScatter(), AllReduce(), PER_NODE)
    bucket = Bucket("0", (Segment("p", 0, 5),), (TensorSpec((5,), torch.float32),), scheme.traits.layout)
    state = scheme.init(bucket, group)
    total, _ = drive(scheme.synchronize(torch.full((5,), 1.0 + group.rank), state, group, 0.5), timeout_s=10)
    group.close()
    return [float(value) for value in total]


def test_groups_of_nodes_open_where_a_plan_needs_them(world: Callable[[int], Ranks]) -> None:
    assert world(4).run(sum_on_other_backends, limit_s=30) == [[5.0] * 5] * 4


@pytest.mark.parametrize("size", [3])
def test_a_number_of_ranks_that_fills_no_nodes_is_refused_when_a_plan_is_made(size: int) -> None:
    specs = {"p": TensorSpec((4,), torch.float32)}
    with pytest.raises(ValueError, match="planned for 2 ranks a node, there are 3 ranks"):
        Plan.make(specs, size, [(["p"], Hierarchical(ReduceScatter(), AllReduce(), 2))])
