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
from .capacity import RowCapacity, opened, write_header
from .formats import Section, Spans, head_nbytes, message_nbytes, sections
from .owners import column_owners
from .tables import (
    Agreement,
    Columns,
    RowGroup,
    Survey,
    Tables,
    common_groups,
    expected_groups,
    specs_of,
)


@dataclass(frozen=True)
class OwnedColumns:
    """What a rank holds after push: the sum of its columns for every row that any rank touched."""

    agreed: Agreement
    indices: tuple[Tensor, ...]  # per group (union,) int64, sorted; the same on every rank
    values: Tensor  # flat: group by group, table by table, (union, columns owned)
    shared: tuple[tuple[Tensor, ...], ...]  # per group the pieces that every rank sums, (union, width)

    def numel_of(self, owner: int, size: int) -> int:
        """Elements that `owner` of `size` ranks holds for the others."""
        stripes = [column_owners(group.dim, size).stripes[owner] for group in self.agreed.groups]
        return sum(len(indices) * (stop - start) for indices, (start, stop) in zip(self.indices, stripes, strict=True))


@register
@dataclass(frozen=True)
class BalancedParallelism(RowCapacity, Partitioned[Tables, OwnedColumns]):
    """Zen's Balanced Parallelism (OSDI 2025, section 3) for row-sparse tables, owned by column stripes. Exact.

    Every rank owns the same columns of every row, so all owners receive equal volumes however skewed the rows are.
    Beyond the paper: an owner sees the row indices of all ranks, so all ranks know the union after push, and pull
    carries values only, in equal parts, with no indices and no size exchange; tables with the same rows send their
    indices once and are striped as one table; a column or two that equal stripes leave over are summed by every rank.
    Wire per rank: push (n-1) * indices + (n-1)/n * values; pull (n-1)/n * values of the union.

    With `capacity` nothing is asked beforehand: a rank's header travels in its push. Where rows do not fit, all push
    once more, by the sizes that all know.
    """

    owners: str = "column_stripe"  # who sums what; the only map for row-sparse tables so far

    layout = Layout.ROWS

    def __post_init__(self) -> None:
        if self.owners != "column_stripe":
            raise ValueError(f"BalancedParallelism.owners must be 'column_stripe', got {self.owners!r}")
        super().__post_init__()

    @property
    def stages(self) -> tuple[str, ...]:
        return ("push", "pull") if self.capacity else ("sizes", "push", "pull")

    async def push(self, x: Tables, state: State, group: Group, scale: float) -> tuple[OwnedColumns, State]:
        # Push: to each owner its columns of my rows.
        survey, specs = Survey.of(x), specs_of(x)
        if self.capacity:
            planned = self.planned_groups(specs)
            bounds = [self.largest_nbytes(planned, _spans(planned, group.size, owner)) for owner in range(group.size)]
            headers, bodies = opened(await group.exchange(self._messages(x, survey, planned, group), bounds), len(x))
            if all(map(self.fits, headers)):
                return _sum_columns(bodies, Agreement.of(headers, planned), group, scale), state
        else:
            headers = [header.tolist() for header in await group.all_gather(survey.header)]  # to size the messages
        agreed = Agreement.of(headers, common_groups(headers, specs))
        messages = await _push_by_sizes(x, survey, agreed, group)
        return _sum_columns(messages, agreed, group, scale), state

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
        n, at_once = placement.size, self.expects_to_fit(profiles)
        groups = self.planned_groups(specs) if at_once else expected_groups(specs, profiles)
        rows = [profiles[group.first].rows for group in groups]
        unions = [profiles[group.first].union_rows(n) for group in groups]
        push = tuple(message_nbytes(groups, rows, _spans(groups, n, owner)) for owner in range(n))
        pull = tuple(_values_nbytes(groups, unions, _stripes(groups, n, owner)) for owner in range(n))
        return (
            Compute("sum_rows", message_nbytes(groups, rows, [[(0, g.dim)] for g in groups]) + sum(push)),
            *self.transfers("push", Pattern.ALL_TO_ALL, push, len(specs), at_once=at_once),
            Compute("sum_rows", n * max(push) + max(pull)),
            Transfer("pull", Pattern.ALL_GATHER, pull),
            Compute("join", 2 * sum(pull)),
        )

    def _messages(self, x: Tables, survey: Survey, planned: tuple[RowGroup, ...], group: Group) -> list[Tensor]:
        """A message for each owner: header and my rows, or the header alone if they do not fit."""
        header = survey.header.tolist()  # the host sizes the messages
        groups = planned if self.fits(header) else ()
        (rows,) = Agreement.of([header], groups).rows
        _, messages = _pack_stripes(x, survey, groups, rows, group, head=head_nbytes(len(x)))
        for message in messages:
            write_header(message, survey)
        return messages


async def _push_by_sizes(x: Tables, survey: Survey, agreed: Agreement, group: Group) -> list[Tensor]:
    """The messages of all ranks, whose sizes all know."""
    outgoing, parts = _pack_stripes(x, survey, agreed.groups, agreed.rows[group.rank], group)
    mine = _spans(agreed.groups, group.size, group.rank)
    sent = [len(part) for part in parts]
    received = [int(message_nbytes(agreed.groups, rows, mine)) for rows in agreed.rows]
    sent[group.rank] = received[group.rank] = 0
    most_rows = [max(counts) for counts in zip(*agreed.rows, strict=True)]
    owners = [_spans(agreed.groups, group.size, owner) for owner in range(group.size)]
    largest = max(int(message_nbytes(agreed.groups, most_rows, spans)) for spans in owners)
    messages = await group.all_to_all(outgoing, sent, received, largest=largest)
    messages[group.rank] = parts[group.rank]
    return messages


