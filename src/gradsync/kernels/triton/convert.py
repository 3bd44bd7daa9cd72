"""Triton kernels that convert values to a narrower dtype, and sum several tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.convert import check_narrow, check_sum
from gradsync.kernels.triton.boundary import (
    BLOCK,
    addresses,
    bits_of,
    blocks,
    device_of,
    launch,
    on,
    pointee,
)
from gradsync.kernels.triton.rows import kind_of, narrowed, widened


@triton.jit
def _narrow(
    x: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    scale: tl.tensor,
    MOST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes `scale` times one block of `x` to `out`, in dtype KIND; finite products stay finite."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0)
    value = value * tl.load(scale).to(value.dtype)
    below = tl.where(value > MOST, MOST, value)
    within = tl.where(below < -MOST, -MOST, below)
    kept = tl.where(value - value == 0, within, value).to(tl.float32)
    tl.store(out + at, narrowed(kept, KIND), mask=at < count)


def narrow(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    check_narrow(x, out)
    device = device_of(x=x, out=out)
    factor = on(device, torch.tensor([scale], dtype=x.dtype))  # in the type of x: as torch multiplies
    constants = {"MOST": torch.finfo(out.dtype).max, "KIND": kind_of("out", out), "BLOCK": BLOCK}
    launch(_narrow, blocks(len(x)), device, x.detach(), bits_of(out), len(x), factor, **constants)


@triton.jit
def _sum_parts(
    parts: tl.tensor,
    num_parts: tl.tensor,
    count: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    POINTEE: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes `scale` times the sum over all parts, in their order, of one block of elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    factor = tl.load(scale)
    total = tl.zeros([BLOCK], factor.dtype)
    part = tl.zeros([], tl.int64)
    while part < num_parts:
        values = tl.load(parts + part).to(tl.pointer_type(POINTEE))
        number = widened(tl.load(values + at, mask=inside, other=0), FROM).to(factor.dtype)
        total = tl.where(part == 0, number, total + number)  # not 0 + the first: of -0.0 that is another zero
        part += 1
    total = total * factor
    if TO != "f64":
        total = total.to(tl.float32)
    tl.store(out + at, narrowed(total, TO), mask=inside)


def sum_parts(parts: Sequence[Tensor], out: Tensor, *, scale: float = 1.0) -> None:
    dtype = check_sum(parts, out)
    device = device_of(out=out, parts=parts)
    if not parts:
        out.detach().zero_()
        return
    factor = on(device, torch.tensor([scale], dtype=dtype))  # in the type of the sum: as torch multiplies
    constants = {"FROM": kind_of("parts", parts[0]), "TO": kind_of("out", out), "POINTEE": pointee(parts[0])}
    arguments = on(device, addresses(parts)), len(parts), len(out), factor, bits_of(out)
    launch(_sum_parts, blocks(len(out)), device, *arguments, **constants, BLOCK=BLOCK)
