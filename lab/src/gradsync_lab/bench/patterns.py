"""Where the non-zeros of a gradient lie: patterns that an owner map must bear, drawn as Zen (OSDI 2025) describes them.

Its section 2 finds most non-zeros at the start of a table, where ids are sorted by frequency, or in a few tensors of a
fused bucket, whose scales differ. Columns and strides are what an owner map that is no hash has to fear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor

DENSITY = 0.01  # of all patterns, about, but for one hot column
COLUMNS = 2048  # of the matrix whose hot columns are touched
HOT_COLUMNS = 20  # a hundredth of them
STRIDE = 128  # a multiple of all usual numbers of owners
FUSED_TENSORS = 16  # of a bucket; each is half as dense as the one before
TABLE_ROWS_A_HIT = 50  # so that about a hundredth of the rows are touched, frequent ones by many hits
UNIT = STRIDE * COLUMNS  # elements must be a multiple: patterns are then whole


@dataclass(frozen=True)
class Pattern:
    """How the rows that a rank touches are drawn: (rows of the table, generator) -> (nnz,) int64, ascending."""

    draw: Callable[[int, Generator], Tensor]
    dim: int = 1  # elements of a row; 1: a flat bucket, whose elements are drawn
    alike: bool = False  # no chance in it: all ranks touch the same


def spread(size: int, generator: Generator, density: float = DENSITY) -> Tensor:
    """Each place with the same chance: the gaps between them are geometric, so that only what is drawn takes time."""
    mean = size * density
    gaps = torch.empty(math.ceil(mean + 8 * math.sqrt(mean)) + 8)
    gaps.exponential_(-math.log1p(-density), generator=generator)  # whose whole parts are geometric
    places = gaps.long().add_(1).cumsum(0) - 1
    inside: Tensor = places[: int(torch.searchsorted(places, size))]
    return inside


def frequent_rows(rows: int, generator: Generator) -> Tensor:
    """Rows by Zipf's law, sorted by frequency."""
    chances = _zipf(rows)
    hits = torch.rand(rows // TABLE_ROWS_A_HIT, dtype=torch.float64, generator=generator) * chances[-1]
    touched: Tensor = torch.searchsorted(chances, hits).clamp(max=rows - 1).unique()
    return touched


def elements_of_frequent_rows(dim: int) -> Callable[[int, Generator], Tensor]:
    """The same rows in a flat bucket."""

    def draw(size: int, generator: Generator) -> Tensor:
        return (frequent_rows(size // dim, generator)[:, None] * dim + torch.arange(dim)).flatten()

    return draw


def fused_bucket(size: int, generator: Generator) -> Tensor:
    """Tensors of one length end to end, the first of which has half of all non-zeros."""
    length = size // FUSED_TENSORS
    densest = DENSITY * FUSED_TENSORS / 2
    return torch.cat([spread(length, generator, densest / 2**k) + k * length for k in range(FUSED_TENSORS)])


def hot_columns(size: int, columns: Tensor) -> Tensor:
    return (torch.arange(size // COLUMNS)[:, None] * COLUMNS + columns).flatten()


@lru_cache(maxsize=2)
def _zipf(rows: int) -> Tensor:
    """Of each row the chance of it or one before, not normalised."""
    return (1 / torch.arange(1, rows + 1, dtype=torch.float64)).cumsum(0)


PATTERNS: dict[str, Pattern] = {
    "uniform": Pattern(spread),
    "Zipf rows of 256": Pattern(elements_of_frequent_rows(256)),
    "Zipf rows of 16": Pattern(elements_of_frequent_rows(16)),
    "dense first hundredth": Pattern(lambda size, _: torch.arange(round(size * DENSITY)), alike=True),
    "20 hot columns of 2048": Pattern(
        lambda size, _: hot_columns(size, 7 + torch.arange(HOT_COLUMNS) * 103), alike=True
    ),
    "one hot column of 2048": Pattern(lambda size, _: hot_columns(size, torch.tensor([5])), alike=True),
    "stride of 128": Pattern(lambda size, _: torch.arange(0, size, STRIDE), alike=True),
    "fused bucket": Pattern(fused_bucket),
    "table of Zipf rows of 256": Pattern(frequent_rows, dim=256),
    "table of Zipf rows of 16": Pattern(frequent_rows, dim=16),
}
