"""Chunks of a flat tensor that are sent or kept, in plain torch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    Sections,
    check_ascending,
    check_flat,
    check_floating,
    check_range,
    check_residuals,
    check_shape,
    describe,
)
from gradsync.kernels.reference.blocks import in_blocks, ordered_sum
from gradsync.kernels.reference.convert import NARROW, narrow
from gradsync.kernels.reference.rows import accumulation_dtype


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
    """See `gradsync.kernels.take_chunks`."""
    check_take(x, residual, chosen, payload, next_residual, norms, chunk, scale)
    torch.add(residual, x, out=next_residual)
    for place, number in enumerate(chosen.tolist()):
        room = payload[place * chunk : (place + 1) * chunk]
        part = next_residual[number * chunk : (number + 1) * chunk]
        sent = room[: len(part)]
        if payload.dtype in NARROW:
            narrow(part, sent, scale=scale)
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
    """Refuses what `take_chunks` cannot work on. Reads the chosen back to the host."""
    check_layout(x, chosen, payload, norms, chunk, scale)
    check_residuals(x, residual, next_residual, accumulation_dtype(x.dtype))
    check_range("take_chunks", chosen, len(norms), "chunks")
    check_ascending("take_chunks", "chosen chunks", chosen, strictly=True)


def check_layout(x: Tensor, chosen: Tensor, payload: Tensor, norms: Tensor, chunk: int, scale: float) -> None:
    """Refuses chunks, payloads, norms and scales that do not fit, whatever is chosen."""
    check_floating("x", x)
    check_flat("x", x)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if not 0 < scale < math.inf or math.frexp(scale)[0] != 0.5:
        raise ValueError(f"scale must be a power of two, got {scale}")
    if chosen.dtype != torch.int64:
        raise TypeError(f"chosen must be int64, got {describe(chosen)}")
    check_flat("chosen", chosen)
    if payload.dtype != x.dtype and (payload.dtype not in NARROW or x.itemsize < 4):
        raise TypeError(f"payload must be {x.dtype}, or bfloat16 or float16 of wider floats, got {describe(payload)}")
    check_shape("payload", payload, len(chosen) * chunk)
    check_floating("norms", norms, torch.float64)
    check_shape("norms", norms, -(-len(x) // chunk))
