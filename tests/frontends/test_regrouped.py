"""After links change, a consensus is followed by other groups: the same on all ranks, and nothing is lost."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import gradsync
from gradsync.comm.shuffle import GroupSchedule, Round, grid, of_ranks, together, with_local_steps, with_ranks_absent
from gradsync.compressors import Cast
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.frontends import regrouping
from gradsync.frontends.regrouping import Regrouping
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.plan import schedule_of
from gradsync.planner.averaging.regroup import FIGURES, LEAST_ROUNDS
from gradsync.tuning import rates
from gradsync.tuning.rates import Rates
from tests.frontends.models import Perceptron
from tests.world import Ranks, on_all_ranks
from tests.world import World as Processes

pytestmark = pytest.mark.waiting
World = Callable[[int], Ranks]
NODES = 4
PAIRS = grid((2, 2))
WITHOUT_3 = with_ranks_absent(PAIRS, (3,), 4)
WATCHED = FIGURES * (LEAST_ROUNDS + 2)  # figures are of whole cycles
LONG_WATCHED = FIGURES * len(WITHOUT_3.rounds) * 2


class Links:
    """Fake measurements of links and of the times of rounds on this rank."""

    def __init__(self) -> None:
        self.slow_node: int | None = None
        self.round_s = 0.01
        self.total_s = 0.0
        self.measured = 0

    def rates(self, *_: Any) -> Rates:
        self.measured += 1
        found = np.full((NODES, NODES), 1e8)
        np.fill_diagonal(found, 0.0)
        if self.slow_node is not None:
            found[self.slow_node] /= 10
            found[:, self.slow_node] /= 10
        return found


@contextmanager
def emulated(per_node: int = 1) -> Iterator[Links]:
    """Emulates `per_node` ranks on each node, by torchrun's environment and fake links."""
    links = Links()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank() // per_node)}))
        stack.enter_context(mock.patch.object(rates, "measured_rates", links.rates))
        stack.enter_context(mock.patch.object(rates, "latency_of", lambda group: 0.0))
        stack.enter_context(mock.patch.object(Regrouping, "_communication_s", lambda self: links.total_s))
        yield links


def make(planner: AveragingPlanner) -> tuple[nn.Module, SGD, gradsync.Attachment]:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, gradsync.attach(model, optimizer, planner, timeout=15)


