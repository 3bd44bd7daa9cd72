"""Count sketches, in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_floating, check_sections, check_shape
from gradsync.kernels.draws import check_median, check_sketch, sketch_keys, sketch_lanes
from gradsync.kernels.reference.draws import draws_at
from gradsync.kernels.reference.rows import accumulation_dtype


def check_count_sketch(
    name: str, elements: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, rows: int
) -> None:
    """Refuses what are not the sections' elements and counters."""
    check_sketch(sections, columns, rows)
    check_sections(name, elements, sections)
    check_floating("counters", counters, accumulation_dtype(elements.dtype))
    check_shape("counters", counters, rows * sum(columns))


@torch.no_grad()
def count_sketch(x: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, *, rows: int) -> None:
    """See `gradsync.kernels.count_sketch`. On a CPU, where torch adds in order."""
    check_count_sketch("x", x, sections, columns, counters, rows)
    counters.zero_()
    for part, row, column, negative in _hashed(x, sections, columns, counters, rows):
        addends = part.to(row.dtype)
        row.index_add_(0, column, torch.where(negative, -addends, addends))


@torch.no_grad()
def sketch_estimates(counters: Tensor, sections: Sections, columns: Sequence[int], out: Tensor, *, rows: int) -> None:
    """See `gradsync.kernels.sketch_estimates`."""
    check_count_sketch("out", out, sections, columns, counters, rows)
    check_median(rows)
    estimates: list[Tensor] = []
    for part, row, column, negative in _hashed(out, sections, columns, counters, rows):
        found = row[column]
        estimates.append(torch.where(negative, -found, found) + 0.0)  # without -0.0, of which a median is not sure
        if len(estimates) == rows:
            part.copy_(torch.stack(estimates).median(dim=0).values)
            estimates.clear()


def _hashed(
    flat: Tensor, sections: Sections, columns: Sequence[int], counters: Tensor, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each section and row: its elements, the row's counters, the column of each element, whether it is negated."""
    begin = first = 0
    starts = sections.starts or (0,) * len(columns)
    for length, start, seed, count in zip(sections.lengths, starts, sections.seeds, columns, strict=True):
        lanes = sketch_lanes(count)
        lane = torch.arange(lanes, device=flat.device)
        groups = torch.arange(start, start + length, lanes, device=flat.device)[:, None]
        for row in range(rows):
            where, which = sketch_keys(seed, row)
            drawn, signs = draws_at(groups, where), draws_at(groups, which)
            counter = lane ^ drawn % lanes
            column = (drawn * (count // lanes) >> 32) * lanes + counter
            negative = (signs >> counter & 1).bool()
            own = counters[first : first + count]
            yield flat[begin : begin + length], own, column.flatten()[:length], negative.flatten()[:length]
            first += count
        begin += length
