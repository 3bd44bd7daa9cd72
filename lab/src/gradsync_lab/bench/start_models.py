"""The models of `gradsync bench start`: a small recommender and a perceptron, on generated samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from .. import workloads
from ..workloads import Batch, Workload
from ..workloads.base import evaluating
from ..workloads.data import Array
from ..workloads.dense import DenseWorkload

NUM_SAMPLES, NUM_HELD_OUT = 65_536, 1_024
IDS, HIDDEN, IDS_SEED = 8, 256, 0


class Recommender(nn.Module):
    """A mean of a sample's table rows, and a perceptron of it."""

    def __init__(self, rows: int, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, dim, sparse=sparse)
        self.perceptron = nn.Sequential(
            nn.Linear(dim, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns scores (batch,) float32 for `ids` (batch, 8) int64."""
        scores: Tensor = self.perceptron(self.table(ids).mean(dim=1)).squeeze(1)
        return scores


@dataclass(frozen=True, kw_only=True)
class TablesWorkload(Workload):
    """A small recommender, whose steps take a few milliseconds: 200,000 rows of 32, of which a step touches 1 %."""

    name: ClassVar[str] = "tables"

    batch_size: int = 256
    rows: int = 200_000
    dim: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows < 1 or self.dim < 1:
            raise ValueError(f"rows and dim must be at least 1, got {self.rows} and {self.dim}")

    @property
    def source(self) -> str:
        return "synthetic"

    @property
    def num_train(self) -> int:
        return NUM_SAMPLES - NUM_HELD_OUT

    @cached_property
    def _ids(self) -> Array:
        return np.random.default_rng(IDS_SEED).integers(self.rows, size=(NUM_SAMPLES, IDS))

    def batch(self, rows: Array) -> Batch:
        """Returns ids (n, 8) int64, uniform ones, and targets (n,) float32 in [0, 1), by the first id."""
        ids = self._ids[rows]
        return torch.from_numpy(ids), torch.from_numpy(ids[:, 0] % 97 / 97).float()

    def model(self, *, sparse: bool, seed: int = 0) -> Recommender:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Recommender(self.rows, self.dim, sparse=sparse)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        ids, targets = batch
        return functional.mse_loss(model(ids), targets)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns SGD without momentum, which takes sparse gradients."""
        return SGD(model.parameters(), lr=self.learning_rate)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the loss over the held-out samples."""
        ids, targets = self.batch(np.arange(self.num_train, NUM_SAMPLES))
        with evaluating(model) as device:
            return {"loss": float(functional.mse_loss(model(ids.to(device)), targets.to(device)))}

    def describe(self) -> str:
        return (
            f"a table of {self.rows:,} rows of {self.dim} and a perceptron, batch {self.batch_size} a rank; synthetic, "
            "measures the start of a job"
        )


@dataclass(frozen=True, kw_only=True)
class PerceptronWorkload(DenseWorkload):
    """A stack of 4 linear layers, 4.2 MB in 8 tensors."""

    name: ClassVar[str] = "mlp"
    depth: ClassVar[int] = 4
    width: ClassVar[int] = 512


_KINDS: dict[str, type[Workload]] = {kind.name: kind for kind in (TablesWorkload, PerceptronWorkload)}


def names() -> tuple[str, ...]:
    """Returns the models that `gradsync bench start` knows: its own, and all workloads."""
    return (*_KINDS, *workloads.names())


def kind_of(name: str) -> type[Workload]:
    """Returns the class of the model `name`, without opening data.

    Raises:
        ValueError: there is no such model; the message lists the names.
    """
    if name not in names():
        raise ValueError(f"unknown model {name!r}; expected one of {', '.join(names())}")
    return _KINDS.get(name) or workloads.kind_of(name)
