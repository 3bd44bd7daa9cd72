"""Random patterns of a gradient's non-zeros that owner maps spread unevenly, drawn as Zen (OSDI 2025) describes.

Section 2 of the paper finds most non-zeros at the start of a table, where ids are sorted by frequency, or in a few
tensors of a fused bucket, whose scales differ. Columns and strides are the worst cases of owner maps without a hash.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Generator, Tensor

DENSITY = 0.01  # approximate, of all patterns except one hot column
COLUMNS = 2048  # of the matrix with hot columns
HOT_COLUMNS = 20  # a hundredth of them
STRIDE = 128  # a multiple of all usual numbers of owners
FUSED_TENSORS = 16  # tensors of a bucket; each is half as dense as the one before
TABLE_ROWS_A_HIT = 50  # table rows per drawn row: about a hundredth of the rows is touched, frequent ones often
UNIT = STRIDE * COLUMNS  # the number of elements must be a multiple, so that patterns are complete


@dataclass(frozen=True)
class Pattern:
    """A pattern; `draw` returns a rank's non-zero rows: (rows of the table, generator) -> (nnz,) int64, ascending."""

    draw: Callable[[int, Generator], Tensor]
    dim: int = 1  # elements of a row; 1: a flat bucket, whose elements are drawn
    alike: bool = False  # no chance in it: all ranks touch the same


def spread(size: int, generator: Generator, density: float = DENSITY) -> Tensor:
    """Draws each index below `size` with probability `density`: (nnz,) int64, ascending.

    Draws the gaps, which are geometric, so that the time depends on the number of drawn indices only.
    """
    mean = size * density
    gaps = torch.empty(math.ceil(mean + 8 * math.sqrt(mean)) + 8)
    gaps.exponential_(-math.log1p(-density), generator=generator)  # integer parts are geometric
    places = gaps.long().add_(1).cumsum(0) - 1
    inside: Tensor = places[: int(torch.searchsorted(places, size))]
    return inside


def frequent_rows(rows: int, generator: Generator) -> Tensor:
    """Draws rows of a table that is sorted by frequency, by Zipf's law: (nnz,) int64, ascending."""
    chances = _zipf(rows)
    hits = torch.rand(rows // TABLE_ROWS_A_HIT, dtype=torch.float64, generator=generator) * chances[-1]
    touched: Tensor = torch.searchsorted(chances, hits).clamp(max=rows - 1).unique()
    return touched


def elements_of_frequent_rows(dim: int) -> Callable[[int, Generator], Tensor]:
    """Returns a function that draws `frequent_rows` and returns the indices of all their elements in a flat bucket."""

    def draw(size: int, generator: Generator) -> Tensor:
        return (frequent_rows(size // dim, generator)[:, None] * dim + torch.arange(dim)).flatten()

    return draw


def fused_bucket(size: int, generator: Generator) -> Tensor:
    """Draws indices of non-zeros, (nnz,) int64, ascending, in a bucket of equal tensors; half are in the first."""
    length = size // FUSED_TENSORS
    densest = DENSITY * FUSED_TENSORS / 2
    return torch.cat([spread(length, generator, densest / 2**k) + k * length for k in range(FUSED_TENSORS)])


def hot_columns(size: int, columns: Tensor) -> Tensor:
    return (torch.arange(size // COLUMNS)[:, None] * COLUMNS + columns).flatten()


@lru_cache(maxsize=2)
def _zipf(rows: int) -> Tensor:
    """Returns the cumulative sum of Zipf's probabilities over the rows, not normalised."""
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
