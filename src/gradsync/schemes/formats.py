"""Bits on the wire: how the rows of all groups of tables, or some rows of a part, are laid into a message for a peer.

A message of tables holds, group by group, the positions of rows and then, table by table, the values of the peer's
columns; one of a part its positions and then its values. Positions travel in the smallest of several formats
(`tensors/index_formats.py`). Each section starts at a multiple of 8 bytes, so that any element type can be viewed in
place.
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

Spans = tuple[Columns, ...]  # of the columns of a group, side by side


@dataclass(frozen=True)
class Section:
    """One group in a message: its indices, and the values of each piece that travels."""

    positions: Positions  # its rows
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
        """Bytes of a row's values in each piece of each group."""
        return tuple(tuple(piece.width * piece.itemsize for piece in pieces) for pieces in self.pieces)

    def nbytes(self, rows: Sequence[float]) -> float:
        """Size of a message with these rows of each group; exact for whole numbers, the mean for expected ones."""
        total = 0.0
        for group, widths, count in zip(self.groups, self._widths, rows, strict=True):
            total += smallest(count, group.num_rows).nbytes(count, group.num_rows)
            total += sum(aligned(count * width) for width in widths)
        return total

    def sections(self, message: Tensor, rows: Sequence[int]) -> list[Section]:
        """Views of a uint8 message, group by group, to be written or read."""
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
    """Size of what comes before the sections where sizes are not exchanged: the message's length, the rank's header."""
    return LENGTH_BYTES + 8 * tables


@dataclass(frozen=True)
class PartMessage:
    """A message of some rows of a part, in place: positions to be encoded or decoded, and values.

    Of a dense message `values` are all rows of the part; `put` and `get` know that.
    """

    positions: Positions
    values: Tensor  # (count, dim)

    def put(self, indices: Tensor, values: Tensor) -> None:
        """Writes rows into the message; `indices` (count,) ascending, `values` (count, dim)."""
        if self.positions.format is IndexFormat.DENSE:
            self.values.zero_()
            kernels.scatter_rows(indices, values, self.values, accumulate=False)
            return
        self.positions.encode(indices)
        self.values.copy_(values)

    def get(self) -> tuple[Tensor, Tensor]:
        """Indices and values of the rows that came; views of the message where they can be."""
        if self.positions.format is IndexFormat.DENSE:
            length = self.positions.length
            return torch.arange(length, dtype=index_dtype(length), device=self.values.device), self.values
        return self.positions.decode(), self.values


@dataclass(frozen=True)
class PartFormat:
    """How some rows of a part of `length` rows travel: their positions in the smallest of the `formats`, and values.

    Single elements are rows of one.
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

    def part(self, message: Tensor, count: int) -> PartMessage:
        """A uint8 message of `count` rows, to be written or read."""
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
