"""Centralised sparse schemes: every rank receives every other rank's rows and sums them itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import kernels
from ..bucket import Layout, TensorSpec
from ..cluster import Placement
from ..comm import Group
from ..density import DensityProfile
from ..sparse import SparseRows
from ..steps import Compute, Pattern, Step, Transfer
from .base import Scheme, State, register
from .formats import read_rows, row_counts, rows_message_nbytes, write_rows
from .tables import Tables, coalesce, spec_of


@register
@dataclass(frozen=True)
class AGSparse(Scheme[Tables]):
    """All-gather of rows, summed on every rank: what DDP does with sparse gradients (Zen, section 3). Exact.

    Unlike DDP's, it merges repeated rows first and sends 4-byte indices and values in one message.
    Wire: each rank sends its rows, indices and values, to n-1 others; volume grows with n.
    """

    layout = Layout.ROWS
    name = "agsparse"

    @property
    def stages(self) -> tuple[str, ...]:
        return ("sizes", "gather")

    async def synchronize(self, x: Tables, state: State, group: Group, scale: float) -> tuple[Tables, State]:
        tables = coalesce(x)
        counts = [c.tolist() for c in await group.all_gather(row_counts(tables))]  # the host sizes the messages
        message = pack(tables)
        sizes = [sum(message_sections(tables, rows)) for rows in counts]
        messages = await group.all_gather(message, sizes)
        return sum_messages(messages, counts, tables, scale), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        n = placement.size
        message = sum(rows_message_nbytes(s, p.rows, s.dim) for s, p in zip(specs, profiles, strict=True))
        summed = sum(s.dim * s.itemsize * p.union_rows(n) for s, p in zip(specs, profiles, strict=True))
        return (
            Compute("sum_rows", 2 * message),
            Transfer("sizes", Pattern.ALL_GATHER, (8.0 * len(specs),) * n),
            Transfer("gather", Pattern.ALL_GATHER, (message,) * n),
            Compute("sum_rows", n * message + summed),
        )


def message_sections(tables: Tables, rows: list[int]) -> list[int]:
    """Bytes of each table in a message that holds whole rows; `rows` as `row_counts` gives them."""
    return [int(rows_message_nbytes(spec_of(t), max(r, 0), t.dim)) for t, r in zip(tables, rows, strict=True)]


def pack(tables: Tables) -> torch.Tensor:
    """One message with whole rows of all tables."""
    nbytes = sum(message_sections(tables, [t.nnz for t in tables]))
    message = torch.empty(nbytes, dtype=torch.uint8, device=tables[0].values.device)
    offset = 0
    for table in tables:
        offset = write_rows(message, offset, table, (0, table.dim))
    return message


def sum_messages(messages: list[torch.Tensor], counts: list[list[int]], tables: Tables, scale: float) -> Tables:
    """`scale` times the sum of all ranks' messages, in rank order."""
    parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in tables]
    for message, rows in zip(messages, counts, strict=True):
        offset = 0
        for position, table in enumerate(tables):
            indices, values, offset = read_rows(message, offset, max(rows[position], 0), table.dim, spec_of(table))
            parts[position].append((indices, values))
    return tuple(
        SparseRows(
            *kernels.sum_rows(parts[position], table.num_rows, scale=scale),
            table.num_rows,
            present=any(rows[position] >= 0 for rows in counts),
        )
        for position, table in enumerate(tables)
    )
