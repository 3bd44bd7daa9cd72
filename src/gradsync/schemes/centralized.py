"""Centralised sparse schemes: every rank receives every other rank's rows and sums them itself."""

from __future__ import annotations

from collections.abc import Sequence
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
from .formats import Spans, message_nbytes, sections
from .tables import Agreement, Survey, Tables, common_groups, expected_groups, specs_of


@register
@dataclass(frozen=True)
class AGSparse(Scheme[Tables]):
    """All-gather of rows, summed on every rank: what DDP does with sparse gradients (Zen, section 3). Exact.

    Unlike DDP's, it merges repeated rows first and sends 4-byte indices and values in one message, and the indices of
    tables with the same rows once.
    Wire: each rank sends its rows, indices and values, to n-1 others; volume grows with n.
    """

    layout = Layout.ROWS
    name = "agsparse"

    @property
    def stages(self) -> tuple[str, ...]:
        return ("sizes", "gather")

    async def synchronize(self, x: Tables, state: State, group: Group, scale: float) -> tuple[Tables, State]:
        survey = Survey.of(x)
        headers = [header.tolist() for header in await group.all_gather(survey.header)]  # the host sizes the messages
        agreed = Agreement.of(headers, common_groups(headers, specs_of(x)))
        whole = [[(0, g.dim)] for g in agreed.groups]
        message = _pack(x, survey, agreed, whole, group.rank)
        sizes = [int(message_nbytes(agreed.groups, rows, whole)) for rows in agreed.rows]
        messages = await group.all_gather(message, sizes)
        return _sum_messages(messages, agreed, whole, scale), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        n = placement.size
        groups = expected_groups(specs, profiles)
        rows = [profiles[group.first].rows for group in groups]
        message = message_nbytes(groups, rows, [[(0, g.dim)] for g in groups])
        summed = sum(s.dim * s.itemsize * p.union_rows(n) for s, p in zip(specs, profiles, strict=True))
        return (
            Compute("sum_rows", 2 * message),
            Transfer("sizes", Pattern.ALL_GATHER, (8.0 * len(specs),) * n),
            Transfer("gather", Pattern.ALL_GATHER, (message,) * n),
            Compute("sum_rows", n * message + summed),
        )


def _pack(tables: Tables, survey: Survey, agreed: Agreement, whole: Sequence[Spans], rank: int) -> torch.Tensor:
    """One message with the whole rows of all groups."""
    rows = agreed.rows[rank]
    nbytes = int(message_nbytes(agreed.groups, rows, whole))
    message = torch.empty(nbytes, dtype=torch.uint8, device=tables[0].values.device)
    for group, section in zip(agreed.groups, sections(message, agreed.groups, rows, whole), strict=True):
        survey.unions[group.first].write_indices(section.indices)
        for piece, values in section.pieces:
            survey.unions[piece.position].sum([tables[piece.position].values], [values])
    return message


def _sum_messages(messages: list[torch.Tensor], agreed: Agreement, whole: Sequence[Spans], scale: float) -> Tables:
    """`scale` times the sum of all ranks' messages, in rank order."""
    received = [
        list(sections(message, agreed.groups, rows, whole)) for message, rows in zip(messages, agreed.rows, strict=True)
    ]
    result: dict[int, SparseRows] = {}
    for number, group in enumerate(agreed.groups):
        parts = [rank[number] for rank in received]
        union = kernels.unite_rows([part.indices for part in parts], group.num_rows)
        indices = parts[0].indices.new_empty(union.count, dtype=torch.int64)
        union.write_indices(indices)
        places = {piece.position: place for place, (piece, _) in enumerate(parts[0].pieces)}
        for position, spec in zip(group.positions, group.specs, strict=True):
            total = indices.new_empty(union.count, spec.dim, dtype=spec.dtype)
            if position in places:  # else rows without elements
                union.sum([part.pieces[places[position]][1] for part in parts], [total], scale=scale)
            result[position] = SparseRows(indices, total, group.num_rows, agreed.present[position])
    return tuple(result[position] for position in range(len(result)))
