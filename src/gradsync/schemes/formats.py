"""Message formats: the bytes in which rows of tables, or some rows of one part, travel to another rank.

A message of tables holds the positions of rows, group by group, and then, table by table, the values of the receiver's
columns, behind those of columns that all receivers get; a message of one part holds positions and then values.
Positions travel in the smallest of several formats (`tensors/index_formats.py`). Each section starts at a multiple of 8
bytes, so that any dtype can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

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
    def _lengths(self) -> tuple[int, ...]:
        return tuple(group.num_rows for group in self.groups)

    @cached_property
    def _layout(self) -> tuple[_PieceKind, ...]:
        """The pieces in their order in a message: those of the groups' first ranges of columns come first."""
        return tuple(
            _PieceKind(number, place, piece.width, piece.width * piece.itemsize)
            for place in range(max(map(len, self.spans), default=0))
            for number, (group, spans) in enumerate(zip(self.groups, self.spans, strict=True))
            for piece in group.pieces(spans[place : place + 1])
        )

    def nbytes(self, rows: Sequence[float]) -> float:
        """Returns the bytes of a message with `rows[i]` rows of the i-th group of tables; of means, the mean.

        Tables of a group have the same rows, whose indices travel once.
        """
        return _places(self._lengths, self._layout, tuple(rows)).end

    def common_nbytes(self, rows: Sequence[int]) -> int:
        """Returns the bytes in front of the groups' second ranges of columns: positions and values of the first ranges.

        `rows`: the number of rows of each group in the message.
        """
        places = _places(self._lengths, self._layout, tuple(rows))
        return int(next((start for kind, start in places.values if kind.span > 0), places.end))

    def sections(self, message: Tensor, rows: Sequence[int]) -> list[Section]:
        """Returns views of the rows' positions and values in a message, one entry for each group of tables.

        Args:
            message: (nbytes(rows),) uint8.
            rows: the number of rows of each group in the message; tables of a group have the same rows.
        """
        places = _places(self._lengths, self._layout, tuple(rows))
        return [
            Section(Positions(message[int(start) : int(stop)], count, length, choice), tuple(values))
            for (choice, start, stop), count, length, values in zip(
                places.positions, rows, self._lengths, self.values(message, rows), strict=True
            )
        ]

    def values(self, message: Tensor, rows: Sequence[int], first_span: int = 0) -> list[list[Tensor]]:
        """Returns views of the values in a message, (rows, width) of each piece, for each group of tables.

        Args:
            message: (nbytes(rows),) uint8.
            rows: the number of rows of each group in the message.
            first_span: leaves out so many ranges of columns of each group.
        """
        found: list[list[Tensor]] = [[] for _ in self.groups]
        if not self.groups:
            return found
        dtype = self.groups[0].specs[0].dtype
        numbers = message.view(dtype)  # once: a step cuts some hundred pieces
        for (number, span, width, _), start in _places(self._lengths, self._layout, tuple(rows)).values:
            if span >= first_span:
                part = numbers.narrow(0, int(start) // dtype.itemsize, rows[number] * width)
                found[number].append(part.view(rows[number], width))
        return found


class _PieceKind(NamedTuple):
    """A piece in the layout of messages: a range of columns of one table."""

    group: int  # of tables with the same rows
    span: int  # which range of columns of the group
    width: int  # columns
    row_bytes: int


class _Places(NamedTuple):
    """The byte offsets in a message with given numbers of rows."""

    positions: tuple[tuple[IndexFormat, float, float], ...]  # of each group: format, start, stop
    values: tuple[tuple[_PieceKind, float], ...]  # of each piece, its start
    end: float


@lru_cache(maxsize=1024)  # the messages to all owners of equal stripes are laid out alike
def _places(lengths: tuple[int, ...], layout: tuple[_PieceKind, ...], rows: tuple[float, ...]) -> _Places:
    """Returns where positions and values stand in a message with `rows[g]` of the `lengths[g]` rows of each group g."""
    positions, values, offset = [], [], 0.0 if any(isinstance(count, float) for count in rows) else 0
    for count, length in zip(rows, lengths, strict=True):
        choice = smallest(count, length)
        stop = offset + choice.nbytes(count, length)
        positions.append((choice, offset, stop))
        offset = stop
    for kind in layout:
        values.append((kind, offset))
        offset += aligned(rows[kind.group] * kind.row_bytes)
    return _Places(tuple(positions), tuple(values), offset)


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
