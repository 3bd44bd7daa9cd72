"""From a step to seconds: the latency-bandwidth (alpha-beta) model, fitted from measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .steps import Compute, Step


@dataclass(frozen=True)
class KernelCost:
    """What a kernel takes: so much a call, and so much a byte that it must read or write."""

    call_s: float
    byte_s: float


@dataclass(frozen=True)
class CostModel:
    """`rounds * alpha_s + busiest bytes / bandwidth` for a transfer; for a computation what its kernel was measured to
    take, else `bytes / memory bandwidth`.
    """

    alpha_s: float
    bandwidth_bytes_per_s: float
    memory_bytes_per_s: float = 10e9
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)

    def seconds(self, step: Step) -> float:
        if isinstance(step, Compute):
            kernel = self.kernels.get(step.kernel) or KernelCost(0.0, 1 / self.memory_bytes_per_s)
            return step.calls * kernel.call_s + step.nbytes * kernel.byte_s
        return step.rounds * self.alpha_s + step.busiest_bytes / self.bandwidth_bytes_per_s

    def total_s(self, steps: Iterable[Step]) -> float:
        """All steps one after the other, nothing overlapping."""
        return sum(self.seconds(step) for step in steps)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CostModel:
        """What `dataclasses.asdict` made of a cost model."""
        kernels = {name: KernelCost(**costs) for name, costs in values["kernels"].items()}
        return cls(**{**values, "kernels": kernels})

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float, float]], **known: Any) -> CostModel:
        """Least squares over (rounds, busiest bytes, measured seconds), weighted by 1/seconds (relative error).

        `known` are the other fields.

        Raises:
            ValueError: with fewer than two samples, or when the samples do not tell latency from bandwidth.
        """
        if len(samples) < 2:
            raise ValueError(f"CostModel.fit needs at least 2 samples of different size, got {len(samples)}")
        table = np.asarray(samples, dtype=np.float64)
        weighted = table[:, :2] / table[:, 2:]
        solution, _, rank, _ = np.linalg.lstsq(weighted, np.ones(len(table)), rcond=None)
        if rank < 2 or solution[1] <= 0:
            raise ValueError("CostModel.fit: the samples do not separate latency from bandwidth; vary the sizes more")
        return cls(max(float(solution[0]), 0.0), 1.0 / float(solution[1]), **known)
