"""`NcclGroup`: a group on NCCL; waiting for an operation makes the current CUDA stream wait, not the host."""

from __future__ import annotations

from typing import Any

import torch

from .distributed import TorchGroup


class NcclGroup(TorchGroup):
    """The members of a process group with the NCCL backend; all tensors are on the current CUDA device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def _patience_s(self, timeout_s: float) -> float:
        return timeout_s  # NCCL's own watchdog ends a job that hangs

    def _wait(self, work: Any, number: int, timeout_s: float) -> None:
        work.wait()  # makes the current stream wait, not the host
