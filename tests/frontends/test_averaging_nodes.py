"""Averages of parameters on nodes with several ranks: groups of whole nodes, and steps in which every rank is alone."""

from __future__ import annotations

import copy
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam

import gradsync
from gradsync.comm.shuffle import GroupSchedule, exact, of_ranks, together, with_local_steps, with_ranks_absent
from gradsync.compressors import BlockInt, Cast
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.plan import schedule_of
from tests.frontends.models import Branches, Perceptron
from tests.world import World, on_all_ranks

LOCAL = with_local_steps(together(2), 3)
SHAPES: dict[str, tuple[int, GroupSchedule]] = {  # ranks on each node, and a schedule of nodes
    "2x2": (2, LOCAL),
    "3x2": (2, with_local_steps(exact(3, 2), 2)),
    "2x3": (3, with_ranks_absent(together(2), (1,), 2)),
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(6) as processes:
        yield processes


@contextmanager
def nodes_of(per_node: int) -> Iterator[None]:
    """Emulates nodes of so many ranks, by torchrun's environment."""
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank() // per_node)}):
        yield


def make(schedule: GroupSchedule, **settings: Any) -> tuple[nn.Module, SGD, gradsync.Attachment]:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    planner = AveragingPlanner(schedule=schedule, **settings)
    return model, optimizer, gradsync.attach(model, optimizer, planner, timeout=10)


def train(model: nn.Module, optimizer: SGD, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def sent_bytes(handle: gradsync.Attachment) -> float:
    handle.wait()
    return sum(bucket.sent_bytes for bucket in handle.statistics())


def whole_nodes_average_or_all_ranks_rest(shape: str, settings: dict[str, Any], tolerance: float) -> None:
    per_node, nodes = SHAPES[shape]
    with nodes_of(per_node):
        model, optimizer, handle = make(nodes, **settings)
        schedule = schedule_of(handle.plan)
        assert schedule == of_ranks(nodes, Placement.regular(nodes.size, per_node))
        for step in range(2 * len(schedule.rounds)):
            before = sent_bytes(handle)
            alone = copy.deepcopy(model)
            twin = SGD(alone.parameters(), lr=0.1, momentum=0.9)
            twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(alone, twin, step)
            train(model, optimizer, step)
            assert (sent_bytes(handle) == before) == schedule.round(step).rests, "who rests sends nothing"
            own, now = on_all_ranks(alone.parameters()), on_all_ranks(model.parameters())
            mixed = torch.from_numpy(schedule.round(step).mixing).float() @ own
            torch.testing.assert_close(now, mixed, rtol=1e-5, atol=tolerance)
            torch.testing.assert_close(now.mean(0), own.mean(0), rtol=1e-5, atol=1e-6)
            for group, share in schedule.round(step).parts:
                assert share != 1 or tolerance > 1e-6 or all(torch.equal(now[r], now[group[0]]) for r in group)
        assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
        mean = on_all_ranks(model.parameters()).mean(0)
        handle.consensus()
        now = on_all_ranks(model.parameters())
        assert all(torch.equal(row, now[0]) for row in now)
        torch.testing.assert_close(now[0], mean)
        handle.detach()


@every_shape
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [({}, 1e-6), ({"compressor": Cast("bfloat16")}, 1e-3), ({"compressor": BlockInt(8)}, 2e-2)],
    ids=["exact", "16 bits", "8 bits"],
)
def test_whole_nodes_average_or_all_ranks_rest(
    world: World, shape: str, settings: dict[str, Any], tolerance: float
) -> None:
    per_node, nodes = SHAPES[shape]
    world.run(whole_nodes_average_or_all_ranks_rest, shape, settings, tolerance, size=nodes.size * per_node)


def rests_wait_for_nobody(settings: dict[str, Any]) -> None:
    """Lets rank 0 begin a local step only when the others have ended theirs, and the other way round."""
    with nodes_of(2):
        model, optimizer, handle = make(LOCAL, **settings)
        for step in range(6):
            comes_last = dist.get_rank() == 0 if step % 3 == 0 else dist.get_rank() > 0
            rests = step % 3 < 2
            if rests and comes_last:
                dist.barrier()
            train(model, optimizer, step)
            handle.wait()
            if rests and not comes_last:
                dist.barrier()
        handle.detach()


@pytest.mark.parametrize(
    "settings",
    [{"momentum_every": 2}, {"early": True, "momentum_every": 1}, {"compressor": Cast("bfloat16")}],
    ids=["exact", "early", "16 bits"],
)
def test_rests_wait_for_nobody(world: World, settings: dict[str, Any]) -> None:
    world.run(rests_wait_for_nobody, settings, size=4)


def rests_touch_nothing(settings: dict[str, Any]) -> None:
    """Looks at what is loaded into buckets, and changes a parameter while another rank may still be in its step."""
    with nodes_of(2):
        model, optimizer, handle = make(LOCAL, momentum_every=2, **settings)
        engine, weight = handle._switch.present.engine, model.layers[0].weight
        loaded, sizes = list[str](), set[int]()
        load = engine.load
        engine.load = lambda name, *given, **more: (loaded.append(name), load(name, *given, **more))
        for step in range(12):
            loaded.clear()
            train(model, optimizer, step)
            active = [b.names for b in handle.plan.buckets if not b.scheme.schedule.round(step).rests]
            assert sorted(loaded) == sorted(name for names in active for name in names)
            sizes.add(len(active))
            if not active:
                with torch.no_grad():
                    weight[0, 0] = float(step)
                model(torch.ones(1, 6))
                assert weight[0, 0] == step
        assert len(sizes) == 3, "in some rounds nothing is averaged, in some parameters, in some momenta as well"
        handle.detach()


@pytest.mark.parametrize(
    "settings", [{}, {"early": True}, {"compressor": Cast("bfloat16")}], ids=["exact", "early", "16 bits"]
)
def test_rests_touch_nothing(world: World, settings: dict[str, Any]) -> None:
    world.run(rests_touch_nothing, settings, size=4)


def a_step_too_many_in_a_rest() -> None:
    with nodes_of(2):
        model, optimizer, handle = make(LOCAL)
        if dist.get_rank() == 3:
            with handle.no_sync():
                train(model, optimizer, 9)
        for step in range(2):
            train(model, optimizer, step)
        handle.wait()
        train(model, optimizer, 2)
        with pytest.raises(RuntimeError, match="the ranks are out of step"):
            handle.wait()
        handle.detach()


def test_a_step_too_many_in_a_rest_is_found_at_the_next_average(world: World) -> None:
    world.run(a_step_too_many_in_a_rest, size=4)


def nodes_wait_for_the_nodes_of_their_group() -> None:
    """Lets the ranks of node 2 begin a round only when nodes 0 and 1 have averaged without them."""
    with nodes_of(2):
        model, optimizer, handle = make(exact(3, 2), momentum_every=1)
        assert schedule_of(handle.plan).rounds[0].groups == ((0, 1, 2, 3), (4, 5))
        if dist.get_rank() >= 4:
            dist.barrier()
        train(model, optimizer, 0)
        handle.wait()
        if dist.get_rank() < 4:
            dist.barrier()
        for step in range(1, 4):
            train(model, optimizer, step)
        handle.wait()
        handle.detach()


def test_nodes_wait_only_for_the_nodes_of_their_group(world: World) -> None:
    world.run(nodes_wait_for_the_nodes_of_their_group, size=6)


def momenta_of_what_one_rank_uses() -> None:
    """Trains a branch that at first only rank 0 takes: the others hear of its momentum when all nodes average."""
    with nodes_of(2):
        torch.manual_seed(0)
        model = Branches()
        optimizer = Adam(model.parameters(), lr=0.01)
        planner = AveragingPlanner(schedule=LOCAL, momentum_every=1)
        handle = gradsync.attach(model, optimizer, planner, timeout=10)
        for step in range(6):
            optimizer.zero_grad()
            taken = (0,) if dist.get_rank() == 0 else (1,)
            model(torch.ones(2, 6), taken).square().mean().backward()
            optimizer.step()
            handle.wait()
            branch = model.branches[0].weight
            assert (branch in optimizer.state and bool(optimizer.state[branch])) == (dist.get_rank() == 0 or step >= 2)
            if step % 3 == 2:
                moments = on_all_ranks([optimizer.state[branch]["exp_avg_sq"]])
                assert bool((moments[0] > 0).any()) and torch.allclose(moments, moments[:1], rtol=2**-6)
                assert branch.isfinite().all()
        assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
        handle.detach()


def test_momenta_of_what_one_rank_uses_are_averaged_over_nodes(world: World) -> None:
    world.run(momenta_of_what_one_rank_uses, size=4)


def checkpoints_go_on(shape: str, settings: dict[str, Any]) -> None:
    """Saves in the middle of a cycle, and goes on there in another model."""
    per_node, nodes = SHAPES[shape]
    with nodes_of(per_node):
        model, optimizer, handle = make(nodes, momentum_every=2, **settings)
        for step in range(4):
            train(model, optimizer, step)
        content = io.BytesIO()
        torch.save([part.state_dict() for part in (model, optimizer, handle)], content)
        for step in range(4, 12):
            train(model, optimizer, step)
        handle.wait()
        expected = on_all_ranks(model.parameters())
        handle.detach()
        model, optimizer, handle = make(nodes, momentum_every=2, **settings)
        content.seek(0)
        for part, state in zip((model, optimizer, handle), torch.load(content, weights_only=True), strict=True):
            part.load_state_dict(state)
        for step in range(4, 12):
            train(model, optimizer, step)
        handle.wait()
        assert torch.equal(on_all_ranks(model.parameters()), expected)
        handle.detach()


@every_shape
@pytest.mark.parametrize("settings", [{}, {"compressor": BlockInt(8)}], ids=["exact", "8 bits"])
def test_checkpoints_go_on_in_the_middle_of_a_cycle(world: World, shape: str, settings: dict[str, Any]) -> None:
    per_node, nodes = SHAPES[shape]
    world.run(checkpoints_go_on, shape, settings, size=nodes.size * per_node)


def earlier_plans_are_refused() -> None:
    """Loads a checkpoint whose plan has the groups between nodes inside the sums inside nodes."""
    planner = AveragingPlanner(most_apart=0.1, cluster=Cluster(2, Link(1e8)))
    with nodes_of(2):
        model = Perceptron()
        handle = gradsync.attach(model, SGD(model.parameters(), lr=0.1), planner, timeout=10)
        state = handle.state_dict()
        plan = json.loads(state["plan"])
        for bucket in plan["buckets"]:
            between = {"shuffled": {"rounds": [[[0, 1]]], "relaxations": [], "scheme": {"all_reduce": {}}}}
            levels = {"intra": {"reduce_scatter": {}}, "inter": between, "ranks_per_node": 2}
            bucket["scheme"] = {"hierarchical": levels}
        state["plan"] = json.dumps(plan)
        with pytest.raises(ValueError, match="earlier plans had it the other way round, so make a new plan"):
            handle.load_state_dict(state)
        del state["groups"]
        handle.load_state_dict(state)
        handle.detach()


def test_earlier_plans_are_refused(world: World) -> None:
    world.run(earlier_plans_are_refused, size=4)
