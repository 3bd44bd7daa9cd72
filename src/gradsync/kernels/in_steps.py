"""The sum of rows in two steps, of whichever implementation's `unite_rows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsync.kernels.checks import RowsPart, check_parts, rows_buffers
from gradsync.kernels.phases import RowUnion


def sum_rows(
    unite_rows: Callable[..., RowUnion], parts: Sequence[RowsPart], num_rows: int, scale: float, out: RowsPart | None
) -> RowsPart:
    # Sums by `unite_rows` and its result; copies inputs that are not contiguous.
    check_parts(parts, num_rows)
    union = unite_rows([indices.contiguous() for indices, _ in parts], num_rows)
    rows, total = rows_buffers(out, union.count, parts[0][1])
    union.write_indices(rows)
    union.sum([v if v.stride(1) == 1 else v.contiguous() for _, v in parts], [total], scale=scale)
    return rows, total
