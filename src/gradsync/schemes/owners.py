"""Owner maps of columns: the stripes of a table's columns that each rank sums (Zen's balance dimension)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .formats import RowFormat
from .tables import Columns, Piece, RowGroup

MOST_SHARED = 2  # columns; sharing more costs more bytes than stripes that differ by one column


@dataclass(frozen=True)
class ColumnOwners:
    """Stripes of columns, one for each owner, which sums these columns of *every* row."""

    stripes: tuple[Columns, ...]
    shared: Columns  # summed by every rank


def column_owners(dim: int, size: int, most_shared: int = MOST_SHARED) -> ColumnOwners:
    """Returns stripes of `dim` columns for `size` owners: each owner gets equally many elements of every row.

    Imbalance is 1 in push and pull if `size` divides `dim`, with no hash and no table (Zen, OSDI 2025, made exact for
    row-sparse gradients). Up to `most_shared` columns left over are shared: each rank sums them itself. On n ranks,
    with a union u times as large as one rank's rows, one more column for one owner costs (n-1)(1+u) values for each row
    of a rank; sharing L columns costs (n-1)L, so that sharing is cheaper if L < 1+u. With more columns left over,
    stripes differ by one column.
    """
    left = dim % size
    shared = left if left <= most_shared else 0
    owned = dim - shared
    stripes = tuple((owner * owned // size, (owner + 1) * owned // size) for owner in range(size))
    return ColumnOwners(stripes, (owned, dim))


@dataclass(frozen=True)
class StripedGroups:
    """A bucket's groups of tables, each divided into stripes of columns for the same owners."""

    groups: tuple[RowGroup, ...]
    size: int  # number of owners
    most_shared: int = MOST_SHARED  # columns left over that all owners sum

    @cached_property
    def formats(self) -> tuple[RowFormat, ...]:
        """The layout of messages to each owner: in each group the owner's columns, then the shared ones."""
        owners = [column_owners(group.dim, self.size, self.most_shared) for group in self.groups]
        return tuple(
            RowFormat(self.groups, tuple((group.stripes[owner], group.shared) for group in owners))
            for owner in range(self.size)
        )

    @cached_property
    def shared(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each group that all owners sum, last among the group's pieces in `formats`."""
        owners = [column_owners(group.dim, self.size, self.most_shared) for group in self.groups]
        return tuple(tuple(group.pieces([of.shared])) for group, of in zip(self.groups, owners, strict=True))

    @cached_property
    def owned(self) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
        """The pieces that each owner sums alone: by owner, by group."""
        return tuple(
            tuple(
                pieces[: len(pieces) - len(shared)] for pieces, shared in zip(format.pieces, self.shared, strict=True)
            )
            for format in self.formats
        )

    @cached_property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The number of columns that each owner sums alone: by owner, by group."""
        return tuple(tuple(sum(piece.width for piece in pieces) for pieces in owner) for owner in self.owned)

    def pull_bytes(self, rows: Sequence[float]) -> tuple[float, ...]:
        """Returns for each owner the bytes of sums that it sends in pull, with so many rows in each group."""
        itemsize = self.groups[0].specs[0].itemsize
        return tuple(
            float(sum(count * width * itemsize for count, width in zip(rows, widths, strict=True)))
            for widths in self.widths
        )


@lru_cache(maxsize=64)
def striped(groups: tuple[RowGroup, ...], size: int, most_shared: int = MOST_SHARED) -> StripedGroups:
    """Returns `groups` striped over `size` owners: a cached object, so that the next step finds layouts computed."""
    return StripedGroups(groups, size, most_shared)
