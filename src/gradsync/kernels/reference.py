"""Every kernel in plain torch operations: the definition that the fast implementations must meet bit for bit.

Runs on any device and dtype, so it is also the fallback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

RowsPart = tuple[Int[Tensor, "nnz"], Float[Tensor, "nnz dim"]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_parts(parts: Sequence[RowsPart], num_rows: int) -> None:
    """Checks what `sum_rows` needs of its arguments, except the range of the indices.

    Raises:
        ValueError: no part at all, shapes that do not fit together, more than one device, a negative `num_rows`.
        TypeError: indices that are not int64 or int32, values that are not floating point or of different dtypes.
    """
    if not parts:
        raise ValueError("sum_rows needs at least one part (it may be empty): dim and dtype come from the parts")
    if num_rows < 0:
        raise ValueError(f"num_rows must not be negative, got {num_rows}")
    first = parts[0][1]
    for number, (indices, values) in enumerate(parts):
        if indices.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"indices of part {number} must be int64 or int32, got {indices.dtype}")
        if not values.is_floating_point() or values.dtype != first.dtype:
            raise TypeError(f"values of part {number} must be {first.dtype}, floating as all parts, got {values.dtype}")
        if indices.ndim != 1 or values.ndim != 2 or len(indices) != len(values) or values.shape[1] != first.shape[-1]:
            raise ValueError(
                f"part {number} must be indices (nnz,) and values (nnz, {first.shape[-1] if first.ndim else 'dim'}), "
                f"got {tuple(indices.shape)} and {tuple(values.shape)}"
            )
        if indices.device != first.device or values.device != first.device:
            raise ValueError(f"part {number} must be on {first.device}, got {indices.device} and {values.device}")


@torch.no_grad()
def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0) -> RowsPart:
    """See `gradsync.kernels.sum_rows`."""
    check_parts(parts, num_rows)
    for number, (indices, _) in enumerate(parts):
        outside = indices[(indices < 0) | (indices >= num_rows)]
        if len(outside) > 0:
            raise ValueError(f"sum_rows: index {outside[0]} of part {number} is outside [0, num_rows={num_rows})")

    union = torch.unique(torch.cat([indices.long() for indices, _ in parts]), sorted=True)
    dtype, dim = parts[0][1].dtype, parts[0][1].shape[1]
    total = torch.zeros(len(union), dim, dtype=accumulation_dtype(dtype), device=union.device)
    for indices, values in parts:
        places = torch.searchsorted(union, indices.long().contiguous())
        total.index_add_(0, places, values.to(total.dtype))
    return union, total.mul_(scale).to(dtype)
