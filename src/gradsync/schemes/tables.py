"""Row-sparse buckets as schemes see them: a tuple of tables, in groups that have the same rows.

Tables looked up with the same ids have the same rows (factors and first-order weights of a factorization machine).
Such tables form one `RowGroup`: indices are computed once and travel once, and columns lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..devices import host
from ..tensors.bucket import TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import SparseRows

Tables = tuple[SparseRows, ...]
Columns = tuple[int, int]  # [start, stop)

ABSENT = -1  # in a header: the rank has no gradient for the table
SAME_AS = -2  # in a header: SAME_AS - t means that the rows are those of the earlier table t


@dataclass(frozen=True)
class Piece:
    """A range of consecutive columns of one table."""

    position: int  # of the table in the bucket
    columns: Columns  # [start, stop)
    itemsize: int

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class RowGroup:
    """Tables of a bucket that share one list of row indices on each rank; ranks may have different lists."""

    positions: tuple[int, ...]  # of the tables in the bucket
    specs: tuple[TensorSpec, ...]  # of these tables

    @property
    def first(self) -> int:
        """The position in the bucket of the group's first table, whose rows are those of all tables of the group."""
        return self.positions[0]

    @property
    def num_rows(self) -> int:
        return self.specs[0].num_rows

    @property
    def dim(self) -> int:
        """The number of columns of all tables of the group together."""
        return sum(spec.dim for spec in self.specs)

    def pieces(self, spans: Sequence[Columns]) -> list[Piece]:
        """Returns ranges of columns cut at the borders of tables, so that each is of one table.

        `spans`: ranges [start, stop), where the columns of all tables of the group count as lying side by side.
        """
        found = []
        for start, stop in spans:
            offset = 0
            for position, spec in zip(self.positions, self.specs, strict=True):
                low, high = max(start - offset, 0), min(stop - offset, spec.dim)
                if low < high:
                    found.append(Piece(position, (low, high), spec.itemsize))
                offset += spec.dim
        return found


@dataclass(frozen=True)
class OwnRows:
    """This rank's distinct rows in each table, and the header by which it tells other ranks how many there are.

    Attributes:
        unions: the distinct rows of each table; tables with the same rows have one object.
        header: for each table the number of distinct rows, `ABSENT` for no gradient, or `SAME_AS` - t for the rows of
            an earlier table t, (tables,) int64.
    """

    unions: tuple[kernels.RowUnion, ...]  # the same object for tables with the same rows
    header: Tensor  # (tables,) int64: the number of distinct rows, ABSENT, or SAME_AS - t

    @classmethod
    def of(cls, tables: Tables) -> OwnRows:
        """Finds the distinct rows of this rank's tables, and the tables that have the same rows.

        Raises:
            ValueError: for an index outside its table.
        """
        unions: list[kernels.RowUnion] = []
        header: list[int] = []
        for position, table in enumerate(tables):
            first = next((p for p in range(position) if _same_rows(tables[p], table)), None)
            if first is not None:
                unions.append(unions[first])
                header.append(SAME_AS - first)
            else:
                unions.append(kernels.unite_rows([table.indices], table.num_rows))
                header.append(unions[-1].count if table.present else ABSENT)
        return cls(tuple(unions), host.numbers(header, tables[0].values.device, torch.int64))


@dataclass(frozen=True)
class AgreedRows:
    """The number of rows that each rank has in each group of tables, read from headers: the same on every rank.

    Tables of a group have the same rows.
    """

    groups: tuple[RowGroup, ...]
    rows: tuple[tuple[int, ...], ...]  # per rank: the number of rows in each group
    present: tuple[bool, ...]  # per table: whether any rank has a gradient for it

    @classmethod
    def of(cls, headers: Sequence[Sequence[int]], groups: tuple[RowGroup, ...]) -> AgreedRows:
        """Returns each rank's number of rows in each group of tables, and which tables have a gradient on any rank.

        Args:
            headers: what each rank says of each table: headers[rank][table] is a number of rows, `ABSENT` for no
                gradient, or `SAME_AS` - t if the rows are those of the earlier table t.
            groups: tables that have the same rows on every rank.
        """
        own = [[header[origin] for origin in origins(header)] for header in headers]
        return cls(
            groups,
            tuple(tuple(max(counts[group.first], 0) for group in groups) for counts in own),
            tuple(any(counts[position] != ABSENT for counts in own) for position in range(len(own[0]))),
        )


def common_groups(headers: Sequence[Sequence[int]], specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
    """Returns the tables in groups of those that have the same rows on every rank, so that indices are sent once.

    Args:
        headers: what each rank says of each table: headers[rank][table] is a number of rows, `ABSENT` for no gradient,
            or `SAME_AS` - t if the rows are those of the earlier table t.
        specs: shape and dtype of each table.
    """
    members: dict[int, list[int]] = {}
    for position in range(len(specs)):
        said = {header[position] for header in headers}
        first = SAME_AS - said.pop() if len(said) == 1 else ABSENT
        # Tables with the same rows on some ranks only stay apart, as all ranks must lay out messages alike.
        members.setdefault(first if first in members else position, []).append(position)
    return groups_of(members.values(), specs)


def origins(header: Sequence[int]) -> list[int]:
    """Returns for each table the position of the first table that has its rows, on the rank that sent this header.

    That is t if the header says `SAME_AS` - t for the table, else the position of the table itself.
    """
    return [SAME_AS - said if said <= SAME_AS else position for position, said in enumerate(header)]


def specs_of(tables: Tables) -> tuple[TensorSpec, ...]:
    """Returns shape, (num_rows, dim), and dtype of each table; rows without a gradient count, too."""
    return tuple(TensorSpec((t.num_rows, t.dim), t.values.dtype) for t in tables)


def expected_groups(specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...]) -> tuple[RowGroup, ...]:
    """Returns the tables in groups, each of tables that are expected to have the same non-zero rows.

    They are those whose density `profiles` have the same `pattern`, a mark for equal rows in the measured steps.
    """
    members: dict[object, list[int]] = {}
    for position, profile in enumerate(profiles):
        members.setdefault(profile.pattern or position, []).append(position)
    return groups_of(members.values(), specs)


def single_groups(specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
    """Returns one group for each table, with that table alone."""
    return groups_of(([position] for position in range(len(specs))), specs)


def groups_of(members: Iterable[Sequence[int]], specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
    """Returns one group of tables for each entry of `members`, which lists the positions of its tables in the bucket.

    Tables of a group have the same rows. `specs`: shape and dtype of all tables of the bucket.
    """
    return tuple(RowGroup(tuple(positions), tuple(specs[i] for i in positions)) for positions in members)


def _same_rows(a: SparseRows, b: SparseRows) -> bool:
    if not (a.present and b.present) or a.num_rows != b.num_rows or a.nnz != b.nnz:
        return False
    return a.indices.data_ptr() == b.indices.data_ptr() or torch.equal(a.indices, b.indices)
