"""From a step to seconds: the latency-bandwidth (alpha-beta) model, fitted from measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .steps import Compute, Step


@dataclass(frozen=True)
class CostModel:
    """`rounds * alpha_s + busiest bytes / bandwidth` for a transfer, `bytes / memory bandwidth` for a computation."""

    alpha_s: float
    bandwidth_bytes_per_s: float
    memory_bytes_per_s: float = 10e9

    def seconds(self, step: Step) -> float:
        if isinstance(step, Compute):
            return step.nbytes / self.memory_bytes_per_s
        return step.rounds * self.alpha_s + step.busiest_bytes / self.bandwidth_bytes_per_s

    def total_s(self, steps: Iterable[Step]) -> float:
        """All steps one after the other, nothing overlapping."""
        return sum(self.seconds(step) for step in steps)

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float, float]], **known: float) -> CostModel:
        """Least squares over (rounds, busiest bytes, measured seconds), weighted by 1/seconds (relative error).

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
