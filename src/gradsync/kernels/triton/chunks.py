"""The Triton kernel that moves chosen chunks of a flat tensor into a payload; a second pass sums what is left."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.blocks import GROUP
from gradsync.kernels.reference.chunks import check_take
from gradsync.kernels.reference.convert import NARROW
from gradsync.kernels.triton.blocks import blocks_of, sum_blocks
from gradsync.kernels.triton.boundary import bits_of, common_device, device_of, launch, on
from gradsync.kernels.triton.rows import kind_of, narrowed, widened


@triton.jit
def _take(
    begins: tl.tensor,
    counts: tl.tensor,
    owners: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    slots: tl.tensor,
    chunk: tl.tensor,
    factors: tl.tensor,
    payload: tl.tensor,
    left: tl.tensor,
    MOST: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program moves some elements of one chunk of p = x + residual to `payload` or `left`; zeroes them in `x`.

    `owners`: the chunk of each program. `slots`: each chunk's place in the payload, or -1 if it is not sent. `left`:
    the next residual, for a sent chunk its rounding errors. `factors`: the factor of sent elements, and its inverse.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    begin, owner = tl.load(begins + program), tl.load(owners + program)
    inside = lane < tl.load(counts + program)
    at = begin + lane
    bits = tl.load(x + at, mask=inside, other=0)
    p = tl.load(residual + at, mask=inside, other=0) + widened(bits, FROM)
    tl.store(x + at, bits ^ bits, mask=inside)
    slot = tl.load(slots + owner)
    scaled = p * tl.load(factors)
    if MOST > 0:
        below = tl.where(scaled > MOST, MOST, scaled)
        within = tl.where(below < -MOST, -MOST, below)
        scaled = tl.where(scaled - scaled == 0, within, scaled).to(tl.float32)
    sent = narrowed(scaled, TO)
    tl.store(payload + slot * chunk + begin - owner * chunk + lane, sent, mask=inside & (slot >= 0))
    rest = p - widened(sent, TO).to(p.dtype) * tl.load(factors + 1)
    tl.store(left + at, tl.where(slot >= 0, rest, p), mask=inside)


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
    check_take(x, residual, chosen, payload, next_residual, norms, chunk, scale)
    device = device_of(x=x, residual=residual, payload=payload, next_residual=next_residual)
    common_device([x, chosen, norms])
    slots = torch.full((len(norms),), -1, dtype=torch.int64, device=device)
    slots[chosen] = torch.arange(len(chosen), device=device)
    if short := len(x) % chunk:
        payload.detach()[len(payload) - (chunk - short) :] = 0  # in case it is the last chunk's
    lengths, groups = blocks_of((len(x),), chunk)
    factors = on(device, torch.tensor([scale, 1 / scale], dtype=residual.dtype))
    tables = [on(device, table) for table in groups]
    most = torch.finfo(payload.dtype).max if payload.dtype in NARROW else 0.0
    constants = {"MOST": most, "FROM": kind_of("x", x), "TO": kind_of("payload", payload), "BLOCK": GROUP}
    outs = bits_of(payload), next_residual.detach()
    arguments = bits_of(x), residual.detach(), slots, chunk, factors, *outs
    launch(_take, len(tables[0]), device, *tables, *arguments, **constants)
    norms.copy_(sum_blocks(next_residual, lengths, groups, "magnitude"))
