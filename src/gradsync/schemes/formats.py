"""Bits on the wire: how the rows of all groups of tables, or single elements, are laid into one message for a peer.

A message of rows holds, group by group, the row indices and then, table by table, the values of the peer's columns; one
of elements holds their positions and then their values. Each section starts at a multiple of 8 bytes, so that any
element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
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


WORD_BITS = 64  # of a bitmap, the unit of the kernels


@dataclass(frozen=True)
class Elements:
    """A message of single elements, seen in place: fill `positions` and `values` and `encode`, or `decode` and read."""

    positions: Tensor  # (count,) int32, ascending
    values: Tensor  # (count,)
    bitmap: Tensor | None  # (words,) int64: travels in place of the positions, which then are a buffer of their own
    capacity: int

    def encode(self) -> None:
        """Writes the positions into the bitmap, if one travels."""
        if self.bitmap is not None:
            kernels.encode_bitmap(self.positions, self.capacity, self.bitmap)

    def decode(self) -> None:
        """Reads the positions from the bitmap, if one has come."""
        if self.bitmap is not None:
            kernels.decode_bitmap(self.bitmap, self.positions)


@dataclass(frozen=True)
class ElementFormat:
    """How some elements of a part of `capacity` elements travel: positions in the smaller of two formats, and values.

    A list takes 4 bytes a position, a bitmap a bit for each element of the part, so that it is smaller above a density
    of 1/32. Who knows the number of elements knows which it is.
    """

    capacity: int  # at most 2^31
    dtype: torch.dtype

    @property
    def bitmap_nbytes(self) -> int:
        return -(-self.capacity // WORD_BITS) * (WORD_BITS // 8)

    def has_bitmap(self, count: float) -> bool:
        """Whether `count` elements' positions travel as a bitmap; a list of the same size is cheaper to write."""
        return self.bitmap_nbytes < aligned(count * torch.int32.itemsize)

    def nbytes(self, count: float) -> float:
        """Size of a message; exact for a whole number of elements, the mean for an expected one."""
        positions = min(self.bitmap_nbytes, aligned(count * torch.int32.itemsize))
        return positions + aligned(count * self.dtype.itemsize)

    def elements(self, message: Tensor, count: int) -> Elements:
        """A uint8 message of `count` elements, to be written or read."""
        list_nbytes = count * torch.int32.itemsize
        if self.has_bitmap(count):
            bitmap = message[: self.bitmap_nbytes].view(torch.int64)
            positions, start = message.new_empty(count, dtype=torch.int32), self.bitmap_nbytes
        else:
            bitmap = None
            positions, start = message[:list_nbytes].view(torch.int32), int(aligned(list_nbytes))
        values = message[start : start + count * self.dtype.itemsize].view(self.dtype)
        return Elements(positions, values, bitmap, self.capacity)
