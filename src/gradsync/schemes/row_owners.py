"""Owner maps of rows: which rank sums which rows of a table, or elements of a flat bucket (Zen, OSDI 2025).

A map divides sorted rows among owners and numbers each owner's rows from 0, so that a bitmap over an owner's rows has
no bits for rows of other owners. All ranks compute the same map, from the numbers of rows and owners and a seed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..tensors.density import DensityProfile
from ..tensors.sparse import SparseRows
from .hash_lists import owned_by_hash


@dataclass(frozen=True)
class RowOwners(ABC):
    """A map that assigns each row of a table to the rank that sums it, its owner, and numbers its rows from 0."""

    num_rows: int  # of the table
    owners: int  # the number of owners

    @property
    def length(self) -> int:
        """The room for rows of one owner (rank that sums them): all of its rows have numbers, from 0, below this.

        It is `num_rows` of each part that `split` returns.
        """
        return -(-self.num_rows // self.owners)

    def prepare(self, group: Group, device: torch.device) -> None:  # noqa: B027 (not abstract: most maps are formulas)
        """Computes and caches which rows each rank sums, if the map is no formula; call it before an exchange.

        `group`: the cache lasts as long as this process group.
        """

    @abstractmethod
    def split(self, rows: SparseRows) -> list[SparseRows]:
        """Returns the rows that each rank is to sum, and which are sent to it; `rows` are sorted and distinct.

        In each part an index is the row's number among those that the rank sums, not its row number in the table.
        """

    @abstractmethod
    def rows_of(self, owner: int, positions: Tensor) -> Tensor:
        """Returns the row numbers in the table, (count,) int64, of some of the rows that rank `owner` sums.

        `positions`: their numbers among the rows of this rank, (count,), ascending.
        """

    def share(self, owner: int, profile: DensityProfile, ranks: int) -> float:
        """Returns the expected share, in [0, 1], of the rows that `ranks` ranks touch together which belong to `owner`.

        `profile` is the table's density.
        """
        return 1.0 / self.owners

    def join(self, parts: Sequence[SparseRows]) -> SparseRows:
        """Returns the rows that all ranks summed as one table, sorted by row number: the inverse of `split`."""
        present = any(part.present for part in parts)
        if self.owners == 1:  # in order already
            return SparseRows(parts[0].indices.long(), parts[0].values, self.num_rows, present)
        indices = torch.cat([self.rows_of(owner, part.indices) for owner, part in enumerate(parts)])
        values = torch.cat([part.values for part in parts])
        order = torch.argsort(indices)  # no row occurs twice
        return SparseRows(indices[order], values[order], self.num_rows, present)


@dataclass(frozen=True)
class EvenSplit(RowOwners):
    """The map of a parameter server: each rank sums consecutive rows, equally many, the last ones fewer or none.

    Imbalanced: if a table's frequent rows come first, the first rank gets most of the load (Zen, section 2: more than
    half of all rows).
    """

    def split(self, rows: SparseRows) -> list[SparseRows]:
        starts = torch.arange(self.owners + 1, device=rows.indices.device) * self.length
        cuts = torch.searchsorted(rows.indices, starts).tolist()  # the host cuts the views
        return [
            replace(
                rows,
                indices=rows.indices[low:high] - owner * self.length,
                values=rows.values[low:high],
                num_rows=self.length,
            )
            for owner, (low, high) in enumerate(zip(cuts, cuts[1:], strict=False))
        ]

    def rows_of(self, owner: int, positions: Tensor) -> Tensor:
        return positions.long() + owner * self.length

    def share(self, owner: int, profile: DensityProfile, ranks: int) -> float:
        return profile.share(owner * self.length, (owner + 1) * self.length, ranks)


@dataclass(frozen=True)
class RotatedStripe(RowOwners):
    """A map that spreads neighbouring rows over ranks: row n q + r is row q of those that rank (r + rho(q)) mod n sums.

    n is the number of these ranks (owners), rho(q) a hash of q and the seed. Balanced: each run of n neighbours goes to
    n owners, so that neither dense regions nor regular patterns of rows load one owner. See
    `kernels.partition_rotated`.
    """

    seed: int = 0

    def split(self, rows: SparseRows) -> list[SparseRows]:
        partition = kernels.partition_rotated(rows.indices, self.num_rows, self.owners, self.seed)
        parts = [
            SparseRows(
                rows.indices.new_empty(count, dtype=torch.int32),
                rows.values.new_empty(count, rows.dim),
                self.length,
                rows.present,
            )
            for count in partition.counts
        ]
        partition.write(rows.values, [part.indices for part in parts], [part.values for part in parts])
        return parts

    def rows_of(self, owner: int, positions: Tensor) -> Tensor:
        rows = torch.empty(len(positions), dtype=torch.int64, device=positions.device)
        kernels.rotated_index(owner, positions.int(), self.owners, self.seed, rows)
        return rows


@dataclass(frozen=True)
class HashedRows(RowOwners):
    """The map of rows to the ranks that sum them in Zen's paper: a hash of row and seed (h0) gives the rank, its owner.

    An owner's rows are numbered in order. Balanced as random owners are. No formula gives an owner's rows: all ranks
    keep the lists of all owners, an integer for each row of the table, to decode a bitmap over an owner's rows (Zen's
    hash bitmap).
    """

    seed: int = 0

    @property
    def length(self) -> int:
        """The room for rows of one rank: their mean number plus 8 standard deviations and 8, at most all rows.

        It is known without computing which rows a rank sums.
        """
        mean = self.num_rows / self.owners
        return min(self.num_rows, math.ceil(mean + 8 * math.sqrt(mean)) + 8)

    def prepare(self, group: Group, device: torch.device) -> None:
        owned_by_hash(self.num_rows, self.owners, self.seed, device, kept_for=group)

    def split(self, rows: SparseRows) -> list[SparseRows]:
        partition = kernels.partition_hashed(rows.indices, self.num_rows, self.owners, self.seed)
        parts = [
            SparseRows(rows.indices.new_empty(count), rows.values.new_empty(count, rows.dim), self.length, rows.present)
            for count in partition.counts
        ]
        partition.write(rows.values, [part.indices for part in parts], [part.values for part in parts])
        for part, owned in zip(parts, self._owned(rows.indices.device), strict=True):
            kernels.positions_in(owned, part.indices.clone(), part.indices)
        return parts

    def rows_of(self, owner: int, positions: Tensor) -> Tensor:
        return self._owned(positions.device)[owner].long()[positions.long()]

    def _owned(self, device: torch.device) -> tuple[Tensor, ...]:
        """Returns the row numbers of each owner, ascending, from a cache.

        Raises:
            ValueError: if an owner has more rows than `length`, which random hashes practically never give.
        """
        owned = owned_by_hash(self.num_rows, self.owners, self.seed, device)
        if (longest := max(map(len, owned))) > self.length:
            raise ValueError(
                f"seed {self.seed} gives an owner {longest} of {self.num_rows} rows, more than {self.length}; "
                "take another seed"
            )
        return owned
