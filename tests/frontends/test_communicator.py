"""One thread issues gradsync's collectives and the user's with a shared communicator, in one order on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.comm import GlooGroup, GroupError, StreamGroup, TorchGroup
from gradsync.comm.backends import GROUP_OF_BACKEND
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CompressedTwoWay, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.world import Ranks

World = Callable[[int], Ranks]

STEPS, LAYERS = 3, 4


class Shared(torch.autograd.Function):
    """Sums over the ranks in forward and in backward, as SyncBatchNorm does with its statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.sum(0)
        dist.all_reduce(total)
        return x - total / (len(x) * dist.get_world_size())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.02)  # ranks are never alike
        total = grad.sum(0)
        dist.all_reduce(total)
        return grad - total / (len(grad) * dist.get_world_size())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5 + k, 6 + k) for k in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Shared.apply(layer(x)).relu()
        return x


def train(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 5, generator=draws)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def one_bucket_each(model: nn.Module, scheme: Scheme[Any]) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    return Plan.make(specs, dist.get_world_size(), [([name], scheme) for name in reversed(specs)])


def issued_in_training(communicator: Any, frontend: str) -> tuple[list[tuple[str, int]], bool]:
    """Returns (thread, elements) of each all-reduce, and whether the parameters have the bits that DDP gives them."""
    torch.manual_seed(0)
    expected = train(DistributedDataParallel(Normed()))
    torch.manual_seed(0)
    model: nn.Module = Normed()
    plan = one_bucket_each(model, AllReduce())
    with patch.dict(GROUP_OF_BACKEND, {"gloo": StreamGroup}):
        settings: dict[str, Any] = {"plan": plan, "timeout": 20, "communicator": communicator, "verify_every": 0}
        settings |= {"find_unused_parameters": False}
        if frontend == "class":
            model = gradsync.DistributedDataParallel(model, **settings)
            handle = model._attachment
        else:
            model = DistributedDataParallel(model, bucket_cap_mb=1e-5) if frontend == "hook" else model
            handle = gradsync.attach(model, **settings)
        issued: list[tuple[str, int]] = []
        all_reduce = dist.all_reduce

        def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            issued.append((threading.current_thread().name, tensor.numel()))
            return all_reduce(tensor, *args, **kwargs)

        def noted_of_ours(group: TorchGroup, buffer: Tensor) -> Any:
            issued.append((threading.current_thread().name, buffer.numel()))
            return of_ours(group, buffer)

        of_ours = TorchGroup.all_reduce
        with patch.object(dist, "all_reduce", noted), patch.object(TorchGroup, "all_reduce", noted_of_ours):
            found = train(model)
        assert handle is not None
        handle.detach()
    dist.barrier()  # the process group is the user's: it is still there
    return issued, all(map(torch.equal, found, expected))


@pytest.mark.parametrize("frontend", ["attach", "class", "hook"])
def test_all_ranks_issue_in_one_order_from_the_thread_of_backward(world: World, frontend: str) -> None:
    (first, equal), (second, also_equal) = world(2).run(issued_in_training, "shared", frontend)
    assert equal and also_equal, "the parameters are DDP's"
    assert first == second and {name for name, _ in first} == {"MainThread"}
    step = [numel for _, numel in first[-len(first) // STEPS :]]
    users = [6 + k for k in range(LAYERS)]
    assert step[:LAYERS] == users, "of the forward"
    backward = step[LAYERS:]
    assert len(backward) > 2 * LAYERS and backward[0] == users[-1] != backward[1]
    last = len(backward) - 1 - backward[::-1].index(users[0])
    assert last > LAYERS, "exchanges lie between the user's collectives, not behind them all"


def test_with_an_own_communicator_a_thread_issues(world: World) -> None:
    found = world(2).run(issued_in_training, "own", "attach")
    assert all(equal for _, equal in found)
    assert {name for name, _ in found[0][0]} == {"MainThread", "gradsync"}


def groups() -> tuple[bool, bool, bool]:
    shared = StreamGroup(timeout_s=20, on_calling_thread=True)
    own = StreamGroup(timeout_s=20)
    everyone = dist.distributed_c10d._get_default_group()
    part = shared.subgroup((0, 1)) if shared.rank < 2 else own
    found = shared._own is everyone, own._own is not everyone, part._own is not everyone
    shared.close()
    own.close()
    dist.barrier()
    return found


def test_only_a_shared_communicator_is_the_user_s(world: World) -> None:
    assert world(3).run(groups) == [(True, True, True)] * 3


def lossy_on_gloo() -> list[float]:
    torch.manual_seed(0)
    model = Normed()
    plan = one_bucket_each(model, CompressedTwoWay(ErrorFeedback(TopK(0.3))))
    handle = gradsync.attach(model, plan=plan, timeout=20, communicator="shared", find_unused_parameters=False)
    found = [float(parameter.sum()) for parameter in train(model)]
    handle.detach()
    return found


def test_schemes_of_several_stages_go_on_gloo_too(world: World) -> None:
    first, second = world(2).run(lossy_on_gloo)
    assert first == second


def unlike(kind: type[TorchGroup]) -> str:
    mine: Any = ["own", "shared"][dist.get_rank()]
    with patch.dict(GROUP_OF_BACKEND, {"gloo": kind}), pytest.raises(GroupError) as caught:
        gradsync.attach(nn.Linear(2, 2), timeout=20, communicator=mine, find_unused_parameters=False)
    return str(caught.value)


@pytest.mark.parametrize("kind", [GlooGroup, StreamGroup])
def test_ranks_with_unlike_communicators_all_raise_before_they_issue_anything(
    world: World, kind: type[TorchGroup]
) -> None:
    began_s = time.monotonic()
    for text in world(2).run(unlike, kind):
        assert "with communicator='shared' on rank 1" in text
    assert time.monotonic() - began_s < 15, "long before the timeout"


def unused(frontend: str) -> str:
    model: nn.Module = Normed()
    with pytest.raises(ValueError, match="needs find_unused_parameters=False") as caught:
        if frontend == "class":
            gradsync.DistributedDataParallel(model, communicator="shared", find_unused_parameters=True)
        elif frontend == "hook":
            gradsync.attach(DistributedDataParallel(model, find_unused_parameters=True), communicator="shared")
        else:
            gradsync.attach(model, communicator="shared")
    return str(caught.value)


@pytest.mark.parametrize("frontend", ["attach", "class", "hook"])
def test_a_shared_communicator_needs_all_parameters_used(world: World, frontend: str) -> None:
    """A rank that leaves one out would load it at the end of backward, the others in the middle."""
    first, second = world(2).run(unused, frontend)
    assert first == second
