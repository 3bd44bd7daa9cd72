"""Forked processes, such as DataLoader workers: a copy of an attached model trains there by itself, and is freed."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradsync
from gradsync.planner import AveragingPlanner
from tests.frontends.models import Perceptron
from tests.frontends.twins import assert_same_on_all_ranks
from tests.world import Ranks

World = Callable[[int], Ranks]


@contextmanager
def one_worker(data: Dataset[Tensor]) -> Iterator[DataLoader[Tensor]]:
    """Yields a loader of batches of four, made by a forked worker; ranks of `World` are daemons, which have none."""
    with patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
        yield DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")


class Attacked(Dataset[Tensor]):
    """Samples that are moved along the signs of the model's gradients (FGSM), which the worker computes."""

    def __init__(self, model: nn.Module, handle: gradsync.Attachment) -> None:
        self.model, self.handle = model, handle

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        x = torch.randn(1, 6, generator=torch.Generator().manual_seed(index)).requires_grad_()
        self.model.train()(x).square().sum().backward()
        torch.optim.SGD(self.model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="forked from a rank"):
            self.handle._engine.peers.agree("test", None)
        if index == 0:
            self.handle.detach()
        assert x.grad is not None
        return (x + 0.1 * x.grad.sign()).detach()[0]


def used_in_a_worker(averages: bool, is_wrapped: bool) -> None:
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan: Any = AveragingPlanner() if averages else None
    net = gradsync.DistributedDataParallel(model, timeout=8) if is_wrapped else model
    handle = net.attachment if is_wrapped else gradsync.attach(model, optimizer, plan, timeout=8)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    data = Attacked(net, handle)
    with one_worker(data) as loader:
        batches = list(loader) if dist.get_rank() == 0 else [torch.randn(4, 6)] * 2
    for batch in batches:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    handle.consensus()
    assert_same_on_all_ranks(dict(model.named_parameters()))
    handle.detach()


@pytest.mark.parametrize(("averages", "is_wrapped"), [(False, False), (True, False), (False, True)])
def test_a_worker_uses_its_copy_alone(world: World, averages: bool, is_wrapped: bool) -> None:
    world(2).run(used_in_a_worker, averages, is_wrapped)


class Collecting(Dataset[Tensor]):
    """Samples of a worker that collects garbage."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        gc.collect()
        return torch.randn(6)


def dropped_before_a_worker_collects(kind: str) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model = Perceptron()
            model.itself = [model]  # a cycle
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "ddp":
                net: nn.Module = nn.parallel.DistributedDataParallel(model)
                gradsync.attach(net, timeout=8)
            else:
                net = model
                gradsync.attach(model, optimizer, AveragingPlanner() if kind == "averaged" else None, timeout=8)
            with one_worker(Collecting()) as loader:
                for batch in loader:
                    optimizer.zero_grad()
                    net(batch).square().mean().backward()
                    optimizer.step()
    finally:
        gc.enable()
        del model, net
        gc.collect()


@pytest.mark.parametrize("kind", ["gradients", "averaged", "ddp"])
def test_a_worker_frees_its_copy_of_a_dropped_model(world: World, kind: str) -> None:
    world(2).run(dropped_before_a_worker_collects, kind)
