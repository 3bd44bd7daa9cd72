"""`topk`: `gpt`, of whose gradients a rank has the largest elements only. The element-sparse case of exchanges.

All gradients of a step end to end, in the order of the model, are one flat tensor; a share `ratio` of it is left, after
some steps whose residuals it takes up (error feedback). No method trains so yet: this is for exchanges and their
characterisation, and otherwise unknown as a workload.
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
    """`gpt` with what is left of its gradients."""

    name: ClassVar[str] = "topk"

    ratio: float = 0.01  # of all elements, those that are left
    feedback_steps: int = 4  # of each rank before, at the same weights; their residuals are added

    def __post_init__(self) -> None:
        super().__post_init__()
        TopK(self.ratio)
        if self.feedback_steps < 0:
            raise ValueError(f"feedback_steps must not be negative, got {self.feedback_steps}")

    def sparsified(self, model: nn.Module, batches: Iterator[Batch]) -> Tensor:
        """What a rank sends of its next step, (parameters,) float32, mostly zero; after the steps before."""
        compressor = ErrorFeedback(TopK(self.ratio))
        numel = sum(parameter.numel() for parameter in model.parameters())
        state = compressor.init(FlatSpec.of(torch.empty(numel, device="meta")))
        for batch in islice(batches, self.feedback_steps + 1):
            payload, state = compressor.compress(self.gradient(model, batch), state)
        return compressor.decompress(payload)

    def gradient(self, model: nn.Module, batch: Batch) -> Tensor:
        """Of all parameters, end to end."""
        gradients = torch.autograd.grad(self.loss(model, batch), list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])


def names() -> tuple[str, ...]:
    """What `load` knows: all workloads, and `topk`."""
    return (*workloads.names(), TopKWorkload.name)


def kind_of(name: str) -> type[Workload]:
    """As `workloads.kind_of`.

    Raises:
        ValueError: listing the names there are.
    """
    if name not in names():
        raise ValueError(f"unknown workload {name!r}; expected one of {', '.join(names())}")
    return TopKWorkload if name == TopKWorkload.name else workloads.kind_of(name)


def load(name: str, **options: Any) -> Workload:
    """As `workloads.load`."""
    return workloads.open_workload(kind_of(name), **options)
