"""Bits on the wire: how row-sparse parts are packed into one message for each peer.

A message holds, table by table, the row indices and then the values of the peer's columns; each section starts at a
multiple of 8 bytes, so that any element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..bucket import TensorSpec
from ..sparse import SparseRows

ALIGNMENT_BYTES = 8
INT32_ROWS = 2**31  # tables up to this many rows send indices of 4 bytes, larger ones of 8

ABSENT = -1  # row count of a rank that has no gradient for the table


def aligned(nbytes: float) -> float:
    """`nbytes` rounded up to the alignment; exact for whole numbers, the mean for expected sizes."""
    if float(nbytes).is_integer():
        return -(-int(nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return nbytes + ALIGNMENT_BYTES / 2


def index_dtype(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows <= INT32_ROWS else torch.int64


def rows_message_nbytes(spec: TensorSpec, rows: float, columns: int) -> float:
    """Size of one table's sections for `rows` rows and `columns` columns of each."""
    return aligned(rows * index_dtype(spec.num_rows).itemsize) + aligned(rows * columns * spec.itemsize)


def row_counts(tables: Sequence[SparseRows]) -> Tensor:
    """(tables,) int64: stored rows of each table, ABSENT where this rank has no gradient."""
    return torch.tensor([t.nnz if t.present else ABSENT for t in tables], device=tables[0].values.device)


def write_rows(out: Tensor, offset: int, table: SparseRows, columns: tuple[int, int]) -> int:
    """Writes one table's sections into the uint8 message `out` at `offset`; returns the offset behind them."""
    indices_dtype = index_dtype(table.num_rows)
    nbytes = table.nnz * indices_dtype.itemsize
    out[offset : offset + nbytes].view(indices_dtype).copy_(table.indices)
    offset += int(aligned(nbytes))
    start, stop = columns
    nbytes = table.nnz * (stop - start) * table.values.element_size()
    if nbytes:
        target = out[offset : offset + nbytes].view(table.values.dtype).view(table.nnz, stop - start)
        target.copy_(table.values[:, start:stop])
    return offset + int(aligned(nbytes))


def read_rows(message: Tensor, offset: int, rows: int, columns: int, spec: TensorSpec) -> tuple[Tensor, Tensor, int]:
    """(indices (rows,), values (rows, columns), offset behind them), as views into the message."""
    indices_dtype = index_dtype(spec.num_rows)
    nbytes = rows * indices_dtype.itemsize
    indices = message[offset : offset + nbytes].view(indices_dtype)
    offset += int(aligned(nbytes))
    nbytes = rows * columns * spec.itemsize
    values = message[offset : offset + nbytes].view(spec.dtype).view(rows, columns)
    return indices, values, offset + int(aligned(nbytes))