def step(model: nn.Module, optimizer: SGD, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    optimizer.zero_grad()
    model(torch.randn(5, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def train(model: nn.Module, optimizer: SGD, links: Links, steps: int) -> None:
    for number in range(steps):
        links.total_s += links.round_s
        step(model, optimizer, number)


def everyones(model: nn.Module, handle: gradsync.Attachment) -> Tensor:
    """Returns all parameters of all ranks, (ranks, elements)."""
    handle.wait()
    return on_all_ranks(model.parameters())


def groups_follow_the_links(planner: AveragingPlanner, tolerance: float, per_node: int) -> list[str]:
    """Makes node 3 slow; a node of two ranks may sit out twice as long, as its ranks' mean has half the noise."""
    placement = Placement.regular(NODES, per_node)
    pairs, without_3 = (of_ranks(each, placement) for each in (PAIRS, with_ranks_absent(PAIRS, (3,), 4 * per_node)))
    with emulated(per_node) as links:
        model, optimizer, handle = make(planner)
        assert schedule_of(handle.plan) == pairs and links.measured == 1
        train(model, optimizer, links, WATCHED)
        handle.consensus()
        links.slow_node = 3
        links.round_s = 0.1 if dist.get_rank() == 2 else 0.01  # the others hear of it
        train(model, optimizer, links, WATCHED)
        assert schedule_of(handle.plan) == pairs, "not before a consensus"
        assert links.measured == 1
        momenta = [kept["momentum_buffer"].clone() for kept in optimizer.state.values()]
        handle.consensus()
        assert links.measured == 2
        assert schedule_of(handle.plan) == without_3
        for kept, before in zip(optimizer.state.values(), momenta, strict=True):
            assert torch.equal(kept["momentum_buffer"], before), "each rank's own"
        follow(model, optimizer, handle, without_3, first=2 * WATCHED, tolerance=tolerance)
        assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
        digest = handle.plan.digest
        handle.detach()
        return [digest]


def stepped_alone_and_together(
    model: nn.Module, optimizer: SGD, handle: gradsync.Attachment, number: int
) -> tuple[Tensor, Tensor]:
    """Returns all ranks' parameters after a local step, and after the same step with averaging."""
    handle.wait()
    alone = copy.deepcopy(model)
    twin = SGD(alone.parameters(), lr=0.02, momentum=0.9)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(alone, twin, number)
    step(model, optimizer, number)
    return everyones(alone, handle), everyones(model, handle)


def follow(
    model: nn.Module,
    optimizer: SGD,
    handle: gradsync.Attachment,
    schedule: GroupSchedule,
    *,
    first: int,
    tolerance: float = 1e-6,
) -> None:
    """Trains a cycle of the new groups; each step must equal local steps that are then averaged."""
    for number in range(first, first + len(schedule.rounds)):
        own, now = stepped_alone_and_together(model, optimizer, handle, number)
        mixed = torch.from_numpy(schedule.round(number).mixing).float() @ own
        torch.testing.assert_close(now, mixed, rtol=1e-5, atol=tolerance)


@pytest.mark.core
@pytest.mark.parametrize(
    ("planner", "tolerance"),
    [
        (AveragingPlanner(most_local_steps=1), 1e-6),
        (AveragingPlanner(most_local_steps=1, early=True), 1e-6),
        (AveragingPlanner(most_local_steps=1, compressor=Cast("bfloat16")), 1e-3),
    ],
    ids=["plain", "early", "rounded"],
)
def test_groups_follow_the_links_at_a_consensus(world: World, planner: AveragingPlanner, tolerance: float) -> None:
    digests = world(NODES).run(groups_follow_the_links, planner, tolerance, 1)
    assert len({str(each) for each in digests}) == 1


def test_groups_of_nodes_with_several_ranks_follow_the_links() -> None:
    with Processes(2 * NODES) as world:
        digests = world.run(groups_follow_the_links, AveragingPlanner(most_local_steps=1), 1e-6, 2)
    assert len({str(each) for each in digests}) == 1


def nodes_of_two_average_in_groups() -> None:
    """Averages two of three nodes at a time, and the ranks of the third among themselves."""
    nodes = GroupSchedule((Round(((0, 1), (2,))), Round(((0,), (1, 2)))))
    planner = AveragingPlanner(cluster=Cluster(3, Link(1e8), ranks_per_node=2), schedule=nodes, momentum_every=2)
    with emulated(per_node=2):
        model, optimizer, handle = make(planner)
        for number in range(4):
            own, now = stepped_alone_and_together(model, optimizer, handle, number)
            mixing = np.kron(nodes.round(number).mixing, np.full((2, 2), 0.5))
            torch.testing.assert_close(now, torch.from_numpy(mixing).float() @ own, rtol=1e-5, atol=1e-6)
        handle.wait()
        assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
        handle.detach()


def test_nodes_with_several_ranks_average_in_groups() -> None:
    with Processes(6) as world:
        world.run(nodes_of_two_average_in_groups)


def groups_come_back() -> None:
    with emulated() as links:
        model, optimizer, handle = make(AveragingPlanner(most_local_steps=1))
        taken = []
        for slow_node, round_s in ((None, 0.01), (3, 0.1), (3, 0.04), (None, 0.01), (None, 0.01)):
            links.slow_node, links.round_s = slow_node, round_s
            train(model, optimizer, links, LONG_WATCHED)
            handle.consensus()
            taken.append(schedule_of(handle.plan))
        assert taken == [PAIRS, WITHOUT_3, WITHOUT_3, PAIRS, PAIRS]
        assert links.measured == 3, "when attached, and when rounds took another time"
        handle.detach()


def test_groups_come_back_when_contention_is_over(world: World) -> None:
    world(NODES).run(groups_come_back)


def plans_follow_one_another(per_node: int) -> list[int]:
    """Returns how many communicators each plan has open; every second plan pairs ranks differently."""
    others = grid((2, 2), [0, 3, 1, 2])
    assert set(others.distinct) != set(PAIRS.distinct)
    with emulated(per_node):
        model, optimizer, handle = make(AveragingPlanner(schedule=PAIRS))
        engine, opened = handle._engine, [len(dist.distributed_c10d._world.pg_map)]
        for schedule in (others, PAIRS, others, PAIRS):
            handle.consensus()
            plan = AveragingPlanner(schedule=schedule).plan(model, optimizer, engine.group.placement)
            engine.replan(plan)
            for number in range(2):
                own, now = stepped_alone_and_together(model, optimizer, handle, number)
                mixing = np.kron(schedule.round(engine.step - 1).mixing, np.full((per_node, per_node), 1 / per_node))
                torch.testing.assert_close(now, torch.from_numpy(mixing).float() @ own, rtol=1e-5, atol=1e-6)
            opened.append(len(dist.distributed_c10d._world.pg_map))
        handle.detach()
    return opened


def test_groups_of_plans_that_are_over_are_closed(world: World) -> None:
    for opened in world(NODES).run(plans_follow_one_another, 1):
        assert len(set(opened)) == 1


def test_so_are_those_between_nodes_with_several_ranks() -> None:
    with Processes(2 * NODES) as world:
        for opened in world.run(plans_follow_one_another, 2):
            assert len(set(opened)) == 1


def groups_stay() -> None:
    """Makes rounds slower where other groups promise nothing, or where the planner must not regroup."""
    with emulated() as links:
        for planner, measured in (
            (AveragingPlanner(most_local_steps=1), 1),
            (AveragingPlanner(most_local_steps=1, remap=False), 0),
        ):
            links.measured, links.round_s = 0, 0.01
            model, optimizer, handle = make(planner)
            plan = handle.plan
            train(model, optimizer, links, WATCHED)
            links.round_s = 0.1
            for _ in range(2):
                train(model, optimizer, links, WATCHED)
                handle.consensus()
            assert handle.plan is plan
            assert links.measured == 1 + measured
            handle.detach()


def test_groups_stay_where_others_are_no_better(world: World) -> None:
    world(NODES).run(groups_stay)


def training_resumes_with_the_groups_of_its_checkpoint() -> None:
    planner = AveragingPlanner(most_local_steps=1, compressor=Cast("bfloat16"))
    with emulated() as links:
        model, optimizer, handle = make(planner)
        train(model, optimizer, links, WATCHED)
        links.slow_node, links.round_s = 3, 0.1
        train(model, optimizer, links, WATCHED)
        handle.consensus()
        train(model, optimizer, links, 3)
        content = io.BytesIO()
        torch.save([part.state_dict() for part in (model, handle, optimizer)], content)
        train(model, optimizer, links, 4)
        trained = everyones(model, handle)
        handle.detach()
        links.slow_node = None
        other, its_optimizer, its_handle = make(planner)
        assert schedule_of(its_handle.plan) == PAIRS
        content.seek(0)
        for part, saved in zip((other, its_handle, its_optimizer), torch.load(content, weights_only=True), strict=True):
            part.load_state_dict(saved)
        assert schedule_of(its_handle.plan) == WITHOUT_3
        train(other, its_optimizer, links, 4)
        assert torch.equal(everyones(other, its_handle), trained)
        its_handle.detach()


@pytest.mark.core
def test_training_resumes_with_the_groups_of_its_checkpoint(world: World) -> None:
    world(NODES).run(training_resumes_with_the_groups_of_its_checkpoint)


def checkpoints_of_other_settings_bring_no_groups() -> str:
    with emulated() as links:
        links.slow_node = 3
        model, optimizer, handle = make(AveragingPlanner(most_local_steps=1))
        assert schedule_of(handle.plan) == WITHOUT_3
        train(model, optimizer, links, 2)
        state = handle.state_dict()
        handle.detach()
        links.slow_node = None
        _, _, other = make(AveragingPlanner(most_local_steps=1, momentum_every=2))
        other.load_state_dict(state)
        assert schedule_of(other.plan) == PAIRS
        other.detach()
        _, _, same = make(AveragingPlanner(most_local_steps=1))
        broken = {**state, "plan": "{}"} if dist.get_rank() == 1 else state
        with pytest.raises((RuntimeError, ValueError)) as caught:
            same.load_state_dict(broken)
        assert schedule_of(same.plan) == PAIRS
        same.detach()
        return str(caught.value)


def test_checkpoints_of_other_settings_bring_no_groups(world: World) -> None:
    said = world(NODES).run(checkpoints_of_other_settings_bring_no_groups)
    assert all("rank 1 could not" in text for rank, text in enumerate(said) if rank != 1)


@contextmanager
def asked_for_groups() -> Iterator[list[float]]:
    """Yields a list that gets what the planner is told of the spread that rounds removed."""
    asked: list[float] = []
    regrouped = AveragingPlanner.regrouped

    def noted(self: AveragingPlanner, *arguments: Any, removed: float) -> Any:
        asked.append(removed)
        return regrouped(self, *arguments, removed=removed)

    with mock.patch.object(AveragingPlanner, "regrouped", noted):
        yield asked


def groups_follow_distances(planner: AveragingPlanner, first: GroupSchedule) -> None:
    """Counts by hand, too, the spread that rounds removed; rank 0 asks."""
    cycle = len(first.rounds)
    with emulated() as links, asked_for_groups() as asked:
        model, optimizer, handle = make(planner)
        assert schedule_of(handle.plan) == first
        removed = [share_removed_by_a_step(model, optimizer, handle, number) for number in range(2 * WATCHED)]
        handle.consensus()
        assert schedule_of(handle.plan) == together(NODES)
        counted = removed[cycle:-1]  # behind the first cycle; the last round was not over
        counted = counted[: len(counted) // cycle * cycle]
        assert asked == ([pytest.approx(float(np.mean(counted)), rel=1e-4)] if dist.get_rank() == 0 else [])
        (group,) = optimizer.param_groups
        group["lr"] = 1e-9
        train(model, optimizer, links, WATCHED)
        handle.consensus()
        assert schedule_of(handle.plan) == first
        follow(model, optimizer, handle, first, first=3 * WATCHED)
        assert links.measured == (planner.cluster is None)
        handle.detach()


def share_removed_by_a_step(model: nn.Module, optimizer: SGD, handle: gradsync.Attachment, number: int) -> float:
    own, now = stepped_alone_and_together(model, optimizer, handle, number)
    return float(((own - now).square().sum(1) / now.square().sum(1)).mean())


@pytest.mark.parametrize(
    ("planner", "first"),
    [
        (AveragingPlanner(most_local_steps=1, most_apart=1e-4), PAIRS),
        (AveragingPlanner(most_local_steps=1, most_apart=1e-4, cluster=Cluster(NODES, Link(1e8))), PAIRS),
        (AveragingPlanner(most_apart=1e-4, cluster=Cluster(NODES, Link(1e8))), with_local_steps(PAIRS, 3)),
    ],
    ids=["links measured", "links given", "local steps"],
)
def test_groups_grow_where_ranks_are_apart_and_shrink_when_they_are_not(
    world: World, planner: AveragingPlanner, first: GroupSchedule
) -> None:
    world(NODES).run(groups_follow_distances, planner, first)


def nodes_of_two_are_together() -> None:
    planner = AveragingPlanner(most_local_steps=1, most_apart=1e-4, cluster=Cluster(2, Link(1e8), ranks_per_node=2))
    with emulated(per_node=2), asked_for_groups() as asked:
        model, optimizer, handle = make(planner)
        assert schedule_of(handle.plan) == together(4)
        removed = [share_removed_by_a_step(model, optimizer, handle, number) for number in range(WATCHED)]
        handle.consensus()
        assert asked == ([pytest.approx(float(np.mean(removed[1:-1])), rel=1e-4)] if dist.get_rank() == 0 else [])
        assert schedule_of(handle.plan) == together(4)
        handle.detach()


def test_distances_are_seen_where_nodes_have_several_ranks(world: World) -> None:
    world(NODES).run(nodes_of_two_are_together)


def rates_are_measured_while_training(early: bool) -> str:
    """Measures real links: the new groups are unknown, but training goes on the same on all ranks."""
    model, optimizer, handle = make(AveragingPlanner(most_local_steps=1, early=early))
    for _ in range(2):
        for number in range(LONG_WATCHED):
            step(model, optimizer, number)
        handle.consensus()
        now = everyones(model, handle)
        assert all(torch.equal(row, now[0]) for row in now)
    digest = handle.plan.digest
    follow(model, optimizer, handle, schedule_of(handle.plan), first=2 * LONG_WATCHED)
    handle.detach()
    return digest


def measured_while_training(early: bool) -> str:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank())}))
        stack.enter_context(mock.patch.object(regrouping, "links_changed", lambda *figures: all(map(all, figures))))
        measured = stack.enter_context(mock.patch.object(rates, "measured_rates", wraps=rates.measured_rates))
        digest = rates_are_measured_while_training(early)
        assert measured.call_count >= 2, "when attached, and at a consensus"
        return digest


@pytest.mark.core
@pytest.mark.parametrize("early", [False, True])
def test_rates_are_measured_while_training(world: World, early: bool) -> None:
    assert len(set(world(NODES).run(measured_while_training, early))) == 1


def settings_differ() -> str:
    with emulated(), pytest.raises(ValueError, match="settings of attach differ") as caught:
        make(AveragingPlanner(most_local_steps=1, remap=dist.get_rank() == 0))
    return str(caught.value)


@pytest.mark.core
def test_ranks_with_other_settings_are_found(world: World) -> None:
    for said in world(NODES).run(settings_differ):
        assert "remap=True" in said and "remap=False" in said
