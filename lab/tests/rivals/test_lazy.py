"""Lazily merged buckets in the engine give DDP's gradients for any threshold, in an order independent of ranks'
timing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.planner.default.network import Network
from gradsync.planner.search.job import Job
from gradsync.planner.search.ways import Constraints
from gradsync.schemes import HalfPrecision
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from gradsync.tensors.density import ParameterProfile
from gradsync_lab.rivals.rival_plans import LazyPlans
from tests.frontends.models import Branches, Perceptron
from tests.frontends.test_oracle import UNUSED, rows, train_step
from tests.frontends.twins import Twin, compare_with_ddp, momentum
from tests.world import Ranks

World = Callable[[int], Ranks]

THRESHOLDS = {0.0: 8, 100.0: 4, inf: 1}  # bytes -> number of buckets of a `Perceptron` in float32


def lazily_merged(model: nn.Module, nbytes: float, *lossy: HalfPrecision) -> Plan:
    """Returns the plan for gradients that become ready one after the other, the last parameter's first."""
    parameters = trainable_parameters(model).items()
    profiles = [
        ParameterProfile(name, TensorSpec.of(p), sparse=False, position=len(parameters) - number)
        for number, (name, p) in enumerate(parameters)
    ]
    network = Network(CostModel(1e-4, 1e9), Placement.one_per_node(dist.get_world_size()))
    job = Job(tuple(profiles), {p.name: 1e-3 * (p.position + 1) for p in profiles}, 0.1, network)
    (plan,) = LazyPlans(nbytes)(job, Constraints(lossy, always=bool(lossy)))
    return plan


def merged(nbytes: float) -> None:
    plan = lazily_merged(Perceptron(), nbytes)
    assert len(plan.buckets) == THRESHOLDS[nbytes]
    compare_with_ddp(Perceptron, train_step, options={"plan": plan}, optimizer=momentum)


def merged_and_unused_in_turns(nbytes: float) -> None:
    def step(twin: Twin, number: int) -> None:
        twin.optimizer.zero_grad()
        twin.model(rows(), ((number + dist.get_rank()) % 2,)).square().mean().backward()
        twin.optimizer.step()

    compare_with_ddp(Branches, step, options={"plan": lazily_merged(Branches(), nbytes)}, **UNUSED)


@pytest.mark.parametrize(("nbytes", "size"), [*((nbytes, 2) for nbytes in THRESHOLDS), (100.0, 3)])
@pytest.mark.parametrize("story", [merged, merged_and_unused_in_turns], ids=["dense", "unused"])
def test_gradients_are_ddps_for_any_threshold(
    world: World, story: Callable[[float], None], nbytes: float, size: int
) -> None:
    world(size).run(story, nbytes)


class Towers(nn.Module):
    """Parallel layers; gradients of layers that are called later are ready earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(6, 4) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        return torch.stack([self.towers[number](x) for number in order]).sum(0)


def other_orders_of_readiness() -> tuple[list[list[str]], list[list[str]], list[str]]:
    """Returns the orders in which gradients became ready and buckets were exchanged, step by step, and the plan's
    order.
    """
    torch.manual_seed(0)
    model, ready = Towers(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready[-1].append(name))
    plan = lazily_merged(model, 100.0)
    handle = gradsync.attach(model, plan=plan, timeout=10)
    exchanged = []
    for step in range(6):
        ready.append([])
        order = torch.randperm(4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(rows(), order.tolist()).square().mean().backward()
        links = sorted((task for task in handle.timeline() if task.stream == "link"), key=lambda task: task.start_s)
        exchanged.append([task.name for task in links])
    handle.detach()
    return ready, exchanged, [":".join(turn) for turn in plan.order]


def test_what_is_ready_when_changes_neither_buckets_nor_their_order(world: World) -> None:
    everyone = world(3).run(other_orders_of_readiness)
    readiness = [ready for ready, _, _ in everyone]
    assert any(len(set(map(tuple, orders))) == 3 for orders in zip(*readiness, strict=True)), "no two ranks alike"
    for _, exchanged, planned in everyone:
        assert len(planned) == 4 and exchanged == [planned] * 6
