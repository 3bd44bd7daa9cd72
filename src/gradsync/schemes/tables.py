"""What schemes of row-sparse buckets see: a tuple of tables, one for each parameter of the bucket."""

from __future__ import annotations

from .. import kernels
from ..bucket import TensorSpec
from ..sparse import SparseRows

Tables = tuple[SparseRows, ...]


def coalesce(tables: Tables) -> Tables:
    """The same tables with sorted, unique rows."""
    return tuple(t.with_rows(*kernels.sum_rows([(t.indices, t.values)], t.num_rows)) for t in tables)


def spec_of(table: SparseRows) -> TensorSpec:
    """The whole table's shape and element type."""
    return TensorSpec((table.num_rows, table.dim), table.values.dtype)
