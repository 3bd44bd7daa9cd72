"""The workload `topk`: `gpt` with only the largest elements of a rank's gradients.

Benchmarks of exchanges use it as their element-sparse case. All gradients of a step, in the order of the model, are one
flat tensor; a share `ratio` of it is kept, after some steps whose residuals are added (error feedback). Training
benchmarks do not know this workload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradsync.compressors import ErrorFeedback, TopK
from gradsync.tensors.bucket import FlatSpec

from .. import workloads
from ..workloads import Batch, GPTWorkload, Workload


@dataclass(frozen=True, kw_only=True)
class TopKWorkload(GPTWorkload):
    """The workload `gpt` with gradients of which only the largest elements are kept (top-k)."""

    name: ClassVar[str] = "topk"

    ratio: float = 0.01  # share of the elements that is kept
    feedback_steps: int = 4  # earlier steps of each rank, at the same weights, whose residuals are added

    def __post_init__(self) -> None:
        super().__post_init__()
        TopK(self.ratio)
        if self.feedback_steps < 0:
            raise ValueError(f"feedback_steps must not be negative, got {self.feedback_steps}")

    def sparsified(self, model: nn.Module, batches: Iterator[Batch]) -> Tensor:
        """Returns a rank's next top-k gradient, (parameters,) float32, mostly zero; adds earlier steps' residuals."""
        compressor = ErrorFeedback(TopK(self.ratio))
        numel = sum(parameter.numel() for parameter in model.parameters())
        state = compressor.init(FlatSpec.of(torch.empty(numel, device="meta")))
        for batch in islice(batches, self.feedback_steps + 1):
            payload, state = compressor.compress(self.gradient(model, batch), state)
        return compressor.decompress(payload)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the gradients of all parameters, concatenated: (parameters,) float32."""
        gradients = torch.autograd.grad(self.loss(model, batch), list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])


def names() -> tuple[str, ...]:
    """Returns the names that `load` knows: all workloads, and `topk`."""
    return (*workloads.names(), TopKWorkload.name)


def kind_of(name: str) -> type[Workload]:
    """Returns the workload's class as `workloads.kind_of` does, for `topk` too.

    Raises:
        ValueError: the name is unknown; the message lists the names.
    """
    if name not in names():
        raise ValueError(f"unknown workload {name!r}; expected one of {', '.join(names())}")
    return TopKWorkload if name == TopKWorkload.name else workloads.kind_of(name)


def load(name: str, **options: Any) -> Workload:
    """Returns the open workload as `workloads.load` does, for `topk` too."""
    return workloads.open_workload(kind_of(name), **options)
