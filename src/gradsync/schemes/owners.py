"""Owner maps of columns: the stripe, consecutive columns of a table, that each rank sums (Zen's balance dimension)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .formats import RowFormat
from .tables import Columns, Piece, RowGroup

MOST_SHARED = 2  # columns; sharing more costs more bytes than stripes that differ by one column


@dataclass(frozen=True)
class ColumnOwners:
    """The division of a table's columns among ranks: each sums consecutive columns, its stripe, of *every* row.

    Attributes:
        stripes: the columns [start, stop) of each rank.
        shared: the columns that every rank sums for itself.
    """

    stripes: tuple[Columns, ...]
    shared: Columns  # summed by every rank


def column_owners(dim: int, size: int, most_shared: int = MOST_SHARED) -> ColumnOwners:
    """Divides `dim` columns into stripes for `size` owners (ranks): each sums equally many elements of every row.

    If `size` divides `dim`, all messages of push (rows to owners) and pull (sums to all) are equally long, with no hash
    and no table of owners (Zen, OSDI 2025, made exact for row-sparse gradients). Up to `most_shared` columns left over
    are shared: each rank sums them itself. On n ranks that together touch u times as many rows as one, one more column
    for one owner costs (n-1)(1+u) values for each row of a rank; sharing L columns costs (n-1)L, so that sharing is
    cheaper if L < 1+u. With more columns left over, stripes differ by one column.
    """
    left = dim % size
    shared = left if left <= most_shared else 0
    owned = dim - shared
    stripes = tuple((owner * owned // size, (owner + 1) * owned // size) for owner in range(size))
    return ColumnOwners(stripes, (owned, dim))


@dataclass(frozen=True)
class StripedGroups:
    """The division of a bucket's tables by columns among the ranks that sum them, their owners.

    Tables with the same rows form a group, whose columns, side by side, are divided as those of one table.
    """

    groups: tuple[RowGroup, ...]
    size: int  # number of owners
    most_shared: int = MOST_SHARED  # columns left over that all owners sum

    @cached_property
    def formats(self) -> tuple[RowFormat, ...]:
        """The layout of the message to each rank: the columns that every rank sums, and then those that it alone sums.

        So all messages of a rank begin alike. Both are columns of all groups of tables, where tables of a group have
        the same rows.
        """
        owners = [column_owners(group.dim, self.size, self.most_shared) for group in self.groups]
        return tuple(
            RowFormat(self.groups, tuple((group.shared, group.stripes[owner]) for group in owners))
            for owner in range(self.size)
        )

    @cached_property
    def shared(self) -> tuple[tuple[Piece, ...], ...]:
        """The ranges of columns that every rank sums for itself, as they are too few to divide.

        There is one tuple for each group of tables that have the same rows. In messages these columns travel in front
        of those that the receiver alone sums.
        """
        owners = [column_owners(group.dim, self.size, self.most_shared) for group in self.groups]
        return tuple(tuple(group.pieces([of.shared])) for group, of in zip(self.groups, owners, strict=True))

    @cached_property
    def owned(self) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
        """The ranges of columns that each rank sums alone, by rank, then by group of tables of the same rows."""
        return tuple(
            tuple(pieces[len(shared) :] for pieces, shared in zip(format.pieces, self.shared, strict=True))
            for format in self.formats
        )

    @cached_property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The number of columns that each rank sums alone, by rank, then by group of tables of the same rows."""
        return tuple(tuple(sum(piece.width for piece in pieces) for pieces in owner) for owner in self.owned)

    def pull_bytes(self, rows: Sequence[float]) -> tuple[float, ...]:
        """Returns the bytes of sums that each rank sends to all others, if group g of tables has `rows[g]` rows.

        Tables of a group have the same rows.
        """
        itemsize = self.groups[0].specs[0].itemsize
        return tuple(
            float(sum(count * width * itemsize for count, width in zip(rows, widths, strict=True)))
            for widths in self.widths
        )


@lru_cache(maxsize=64)
def striped(groups: tuple[RowGroup, ...], size: int, most_shared: int = MOST_SHARED) -> StripedGroups:
    """Returns how the columns of tables are divided among `size` ranks, which sum them; cached.

    Args:
        groups: the tables, in groups of those that have the same rows.
        size: the number of ranks.
        most_shared: if equal division leaves up to so many columns over, every rank sums these for itself.
    """
    return StripedGroups(groups, size, most_shared)
