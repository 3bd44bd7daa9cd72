"""What schemes of row-sparse buckets see: a tuple of tables, one for each parameter of the bucket.

Tables looked up with the same ids have the same rows (factors and first-order weights of a factorization machine).
Such tables form one `RowGroup`: their indices are found once and travel once, and their columns lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..tensors.bucket import TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import SparseRows

Tables = tuple[SparseRows, ...]
Columns = tuple[int, int]  # [start, stop)

ABSENT = -1  # in a header: this rank has no gradient for the table
SAME_AS = -2  # in a header: SAME_AS - t says that the rows are those of the earlier table t


@dataclass(frozen=True)
class Piece:
    """Columns of one table."""

    position: int  # of the table in the bucket
    columns: Columns
    itemsize: int

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class RowGroup:
    """Tables of a bucket that have the same rows on every rank."""

    positions: tuple[int, ...]  # of the tables in the bucket
    specs: tuple[TensorSpec, ...]  # of these tables

    @property
    def first(self) -> int:
        """Position of the first of the tables, which stands for the rows of all."""
        return self.positions[0]

    @property
    def num_rows(self) -> int:
        return self.specs[0].num_rows

    @property
    def dim(self) -> int:
        """Columns of all tables, side by side."""
        return sum(spec.dim for spec in self.specs)

    def pieces(self, spans: Sequence[Columns]) -> list[Piece]:
        """What `spans` of all columns, side by side, are of each table's own; span by span, without empty ones."""
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
class Survey:
    """Which rows this rank has of each table, sorted and unique; the same object for tables with the same rows."""

    unions: tuple[kernels.RowUnion, ...]
    header: Tensor  # (tables,) int64: distinct rows, ABSENT, or SAME_AS - t; what the ranks tell each other

    @classmethod
    def of(cls, tables: Tables) -> Survey:
        """
        Raises:
            ValueError: for an index outside of its table.
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
        return cls(tuple(unions), torch.tensor(header, dtype=torch.int64, device=tables[0].values.device))


@dataclass(frozen=True)
class Agreement:
    """What the headers of all ranks say: the same on every rank."""

    groups: tuple[RowGroup, ...]
    rows: tuple[tuple[int, ...], ...]  # per rank: its rows of each group
    present: tuple[bool, ...]  # per table: whether any rank has a gradient for it

    @classmethod
    def of(cls, headers: Sequence[Sequence[int]], groups: tuple[RowGroup, ...]) -> Agreement:
        """`groups` of tables that have the same rows on every rank."""
        own = [[header[origin] for origin in origins(header)] for header in headers]
        return cls(
            groups,
            tuple(tuple(max(counts[group.first], 0) for group in groups) for counts in own),
            tuple(any(counts[position] != ABSENT for counts in own) for position in range(len(own[0]))),
        )


def common_groups(headers: Sequence[Sequence[int]], specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
    """The groups that the headers show: tables whose rows are the same on all ranks."""
    members: dict[int, list[int]] = {}
    for position in range(len(specs)):
        said = {header[position] for header in headers}
        first = SAME_AS - said.pop() if len(said) == 1 else ABSENT
        # Rows that only some ranks have in common travel twice: all must cut messages alike.
        members.setdefault(first if first in members else position, []).append(position)
    return groups_of(members.values(), specs)


def origins(header: Sequence[int]) -> list[int]:
    """For each table of a header the first one with the same rows."""
    return [SAME_AS - said if said <= SAME_AS else position for position, said in enumerate(header)]


def specs_of(tables: Tables) -> tuple[TensorSpec, ...]:
    """The whole tables' shapes and element types."""
    return tuple(TensorSpec((t.num_rows, t.dim), t.values.dtype) for t in tables)


def expected_groups(specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...]) -> tuple[RowGroup, ...]:
    """The groups that tables of these profiles will form."""
    members: dict[object, list[int]] = {}
    for position, profile in enumerate(profiles):
        members.setdefault(profile.pattern or position, []).append(position)
    return groups_of(members.values(), specs)


def single_groups(specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
    """Every table on its own."""
    return groups_of(([position] for position in range(len(specs))), specs)


def groups_of(members: Iterable[Sequence[int]], specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
    """The groups whose tables stand at these positions of the bucket."""
    return tuple(RowGroup(tuple(positions), tuple(specs[i] for i in positions)) for positions in members)


def _same_rows(a: SparseRows, b: SparseRows) -> bool:
    if not (a.present and b.present) or a.num_rows != b.num_rows or a.nnz != b.nnz:
        return False
    return a.indices.data_ptr() == b.indices.data_ptr() or torch.equal(a.indices, b.indices)
