"""Message formats: the bytes in which rows of tables, or some rows of one part, travel to another rank.

A message of tables holds, group by group, the positions of rows and then, table by table, the values of the receiver's
columns; a message of one part holds positions and then values. Positions travel in the smallest of several formats
(`tensors/index_formats.py`). Each section starts at a multiple of 8 bytes, so that any dtype can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import kernels
from ..comm import LENGTH_BYTES
from ..tensors.index_formats import SPARSE_FORMATS, IndexFormat, Positions, aligned, smallest
from ..tensors.sparse import index_dtype
from .tables import Columns, Piece, RowGroup

Spans = tuple[Columns, ...]  # ranges of columns of a group whose tables lie side by side


@dataclass(frozen=True)
class Section:
    """Views of what a message says about one group of tables that have the same rows.

    Attributes:
        positions: which rows the message has.
        values: their values, (rows, width) for each range of columns that is sent.
    """

    positions: Positions  # of the rows
    values: tuple[Tensor, ...]  # (rows, width) of each of the format's pieces


@dataclass(frozen=True)
class RowFormat:
    """The layout of a message to one rank: which columns of each table's rows travel, and in which order.

    Tables with the same rows form a group, whose row indices travel once. All that does not depend on the number of
    rows is computed once, as each training step lays out a message to each rank.
    """

    groups: tuple[RowGroup, ...]
    spans: tuple[Spans, ...]  # of each group

    @classmethod
    def whole(cls, groups: tuple[RowGroup, ...]) -> RowFormat:
        """Returns the layout in which all columns of all tables travel."""
        return cls(groups, tuple(((0, group.dim),) for group in groups))

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """The ranges of columns that travel, for each group of tables that have the same rows.

        A range never goes beyond one table.
        """
        return tuple(tuple(group.pieces(spans)) for group, spans in zip(self.groups, self.spans, strict=True))

    @cached_property
    def _widths(self) -> tuple[tuple[int, ...], ...]:
        """The bytes of one row's values in each piece (range of columns) of each group of tables."""
        return tuple(tuple(piece.width * piece.itemsize for piece in pieces) for pieces in self.pieces)

    def nbytes(self, rows: Sequence[float]) -> float:
        """Returns the bytes of a message with `rows[i]` rows of the i-th group of tables; of means, the mean.

        Tables of a group have the same rows, whose indices travel once.
        """
        total = 0.0
        for group, widths, count in zip(self.groups, self._widths, rows, strict=True):
            total += smallest(count, group.num_rows).nbytes(count, group.num_rows)
            total += sum(aligned(count * width) for width in widths)
        return total

    def sections(self, message: Tensor, rows: Sequence[int]) -> list[Section]:
        """Returns views of the rows' positions and values in a message, one entry for each group of tables.

        Args:
            message: (nbytes(rows),) uint8.
            rows: the number of rows of each group in the message; tables of a group have the same rows.
        """
        found, offset = [], 0
        for group, pieces, widths, count in zip(self.groups, self.pieces, self._widths, rows, strict=True):
            choice = smallest(count, group.num_rows)
            start = offset + int(choice.nbytes(count, group.num_rows))
            positions = Positions(message[offset:start], count, group.num_rows, choice)
            values, offset = [], start
            for piece, width in zip(pieces, widths, strict=True):
                part = message[offset : offset + count * width]
                values.append(part.view(group.specs[0].dtype).view(count, piece.width))
                offset += int(aligned(count * width))
            found.append(Section(positions, tuple(values)))
        return found


def head_nbytes(tables: int) -> int:
    """Returns the bytes in front of the rows in a message: 8 for its length, 8 for the number of rows of each table."""
    return LENGTH_BYTES + 8 * tables


@dataclass(frozen=True)
class PartMessage:
    """Views of the rows in a message to or from the rank that sums one part of a table or flat bucket, its owner.

    Attributes:
        positions: the rows' places in the part, packed; none are stored in the dense format.
        values: the rows, (count, dim); in the dense format all rows of the part, absent ones as zeros.
    """

    positions: Positions
    values: Tensor  # (count, dim)

    def put(self, indices: Tensor, values: Tensor) -> None:
        """Writes rows into the message: `indices`, (count,), ascending, int32 or int64, and `values`, (count, dim)."""
        if self.positions.format is IndexFormat.DENSE:
            self.values.zero_()
            kernels.scatter_rows(indices, values, self.values, accumulate=False)
            return
        self.positions.encode(indices)
        self.values.copy_(values)

    def get(self) -> tuple[Tensor, Tensor]:
        """Returns the rows in the message: indices, (count,), int32 or int64, and values, (count, dim).

        Both are views of the message where the format allows. Of a dense message only rows that are not all zero are
        returned: otherwise sums would have all rows, and be sent so.
        """
        if self.positions.format is IndexFormat.DENSE:
            return self._nonzero()
        return self.positions.decode(), self.values

    def _nonzero(self) -> tuple[Tensor, Tensor]:
        found, length, values = kernels.nonzero_rows(self.values), self.positions.length, self.values
        indices = torch.empty(found.count, dtype=index_dtype(length), device=values.device)
        found.write_indices(indices)
        if found.count < length:
            values = values.new_empty(found.count, values.shape[1])
            found.gather([values])
        return indices, values


@dataclass(frozen=True)
class PartFormat:
    """The layout of messages with some rows of one owner's part: positions in the smallest format, then values.

    An owner is a rank that sums one part of a table, or of a flat bucket, whose elements count as rows of length 1.
    """

    length: int  # rows of the part
    dim: int  # elements of a row; 1 for single elements
    dtype: torch.dtype
    formats: tuple[IndexFormat, ...] = SPARSE_FORMATS  # allowed for positions

    def nbytes(self, count: float) -> float:
        """Returns the bytes of a message with `count` rows; for a mean number of rows, about the mean."""
        return self._nbytes(self.choice(count), count)

    @property
    def most_nbytes(self) -> int:
        """The bytes of the largest possible message, which has all rows of the part."""
        return int(self.nbytes(self.length))

    def choice(self, count: float) -> IndexFormat:
        """Returns the format of positions, such as a bitmap, in which a message of `count` rows is smallest."""
        return min(self.formats, key=lambda choice: self._nbytes(choice, count))

    def part(self, message: Tensor, count: int) -> PartMessage:
        """Returns views of the rows in `message`, a flat tensor, (nbytes(count),) uint8, for reading or writing.

        `count` is their number. The views are their positions and their values, (count, dim).
        """
        choice = self.choice(count)
        rows = self.length if choice is IndexFormat.DENSE else count
        start = int(choice.nbytes(count, self.length))
        values = message[start : start + rows * self._row_nbytes].view(self.dtype).view(rows, self.dim)
        return PartMessage(Positions(message[:start], count, self.length, choice), values)

    @property
    def _row_nbytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def _nbytes(self, choice: IndexFormat, count: float) -> float:
        rows = self.length if choice is IndexFormat.DENSE else count
        return choice.nbytes(count, self.length) + aligned(rows * self._row_nbytes)
