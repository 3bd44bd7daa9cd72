"""A step of a model with many small tensors: the same bits on all ranks, and whatever was measured of the links."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.schemes import AllReduce
from gradsync.tensors.bucket import TensorSpec
from tests.world import Ranks

World = Callable[[int], Ranks]

Links = tuple[float, float, float]  # seconds a message, seconds an operation, bytes per second
SLOW: Links = (1e-6, 0.0, 1e6)
QUICK: Links = (1e-2, 1e-3, 1e11)


class Small(nn.Module):
    """240 tensors of 64 to 1024 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(60))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def buckets_of(model: nn.Module) -> list[list[str]]:
    """Returns the parameters' names in three buckets, of 2, 30 and 39 KiB."""
    names = [name for name, _ in model.named_parameters()]
    return [names[:8], names[8:108], names[108:]]


def step(links: Links) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns this rank's gradients, times 1 / ranks, and the synchronised ones, by name."""
    torch.manual_seed(0)
    model, size = Small(), dist.get_world_size()
    parameters = dict(model.named_parameters())
    specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
    plan = Plan.make(specs, size, [(bucket, AllReduce()) for bucket in buckets_of(model)])
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    own = torch.autograd.grad(model(x).square().sum(), list(parameters.values()))
    with patch("gradsync.comm.distributed.measured_link", lambda *_: links):
        handle = gradsync.attach(model, plan=plan, timeout=20)
    model(x).square().sum().backward()
    mine = {name: gradient * (1 / size) for name, gradient in zip(parameters, own, strict=True)}
    mean = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    handle.detach()
    return mine, mean


@pytest.mark.parametrize(
    ("size", "known", "add"),
    [
        pytest.param(3, 2, lambda a, b, c: a + b + c, id="straight to all, a ring for the last bucket"),
        pytest.param(4, 3, lambda a, b, c, d: (a + b) + (c + d), id="doubling"),
    ],
)
def test_small_buckets_are_summed_in_one_order_whatever_was_measured(
    world: World, size: int, known: int, add: Callable[..., Tensor]
) -> None:
    """Rounding depends on the algorithm that sums: a choice by measured links would change last bits between runs."""
    slow, quick = (world(size).run(step, links) for links in (SLOW, QUICK))
    mean = slow[0][1]
    for _, theirs in (*slow, *quick):
        assert all(torch.equal(theirs[name], gradient) for name, gradient in mean.items())
    for name in chain.from_iterable(buckets_of(Small())[:known]):
        assert torch.equal(mean[name], add(*(mine[name] for mine, _ in slow)))
