"""Partitioned sparse schemes: the rank that owns a part of a table sums it (push), then hands it to all (pull)."""

from __future__ import annotations

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
from .formats import read_rows, row_counts, rows_message_nbytes, write_rows
from .owners import column_stripes
from .tables import Tables, coalesce, spec_of


@dataclass(frozen=True)
class OwnedColumns:
    """What a rank holds after push: the sum of its columns for every row that any rank touched."""

    indices: Tensor  # (union,) int64, sorted; the same on every rank
    values: Tensor  # (union, columns owned)
    num_rows: int
    dim: int
    present: bool

    def numel_of(self, owner: int, size: int) -> int:
        """Elements that `owner` of `size` ranks holds of the same sum."""
        start, stop = column_stripes(self.dim, size)[owner]
        return self.indices.numel() * (stop - start)


@register
@dataclass(frozen=True)
class BalancedParallelism(Partitioned[Tables, tuple[OwnedColumns, ...]]):
    """Zen's Balanced Parallelism (OSDI 2025, section 3) for row-sparse tables, owned by column stripes. Exact.

    Every rank owns the same columns of every row, so all owners receive equal volumes however skewed the rows are.
    Beyond the paper: an owner sees the row indices of all ranks, so all ranks know the union after push, and pull
    carries values only, in equal parts, with no indices and no size exchange.
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

    async def push(self, x: Tables, state: State, group: Group, scale: float) -> tuple[tuple[OwnedColumns, ...], State]:
        # Push: to each owner its columns of my rows.
        tables = coalesce(x)
        counts = [c.tolist() for c in await group.all_gather(row_counts(tables))]  # the host sizes the messages
        message, sent = _pack_stripes(tables, group)
        received = [_stripe_nbytes(tables, rows, group.size, group.rank) for rows in counts]
        received[group.rank] = 0
        messages = await group.all_to_all(message, sent, received)
        return _sum_stripes(messages, counts, tables, group, scale), state

    async def pull(self, shard: tuple[OwnedColumns, ...], state: State, group: Group) -> Tables:
        # Pull: from each owner its columns of the sum; everybody knows the rows already.
        mine = torch.cat([owned.values.flatten() for owned in shard])
        sizes = [sum(owned.numel_of(owner, group.size) for owned in shard) for owner in range(group.size)]
        parts = await group.all_gather(mine, sizes)
        return _join_stripes(parts, shard)

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        n = placement.size
        widths = [[stop - start for start, stop in column_stripes(s.dim, n)] for s in specs]
        tables = list(zip(specs, profiles, widths, strict=True))
        push = tuple(sum(rows_message_nbytes(s, p.rows, w[owner]) for s, p, w in tables) for owner in range(n))
        pull = tuple(sum(p.union_rows(n) * w[owner] * s.itemsize for s, p, w in tables) for owner in range(n))
        return (
            Compute("sum_rows", 2 * sum(rows_message_nbytes(s, p.rows, s.dim) for s, p, _ in tables)),
            Transfer("sizes", Pattern.ALL_GATHER, (8.0 * len(specs),) * n),
            Compute("pack", 2 * sum(push)),
            Transfer("push", Pattern.ALL_TO_ALL, push),
            Compute("sum_rows", n * max(push) + max(pull)),
            Transfer("pull", Pattern.ALL_GATHER, pull),
            Compute("join", 2 * sum(pull)),
        )


def _stripe_nbytes(tables: Tables, rows: list[int], size: int, owner: int) -> int:
    """Bytes of the message to `owner` from a rank with these row counts."""
    total = 0
    for table, count in zip(tables, rows, strict=True):
        start, stop = column_stripes(table.dim, size)[owner]
        total += int(rows_message_nbytes(spec_of(table), max(count, 0), stop - start))
    return total


def _pack_stripes(tables: Tables, group: Group) -> tuple[Tensor, list[int]]:
    """One message for each owner, one after the other, none for this rank; and their sizes in bytes."""
    rows = [table.nnz for table in tables]
    sent = [_stripe_nbytes(tables, rows, group.size, owner) for owner in range(group.size)]
    sent[group.rank] = 0
    message = torch.empty(sum(sent), dtype=torch.uint8, device=tables[0].values.device)
    offset = 0
    for owner in range(group.size):
        if owner != group.rank:
            for table in tables:
                offset = write_rows(message, offset, table, column_stripes(table.dim, group.size)[owner])
    return message, sent


def _sum_stripes(
    messages: list[Tensor], counts: list[list[int]], tables: Tables, group: Group, scale: float
) -> tuple[OwnedColumns, ...]:
    """`scale` times the sum of my columns over all ranks, in rank order."""
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tables]
    for rank, (message, rows) in enumerate(zip(messages, counts, strict=True)):
        offset = 0
        for position, table in enumerate(tables):
            start, stop = column_stripes(table.dim, group.size)[group.rank]
            if rank == group.rank:
                parts[position].append((table.indices, table.values[:, start:stop].contiguous()))
                continue
            count = max(rows[position], 0)
            indices, values, offset = read_rows(message, offset, count, stop - start, spec_of(table))
            parts[position].append((indices, values))
    return tuple(
        OwnedColumns(
            *kernels.sum_rows(parts[position], table.num_rows, scale=scale),
            table.num_rows,
            table.dim,
            present=any(rows[position] >= 0 for rows in counts),
        )
        for position, table in enumerate(tables)
    )


def _join_stripes(parts: list[Tensor], shard: tuple[OwnedColumns, ...]) -> Tables:
    """Whole rows from the owners' columns; `parts[owner]` holds its columns of all tables."""
    size = len(parts)
    offsets = [0] * size
    result = []
    for owned in shard:
        union = owned.indices.numel()
        values = owned.values.new_empty(union, owned.dim)
        for owner, (start, stop) in enumerate(column_stripes(owned.dim, size)):
            taken = union * (stop - start)
            values[:, start:stop] = parts[owner][offsets[owner] : offsets[owner] + taken].view(union, stop - start)
            offsets[owner] += taken
        result.append(SparseRows(owned.indices, values, owned.num_rows, owned.present))
    return tuple(result)
