"""The kernel that moves chosen chunks of a flat tensor into a payload, in plain torch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    Sections,
    check_ascending,
    check_dtype,
    check_flat,
    check_floating,
    check_range,
    check_residuals,
    check_shape,
    describe,
)
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.blocks import in_blocks, ordered_sum
from gradsync.kernels.reference.convert import NARROW, narrow
from gradsync.kernels.reference.rows import accumulation_dtype


@dispatched("x", "residual", "chosen", "payload", "next_residual", "norms", entries="x")
@torch.no_grad()
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
    """Writes chosen chunks (adjacent elements) of p = residual + x to `payload`, and the rest to `next_residual`.

    One pass over memory. `payload` has scale * p, rounded to nearest; finite products stay so. `next_residual` is p,
    less payload / scale in chosen chunks, so that it holds rounding errors too. `norms` gets the sum of the magnitudes
    of `next_residual` in each chunk, added in float64 in the order of `reference.blocks.ordered_sum`.

    Args:
        x: (numel,) floating. Overwritten by zeros.
        residual: (numel,), in the accumulation dtype of `x`.
        chosen: (k,) int64, ascending: numbers of chunks. The last chunk of `x` may be shorter than the others.
        payload: (k * chunk,), in the dtype of `x`, or bfloat16 or float16; zeros follow a short chunk. Overwritten.
        next_residual: as `residual`, in other memory. Overwritten.
        norms: (chunks,) float64. Overwritten.
        chunk: elements of a chunk, at least 1.
        scale: a power of two, so that only rounding to the payload's dtype changes numbers.

    Raises:
        ValueError: shapes that do not fit, chunks that do not exist or do not ascend, other scales.
        TypeError: other dtypes.
    """
    check_take(x, residual, chosen, payload, next_residual, norms, chunk, scale)
    torch.add(residual, x, out=next_residual)
    for place, number in enumerate(chosen.tolist()):
        room = payload[place * chunk : (place + 1) * chunk]
        part = next_residual[number * chunk : (number + 1) * chunk]
        sent = room[: len(part)]
        if payload.dtype in NARROW:
            narrow.reference(part, sent, scale=scale)
        else:
            torch.mul(part, scale, out=sent)
        room[len(part) :] = 0
        part.sub_(sent.to(part.dtype) * (1 / scale))
    for these, (part,) in in_blocks(Sections((len(x),)), chunk, next_residual):
        norms[these] = ordered_sum(part.abs())
    x.zero_()


def check_take(
    x: Tensor,
    residual: Tensor,
    chosen: Tensor,
    payload: Tensor,
    next_residual: Tensor,
    norms: Tensor,
    chunk: int,
    scale: float,
) -> None:
    """Checks the arguments of `take_chunks`, and raises the errors that its docstring lists. Waits for the device."""
    check_layout(x, chosen, payload, norms, chunk, scale)
    check_residuals(x, residual, next_residual, accumulation_dtype(x.dtype))
    check_range("take_chunks", chosen, len(norms), "chunks")
    check_ascending("take_chunks", "chosen chunks", chosen, strictly=True)


def check_layout(x: Tensor, chosen: Tensor, payload: Tensor, norms: Tensor, chunk: int, scale: float) -> None:
    """Checks these arguments of `take_chunks`, but not the numbers in `chosen`, without waiting for the device."""
    check_floating("x", x)
    check_flat("x", x)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if not 0 < scale < math.inf or math.frexp(scale)[0] != 0.5:
        raise ValueError(f"scale must be a power of two, got {scale}")
    check_dtype("chosen", chosen, torch.int64)
    check_flat("chosen", chosen)
    if payload.dtype != x.dtype and (payload.dtype not in NARROW or x.itemsize < 4):
        raise TypeError(f"payload must be {x.dtype}, or bfloat16 or float16 of wider floats, got {describe(payload)}")
    check_shape("payload", payload, len(chosen) * chunk)
    check_floating("norms", norms, torch.float64)
    check_shape("norms", norms, -(-len(x) // chunk))
