"""Kernels on the rows of tables: sums of row-sparse parts, rows that are not zero, columns joined."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import RowsPart, Stripes
from gradsync.kernels.choice import pick
from gradsync.kernels.phases import NonzeroRows, RowUnion


def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0, out: RowsPart | None = None) -> RowsPart:
    """The sum of row-sparse parts of one (num_rows, dim) table, times `scale`; of one part, its coalesced form.

    Sums run in the order of the parts, then of occurrence within a part, in float32 (float64 for float64), and are
    rounded once: the bits depend neither on the implementation (the reference but on the CPU only) nor on the number
    of threads. Parts that are strided within a row are copied first. `unite_rows` is the same in two phases.

    Args:
        parts: each indices (nnz,) int64 or int32, in any order, duplicates allowed; values (nnz, dim) floating.
        num_rows: all indices are in [0, num_rows).
        out: indices and values buffers with room for at least u rows; what is returned are views of their first u.

    Returns:
        indices (u,) int64, or as in `out`: the sorted union of all indices; values (u, dim) in the dtype of the parts.

    Raises:
        ValueError: an index out of range, no part, or shapes and devices that do not fit together.
        TypeError: dtypes other than said above.
    """
    tensors = [tensor for part in parts for tensor in part]
    total: RowsPart = pick("sum_rows", tensors, num_rows)(parts, num_rows, scale=scale, out=out)
    return total


def unite_rows(indices: Sequence[Tensor], num_rows: int) -> RowUnion:
    """First phase of the sum of row-sparse parts of one table: which rows occur.

    Native: by a bitmap that ranks them or, where it would have more than about four words for each index, by sorting;
    either way, time and memory grow with the number of indices, not with that of rows.

    Args:
        indices: per part (nnz,) int64 or int32, in any order, duplicates allowed.
        num_rows: all indices are in [0, num_rows).

    Raises:
        ValueError: an index out of range, no part; native: more than 2^34 rows or 2^32 - 1 indices.
        TypeError: other dtypes.
    """
    union: RowUnion = pick("unite_rows", indices, num_rows)(indices, num_rows)
    return union


def join_columns(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    """Puts stripes of columns back together to whole rows: out[:, start:stop] = part.

    Args:
        parts: per stripe (u, stop - start), floating.
        stripes: [start, stop) of the columns of each part; columns of no stripe stay, of several get the last.
        out: (u, dim) in the dtype of the parts.

    Raises:
        ValueError: shapes that do not fit, stripes outside the columns.
        TypeError: different dtypes.
    """
    pick("join_columns", [*parts, out])(parts, stripes, out)


def scatter_rows(indices: Tensor, values: Tensor, dense: Tensor, *, accumulate: bool) -> None:
    """Writes rows into `dense`, or adds them to it, in order: of equal indices the last is kept, or all are added.

    Args:
        indices: (nnz,) int64 or int32, in any order.
        values: (nnz, dim) floating.
        dense: (num_rows, dim) in the dtype of the values; each addition is rounded to it.

    Raises:
        ValueError: an index outside [0, num_rows), before anything is written; shapes that do not fit.
        TypeError: other or different dtypes.
    """
    pick("scatter_rows", [indices, values, dense])(indices, values, dense, accumulate=accumulate)


def nonzero_rows(dense: Tensor) -> NonzeroRows:
    """Finds the rows of `dense`, (num_rows, dim) floating, that are not zero, by their bits.

    -0.0 is zero; NaN, infinity and subnormals are not.
    """
    found: NonzeroRows = pick("nonzero_rows", [dense], len(dense))(dense)
    return found
