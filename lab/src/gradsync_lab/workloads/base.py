"""The base classes of workloads: a seeded model, a reproducible order of batches, a loss, an optimizer, an evaluation.

A workload is a frozen dataclass of options. Workloads know nothing of gradient synchronisation, so that all methods
under comparison train the same thing: the same weights, the same batches in the same order, the same update rule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from .data import Array, cache_directory

Batch = tuple[Tensor, ...]
"""The samples of one rank in one step; only the workload's own `loss` knows their layout."""

# Adagrad's sums of squares start here, about the square of a typical gradient entry, instead of at 0, where a first
# step is a sign: rounding then decides it for entries near 0 (losses differ by 7e-4 after 60 steps, with this 6e-8).
INITIAL_ACCUMULATOR = 1e-6


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    """One training task: its fields are options, `prepare` opens the data, and `model` returns the model."""

    name: ClassVar[str]

    batch_size: int = 1024  # samples a rank and step
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options as plain values, for a record."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    @abstractmethod
    def source(self) -> str:
        """Returns the name of the data set; users must be told when it is not a real one."""

    @property
    @abstractmethod
    def num_train(self) -> int:
        """Returns the number of training samples, over which `batches` shuffles."""

    @abstractmethod
    def batch(self, rows: np.ndarray[Any, Any]) -> Batch:
        """Returns the training samples `rows`, (batch_size,) int64, as tensors on the CPU."""

    @abstractmethod
    def model(self, *, sparse: bool, seed: int = 0) -> nn.Module:
        """Returns a fresh model whose weights depend on `seed` only; `sparse` chooses sparse gradients for embeddings.

        The caller's random state is left as it was.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean training loss of `model` over `batch`: a scalar to call `backward()` on."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer, whose updates from sparse and from dense gradients are equal up to rounding."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns measures on held-out samples by name; leaves the model's weights and training mode as they were."""

    @abstractmethod
    def describe(self) -> str:
        """Describes model and data in one line."""

    def prepare(self) -> None:  # noqa: B027 (not abstract: a workload without files has nothing to do)
        """Fetches and opens the data, so that missing data are reported here and not in the first step."""

    def steps_per_epoch(self, world_size: int) -> int:
        """Returns the whole steps in one pass over the training samples; the incomplete last one is dropped."""
        return self.num_train // (self.batch_size * world_size)

    def batches(self, rank: int, world_size: int, seed: int, start_step: int = 0) -> Iterator[Batch]:
        """Yields this rank's batches from `start_step` on, without end.

        Each epoch is shuffled anew over all samples; a step takes the next `world_size * batch_size` of them, each rank
        its own part. The order depends on the arguments alone, so a resumed run continues where it stopped.
        """
        order = shuffled_rows(self.num_train, self.batch_size, rank, world_size, seed=seed, start_step=start_step)
        return map(self.batch, order)


@dataclass(frozen=True, kw_only=True)
class DataWorkload(Workload):
    """A workload on a real data set, which is fetched, or on a stand-in for it, such as generated samples."""

    real: ClassVar[str]  # the name of the real data
    stand_in: ClassVar[str] = "zipf"  # the name of the stand-in: by default generated, for tests
    held_out_ratio: ClassVar[float]  # share of the samples that is held out, the last ones

    data: str  # `real`, `stand_in`, or "any": the stand-in, with a warning, where the real data are not available
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data not in (self.real, self.stand_in, "any"):
            raise ValueError(f"data must be {self.real}, {self.stand_in} or any, got {self.data!r}")

    @abstractmethod
    def open(self, cache: Path) -> tuple[Array, str]:
        """Returns the samples that the option `data` asks for, and the name of the data set that they come from."""

    @cached_property
    def _opened(self) -> tuple[Array, str]:
        return self.open(cache_directory(self.cache_dir))

    @property
    def options(self) -> dict[str, Any]:
        kept = {name: value for name, value in super().options.items() if name not in ("cache_dir", "data")}
        return {**kept, "source": self.source}

    @property
    def source(self) -> str:
        """Returns the name of the data set in use; `zipf` is generated, not real data."""
        return self._opened[1]

    @property
    def num_samples(self) -> int:
        """Returns the number of training and held-out samples."""
        return len(self._opened[0])

    @property
    def num_train(self) -> int:
        return self.num_samples - round(self.num_samples * self.held_out_ratio)

    def prepare(self) -> None:
        _ = self._opened


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Disables gradients and sets evaluation mode inside the block; yields the model's device.

    Afterwards each module has its former mode.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, mode in was_training:
            module.training = mode


def shuffled_rows(
    num_rows: int, batch_size: int, rank: int, world_size: int, *, seed: int, start_step: int = 0
) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the sample numbers, (batch_size,) int64, that `rank` takes in step `start_step`, `start_step + 1`, ...

    Raises:
        ValueError: the rank is outside the world, a number is negative, or one step needs more than all rows.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
    if seed < 0 or start_step < 0:
        raise ValueError(f"seed and start_step must not be negative, got {seed} and {start_step}")
    steps_per_epoch = num_rows // (batch_size * world_size)
    if steps_per_epoch == 0:
        raise ValueError(
            f"one step needs {world_size} x {batch_size} samples and there are {num_rows}; lower batch_size"
        )

    def rows() -> Iterator[np.ndarray[Any, Any]]:
        epoch, first_step = divmod(start_step, steps_per_epoch)
        while True:
            order = np.random.default_rng([seed, epoch]).permutation(num_rows)
            for step in range(first_step, steps_per_epoch):
                begin = (step * world_size + rank) * batch_size
                yield order[begin : begin + batch_size]
            epoch, first_step = epoch + 1, 0

    return rows()  # a generator of its own, so that wrong arguments raise at the call and not at the first step


def adagrad_of_tables(model: nn.Module, learning_rate: float, *, dense_ratio: float) -> Optimizer:
    """Returns Adagrad with one learning rate for tables (`nn.Embedding`) and `dense_ratio` times that for all else.

    A row without gradient keeps its weights and its sum of squares, so sparse and dense updates agree. Adagrad builds
    sparse tensors, and torch warns unless the process has decided whether to check sparse tensors; this function
    disables the check for the process.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    of_tables = {id(table) for table in tables}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in of_tables]
    groups: list[dict[str, Any]] = [{"params": tables}, {"params": dense, "lr": learning_rate * dense_ratio}]
    return Adagrad(groups, lr=learning_rate, initial_accumulator_value=INITIAL_ACCUMULATOR)


def roc_auc(scores: Tensor, positive: Tensor) -> float:
    """Returns the area under the ROC curve: the chance that a positive sample scores above a negative one, ties
    counting half.

    Computed from the rank sum (Mann & Whitney, 1947).

    Args:
        scores: (n,) float.
        positive: (n,) bool.

    Raises:
        ValueError: all samples are of one class.
    """
    _, group, group_sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = group_sizes.cumsum(0) - (group_sizes - 1).double() / 2
    num_positive = int(positive.sum())
    num_negative = positive.numel() - num_positive
    if num_positive == 0 or num_negative == 0:
        raise ValueError(f"AUC needs both classes, got {num_positive} positive and {num_negative} negative samples")
    rank_sum = float(mean_ranks[group[positive]].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)
