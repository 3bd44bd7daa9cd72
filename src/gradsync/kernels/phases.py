"""Results of kernels with two phases: their `count` says how much room is needed, their methods write the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradsync.kernels.checks import PackedPositions, Stripes


class RowUnion(Protocol):
    """The rows that occur in any of several parts of one table; made by `unite_rows`."""

    count: int  # distinct rows, u

    def write_indices(self, out: Tensor) -> None:
        """Writes the sorted distinct indices into `out`, (u,) int64, or int32 for tables of up to 2^31 rows."""

    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        """Sums the parts' rows as `sum_rows` does, and spreads the result over `outs` by columns, in the same pass.

        With the stripes of the owners and views into their messages as `outs`, this is the owner partition of
        row-sparse gradients (Zen, OSDI 2025, with the column stripe as the owner map).

        Args:
            values: per part (its number of indices, dim) floating, all of one dtype.
            outs: per stripe (u, stop - start), in that dtype; overwritten.
            stripes: [start, stop) of the columns of each output; by default one output of all columns.

        Raises:
            ValueError: shapes that do not fit, stripes outside the columns.
            TypeError: different dtypes.
        """


class NonzeroRows(Protocol):
    """The rows of a dense tensor that are not zero; made by `nonzero_rows`."""

    count: int

    def write_indices(self, out: Tensor) -> None:
        """Writes the ascending indices of the rows into `out`, (count,) int64, or int32 for up to 2^31 rows."""

    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        """Copies the rows into `outs`, (count, stop - start) for each stripe of columns [start, stop).

        Without stripes, `outs` is one tensor for all columns. The dtype is that of the dense tensor.
        """


class NonzeroElements(Protocol):
    """The elements of a dense tensor that are not zero; made by `nonzero_elements`."""

    count: int

    def write(self, indices: Tensor, values: Tensor) -> None:
        """Writes ascending indices, (count,) int64, or int32 for up to 2^31 elements, and values, (count,).

        The values have the dtype of the dense tensor.
        """


class ElementPartition(Protocol):
    """The elements of a dense tensor that are not zero, by owner; made by `partition_elements`."""

    counts: list[int]  # elements of each owner

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        """Writes the elements of each owner: positions in the owner's part, and values, (count,).

        The values have the dtype of the dense tensor.
        """


class ElementUnion(Protocol):
    """The positions that occur in any of several parts; made by `unite_elements`."""

    count: int

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        """Writes the distinct positions, and for each `scale` times the sum of the parts' values, as `sum_rows` sums.

        Args:
            values: per part (its count,) floating, all of one dtype.
            positions: room for `count` positions, overwritten.
            out: (count,), in that dtype.
        """


class RotatedPartition(Protocol):
    """Sorted element indices by owner; made by `partition_rotated`."""

    counts: list[int]  # elements of each owner

    def write(self, values: Tensor, positions: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Writes the elements of each owner: ascending positions in the owner's part, (count,) int32, and values.

        Args:
            values: (nnz,), or (nnz, dim) contiguous where rows are dealt to owners; floating.
            positions, outs: one for each owner; `outs` (count,) or (count, dim) in the dtype of `values`.
        """


class HashedPartition(Protocol):
    """Sorted element indices by owner; made by `partition_hashed`."""

    counts: list[int]  # elements of each owner

    def write(self, values: Tensor, indices_out: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Writes the elements of each owner: ascending indices, 1-D, and values.

        Args:
            values: (nnz,), or (nnz, dim) contiguous where rows are dealt to owners; floating.
            indices_out: one for each owner, (count,) int64, or all int32 for sizes up to 2^31.
            outs: one for each owner, (count,) or (count, dim) in the dtype of `values`.
        """
