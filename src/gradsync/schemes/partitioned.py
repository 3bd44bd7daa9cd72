"""Partitioned schemes for tables: each rank sums the part that it owns (push), then sends it to all ranks (pull)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors.expressions import register
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import SparseRows
from .base import Partitioned, State, Traits
from .capacity import RowCapacity, opened, write_header
from .formats import RowFormat, Section, head_nbytes
from .owners import MOST_SHARED, StripedGroups, striped
from .tables import (
    AgreedRows,
    Columns,
    OwnRows,
    RowGroup,
    Tables,
    common_groups,
    expected_groups,
    single_groups,
    specs_of,
)


@dataclass(frozen=True)
class OwnedColumns:
    """The sums that one rank made, before it sends them: its columns of every row that any rank touched."""

    stripes: StripedGroups  # the owner map
    rank: int  # this owner
    present: tuple[bool, ...]  # per table: whether any rank has a gradient for it
    indices: tuple[Tensor, ...]  # per group (union,) int64, sorted; the same on every rank
    values: Tensor  # flat: group by group, table by table, (union, columns owned)
    shared: tuple[tuple[Tensor, ...], ...]  # per group the pieces that every rank sums, each (union, width)

    @property
    def numels(self) -> list[int]:
        """How many elements of sums each rank sends to every other rank."""
        rows = [indices.numel() for indices in self.indices]
        return [sum(map(operator.mul, rows, widths)) for widths in self.stripes.widths]


@register
@dataclass(frozen=True)
class BalancedParallelism(RowCapacity, Partitioned[Tables, OwnedColumns]):
    """Zen's Balanced Parallelism (OSDI 2025, section 3) for row-sparse tables: each rank sums some columns. Exact.

    Push: each rank sends columns of its rows to the ranks that sum them (owners); pull: the owners' sums go to all
    ranks. An owner sums the same columns of every row, so all owners receive equal volumes however skewed the rows are.
    Beyond the paper: an owner sees the row indices of all ranks, so all ranks know the union after push, and pull
    carries values only, in equal parts, with no indices and no exchange of sizes; tables with the same rows send their
    indices once and are striped as one table; every rank sums the column or two that equal stripes leave over.
    Wire per rank: push (n-1) * indices + (n-1)/n * values; pull (n-1)/n * values of the union.

    With `capacity`, planned room for rows, no sizes are exchanged beforehand: a header with the numbers of rows travels
    in front of the rows. If rows of any rank do not fit, all ranks push once more, by the sizes in the headers.

    Attributes:
        owners: the owner map: with "column_stripe" tables that have the same rows are striped as one, with
            "table_stripe" each by itself.
    """

    owners: Literal["column_stripe", "table_stripe"] = "column_stripe"

    traits = Traits(Layout.ROWS, waits_for_device=True)

    @property
    def owns_alike(self) -> bool:
        """Whether each rank sums the same columns at every step, whatever the gradients are.

        That is so if each table is divided by itself (`table_stripe`), and not together with tables of the same rows.
        """
        return self.owners == "table_stripe"

    def planned_groups(self, specs: tuple[TensorSpec, ...]) -> tuple[RowGroup, ...]:
        planned = super().planned_groups(specs)
        return single_groups(specs) if self.owns_alike else planned

    def push_stages(self, size: int) -> tuple[str, ...]:
        return ("push",) if self.capacity else ("sizes", "push")

    def pull_stages(self, size: int) -> tuple[str, ...]:
        return ("pull",)

    async def push(
        self, x: Tables, state: State, group: Group, scale: float, *, keep_fp32: bool = False
    ) -> tuple[OwnedColumns, State]:
        # Push: to each owner its columns of this rank's rows.
        survey, specs = OwnRows.of(x), specs_of(x)
        dtype = kernels.accumulation_dtype(specs[0].dtype) if keep_fp32 else specs[0].dtype
        if self.capacity:
            stripes = self._striped(self.planned_groups(specs), group.size)
            bounds = [self.largest_nbytes(format) for format in stripes.formats]
            messages = self._messages(x, survey, stripes, group.rank)
            headers, bodies = opened(await group.exchange(messages, bounds), len(x))
            if all(map(self.fits, headers)):
                agreed = AgreedRows.of(headers, stripes.groups)
                return _sum_columns(bodies, agreed, stripes, group.rank, scale, dtype), state
        else:
            headers = torch.stack(await group.all_gather(survey.header)).tolist()  # to size the messages
        agreed = AgreedRows.of(headers, single_groups(specs) if self.owns_alike else common_groups(headers, specs))
        stripes = self._striped(agreed.groups, group.size)
        messages = await _push_by_sizes(x, survey, agreed, stripes, group)
        return _sum_columns(messages, agreed, stripes, group.rank, scale, dtype), state

    async def pull(self, shard: OwnedColumns, state: State, group: Group) -> Tables:
        # Pull: from each owner its columns of the sum; all ranks know the rows since push.
        return _join_stripes(await group.all_gather(shard.values, shard.numels), shard)

    def part(self, shard: OwnedColumns) -> Tables:
        """Returns the sums that this rank made, of its columns, as tables of the rows that any rank touched.

        A hierarchy sums them further, across nodes. A table may have no column.
        """
        widths = shard.stripes.widths[shard.rank]
        sizes = [len(rows) * width for rows, width in zip(shard.indices, widths, strict=True)]
        values = torch.split(shard.values, sizes)
        return tuple(
            SparseRows(indices, part.view(len(indices), width), group.num_rows, present)
            for group, indices, part, width, present in zip(
                shard.stripes.groups, shard.indices, values, widths, shard.present, strict=True
            )
        )

    def with_part(self, shard: OwnedColumns, part: Tables) -> OwnedColumns:
        values = torch.cat([table.values.reshape(-1) for table in part]).to(shard.stripes.groups[0].specs[0].dtype)
        present, indices = tuple(table.present for table in part), tuple(table.indices for table in part)
        return replace(shard, present=present, indices=indices, values=values)

    def push_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> tuple[Step, ...]:
        at_once, stripes = self.expects_to_fit(profiles), self._expected(specs, profiles, size)
        rows = [profiles[group.first].rows for group in stripes.groups]
        push = tuple(format.nbytes(rows) for format in stripes.formats)
        summed = stripes.pull_bytes([profiles[group.first].union_rows(size) for group in stripes.groups])
        return (
            Compute("stripe_rows", RowFormat.whole(stripes.groups).nbytes(rows) + sum(push), calls=len(specs)),
            *self.transfers("push", Pattern.ALL_TO_ALL, push, len(specs), at_once=at_once),
            Compute("sum_stripes", size * max(push) + max(summed), calls=len(specs)),
        )

    def pull_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, summed: int
    ) -> tuple[Step, ...]:
        stripes = self._expected(specs, profiles, size)
        pull = stripes.pull_bytes([profiles[group.first].union_rows(summed) for group in stripes.groups])
        return Transfer("pull", Pattern.ALL_GATHER, pull), Compute("join_stripes", 2 * sum(pull), calls=len(specs))

    def part_of(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, owner: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[DensityProfile, ...]]:
        widths = self._striped(single_groups(specs), size).widths[owner]
        wide = kernels.accumulation_dtype(specs[0].dtype)
        parts = tuple(TensorSpec((s.num_rows, width), wide) for s, width in zip(specs, widths, strict=True))
        return parts, tuple(profile.of_sums(size) for profile in profiles)

    def _striped(self, groups: tuple[RowGroup, ...], size: int) -> StripedGroups:
        return striped(groups, size, 0 if self.owns_alike else MOST_SHARED)

    def _expected(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> StripedGroups:
        """Returns the groups of tables that are expected to share one list of indices, striped over `size` owners."""
        if self.owns_alike or self.expects_to_fit(profiles):
            groups = single_groups(specs) if self.owns_alike else self.planned_groups(specs)
        else:
            groups = expected_groups(specs, profiles)
        return self._striped(groups, size)

    def _messages(self, x: Tables, survey: OwnRows, stripes: StripedGroups, rank: int) -> list[Tensor]:
        """Returns a message for each owner: the header (numbers of rows), and the rows if these are as planned."""
        header = survey.header.tolist()  # the host sizes the messages
        if not self.fits(header):
            stripes = self._striped((), stripes.size)
        (rows,) = AgreedRows.of([header], stripes.groups).rows
        _, messages = _pack_stripes(x, survey, stripes, rows, rank, headed=True)
        return messages


async def _push_by_sizes(
    x: Tables, survey: OwnRows, agreed: AgreedRows, stripes: StripedGroups, group: Group
) -> list[Tensor]:
    """Sends each owner its columns in messages whose sizes all ranks know; returns the messages to this rank."""
    outgoing, parts = _pack_stripes(x, survey, stripes, agreed.rows[group.rank], group.rank)
    sent = [len(part) for part in parts]
    received = [int(stripes.formats[group.rank].nbytes(rows)) for rows in agreed.rows]
    sent[group.rank] = received[group.rank] = 0
    most_rows = [max(counts) for counts in zip(*agreed.rows, strict=True)]
    largest = max(int(format.nbytes(most_rows)) for format in stripes.formats)
    messages = await group.all_to_all(outgoing, sent, received, largest=largest)
    messages[group.rank] = parts[group.rank]
    return messages


def _pack_stripes(
    tables: Tables,
    survey: OwnRows,
    stripes: StripedGroups,
    rows: Sequence[int],
    rank: int,
    *,
    headed: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Packs the rows for all owners; returns the other owners' messages end to end, and a list of all messages.

    The list has an entry for each owner, this rank included. `headed`: messages begin with room for their length,
    and the numbers of rows.
    """
    head = head_nbytes(len(tables)) if headed else 0
    nbytes = [head + int(format.nbytes(rows)) for format in stripes.formats]
    own = torch.empty(nbytes[rank], dtype=torch.uint8, device=tables[0].values.device)
    nbytes[rank] = 0
    outgoing = own.new_empty(sum(nbytes))
    parts = list(torch.split(outgoing, nbytes))
    parts[rank] = own
    first, format = parts[0], stripes.formats[0]
    owned = [each.values(part[head:], rows, 1) for part, each in zip(parts, stripes.formats, strict=True)]
    for number, section in enumerate(format.sections(first[head:], rows)):
        _write_group(tables, survey, stripes, number, section, [owner[number] for owner in owned])
    if headed:
        write_header(first, survey)
    # Header, positions and shared columns are the same for every owner.
    common = first[: head + format.common_nbytes(rows)]
    for other in parts[1:]:
        other[: len(common)].copy_(common)
    return outgoing, parts


