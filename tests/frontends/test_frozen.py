"""Schemes that send some chunks: attachments report what arrived, and optimisers can leave the rest unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import gradsync
from gradsync import Plan
from gradsync.schemes import AllReduce, CoarseGrained
from gradsync.tensors.bucket import TensorSpec
from tests.world import Ranks

World = Callable[[int], Ranks]


def trained(model: nn.Module, handle: gradsync.Attachment, optimizer: Optimizer, *, steps: int = 4) -> None:
    """Trains; in each step `handle.arrived` must name the elements that moved."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    freezes = any(bucket.scheme.traits.freezes for bucket in handle.plan.buckets)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 16, generator=generator)).square().mean().backward()
        before = {p: p.detach().clone() for p in model.parameters()}
        optimizer.step()
        for parameter in model.parameters():
            sections = handle.arrived(parameter)
            moved = (parameter != before[parameter]).reshape(-1)
            if sections is None:
                assert moved.any()
                continue
            arrived = torch.zeros(parameter.numel(), dtype=torch.bool)
            for start, stop in sections:
                arrived[start:stop] = True
            assert parameter.grad is not None and not parameter.grad.reshape(-1)[~arrived].any()
            left = moved[~arrived]
            assert not left.any() if freezes else left.any(), "momentum, or the decay of weights"
        first = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        dist.broadcast(mine := first.clone(), 0)
        assert torch.equal(mine, first)


def what_did_not_arrive_stays(freeze: bool, behind_ddp: bool, adam: bool) -> list[int]:
    """Returns how many elements of the weight arrived in the last step; half of the weight is sent densely."""
    torch.manual_seed(0)
    inner = nn.Linear(16, 16)
    model = DistributedDataParallel(inner) if behind_ddp else inner
    names = {name: TensorSpec.of(p) for name, p in inner.named_parameters()}
    weight, bias = names
    scheme = CoarseGrained(ratio=0.25, chunk=16, freeze=freeze)
    buckets = [([(weight, 0, 128)], scheme), ([(weight, 128, 256), (bias, 0, 16)], AllReduce())]
    handle = gradsync.attach(model, plan=Plan.make(names, dist.get_world_size(), buckets), timeout=10)
    parameters = inner.parameters()
    optimizer = AdamW(parameters, lr=0.1) if adam else SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    trained(model, handle, optimizer)
    assert handle.arrived(torch.zeros(3)) is None, "nothing of it is left out here"
    sections = handle.arrived(inner.weight)
    assert sections is not None and handle.arrived(inner.bias) is None
    handle.detach()
    return [stop - start for start, stop in sections]


def others_see_the_parameters_and_closures_are_refused(given: bool) -> list[str]:
    """Returns the warnings and errors of a loop that steps with and without a closure."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[tuple[int, ...]] = []
    scheme = CoarseGrained(ratio=0.25, chunk=16, freeze=True)
    plan = Plan.make({"weight": TensorSpec.of(model.weight)}, dist.get_world_size(), [(["weight"], scheme)])
    handle = gradsync.attach(model, plan=plan, optimizer=optimizer if given else None, timeout=10)
    trained(model, handle, optimizer, steps=2)

    def remember(optimizer: Optimizer, *_: object) -> None:
        seen.extend(tuple(p.shape) for p in optimizer.param_groups[0]["params"])

    watching = optimizer.register_step_post_hook(remember)
    trained(model, handle, optimizer, steps=2)
    assert seen == [(16, 16)] * 2
    watching.remove()

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.ones(5, 16)).square().mean()
        result.backward()
        return result

    said = []
    for _ in range(2):
        try:
            if dist.get_rank() == 0:
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    handle.detach()
    return said


@pytest.mark.parametrize("given", [False, True], ids=["any optimizer", "its own"])
def test_others_see_the_parameters_and_closures_are_refused(given: bool, world: World) -> None:
    first, second = world(2).run(others_see_the_parameters_and_closures_are_refused, given)
    assert "without a closure" in first[0]
    assert "without a closure" in second[0], "which would have waited for the first one"


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("behind_ddp", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_what_did_not_arrive_stays(freeze: bool, behind_ddp: bool, adam: bool, world: World) -> None:
    for lengths in world(2).run(what_did_not_arrive_stays, freeze, behind_ddp, adam):
        assert lengths == [16, 16, 128], "two of eight chunks, and all of the other half"
