"""Centralised sparse schemes: every rank receives every other rank's rows and sums them itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Pattern, Step
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import SparseRows
from .base import Scheme, State, Traits
from .capacity import RowCapacity, opened, write_header
from .formats import RowFormat, head_nbytes
from .tables import AgreedRows, OwnRows, Tables, common_groups, expected_groups, specs_of


@register
@dataclass(frozen=True)
class AGSparse(RowCapacity, Scheme[Tables]):
    """Gathers all rows on every rank, which sums them, as DDP does with sparse gradients (Zen, section 3). Exact.

    Unlike DDP, AGSparse merges repeated rows first, sends 4-byte indices and values in one message, and sends the
    indices of tables with the same rows once.
    Wire: each rank sends its rows, indices and values, to n-1 others; the volume grows with n.

    With `capacity`, for each table the most distinct rows that a rank is expected to have, no sizes are exchanged
    beforehand: a header travels in front of the rows. If rows of any rank do not fit, all ranks gather once more, by
    the sizes in the headers.
    """

    traits = Traits(Layout.ROWS, waits_for_device=True)
    name = "agsparse"

    def stages(self, size: int) -> tuple[str, ...]:
        return ("gather",) if self.capacity else ("sizes", "gather")

    async def synchronize(self, x: Tables, state: State, group: Group, scale: float) -> tuple[Tables, State]:
        survey, specs = OwnRows.of(x), specs_of(x)
        if self.capacity:
            planned = RowFormat.whole(self.planned_groups(specs))
            bound, message = self.largest_nbytes(planned), self._message(x, survey, planned)
            headers, bodies = opened(await group.exchange([message] * group.size, [bound] * group.size), len(x))
            if all(map(self.fits, headers)):
                return _sum_messages(bodies, AgreedRows.of(headers, planned.groups), planned, scale), state
        else:
            headers = torch.stack(await group.all_gather(survey.header)).tolist()  # to size the messages
        agreed = AgreedRows.of(headers, common_groups(headers, specs))
        format = RowFormat.whole(agreed.groups)
        message = _pack(x, survey, format, agreed.rows[group.rank])
        sizes = [int(format.nbytes(rows)) for rows in agreed.rows]
        return _sum_messages(await group.all_gather(message, sizes), agreed, format, scale), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        n, at_once = placement.size, self.expects_to_fit(profiles)
        groups = self.planned_groups(specs) if at_once else expected_groups(specs, profiles)
        message = RowFormat.whole(groups).nbytes([profiles[group.first].rows for group in groups])
        gathers = self.transfers("gather", Pattern.ALL_GATHER, (message,) * n, len(specs), at_once=at_once)
        summed = sum(s.dim * s.itemsize * p.union_rows(n) for s, p in zip(specs, profiles, strict=True))
        return (
            Compute("pack_table", 2 * message, calls=len(specs)),
            *gathers,
            Compute("sum_tables", n * message + summed, calls=len(specs)),
        )

    def _message(self, x: Tables, survey: OwnRows, planned: RowFormat) -> Tensor:
        """Returns this rank's message: header and rows, or only the header if the rows do not fit the capacity."""
        header = survey.header.tolist()  # the host sizes the message
        format = planned if self.fits(header) else RowFormat.whole(())
        (rows,) = AgreedRows.of([header], format.groups).rows
        message = _pack(x, survey, format, rows, head=head_nbytes(len(x)))
        write_header(message, survey)
        return message


def _pack(tables: Tables, survey: OwnRows, format: RowFormat, rows: Sequence[int], head: int = 0) -> Tensor:
    """Returns a message with this rank's rows of all tables, repeated rows merged.

    The caller fills the first `head` bytes. `survey`: this rank's distinct rows; `rows`: how many they are in each
    group of tables that have the same row indices.
    """
    message = torch.empty(head + int(format.nbytes(rows)), dtype=torch.uint8, device=tables[0].values.device)
    written = format.sections(message[head:], rows)
    for group, pieces, section in zip(format.groups, format.pieces, written, strict=True):
        indices = section.positions.room()
        survey.unions[group.first].write_indices(indices)
        section.positions.encode(indices)
        for piece, values in zip(pieces, section.values, strict=True):
            survey.unions[piece.position].sum([tables[piece.position].values], [values])
    return message


def _sum_messages(messages: Sequence[Tensor], agreed: AgreedRows, format: RowFormat, scale: float) -> Tables:
    """Returns the tables with `scale` times the sum of the rows in all ranks' messages, added in rank order."""
    received = [format.sections(message, rows) for message, rows in zip(messages, agreed.rows, strict=True)]
    result: dict[int, SparseRows] = {}
    for number, group in enumerate(format.groups):
        parts = [sections[number] for sections in received]
        union = kernels.unite_messages([part.positions.as_packed for part in parts], group.num_rows)
        indices = messages[0].new_empty(union.count, dtype=torch.int64)
        union.write_indices(indices)
        places = {piece.position: place for place, piece in enumerate(format.pieces[number])}
        for position, spec in zip(group.positions, group.specs, strict=True):
            total = indices.new_empty(union.count, spec.dim, dtype=spec.dtype)
            if position in places:  # else the table has no columns
                union.sum([part.values[places[position]] for part in parts], [total], scale=scale)
            result[position] = SparseRows(indices, total, group.num_rows, agreed.present[position])
    return tuple(result[position] for position in range(len(result)))
