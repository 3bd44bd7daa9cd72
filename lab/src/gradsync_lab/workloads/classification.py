"""The base class of workloads that classify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from .base import Batch, DataWorkload, evaluating


@dataclass(frozen=True, kw_only=True)
class ClassificationWorkload(DataWorkload):
    """A workload whose batches are (inputs, labels) and whose model returns logits (batch, classes)."""

    evaluation_samples: ClassVar[int | None]  # how many held-out samples are evaluated, from the first on; None: all
    evaluation_batch: ClassVar[int]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns loss and accuracy over the first held-out samples."""
        held_out = np.arange(self.num_train, self.num_samples)[: self.evaluation_samples]
        total, right = 0.0, 0
        with evaluating(model) as device:
            for first in range(0, len(held_out), self.evaluation_batch):
                inputs, labels = self.batch(held_out[first : first + self.evaluation_batch])
                logits = model(inputs.to(device)).cpu()
                total += float(functional.cross_entropy(logits, labels, reduction="sum"))
                right += int((logits.argmax(dim=1) == labels).sum())
        return {"loss": total / len(held_out), "accuracy": right / len(held_out)}
