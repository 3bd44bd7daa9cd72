"""Ownership: which rank sums which part of a table (Zen's balance dimension)."""

from __future__ import annotations

from dataclasses import dataclass

from .tables import Columns

MOST_SHARED = 2  # columns; more of them cost more bytes than stripes that differ by one


@dataclass(frozen=True)
class ColumnOwners:
    """`stripes[owner]` are the columns that a rank sums of *every* row; the `shared` ones are summed by every rank."""

    stripes: tuple[Columns, ...]
    shared: Columns

    def spans(self, owner: int) -> tuple[Columns, Columns]:
        """All columns that `owner` sums."""
        return self.stripes[owner], self.shared


def column_owners(dim: int, size: int) -> ColumnOwners:
    """Column stripes: whatever rows a step touches, all owners get equally many elements of each.

    Imbalance 1 in push and pull if `size` divides `dim`, with no hash and no table (Zen, OSDI 2025, made exact for
    row-sparse gradients). One or two columns left over are shared: each rank sums them itself. On n ranks with unions u
    times as large as a rank's rows, a stripe more for one owner costs (n-1)(1+u) values a row of a rank, sharing L
    columns costs (n-1)L, so that sharing pays if L < 1+u. With more columns left over, stripes differ by one column.
    """
    left = dim % size
    shared = left if left <= MOST_SHARED else 0
    owned = dim - shared
    stripes = tuple((owner * owned // size, (owner + 1) * owned // size) for owner in range(size))
    return ColumnOwners(stripes, (owned, dim))
