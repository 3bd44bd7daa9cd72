"""Partitioned sparse schemes: the rank that owns a part of a table sums it (push), then hands it to all (pull)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..bucket import Layout, TensorSpec
from ..cluster import Placement
from ..comm import Group
from ..density import DensityProfile
from ..sparse import SparseRows
from ..steps import Compute, Pattern, Step, Transfer
from .base import Partitioned, State, register
from .formats import Section, message_nbytes, sections
from .owners import column_stripes
from .tables import Agreement, Columns, RowGroup, Survey, Tables, expected_groups, specs_of


@dataclass(frozen=True)
class OwnedColumns:
    """What a rank holds after push: the sum of its columns for every row that any rank touched."""

    agreed: Agreement
    indices: tuple[Tensor, ...]  # per group (union,) int64, sorted; the same on every rank
    values: Tensor  # flat: group by group, table by table, (union, columns owned)

    def numel_of(self, owner: int, size: int) -> int:
        """Elements that `owner` of `size` ranks holds of the same sum."""
        stripes = [column_stripes(group.dim, size)[owner] for group in self.agreed.groups]
        return sum(len(indices) * (stop - start) for indices, (start, stop) in zip(self.indices, stripes, strict=True))


@register
@dataclass(frozen=True)
class BalancedParallelism(Partitioned[Tables, OwnedColumns]):
    """Zen's Balanced Parallelism (OSDI 2025, section 3) for row-sparse tables, owned by column stripes. Exact.

    Every rank owns the same columns of every row, so all owners receive equal volumes however skewed the rows are.
    Beyond the paper: an owner sees the row indices of all ranks, so all ranks know the union after push, and pull
    carries values only, in equal parts, with no indices and no size exchange; tables with the same rows send their
    indices once and are striped as one table.
    Wire per rank: push (n-1) * indices + (n-1)/n * values; pull (n-1)/n * values of the union.
    """

    owners: str = "column_stripe"  # who sums what; the only map for row-sparse tables so far

    layout = Layout.ROWS

    def __post_init__(self) -> None:
        if self.owners != "column_stripe":
            raise ValueError(f"BalancedParallelism.owners must be 'column_stripe', got {self.owners!r}")

    @property
    def stages(self) -> tuple[str, ...]:
        return ("sizes", "push", "pull")

    async def push(self, x: Tables, state: State, group: Group, scale: float) -> tuple[OwnedColumns, State]:
        # Push: to each owner its columns of my rows.
        survey = Survey.of(x)
        agreed = Agreement.of(await group.all_gather(survey.header), specs_of(x))
        message, own, sent = _pack_stripes(x, survey, agreed, group)
        mine = _stripes(agreed.groups, group.size, group.rank)
        received = [int(message_nbytes(agreed.groups, rows, mine)) for rows in agreed.rows]
        received[group.rank] = 0
        most_rows = [max(counts) for counts in zip(*agreed.rows, strict=True)]
        # The last stripe is the widest one.
        largest = int(message_nbytes(agreed.groups, most_rows, _stripes(agreed.groups, group.size, group.size - 1)))
        messages = await group.all_to_all(message, sent, received, largest=largest)
        messages[group.rank] = own
        return _sum_stripes(messages, agreed, mine, scale), state

    async def pull(self, shard: OwnedColumns, state: State, group: Group) -> Tables:
        # Pull: from each owner its columns of the sum; everybody knows the rows already.
        sizes = [shard.numel_of(owner, group.size) for owner in range(group.size)]
        return _join_stripes(await group.all_gather(shard.values, sizes), shard)

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        n = placement.size
        expected = expected_groups(specs, profiles)
        groups, rows = [g for g, _ in expected], [profiles[first].rows for _, first in expected]
        unions = [profiles[first].union_rows(n) for _, first in expected]
        stripes = [_stripes(groups, n, owner) for owner in range(n)]
        push = tuple(message_nbytes(groups, rows, stripe) for stripe in stripes)
        pull = tuple(_values_nbytes(groups, unions, stripe) for stripe in stripes)
        return (
            Compute("sum_rows", message_nbytes(groups, rows, [(0, g.dim) for g in groups]) + sum(push)),
            Transfer("sizes", Pattern.ALL_GATHER, (8.0 * len(specs),) * n),
            Transfer("push", Pattern.ALL_TO_ALL, push),
            Compute("sum_rows", n * max(push) + max(pull)),
            Transfer("pull", Pattern.ALL_GATHER, pull),
            Compute("join", 2 * sum(pull)),
        )


def _stripes(groups: Sequence[RowGroup], size: int, owner: int) -> list[Columns]:
    """The columns that `owner` of `size` ranks owns of each group."""
    return [column_stripes(group.dim, size)[owner] for group in groups]


def _values_nbytes(groups: Sequence[RowGroup], rows: Sequence[float], columns: Sequence[Columns]) -> float:
    itemsize = groups[0].specs[0].itemsize
    return sum(count * (stop - start) * itemsize for count, (start, stop) in zip(rows, columns, strict=True))


def _pack_stripes(tables: Tables, survey: Survey, agreed: Agreement, group: Group) -> tuple[Tensor, Tensor, list[int]]:
    """One message for each other owner, one after the other; this rank's own part; the sizes in bytes (own: 0)."""
    stripes = [_stripes(agreed.groups, group.size, owner) for owner in range(group.size)]
    rows = agreed.rows[group.rank]
    nbytes = [int(message_nbytes(agreed.groups, rows, stripe)) for stripe in stripes]
    own = torch.empty(nbytes[group.rank], dtype=torch.uint8, device=tables[0].values.device)
    nbytes[group.rank] = 0
    message = own.new_empty(sum(nbytes))
    parts = list(torch.split(message, nbytes))
    parts[group.rank] = own
    written = [list(sections(part, agreed.groups, rows, stripe)) for part, stripe in zip(parts, stripes, strict=True)]
    for number, row_group in enumerate(agreed.groups):
        _write_group(tables, survey, row_group, [owner[number] for owner in written])
    return message, own, nbytes


