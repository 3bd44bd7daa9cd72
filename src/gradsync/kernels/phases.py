"""Results of kernels with two phases: their `count` gives the size of the outputs, which their methods then write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradsync.kernels.checks import PackedPositions, Stripes


class RowUnion(Protocol):
    """The union of the rows in several row-sparse parts (indices and values) of one table; `unite_rows` returns it."""

    count: int  # distinct rows, u

    def write_indices(self, out: Tensor) -> None:
        """Writes the sorted distinct row indices into `out`, (count,) int64, or int32 for tables of up to 2^31 rows."""

    def sum(
        self, values: Sequence[Tensor], outs: Sequence[Tensor], stripes: Stripes | None = None, *, scale: float = 1.0
    ) -> None:
        """Writes `scale` times the sum of the rows of equal index in all parts; each output gets some of the columns.

        Sums are added in the order of `sum_rows`. With one stripe of columns for each owner (rank that sums it) and
        views into the messages to owners as `outs`, this splits row-sparse gradients among owners (Zen, OSDI 2025, with
        the column stripe as the owner map).

        Args:
            values: for each part (its number of indices, dim) floating, all of one dtype.
            outs: for each stripe (count, stop - start), in that dtype; overwritten.
            stripes: [start, stop) of the columns of each output; by default one output of all columns.
            scale: a factor of the sums.

        Raises:
            ValueError: shapes that do not fit, stripes outside the columns.
            TypeError: different dtypes.
        """


class NonzeroRows(Protocol):
    """The rows of a dense tensor that are not all zero; `nonzero_rows` returns it."""

    count: int

    def write_indices(self, out: Tensor) -> None:
        """Writes the non-zero rows' ascending indices into `out`, (count,) int64, or int32 for up to 2^31 rows."""

    def gather(self, outs: Sequence[Tensor], stripes: Stripes | None = None) -> None:
        """Copies the non-zero rows into `outs`, (count, stop - start) for each stripe of columns [start, stop).

        Without stripes, `outs` has one tensor, of all columns. The dtype is that of the dense tensor.
        """


class NonzeroElements(Protocol):
    """The non-zero elements of a dense tensor; `nonzero_elements` returns it."""

    count: int

    def write(self, indices: Tensor, values: Tensor) -> None:
        """Writes the elements' ascending indices, (count,) int64, or int32 for sizes up to 2^31, and values, (count,).

        The values have the dtype of the dense tensor.
        """


class ElementPartition(Protocol):
    """The non-zero elements of a dense tensor, split by owner (rank that sums them), from `partition_elements`."""

    counts: list[int]  # elements of each owner

    def write(self, positions: Sequence[PackedPositions], outs: Sequence[Tensor]) -> None:
        """Writes for each owner (rank) its elements' packed positions in the part it sums, and their values, (count,).

        The values have the dtype of the dense tensor.
        """


class ElementUnion(Protocol):
    """The union of the element positions in several messages; `unite_elements` returns it."""

    count: int

    def sum(self, values: Sequence[Tensor], positions: PackedPositions, out: Tensor, *, scale: float = 1.0) -> None:
        """Writes the distinct positions, and for each one `scale` times the sum of its values in all messages.

        Args:
            values: for each message (its count,) floating, all of one dtype; added and rounded as by `sum_rows`.
            positions: a buffer for `count` packed positions, overwritten.
            out: (count,), in that dtype.
        """


class RotatedPartition(Protocol):
    """Sorted element indices, split by owner (rank that sums the elements); `partition_rotated` returns it."""

    counts: list[int]  # elements of each owner

    def write(self, values: Tensor, positions: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Writes for each owner (rank) its elements' sorted positions in the part it sums, (count,) int32, and values.

        Args:
            values: (nnz,), or (nnz, dim) contiguous if rows, not elements, were split; floating.
            positions, outs: one for each owner; `outs` (count,) or (count, dim) in the dtype of `values`.
        """


class HashedPartition(Protocol):
    """Sorted element indices, split by owner (rank that sums the elements); `partition_hashed` returns it."""

    counts: list[int]  # elements of each owner

    def write(self, values: Tensor, indices_out: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Writes for each owner (rank that sums them) its elements' ascending indices in the whole tensor, and values.

        Args:
            values: (nnz,), or (nnz, dim) contiguous if rows, not elements, were split; floating.
            indices_out: one for each owner, (count,) int64, or all int32 for sizes up to 2^31.
            outs: one for each owner, (count,) or (count, dim) in the dtype of `values`.
        """
