"""Bits on the wire: how the rows of all groups of tables are laid into one message for a peer.

A message holds, group by group, the row indices and then, table by table, the values of the peer's columns; each
section starts at a multiple of 8 bytes, so that any element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .tables import Columns, RowGroup

ALIGNMENT_BYTES = 8
INT32_ROWS = 2**31  # tables up to this many rows send indices of 4 bytes, larger ones of 8


def aligned(nbytes: float) -> float:
    """`nbytes` rounded up to the alignment; exact for whole numbers, the mean for expected sizes."""
    if float(nbytes).is_integer():
        return -(-int(nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return nbytes + ALIGNMENT_BYTES / 2


def index_dtype(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows <= INT32_ROWS else torch.int64


def rows_nbytes(group: RowGroup, rows: float, start: int, stop: int) -> float:
    """Size of one group's sections for `rows` rows and columns [start, stop) of the group."""
    owned = zip(group.specs, group.columns(start, stop), strict=True)
    values = sum(aligned(rows * (high - low) * spec.itemsize) for spec, (low, high) in owned)
    return aligned(rows * index_dtype(group.num_rows).itemsize) + values


@dataclass(frozen=True)
class Section:
    """One group in a message: its indices, and of each of its tables (position) the columns that travel."""

    indices: Tensor  # (rows,) int32 or int64
    values: dict[int, tuple[Columns, Tensor]]  # position -> columns, (rows, columns)


def sections(
    message: Tensor, groups: Sequence[RowGroup], rows: Sequence[int], columns: Sequence[Columns]
) -> Iterator[Section]:
    """Views of a uint8 message, group by group, to be written or read; `rows` and `columns` are of each group."""
    offset = 0

    def take(nbytes: int) -> Tensor:
        nonlocal offset
        part = message[offset : offset + nbytes]
        offset += int(aligned(nbytes))
        return part

    for group, count, (start, stop) in zip(groups, rows, columns, strict=True):
        kind = index_dtype(group.num_rows)
        indices = take(count * kind.itemsize).view(kind)
        values = {}
        for position, spec, (low, high) in zip(group.positions, group.specs, group.columns(start, stop), strict=True):
            part = take(count * (high - low) * spec.itemsize)
            values[position] = ((low, high), part.view(spec.dtype).view(count, high - low))
        yield Section(indices, values)


def message_nbytes(groups: Sequence[RowGroup], rows: Sequence[float], columns: Sequence[Columns]) -> float:
    """Size of a message; exact for whole numbers of rows, the mean for expected ones."""
    return sum(rows_nbytes(g, count, *span) for g, count, span in zip(groups, rows, columns, strict=True))
