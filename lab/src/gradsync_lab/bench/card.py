"""Trains workloads on a GPU: each rank on its own, or several on one, which NCCL takes for hosts of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..workloads import Batch, Workload

Device = Literal["cpu", "cuda"]
BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # of the default process group


def own_card() -> torch.device:
    """Returns this rank's GPU, and makes it the current one.

    Ranks of one machine that share a GPU exchange over NCCL's sockets, on the interface that gloo would take: NCCL
    refuses a GPU twice, so each rank tells NCCL that it is a host of its own. Their kernels take turns on the GPU.
    """
    cards = torch.cuda.device_count()
    device = torch.device("cuda", dist.get_rank() % cards)
    if dist.get_world_size() > cards:
        os.environ["NCCL_HOSTID"] = f"rank {dist.get_rank()}"
        os.environ["NCCL_IB_DISABLE"] = "1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    torch.cuda.set_device(device)
    return device


def describe_card(ranks: int) -> dict[str, Any]:
    """Returns the GPU and what it runs, and how many ranks share one, for the environment of a record.

    Raises:
        ValueError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("device cuda needs a GPU that torch can use, and it sees none: take --device cpu")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "nccl": version,
        "ranks_on_a_card": -(-ranks // torch.cuda.device_count()),
    }  # fmt: skip


@dataclass(frozen=True)
class OnCard:
    """A workload whose model and batches are on a GPU; copies of batches to it are a part of the step."""

    workload: Workload
    device: torch.device

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    def model(self, *, sparse: bool, seed: int = 0) -> nn.Module:
        return self.workload.model(sparse=sparse, seed=seed).to(self.device)

    def batches(self, rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Batch]:
        for batch in self.workload.batches(rank, world_size, seed, start_step):
            yield tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.workload.optimizer(model)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns no measures: evaluations are on the CPU."""
        return {}
