"""Gradients live in the buckets' memory: a job needs no more than under DDP and one bucket."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.planner.default.plan import BUCKET_BYTES
from tests.world import World


def train(method: str) -> int:
    """Returns the peak memory of this process, in bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))  # 50 MB
    if method == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model)
    else:
        wrapped, _ = model, gradsync.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3 if method == "ddp" else 14):  # plans of other bucket sizes are on trial by then
        optimizer.zero_grad()
        wrapped(torch.randn(8, 1024)).square().mean().backward()
        optimizer.step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes(method: str) -> int:
    with World(2) as fresh:  # the peak is that of a process' whole life
        peak: int = fresh.run(train, method, limit_s=110)[0]
    return peak


@pytest.mark.timeout(240)
def test_peak_memory_is_at_most_ddps_and_one_bucket() -> None:
    ours, theirs = peak_bytes("gradsync"), peak_bytes("ddp")
    print(f"{ours / 1e6:.0f} MB, DDP {theirs / 1e6:.0f} MB")
    assert ours <= theirs + BUCKET_BYTES
