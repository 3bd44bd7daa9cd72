"""Bits on the wire: how the rows of all groups of tables are laid into one message for a peer.

A message holds, group by group, the row indices and then, table by table, the values of the peer's columns; each
section starts at a multiple of 8 bytes, so that any element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import LENGTH_BYTES
from .tables import Columns, Piece, RowGroup

ALIGNMENT_BYTES = 8
INT32_ROWS = 2**31  # tables up to this many rows send indices of 4 bytes, larger ones of 8


def aligned(nbytes: float) -> float:
    """`nbytes` rounded up to the alignment; exact for whole numbers, the mean for expected sizes."""
    if float(nbytes).is_integer():
        return -(-int(nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return nbytes + ALIGNMENT_BYTES / 2


def index_dtype(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows <= INT32_ROWS else torch.int64


Spans = Sequence[Columns]  # of the columns of a group, side by side


def rows_nbytes(group: RowGroup, rows: float, spans: Spans) -> float:
    """Size of one group's sections for `rows` rows and these columns of the group."""
    values = sum(aligned(rows * piece.width * piece.itemsize) for piece in group.pieces(spans))
    return aligned(rows * index_dtype(group.num_rows).itemsize) + values


@dataclass(frozen=True)
class Section:
    """One group in a message: its indices, and the values of each piece that travels."""

    indices: Tensor  # (rows,) int32 or int64
    pieces: tuple[tuple[Piece, Tensor], ...]  # each with its values (rows, width)


def sections(
    message: Tensor, groups: Sequence[RowGroup], rows: Sequence[int], spans: Sequence[Spans]
) -> Iterator[Section]:
    """Views of a uint8 message, group by group, to be written or read; `rows` and `spans` are of each group."""
    offset = 0

    def take(nbytes: int) -> Tensor:
        nonlocal offset
        part = message[offset : offset + nbytes]
        offset += int(aligned(nbytes))
        return part

    for group, count, columns in zip(groups, rows, spans, strict=True):
        kind, dtype = index_dtype(group.num_rows), group.specs[0].dtype
        indices = take(count * kind.itemsize).view(kind)
        pieces = []
        for piece in group.pieces(columns):
            values = take(count * piece.width * piece.itemsize).view(dtype).view(count, piece.width)
            pieces.append((piece, values))
        yield Section(indices, tuple(pieces))


def head_nbytes(tables: int) -> int:
    """Size of what comes before the sections where sizes are not exchanged: the message's length, the rank's header."""
    return LENGTH_BYTES + 8 * tables


def message_nbytes(groups: Sequence[RowGroup], rows: Sequence[float], spans: Sequence[Spans]) -> float:
    """Size of a message; exact for whole numbers of rows, the mean for expected ones."""
    return sum(rows_nbytes(g, count, columns) for g, count, columns in zip(groups, rows, spans, strict=True))