def _write_group(
    tables: Tables,
    survey: OwnRows,
    stripes: StripedGroups,
    number: int,
    first: Section,
    owned: Sequence[Sequence[Tensor]],
) -> None:
    """Sums repeated rows of one group of tables into messages, in one pass over each table.

    Args:
        tables: this rank's tables.
        survey: their distinct rows.
        stripes: the division of columns among owners.
        number: the group of tables with the same rows.
        first: views of the message to the first owner, whose positions and shared columns are written.
        owned: views of the columns that each owner alone sums, in the message to it.
    """
    group = stripes.groups[number]
    indices = first.positions.room()
    survey.unions[group.first].write_indices(indices)
    first.positions.encode(indices)
    written: dict[int, list[tuple[Columns, Tensor]]] = {position: [] for position in group.positions}
    for piece, values in zip(stripes.shared[number], first.values, strict=False):
        written[piece.position].append((piece.columns, values))
    for pieces, views in zip(stripes.owned, owned, strict=True):
        for piece, values in zip(pieces[number], views, strict=True):
            written[piece.position].append((piece.columns, values))
    for position, outs in written.items():
        union, values = survey.unions[position], tables[position].values
        union.sum([values], [out for _, out in outs], [columns for columns, _ in outs])


def _sum_columns(
    messages: list[Tensor], agreed: AgreedRows, stripes: StripedGroups, rank: int, scale: float, dtype: torch.dtype
) -> OwnedColumns:
    """Returns `scale` times the sum of this owner's columns over all ranks, added in rank order, as `dtype`."""
    format = stripes.formats[rank]
    received = [format.sections(message, rows) for message, rows in zip(messages, agreed.rows, strict=True)]
    unions = [
        kernels.unite_messages([sections[number].positions.as_packed for sections in received], group.num_rows)
        for number, group in enumerate(stripes.groups)
    ]
    total = sum(union.count * width for union, width in zip(unions, stripes.widths[rank], strict=True))
    flat = messages[0].new_empty(total, dtype=dtype)
    indices, shared, offset = [], [], 0
    for number, union in enumerate(unions):
        indices.append(flat.new_empty(union.count, dtype=torch.int64))
        union.write_indices(indices[-1])
        apart = []
        for place, piece in enumerate(format.pieces[number]):
            numel = union.count * piece.width
            if place < len(stripes.shared[number]):  # the shared pieces come first
                out = flat.new_empty(union.count, piece.width)
                apart.append(out)
            else:
                out = flat[offset : offset + numel].view(-1, piece.width)
                offset += numel
            values = [sections[number].values[place] for sections in received]
            if dtype is not values[0].dtype:
                values = [each.to(dtype) for each in values]
            union.sum(values, [out], scale=scale)
        shared.append(tuple(apart))
    return OwnedColumns(stripes, rank, agreed.present, tuple(indices), flat, tuple(shared))


