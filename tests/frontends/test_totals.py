"""An attachment is found by its model, and its totals go over changes of plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.integrations.metrics import StepMetrics
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.full((5, 6), 1.0 + dist.get_rank())).square().mean().backward()
    optimizer.step()


def totals_over_two_plans() -> tuple[list[int], float, float, list[dict[str, float]]]:
    torch.manual_seed(0)
    model = Perceptron()
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    plan = Plan.make(specs, dist.get_world_size(), [(list(specs), AllReduce())])
    apart = Plan.make(specs, dist.get_world_size(), [([name], AllReduce()) for name in specs])
    handle = gradsync.attach(model, plan=plan, verify_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours, metrics = StepMetrics(handle), []
    for _ in range(3):
        step(model, optimizer)
    metrics.append(ours.read())
    metrics.append(ours.read())
    first = handle.totals()
    handle._engine.replan(apart)
    for _ in range(4):
        step(model, optimizer)
    metrics.append(ours.read())
    now = handle.totals()
    sent = first.sent_bytes + sum(bucket.sent_bytes for bucket in handle.statistics())
    handle.detach()
    assert handle.totals() == now
    counts = [first.steps, now.steps, first.plan_changes, now.plan_changes, now.differences]
    assert now.comparisons > 0 and now.communication_s > first.communication_s >= 0
    return counts, now.sent_bytes, sent, metrics


def test_totals_go_over_changes_of_plans_and_metrics_are_of_the_steps_since(world: World) -> None:
    for counts, total, sent, (first, none, later) in world(2).run(totals_over_two_plans):
        assert counts == [3, 7, 0, 1, 0]
        assert total == pytest.approx(sent) and total > 0
        assert none == {}
        assert first["gradsync/sent_mb"] * 3 + later["gradsync/sent_mb"] * 4 == pytest.approx(total / 1e6)
        assert first["gradsync/plan_changes"] == 0 and later["gradsync/plan_changes"] == 1


def found() -> list[bool]:
    plain, dropped, behind, parts = (
        Perceptron(),
        Perceptron(),
        Perceptron(),
        nn.ModuleList([Perceptron(), Perceptron()]),
    )
    handle = gradsync.attach(plain)
    drop_in = gradsync.DistributedDataParallel(dropped)
    wrapped = DistributedDataParallel(behind)
    hooked = gradsync.attach(wrapped)
    both = [gradsync.attach(part) for part in parts]
    results = [
        gradsync.attachment_of(plain) is handle,
        gradsync.attachment_of(nn.Sequential(plain)) is handle,
        gradsync.attachment_of(drop_in) is drop_in.attachment is gradsync.attachment_of(dropped),
        gradsync.attachment_of(wrapped) is hooked is gradsync.attachment_of(behind),
        gradsync.attachment_of(Perceptron()) is None,
        (handle.rank, handle.world_size) == (dist.get_rank(), dist.get_world_size()),
    ]
    with pytest.raises(ValueError, match="2 parts of the model have attachments of their own"):
        gradsync.attachment_of(parts)
    for each in (handle, hooked, *both):
        each.detach()
    results.append(gradsync.attachment_of(plain) is None)
    return results


def test_an_attachment_is_found_by_its_model_and_by_what_is_around_it(world: World) -> None:
    assert world(2).run(found) == [[True] * 7] * 2


def test_what_is_no_model_has_no_attachment() -> None:
    with pytest.raises(TypeError, match="torch.nn.Module"):
        gradsync.attachment_of("model")  # type: ignore[arg-type]
