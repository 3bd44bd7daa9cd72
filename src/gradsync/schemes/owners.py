"""Ownership: which rank sums which part of a table (Zen's balance dimension)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .formats import RowFormat
from .tables import Columns, Piece, RowGroup

MOST_SHARED = 2  # columns; more of them cost more bytes than stripes that differ by one


@dataclass(frozen=True)
class ColumnOwners:
    """`stripes[owner]` are the columns that a rank sums of *every* row; the `shared` ones are summed by every rank."""

    stripes: tuple[Columns, ...]
    shared: Columns


def column_owners(dim: int, size: int, most_shared: int = MOST_SHARED) -> ColumnOwners:
    """Column stripes: whatever rows a step touches, all owners get equally many elements of each.

    Imbalance 1 in push and pull if `size` divides `dim`, with no hash and no table (Zen, OSDI 2025, made exact for
    row-sparse gradients). One or two columns left over are shared: each rank sums them itself. On n ranks with unions u
    times as large as a rank's rows, a stripe more for one owner costs (n-1)(1+u) values a row of a rank, sharing L
    columns costs (n-1)L, so that sharing pays if L < 1+u. With more columns left over, stripes differ by one column.
    """
    left = dim % size
    shared = left if left <= most_shared else 0
    owned = dim - shared
    stripes = tuple((owner * owned // size, (owner + 1) * owned // size) for owner in range(size))
    return ColumnOwners(stripes, (owned, dim))


@dataclass(frozen=True)
class StripedGroups:
    """The groups of a bucket, each striped over the same owners."""

    groups: tuple[RowGroup, ...]
    size: int  # number of owners
    most_shared: int = MOST_SHARED  # columns left over that all owners sum

    @cached_property
    def formats(self) -> tuple[RowFormat, ...]:
        """What each owner sums: of each group its own columns, then the shared ones."""
        owners = [column_owners(group.dim, self.size, self.most_shared) for group in self.groups]
        return tuple(
            RowFormat(self.groups, tuple((group.stripes[owner], group.shared) for group in owners))
            for owner in range(self.size)
        )

    @cached_property
    def shared(self) -> tuple[tuple[Piece, ...], ...]:
        """Of each group the pieces that all owners sum: the last ones of its pieces in `formats`."""
        owners = [column_owners(group.dim, self.size, self.most_shared) for group in self.groups]
        return tuple(tuple(group.pieces([of.shared])) for group, of in zip(self.groups, owners, strict=True))

    @cached_property
    def owned(self) -> tuple[tuple[tuple[Piece, ...], ...], ...]:
        """Of each owner, of each group the pieces that it sums alone."""
        return tuple(
            tuple(
                pieces[: len(pieces) - len(shared)] for pieces, shared in zip(format.pieces, self.shared, strict=True)
            )
            for format in self.formats
        )

    @cached_property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """Of each owner, of each group how many columns it sums alone."""
        return tuple(tuple(sum(piece.width for piece in pieces) for pieces in owner) for owner in self.owned)

    def pull_bytes(self, rows: Sequence[float]) -> tuple[float, ...]:
        """The sums that each owner hands to the others, with so many rows of each group."""
        itemsize = self.groups[0].specs[0].itemsize
        return tuple(
            float(sum(count * width * itemsize for count, width in zip(rows, widths, strict=True)))
            for widths in self.widths
        )


@lru_cache(maxsize=64)
def striped(groups: tuple[RowGroup, ...], size: int, most_shared: int = MOST_SHARED) -> StripedGroups:
    """`groups` striped over `size` owners; the same object at the next step, with what it has worked out."""
    return StripedGroups(groups, size, most_shared)
