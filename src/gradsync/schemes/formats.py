"""Bits on the wire: how the rows of all groups of tables, or some rows of a part, are laid into a message for a peer.

A message of tables holds, group by group, the row indices and then, table by table, the values of the peer's columns;
one of a part holds positions in it, in one of several formats, and then values. Each section starts at a multiple of
8 bytes, so that any element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
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


class IndexFormat(StrEnum):
    """How a message tells which rows of a part it has (Zen, section 5.4, and what there is beside its bitmap)."""

    LIST = "list"  # an integer a row
    BITMAP = "bitmap"  # a bit for each row of the part
    DENSE = "dense"  # nothing tells: all rows travel, of those that are not there zeros


SPARSE_FORMATS = (IndexFormat.LIST, IndexFormat.BITMAP)


@dataclass(frozen=True)
class Part:
    """A message of some rows of a part, in place: fill `positions` and `values` and `encode`, or `decode` and read.

    Of a dense message `values` are all rows of the part; `put` and `get` know that.
    """

    form: PartFormat
    choice: IndexFormat
    positions: Tensor  # (count,) ascending; what travels, or a buffer of their own
    values: Tensor  # (count, dim)
    bitmap: Tensor | None  # (words,) int64: travels in place of the positions

    def encode(self) -> None:
        """Writes the positions as they travel."""
        if self.bitmap is not None:
            kernels.encode_bitmap(self.positions, self.form.length, self.bitmap)

    def decode(self) -> None:
        """Reads the positions as they came."""
        if self.bitmap is not None:
            kernels.decode_bitmap(self.bitmap, self.positions)

    def put(self, positions: Tensor, values: Tensor) -> None:
        """Writes rows into the message; `positions` (count,) ascending, `values` (count, dim)."""
        if self.choice is IndexFormat.DENSE:
            self.values.zero_()
            kernels.scatter_rows(positions, values, self.values, accumulate=False)
            return
        self.positions.copy_(positions)
        self.values.copy_(values)
        self.encode()

    def get(self) -> tuple[Tensor, Tensor]:
        """Positions and values of the rows that came; views of the message where they can be."""
        if self.choice is IndexFormat.DENSE:
            return torch.arange(self.form.length, dtype=self.positions.dtype, device=self.values.device), self.values
        self.decode()
        return self.positions, self.values


@dataclass(frozen=True)
class PartFormat:
    """How some rows of a part of `length` rows travel: their positions in the smallest of the `formats`, and values.

    Who knows the number of rows knows which format it is: nothing says so. Single elements are rows of one.
    """

    length: int
    dim: int
    dtype: torch.dtype
    formats: tuple[IndexFormat, ...] = SPARSE_FORMATS

    def nbytes(self, count: float) -> float:
        """Size of a message; exact for a whole number of rows, the mean for an expected one."""
        return self._nbytes(self.choice(count), count)

    @property
    def most_nbytes(self) -> int:
        """The size that no message exceeds."""
        return int(self.nbytes(self.length))

    def choice(self, count: float) -> IndexFormat:
        """The format of the smallest message; of equally small ones the first of `formats`."""
        return min(self.formats, key=lambda choice: self._nbytes(choice, count))

    def part(self, message: Tensor, count: int) -> Part:
        """A uint8 message of `count` rows, to be written or read."""
        choice, dtype = self.choice(count), index_dtype(self.length)
        rows = self.length if choice is IndexFormat.DENSE else count
        start = int(self._positions_nbytes(choice, count))
        values = message[start : start + rows * self._row_nbytes].view(self.dtype).view(rows, self.dim)
        if choice is IndexFormat.LIST:
            return Part(self, choice, message[: count * dtype.itemsize].view(dtype), values, None)
        bitmap = message[:start].view(torch.int64) if choice is IndexFormat.BITMAP else None
        return Part(self, choice, message.new_empty(count, dtype=dtype), values, bitmap)

    @property
    def _row_nbytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def _nbytes(self, choice: IndexFormat, count: float) -> float:
        rows = self.length if choice is IndexFormat.DENSE else count
        return self._positions_nbytes(choice, count) + aligned(rows * self._row_nbytes)

    def _positions_nbytes(self, choice: IndexFormat, count: float) -> float:
        match choice:
            case IndexFormat.LIST:
                return aligned(count * index_dtype(self.length).itemsize)
            case IndexFormat.BITMAP:
                return -(-self.length // WORD_BITS) * (WORD_BITS // 8)
            case IndexFormat.DENSE:
                return 0
