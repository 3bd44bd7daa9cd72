"""Kernels on rows of a table, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels import in_steps, phases
from gradsync.kernels.checks import (
    RowsPart,
    Stripes,
    check_gathered,
    check_index_out,
    check_indices,
    check_join,
    check_matrix,
    check_range,
    check_scatter,
    check_size,
    check_some,
    check_union_sum,
)
from gradsync.kernels.choice import dispatched

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which sums of `dtype` are kept: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowUnion:
    """The union of the rows in several row-sparse parts of a table, in torch; see `gradsync.kernels.RowUnion`."""

    def __init__(self, indices: Sequence[Tensor], num_rows: int) -> None:
        check_some("unite_rows", indices)
        check_size("num_rows", num_rows)
        for number, part in enumerate(indices):
            check_indices(f"indices of part {number}", part)
            check_range("sum_rows", part, num_rows, "num_rows", number)
        self._num_rows = num_rows
        self._parts = [part.long().contiguous() for part in indices]
        self._rows = torch.unique(torch.cat(self._parts), sorted=True)
        self.count = len(self._rows)

    def write_indices(self, out: Tensor) -> None:
        check_index_out("out", out, self.count, self._num_rows)
        out.copy_(self._rows)

    @torch.no_grad()
    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        stripes = check_union_sum([len(part) for part in self._parts], values, outs, stripes, self.count)
        first = values[0]
        total = first.new_zeros(self.count, first.shape[1], dtype=accumulation_dtype(first.dtype))
        for indices, part in zip(self._parts, values, strict=True):
            total.index_add_(0, torch.searchsorted(self._rows, indices), part.to(total.dtype))
        total.mul_(scale)
        for out, (start, stop) in zip(outs, stripes, strict=True):
            out.copy_(total[:, start:stop])


@dispatched("indices", entries="num_rows")
def unite_rows(indices: Sequence[Tensor], num_rows: int) -> phases.RowUnion:
    """Finds the rows that occur in any of several row-sparse parts of one table: the first phase of their sum.

    Native: by a bitmap that ranks the rows or, if that had more than about four words for each index, by sorting; time
    and memory grow with the number of indices, not of rows.

    Args:
        indices: per part (nnz,) int64 or int32, in any order, duplicates allowed.
        num_rows: all indices are in [0, num_rows).

    Raises:
        ValueError: an index out of range, no part; native: more than 2^34 rows or 2^32 - 1 indices.
        TypeError: other dtypes.
    """
    return RowUnion(indices, num_rows)


@dispatched("parts", entries="num_rows")
@torch.no_grad()
def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0, out: RowsPart | None = None) -> RowsPart:
    """Returns `scale` times the sum of row-sparse parts of one (num_rows, dim) table; a single part is coalesced.

    Sums run in the order of the parts, then of occurrence within a part, in float32 (float64 for float64), and are
    rounded once: all implementations give the same bits with any number of threads, the reference on the CPU only.
    Parts with strided rows are copied first. `unite_rows` does the same in two phases.

    Args:
        parts: each indices (nnz,) int64 or int32, in any order, duplicates allowed; values (nnz, dim) floating.
        num_rows: all indices are in [0, num_rows).
        out: buffers for indices and values with room for at least u rows; views of their first u rows are returned.

    Returns:
        The sorted union of all indices, (u,) int64, or as in `out`; values, (u, dim) in the dtype of the parts.

    Raises:
        ValueError: an index out of range, no part, or shapes and devices that do not fit together.
        TypeError: dtypes other than said above.
    """
    return in_steps.sum_rows(RowUnion, parts, num_rows, scale, out)


@dispatched("parts", "out")
@torch.no_grad()
def join_columns(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    """Writes stripes of columns back into whole rows: out[:, start:stop] = part.

    Args:
        parts: per stripe (u, stop - start), floating.
        stripes: the columns [start, stop) of each part; columns in no stripe stay, columns in several get the last.
        out: (u, dim) in the dtype of the parts.

    Raises:
        ValueError: shapes that do not fit, stripes outside the columns.
        TypeError: different dtypes.
    """
    check_join(parts, stripes, out)
    for part, (start, stop) in zip(parts, stripes, strict=True):
        out[:, start:stop].copy_(part)


@dispatched("indices", "values", "dense")
@torch.no_grad()
def scatter_rows(indices: Tensor, values: Tensor, dense: Tensor, *, accumulate: bool) -> None:
    """Writes rows into `dense`, or adds them to it, in order: of equal indices the last one stays, or all are added.

    Args:
        indices: (nnz,) int64 or int32, in any order.
        values: (nnz, dim) floating.
        dense: (num_rows, dim) in the dtype of the values; each addition is rounded to it.

    Raises:
        ValueError: an index outside [0, num_rows), before anything is written; shapes that do not fit.
        TypeError: other or different dtypes.
    """
    check_scatter(indices, values, dense)
    check_range("scatter_rows", indices, len(dense), "num_rows")
    if accumulate:
        _add_rows(indices.long(), values, dense)
        return
    rows, places = torch.unique(indices.long(), return_inverse=True)
    items = torch.arange(len(indices), device=indices.device)
    last = torch.zeros_like(rows).scatter_reduce_(0, places, items, "amax")
    dense.index_copy_(0, rows, values[last])


def _add_rows(indices: Tensor, values: Tensor, dense: Tensor) -> None:
    if dense.dtype == accumulation_dtype(dense.dtype):
        dense.index_add_(0, indices, values)
        return
    # index_add_ may round narrow types only once. Here each addition is: first all first occurrences, then all second.
    rows, order = torch.sort(indices, stable=True)
    occurrence = torch.arange(len(rows), device=rows.device) - torch.searchsorted(rows, rows)
    while len(order) > 0:
        now = occurrence == 0
        dense.index_copy_(0, rows[now], dense[rows[now]] + values[order[now]])
        rows, order, occurrence = rows[~now], order[~now], occurrence[~now] - 1


def magnitudes(x: Tensor) -> Tensor:
    """Returns all bits of `x`, of any shape and floating dtype, but the sign, as integers that ascend as |x| does."""
    bits = x.contiguous().view(_BITS[x.element_size()])
    return bits & torch.iinfo(bits.dtype).max


def is_nonzero(x: Tensor) -> Tensor:
    """Returns which elements of `x`, of any shape and floating dtype, have a set bit besides the sign, as bool."""
    return magnitudes(x) != 0


class NonzeroRows:
    """The rows of a dense tensor that are not all zero, in torch; see `gradsync.kernels.NonzeroRows`."""

    @torch.no_grad()
    def __init__(self, dense: Tensor) -> None:
        check_matrix("dense", dense)
        self._dense = dense
        self._rows = is_nonzero(dense).any(dim=1).nonzero().flatten()
        self.count = len(self._rows)

    def write_indices(self, out: Tensor) -> None:
        check_index_out("out", out, self.count, len(self._dense))
        out.copy_(self._rows)

    @torch.no_grad()
    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        stripes = check_gathered(outs, stripes, self.count, self._dense)
        rows = self._dense[self._rows]
        for out, (start, stop) in zip(outs, stripes, strict=True):
            out.copy_(rows[:, start:stop])


@dispatched("dense", entries="dense")
def nonzero_rows(dense: Tensor) -> phases.NonzeroRows:
    """Finds the rows of `dense`, (num_rows, dim) floating, that are not all zero, by the elements' bits.

    -0.0 is zero; NaN, infinity and subnormals are not.
    """
    return NonzeroRows(dense)
