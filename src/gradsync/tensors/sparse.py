"""Sparse tensors: some rows of a table, as the gradient of `nn.Embedding(sparse=True)` has them, or some elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..devices import streams
from . import allocator as memory

INT32_ROWS = 2**31  # tables up to this many rows, or elements, have indices of 4 bytes, larger ones of 8


def index_dtype(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows <= INT32_ROWS else torch.int64


@dataclass(frozen=True)
class SparseRows:
    """Some rows of a table's gradient: `values[k]` is added to row `indices[k]`; indices may repeat, in any order.

    Attributes:
        indices: (nnz,) int64.
        values: (nnz, dim), in the dtype of the table.
        num_rows: the number of rows of the table.
        present: False on a rank that has no gradient for the table at all, not even an empty one. If no rank has one,
            the parameter keeps `grad = None`, as one that no rank used; otherwise it gets a gradient, be it zero.
    """

    indices: Tensor
    values: Tensor
    num_rows: int
    present: bool = True

    def __post_init__(self) -> None:
        if self.indices.dim() != 1 or self.values.dim() != 2 or self.indices.numel() != self.values.shape[0]:
            raise ValueError(
                "SparseRows needs indices of shape (nnz,) and values of shape (nnz, dim), got "
                f"{tuple(self.indices.shape)} and {tuple(self.values.shape)}"
            )
        if self.indices.numel() and not self.present:
            raise ValueError(f"SparseRows with present=False has no rows, got {self.indices.numel()}")

    @property
    def nnz(self) -> int:
        """The number of stored rows; repeated ones count each time."""
        return int(self.indices.numel())

    @property
    def dim(self) -> int:
        """The number of elements in a row."""
        return int(self.values.shape[1])

    @classmethod
    def absent(cls, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> SparseRows:
        """Returns the empty `SparseRows` of a rank that has no gradient at all for a table of this shape."""
        dim = int(torch.Size(shape[1:]).numel())
        return cls(
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty(0, dim, dtype=dtype, device=device),
            int(shape[0]),
            present=False,
        )

    @classmethod
    def from_torch(cls, grad: Tensor) -> SparseRows:
        """Returns the rows of a sparse COO tensor, (num_rows, ...) with one sparse dimension, without coalescing them.

        The rows share the tensor's memory. Only indices or values that do not lie one after the other are copied, as
        kernels take adjacent elements only; an embedding whose output was transposed leaves such a gradient.

        Raises:
            ValueError: for another layout, or more than one sparse dimension.
        """
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise ValueError(
                f"expected a sparse COO gradient with one sparse dimension (rows), got layout {grad.layout}"
                + (f" with {grad.sparse_dim()} sparse dimensions" if grad.layout is torch.sparse_coo else "")
            )
        # _indices and _values read an uncoalesced tensor without sorting it; the public accessors refuse to.
        values = grad._values().contiguous()
        dim = int(torch.Size(grad.shape[1:]).numel())
        return cls(grad._indices()[0].contiguous(), values.reshape(values.shape[0], dim), int(grad.shape[0]))

    @classmethod
    def from_dense(cls, grad: Tensor) -> SparseRows:
        """Returns the rows of a dense tensor, (num_rows, ...), that are not all zero, ascending.

        NaN is non-zero, -0.0 is zero.
        """
        rows = grad.reshape(grad.shape[0], torch.Size(grad.shape[1:]).numel()).contiguous()  # as kernels take them
        found = kernels.nonzero_rows(rows)
        indices = torch.empty(found.count, dtype=torch.int64, device=grad.device)
        values = rows.new_empty(found.count, rows.shape[1])
        found.write_indices(indices)
        found.gather([values])
        return cls(indices, values, int(grad.shape[0]))

    def to_torch(self, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Returns a coalesced sparse COO tensor of this shape; the rows must be sorted and unique."""
        # Not sparse_coo_tensor(check_invariants=False), at whose first call torch 2.11 warns that nothing is checked.
        made: Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(
            self.indices.unsqueeze(0), self.values.reshape(self.nnz, *shape[1:]), torch.Size(shape), is_coalesced=True
        )
        return made

    def write_to(self, dense: Tensor) -> Tensor:
        """Copies these rows into `dense`, (num_rows, ...) contiguous, and returns it; the indices must be unique."""
        kernels.scatter_rows(self.indices, self.values, dense.view(self.num_rows, self.dim), accumulate=False)
        return dense


@dataclass(frozen=True)
class SparseVector:
    """Some elements of a vector: element `indices[k]` is `values[k]`, all others are zero.

    Attributes:
        indices: (nnz,) int32 or int64, ascending, without repetition.
        values: (nnz,).
        length: the number of elements of the vector.
    """

    indices: Tensor
    values: Tensor
    length: int

    def __post_init__(self) -> None:
        if self.indices.dim() != 1 or self.values.shape != self.indices.shape:
            raise ValueError(
                "SparseVector needs indices and values of one shape (nnz,), got "
                f"{tuple(self.indices.shape)} and {tuple(self.values.shape)}"
            )

    @property
    def nnz(self) -> int:
        """The number of elements that are given."""
        return int(self.indices.numel())

    @property
    def nbytes(self) -> int:
        """The bytes of the indices and the values together."""
        return self.nnz * (self.indices.itemsize + self.values.itemsize)

    def checked(self) -> SparseVector:
        """Returns this vector after checking its indices.

        Raises:
            ValueError: for an index outside [0, length).
        """
        if self.nnz:
            first, last = self.indices.aminmax()
            within = (first >= 0) & (last < self.length)
            expected = f"indices of {self.length} elements must be below that"
            streams.require(within, expected, lambda: f"{int(first)} to {int(last)}")
        return self

    def to_dense(self) -> Tensor:
        """Returns the vector as a dense tensor, (length,), with zeros in all other places."""
        dense = memory.zeros(self.length, self.values.dtype, self.values.device)
        kernels.scatter_rows(self.indices, self.values[:, None], dense[:, None], accumulate=False)
        return dense

    def add_to(self, dense: Tensor) -> Tensor:
        """Adds these elements to `dense`, (length,), whose type may be wider, and returns it."""
        values = self.values.to(dense.dtype)
        kernels.scatter_rows(self.indices, values[:, None], dense[:, None], accumulate=True)
        return dense

    def subtract_from(self, dense: Tensor) -> Tensor:
        """Subtracts these elements from `dense`, (length,), whose type may be wider, and returns it."""
        return SparseVector(self.indices, self.values.neg(), self.length).add_to(dense)
