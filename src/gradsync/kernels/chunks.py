"""Kernels on chunks: so many consecutive elements of a flat tensor, of which some are sent and the others are kept."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.choice import pick


def take_chunks(
    x: Tensor,
    residual: Tensor,
    chosen: Tensor,
    payload: Tensor,
    next_residual: Tensor,
    norms: Tensor,
    *,
    chunk: int,
    scale: float = 1.0,
) -> None:
    """Writes the chosen chunks of p = residual + x one behind the other, and keeps the rest, with its norm by chunk.

    In one pass over memory. `payload` has scale * p, rounded to nearest; what is finite stays finite. `next_residual`
    is p, less payload / scale in chosen chunks: what rounding takes away is kept. A norm is the sum of the magnitudes
    of `next_residual`, added in float64 in an order that every implementation keeps, that of
    `reference.blocks.ordered_sum`.

    Args:
        x: (numel,) floating. Overwritten by zeros.
        residual: (numel,), in the accumulation dtype of `x`.
        chosen: (k,) int64, ascending: numbers of chunks. The last chunk of `x` may be shorter than the others.
        payload: (k * chunk,), in the dtype of `x`, or bfloat16 or float16; behind a short chunk are zeros. Overwritten.
        next_residual: as `residual`, and not its memory. Overwritten.
        norms: (chunks,) float64. Overwritten.
        chunk: elements of a chunk, at least 1.
        scale: a power of two, so that nothing but rounding to the payload's dtype makes a difference.

    Raises:
        ValueError: shapes that do not fit, chunks that there are not or that do not ascend, other scales.
        TypeError: other dtypes.
    """
    tensors = [x, residual, chosen, payload, next_residual, norms]
    pick("take_chunks", tensors, x.numel())(*tensors, chunk=chunk, scale=scale)
