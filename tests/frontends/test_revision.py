"""Plans are revised during training when densities change: on all ranks alike, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import gradsync
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.engine import plan_control
from gradsync.planner.default.network import Network
from gradsync.plans.plan import Plan
from gradsync.schemes import AGSparse, AllReduce
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import ParameterProfile
from gradsync.tuning.default import MeasuringPlanner
from tests.frontends.twins import Twin, detach, follow, make_twins
from tests.world import Ranks

World = Callable[[int], Ranks]
STEPS_APART = 4
JUMP = 6  # from this step on all rows are touched
ROWS = 2000


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 16, sparse=True)
        self.out = nn.Linear(16, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids))


class SlowNetwork(MeasuringPlanner):
    """A planner with fixed network costs, the same on every machine, and without trials."""

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Any:
        return super().__call__(profiles, world_size)[0]

    def measure(self, group: Any, timeout_s: float) -> Iterator[None]:
        cost = CostModel(alpha_s=1e-4, bandwidth_bytes_per_s=25e6)
        self.network = Network(cost, Placement.one_per_node(group.size))
        return iter(())


def step(twin: Twin, number: int) -> None:
    ids = torch.randint(ROWS, (20,)) if number < JUMP else torch.arange(ROWS)
    twin.optimizer.zero_grad()
    twin.model(ids).square().mean().backward()
    twin.optimizer.step()


def density_jumps() -> tuple[list[str], list[tuple[str, Any]]]:
    """Returns the table's scheme and capacity step by step; gradients are compared with DDP's throughout."""
    with mock.patch.object(plan_control, "LOOK_STEPS", STEPS_APART):
        return follow_through_the_jump()


def follow_through_the_jump() -> tuple[list[str], list[tuple[str, Any]]]:
    twins = make_twins(Lookup, options={"plan": SlowNetwork()})
    handle = twins[1].handle
    assert handle is not None
    seen = []

    def noted(twin: Twin, number: int) -> None:
        step(twin, number)
        if twin.handle is not None:
            (scheme,) = (b.scheme for b in twin.handle.plan.buckets if "words.weight" in b.names)
            seen.append((scheme.name, getattr(scheme, "capacity", None)))

    follow(twins, noted, steps=14)
    digest = handle.plan.digest
    detach(twins)
    return [digest], seen


def test_a_table_that_becomes_dense_is_planned_anew(world: World) -> None:
    everyone = world(3).run(density_jumps)
    assert len({str(outcome) for outcome in everyone}) == 1  # all ranks alike
    _, seen = everyone[0]
    before, after = seen[JUMP - 1], seen[-1]
    assert before[1] is None or max(before[1]) < 200
    assert after == ("balanced_parallelism", (ROWS,))  # all rows of all ranks have room
    changes = [number for number in range(1, len(seen)) if seen[number] != seen[number - 1]]
    assert len(changes) <= 2 and changes[-1] >= JUMP  # when it is known, and when it has changed; not in between


def revise_differently() -> str:
    """Revises with a planner that on rank 1 is not deterministic."""

    class Whim(SlowNetwork):
        def revise(self, plan: Plan, *profiles: Sequence[ParameterProfile]) -> Plan:
            schemes = {Layout.ROWS: AGSparse(), Layout.FLAT: AllReduce()}
            buckets = [(bucket.names, schemes[bucket.scheme.traits.layout]) for bucket in plan.buckets]
            other = Plan.make({n: TensorSpec.of(p) for n, p in model.named_parameters()}, plan.world, buckets)
            return other if torch.distributed.get_rank() == 1 else plan

    torch.manual_seed(0)
    model = Lookup()
    with mock.patch.object(plan_control, "LOOK_STEPS", 1):
        handle = gradsync.attach(model, plan=Whim(), timeout=15)
    try:
        for _ in range(4):
            model(torch.randint(ROWS, (20,))).square().mean().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        handle.detach()
    return ""


def test_revisions_that_differ_raise_on_every_rank(world: World) -> None:
    for message in world(2).run(revise_differently):
        assert "rank 1 has made others than rank 0" in message