def _join_stripes(parts: list[Tensor], shard: OwnedColumns) -> Tables:
    """Returns tables of whole rows: each owner's columns, 1-D in `parts`, and columns that all summed, in `shard`."""
    stripes = shard.stripes
    offsets = [0] * stripes.size
    result: dict[int, SparseRows] = {}
    for number, (group, indices) in enumerate(zip(stripes.groups, shard.indices, strict=True)):
        joined: dict[int, list[tuple[Columns, Tensor]]] = {position: [] for position in group.positions}
        count = indices.numel()
        for owner, (part, owned) in enumerate(zip(parts, stripes.owned, strict=True)):
            for piece in owned[number]:
                values = part.narrow(0, offsets[owner], count * piece.width).view(count, piece.width)
                offsets[owner] += count * piece.width
                joined[piece.position].append((piece.columns, values))
        for piece, total in zip(stripes.shared[number], shard.shared[number], strict=True):
            joined[piece.position].append((piece.columns, total))
        for position, spec in zip(group.positions, group.specs, strict=True):
            whole = shard.values.new_empty(count, spec.dim)
            kernels.join_columns([v for _, v in joined[position]], [columns for columns, _ in joined[position]], whole)
            result[position] = SparseRows(indices, whole, group.num_rows, shard.present[position])
    return tuple(result[position] for position in range(len(result)))
