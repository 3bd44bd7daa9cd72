"""What workloads share whose model gives the loss of tokens: words or pieces of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from gradsync.workloads.base import Batch, DataWorkload, evaluating


@dataclass(frozen=True, kw_only=True)
class LanguageWorkload(DataWorkload):
    """A workload whose model gives the mean loss a token of the batch that it is called with."""

    evaluation_samples: ClassVar[int]  # of the held-out ones, the first
    evaluation_batch: ClassVar[int]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def num_tokens(self, batch: Batch) -> int:
        """Tokens of an evaluated batch that have a loss."""
        return batch[-1].numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and perplexity a token, over the whole vocabulary, of the first held-out samples."""
        held_out = np.arange(self.num_train, self.num_samples)[: self.evaluation_samples]
        total, num_tokens = 0.0, 0
        with evaluating(model) as device:
            for first in range(0, len(held_out), self.evaluation_batch):
                batch = self.batch(held_out[first : first + self.evaluation_batch])
                counted = self.num_tokens(batch)
                total += counted * float(self.loss(model, tuple(part.to(device) for part in batch)))
                num_tokens += counted
        loss = total / num_tokens
        return {"loss": loss, "perplexity": math.exp(loss)}
