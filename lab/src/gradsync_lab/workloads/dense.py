"""Two models without sparse gradients, to measure the cost of gradient synchronisation per step and per tensor.

The models measure overhead only, not learning: a stack of residual linear layers fits a fixed random teacher on
generated samples. `dense20` has few large tensors, `dense160` many tiny ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from .base import Batch, Workload
from .data import Array

NUM_SAMPLES = 16_384
NUM_HELD_OUT = 2_048
TEACHER_SEED = 0


class LinearStack(nn.Module):
    """`depth` linear layers of one width, each added to its input except the last: 2 * depth tensors."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns outputs (batch, width) for `inputs` (batch, width) float32."""
        *hidden, last = self.layers
        for layer in hidden:
            inputs = inputs + functional.relu(layer(inputs)) / len(hidden)  # divided: keeps a deep stack tame
        outputs: Tensor = last(inputs)
        return outputs


@dataclass(frozen=True, kw_only=True)
class DenseWorkload(Workload):
    """Fits a `LinearStack` to a fixed teacher, tanh of a random linear map; it measures overhead only."""

    depth: ClassVar[int]
    width: ClassVar[int]

    batch_size: int = 256
    learning_rate: float = 0.01

    @property
    def source(self) -> str:
        return "synthetic"

    @property
    def num_train(self) -> int:
        return NUM_SAMPLES - NUM_HELD_OUT

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(TEACHER_SEED)
        inputs = torch.randn(NUM_SAMPLES, self.width, generator=generator)
        teacher = torch.randn(self.width, self.width, generator=generator) / self.width**0.5
        return inputs, torch.tanh(inputs @ teacher)

    def prepare(self) -> None:
        _ = self._samples

    def batch(self, rows: Array) -> Batch:
        index = torch.from_numpy(rows)
        inputs, targets = self._samples
        return inputs[index], targets[index]

    def model(self, *, sparse: bool, seed: int = 0) -> LinearStack:
        """Returns a fresh stack; `sparse` changes nothing, as there is no embedding."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LinearStack(self.depth, self.width)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns SGD without momentum: the cheapest update, which hides the least of the measured overhead."""
        return SGD(model.parameters(), lr=self.learning_rate)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the loss over the held-out samples."""
        device = next(model.parameters()).device
        inputs, targets = (part[self.num_train :].to(device) for part in self._samples)
        with torch.no_grad():
            return {"loss": float(functional.mse_loss(model(inputs), targets))}

    def describe(self) -> str:
        num_parameters = self.depth * self.width * (self.width + 1)
        return (
            f"{self.depth} linear layers of width {self.width}: {2 * self.depth} dense tensors, {num_parameters:,} "
            f"parameters, batch {self.batch_size} a rank; synthetic regression, measures overhead only"
        )


@dataclass(frozen=True, kw_only=True)
class Dense20(DenseWorkload):
    """A stack of linear layers with 20 tensors, 6.4 MB, whose step costs depend on bytes."""

    name: ClassVar[str] = "dense20"
    depth: ClassVar[int] = 10
    width: ClassVar[int] = 400


@dataclass(frozen=True, kw_only=True)
class Dense160(DenseWorkload):
    """A stack of linear layers with 160 tensors, 0.3 MB, whose step costs depend on the number of tensors."""

    name: ClassVar[str] = "dense160"
    depth: ClassVar[int] = 80
    width: ClassVar[int] = 32

    batch_size: int = 768