def _spans(groups: Sequence[RowGroup], size: int, owner: int) -> list[Spans]:
    """The columns that `owner` of `size` ranks sums of each group."""
    return [column_owners(group.dim, size).spans(owner) for group in groups]


def _stripes(groups: Sequence[RowGroup], size: int, owner: int) -> list[Columns]:
    """The columns of each group that the others get from `owner` of `size` ranks."""
    return [column_owners(group.dim, size).stripes[owner] for group in groups]


def _values_nbytes(groups: Sequence[RowGroup], rows: Sequence[float], columns: Sequence[Columns]) -> float:
    itemsize = groups[0].specs[0].itemsize
    return sum(count * (stop - start) * itemsize for count, (start, stop) in zip(rows, columns, strict=True))


def _pack_stripes(
    tables: Tables, survey: Survey, groups: Sequence[RowGroup], rows: Sequence[int], group: Group, *, head: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """The messages for the other owners, one after the other, and each owner's, this rank's own among them.

    The first `head` bytes of each are left for others to write.
    """
    spans = [_spans(groups, group.size, owner) for owner in range(group.size)]
    nbytes = [head + int(message_nbytes(groups, rows, columns)) for columns in spans]
    own = torch.empty(nbytes[group.rank], dtype=torch.uint8, device=tables[0].values.device)
    nbytes[group.rank] = 0
    outgoing = own.new_empty(sum(nbytes))
    parts = list(torch.split(outgoing, nbytes))
    parts[group.rank] = own
    written = [list(sections(part[head:], groups, rows, columns)) for part, columns in zip(parts, spans, strict=True)]
    for number, row_group in enumerate(groups):
        _write_group(tables, survey, row_group, [owner[number] for owner in written])
    return outgoing, parts


def _write_group(tables: Tables, survey: Survey, group: RowGroup, owners: list[Section]) -> None:
    """Merges repeated rows and spreads them over the owners' messages, in one pass a table."""
    survey.unions[group.first].write_indices(owners[0].indices)
    copies: dict[tuple[int, Columns], list[Tensor]] = {}  # shared columns go to every owner
    for owner in owners:
        for piece, out in owner.pieces:
            copies.setdefault((piece.position, piece.columns), []).append(out)
    for position in group.positions:
        firsts = {columns: outs[0] for (table, columns), outs in copies.items() if table == position}
        survey.unions[position].sum([tables[position].values], list(firsts.values()), list(firsts))
    for first, *others in [[owner.indices for owner in owners], *copies.values()]:
        for other in others:
            other.copy_(first)


def _sum_columns(messages: list[Tensor], agreed: Agreement, group: Group, scale: float) -> OwnedColumns:
    """`scale` times the sum of my columns over all ranks, in rank order."""
    mine = _spans(agreed.groups, group.size, group.rank)
    received = [
        list(sections(message, agreed.groups, rows, mine)) for message, rows in zip(messages, agreed.rows, strict=True)
    ]
    unions = [
        kernels.unite_rows([rank[number].indices for rank in received], row_group.num_rows)
        for number, row_group in enumerate(agreed.groups)
    ]
    widths = [stop - start for start, stop in _stripes(agreed.groups, group.size, group.rank)]
    dtype = agreed.groups[0].specs[0].dtype
    total = sum(union.count * width for union, width in zip(unions, widths, strict=True))
    flat = messages[0].new_empty(total, dtype=dtype)
    indices, shared, offset = [], [], 0
    for number, (row_group, union) in enumerate(zip(agreed.groups, unions, strict=True)):
        indices.append(flat.new_empty(union.count, dtype=torch.int64))
        union.write_indices(indices[-1])
        owned = len(row_group.pieces(mine[number][:1]))  # the shared pieces come after them
        apart = []
        for place, (piece, _) in enumerate(received[0][number].pieces):
            numel = union.count * piece.width
            out = (flat[offset : offset + numel] if place < owned else flat.new_empty(numel)).view(-1, piece.width)
            union.sum([rank[number].pieces[place][1] for rank in received], [out], scale=scale)
            if place < owned:
                offset += numel
            else:
                apart.append(out)
        shared.append(tuple(apart))
    return OwnedColumns(agreed, tuple(indices), flat, tuple(shared))


def _join_stripes(parts: list[Tensor], shard: OwnedColumns) -> Tables:
    """Whole rows from the owners' columns and the shared ones; `parts[owner]` holds its columns of all tables."""
    size = len(parts)
    offsets = [0] * size
    result: dict[int, SparseRows] = {}
    for group, indices, shared in zip(shard.agreed.groups, shard.indices, shard.shared, strict=True):
        owners = column_owners(group.dim, size)
        columns: dict[int, list[Columns]] = {position: [] for position in group.positions}
        values: dict[int, list[Tensor]] = {position: [] for position in group.positions}
        for owner, stripe in enumerate(owners.stripes):
            for piece in group.pieces([stripe]):
                numel = len(indices) * piece.width
                columns[piece.position].append(piece.columns)
                values[piece.position].append(
                    parts[owner][offsets[owner] : offsets[owner] + numel].view(-1, piece.width)
                )
                offsets[owner] += numel
        for piece, total in zip(group.pieces([owners.shared]), shared, strict=True):
            columns[piece.position].append(piece.columns)
            values[piece.position].append(total)
        for position, spec in zip(group.positions, group.specs, strict=True):
            whole = parts[0].new_empty(len(indices), spec.dim)
            kernels.join_columns(values[position], columns[position], whole)
            result[position] = SparseRows(indices, whole, group.num_rows, shard.agreed.present[position])
    return tuple(result[position] for position in range(len(result)))
