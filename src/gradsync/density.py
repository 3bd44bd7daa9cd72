"""How sparse gradients are, alone and summed over ranks, in the terms of Zen (Wang et al., OSDI 2025, section 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .bucket import TensorSpec


@dataclass(frozen=True)
class DensityProfile:
    """Rows that one rank touches in a step, and the growth of their union over several ranks.

    `densification[k]` is the densification ratio gamma^k: the density of the sum over k ranks over that of one rank.
    """

    num_rows: int
    rows: float  # distinct rows one rank touches, mean over the ranks
    densification: Mapping[int, float] = field(default_factory=dict)
    pattern: str = ""  # tables of equal pattern have the same rows on every rank; empty: nothing is known

    @property
    def density(self) -> float:
        """Share of the rows one rank touches, in [0, 1]."""
        return self.rows / self.num_rows if self.num_rows else 0.0

    def may_have_rows_of(self, other: DensityProfile) -> bool:
        """Whether nothing that is known contradicts that two tables have the same rows."""
        unknown = not (self.pattern and other.pattern)
        return self.rows == other.rows and (unknown or self.pattern == other.pattern or self.rows == 0)

    def union_rows(self, ranks: int) -> float:
        """Rows of the sum over `ranks` ranks: as measured, else interpolated as a power of the number of ranks.

        With nothing measured the ranks are taken as independent and uniform, which overstates the union of skewed data.
        """
        if ranks <= 1 or self.rows == 0:
            return self.rows
        if ranks in self.densification:
            return self.rows * float(self.densification[ranks])
        if not self.densification:
            return self.num_rows * float(1.0 - (1.0 - self.density) ** ranks)
        nearest = min(self.densification, key=lambda k: abs(math.log(k / ranks)))
        if nearest <= 1:
            return float(min(self.rows * ranks, self.num_rows))
        exponent = math.log(self.densification[nearest]) / math.log(nearest)
        return float(min(self.rows * ranks**exponent, self.num_rows))


@dataclass(frozen=True)
class ParameterProfile:
    """What is known of one parameter's gradient before a plan is made; the same on every rank."""

    name: str
    tensor: TensorSpec
    sparse: bool  # some rank's gradient has the sparse layout
    density: DensityProfile | None = None  # None before it was measured, or for dense gradients
    position: int = 0  # place in the order in which gradients become ready; equal before it was measured


def profile_rows(index_lists: Sequence[Tensor], num_rows: int) -> DensityProfile:
    """The exact profile of one step, from the row indices (repeats allowed) that each rank touches."""
    unique = [torch.unique(indices) for indices in index_lists]
    rows = sum(u.numel() for u in unique) / max(len(unique), 1)
    densification: dict[int, float] = {}
    for k in sorted({2**j for j in range(1, 32) if 2**j <= len(unique)} | {len(unique)}):
        if k > 1 and rows > 0:
            densification[k] = torch.unique(torch.cat(unique[:k])).numel() / rows
    return DensityProfile(num_rows, rows, densification)


def profile_tables(tables: Sequence[tuple[int, Sequence[Tensor]]]) -> tuple[DensityProfile, ...]:
    """The exact profiles of several tables in one step, from (num_rows, row indices that each rank touches).

    Tables whose ranks all touch the same rows in the same order get the same pattern.
    """
    profiles: list[DensityProfile] = []
    for position, (num_rows, lists) in enumerate(tables):
        first = next(
            (
                p
                for p, (other_rows, others) in enumerate(tables[:position])
                if other_rows == num_rows and all(map(torch.equal, lists, others))
            ),
            position,
        )
        profiles.append(replace(profile_rows(lists, num_rows), pattern=str(first)))
    return tuple(profiles)
