"""Schemes that send some chunks: attachments report what arrived, and optimisers can leave the rest unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Trains, by closures in every other step; in each step `handle.arrived` must name the elements that moved."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    freezes = any(bucket.scheme.traits.freezes for bucket in handle.plan.buckets)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(5, 16, generator=generator)).square().mean()
        loss.backward()
        return loss

    for step in range(steps):
        before = {p: p.detach().clone() for p in model.parameters()}
        if (step + dist.get_rank()) % 2:
            optimizer.step(closure)  # type: ignore[arg-type]  # torch's type is of floats
        else:
            closure()
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


def others_see_the_parameters(given: bool) -> None:
    model, handle, optimizer = frozen(SGD, given)
    seen: list[tuple[int, ...]] = []
    trained(model, handle, optimizer, steps=2)

    def remember(optimizer: Optimizer, *_: object) -> None:
        seen.extend(tuple(p.shape) for p in optimizer.param_groups[0]["params"])

    watching = optimizer.register_step_post_hook(remember)
    trained(model, handle, optimizer, steps=2)
    assert seen == [(16, 16)] * 2
    watching.remove()
    handle.detach()


def frozen(kind: type[SGD], given: bool) -> tuple[nn.Module, gradsync.Attachment, SGD]:
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    scheme = CoarseGrained(ratio=0.25, chunk=16, freeze=True)
    plan = Plan.make({"weight": TensorSpec.of(model.weight)}, dist.get_world_size(), [(["weight"], scheme)])
    return model, gradsync.attach(model, plan=plan, optimizer=optimizer if given else None, timeout=10), optimizer


class Odd(SGD):
    """Calls its closure as often as it says."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(self.calls):
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * parameter.grad)


def refused(calls: int) -> str:
    """Returns the error of a step with an optimiser that does not call its closure once."""
    model, handle, optimizer = frozen(Odd, given=False)
    Odd.calls = calls

    def closure() -> None:
        model(torch.ones(5, 16)).square().mean().backward()

    if not calls:
        closure()
    with pytest.raises(ValueError, match="closure") as caught:
        optimizer.step(closure)  # type: ignore[arg-type]  # it may return nothing
    handle.detach()
    return str(caught.value)


@pytest.mark.parametrize("given", [False, True], ids=["any optimizer", "its own"])
def test_others_see_the_parameters(given: bool, world: World) -> None:
    world(2).run(others_see_the_parameters, given)


@pytest.mark.parametrize("calls", [0, 2])
def test_an_optimiser_that_does_not_call_its_closure_once_is_refused(calls: int, world: World) -> None:
    for said in world(2).run(refused, calls):
        assert "Odd.step(closure) called its closure several times" in said


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("behind_ddp", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_what_did_not_arrive_stays(freeze: bool, behind_ddp: bool, adam: bool, world: World) -> None:
    for lengths in world(2).run(what_did_not_arrive_stays, freeze, behind_ddp, adam):
        assert lengths == [16, 16, 128], "two of eight chunks, and all of the other half"
