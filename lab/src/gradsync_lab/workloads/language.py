"""The base classes of language workloads, whose models return the loss of tokens: words or pieces of text."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .base import Batch, DataWorkload, evaluating
from .softmax import NEGATIVES, log_uniform, rng_of_negatives


@dataclass(frozen=True, kw_only=True)
class LanguageWorkload(DataWorkload):
    """A workload whose model is called with a batch and returns the mean loss per token."""

    evaluation_samples: ClassVar[int]  # how many held-out samples are evaluated, from the first on
    evaluation_batch: ClassVar[int]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(*batch)
        return loss

    def num_tokens(self, batch: Batch) -> int:
        """Returns how many tokens of an evaluated batch have a loss."""
        return batch[-1].numel()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns loss and perplexity per token, over the whole vocabulary, of the first held-out samples."""
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


@dataclass(frozen=True, kw_only=True)
class SampledSoftmaxWorkload(LanguageWorkload):
    """A language workload trained by sampled softmax (`softmax.py`): a batch ends with the step's sampled words."""

    num_negatives: int
    negatives: str = "own"  # each rank draws its own, or "shared": in a step all ranks draw the same

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_negatives < 1:
            raise ValueError(f"num_negatives must be at least 1, got {self.num_negatives}")
        if self.negatives not in NEGATIVES:
            raise ValueError(f"negatives must be own or shared, got {self.negatives!r}")

    @property
    @abstractmethod
    def scored(self) -> range:
        """Returns the ids of the words that negatives are drawn from, by descending frequency."""

    def batches(self, rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields the batches of `Workload.batches`, with sampled negatives as last tensor, (num_negatives,) int64."""
        batches = super().batches(rank, world_size, seed, start_step)
        return ((*batch, self._draw(seed, step, rank)) for step, batch in enumerate(batches, start_step))

    def _draw(self, seed: int, step: int, rank: int) -> Tensor:
        rng = rng_of_negatives(self.negatives, seed=seed, step=step, rank=rank)
        return torch.from_numpy(log_uniform(rng, self.num_negatives, len(self.scored)) + self.scored.start)
