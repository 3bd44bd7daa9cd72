"""Bits on the wire: how the rows of all groups of tables, or single elements, are laid into one message for a peer.

A message of rows holds, group by group, the row indices and then, table by table, the values of the peer's columns; one
of elements holds their positions and then their values. Each section starts at a multiple of 8 bytes, so that any
element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import kernels
from ..comm import LENGTH_BYTES
from .tables import Columns, Piece, RowGroup

ALIGNMENT_BYTES = 8
INT32_ROWS = 2**31  # tables up to this many rows send indices of 4 bytes, larger ones of 8


def aligned(nbytes: float) -> float:
    """`nbytes` rounded up to the alignment; exact for whole numbers, the mean for expected sizes."""
    if isinstance(nbytes, int) or nbytes.is_integer():
        return -(-int(nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return nbytes + ALIGNMENT_BYTES / 2


def index_dtype(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows <= INT32_ROWS else torch.int64


Spans = tuple[Columns, ...]  # of the columns of a group, side by side


@dataclass(frozen=True)
class Section:
    """One group in a message: its indices, and the values of each piece that travels."""

    indices: Tensor  # (rows,) int32 or int64
    values: tuple[Tensor, ...]  # (rows, width) of each of the format's pieces


@dataclass(frozen=True)
class RowFormat:
    """How rows of all groups travel in one message to a peer, and which columns of them.

    What does not depend on the number of rows is worked out once: a step lays out a message of every peer.
    """

    groups: tuple[RowGroup, ...]
    spans: tuple[Spans, ...]  # of each group

    @classmethod
    def whole(cls, groups: tuple[RowGroup, ...]) -> RowFormat:
        """All columns of each group."""
        return cls(groups, tuple(((0, group.dim),) for group in groups))

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Of each group what its spans are of the tables' own columns."""
        return tuple(tuple(group.pieces(spans)) for group, spans in zip(self.groups, self.spans, strict=True))

    @cached_property
    def _widths(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of a row in each section of each group: of its index, of its values."""
        return tuple(
            (index_dtype(group.num_rows).itemsize, *(piece.width * piece.itemsize for piece in pieces))
            for group, pieces in zip(self.groups, self.pieces, strict=True)
        )

    def nbytes(self, rows: Sequence[float]) -> float:
        """Size of a message with these rows of each group; exact for whole numbers, the mean for expected ones."""
        return sum(aligned(count * width) for count, widths in zip(rows, self._widths, strict=True) for width in widths)

    def sections(self, message: Tensor, rows: Sequence[int]) -> list[Section]:
        """Views of a uint8 message, group by group, to be written or read."""
        found, offset = [], 0
        for group, pieces, widths, count in zip(self.groups, self.pieces, self._widths, rows, strict=True):
            parts = []
            for width in widths:
                parts.append(message[offset : offset + count * width])
                offset += int(aligned(count * width))
            indices, *values = parts
            found.append(
                Section(
                    indices.view(index_dtype(group.num_rows)),
                    tuple(
                        part.view(group.specs[0].dtype).view(count, piece.width)
                        for part, piece in zip(values, pieces, strict=True)
                    ),
                )
            )
        return found


def head_nbytes(tables: int) -> int:
    """Size of what comes before the sections where sizes are not exchanged: the message's length, the rank's header."""
    return LENGTH_BYTES + 8 * tables


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