def _write_group(tables: Tables, survey: Survey, group: RowGroup, owners: list[Section]) -> None:
    """Merges repeated rows and spreads them over the owners' messages, in one pass a table."""
    union = survey.unions[group.positions[0]]
    union.write_indices(owners[0].indices)
    for other in owners[1:]:
        other.indices.copy_(owners[0].indices)
    for position in group.positions:
        shares = [(columns, out) for columns, out in (owner.values[position] for owner in owners) if out.shape[1]]
        survey.unions[position].sum(
            [tables[position].values], [out for _, out in shares], [columns for columns, _ in shares]
        )


def _sum_stripes(messages: list[Tensor], agreed: Agreement, mine: list[Columns], scale: float) -> OwnedColumns:
    """`scale` times the sum of my columns over all ranks, in rank order."""
    received = [
        list(sections(message, agreed.groups, rows, mine)) for message, rows in zip(messages, agreed.rows, strict=True)
    ]
    unions = [
        kernels.unite_rows([rank[number].indices for rank in received], group.num_rows)
        for number, group in enumerate(agreed.groups)
    ]
    widths = [stop - start for start, stop in mine]
    dtype = agreed.groups[0].specs[0].dtype
    total = sum(union.count * width for union, width in zip(unions, widths, strict=True))
    flat = messages[0].new_empty(total, dtype=dtype)
    indices, offset = [], 0
    for number, (group, union) in enumerate(zip(agreed.groups, unions, strict=True)):
        indices.append(flat.new_empty(union.count, dtype=torch.int64))
        union.write_indices(indices[-1])
        for position in group.positions:
            values = [rank[number].values[position][1] for rank in received]
            numel = union.count * values[0].shape[1]
            if numel:
                union.sum(values, [flat[offset : offset + numel].view(union.count, -1)], scale=scale)
            offset += numel
    return OwnedColumns(agreed, tuple(indices), flat)


def _join_stripes(parts: list[Tensor], shard: OwnedColumns) -> Tables:
    """Whole rows from the owners' columns; `parts[owner]` holds its columns of all tables."""
    size = len(parts)
    offsets = [0] * size
    result: dict[int, SparseRows] = {}
    for group, indices in zip(shard.agreed.groups, shard.indices, strict=True):
        owned = [group.columns(*stripe) for stripe in column_stripes(group.dim, size)]
        for number, (position, spec) in enumerate(zip(group.positions, group.specs, strict=True)):
            columns, pieces = [], []
            for owner, (start, stop) in enumerate(tables[number] for tables in owned):
                if start < stop:
                    taken = len(indices) * (stop - start)
                    pieces.append(parts[owner][offsets[owner] : offsets[owner] + taken].view(-1, stop - start))
                    columns.append((start, stop))
                    offsets[owner] += taken
            values = parts[0].new_empty(len(indices), spec.dim)
            kernels.join_columns(pieces, columns, values)
            result[position] = SparseRows(indices, values, group.num_rows, shard.agreed.present[position])
    return tuple(result[position] for position in range(len(result)))
