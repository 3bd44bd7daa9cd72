"""Triton kernels that pack a tensor's signs as bits with a scale for each block, and sum packed tensors.

One pass over the elements writes the sign bits and p = x + residual, one sums each block of p for the scales, and, with
a residual, one subtracts the decoded values from p. Sums have the order of `reference.blocks.ordered_sum`. Each element
of an output has one writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Sections, SignScale, check_residuals, check_sections, check_signs, check_some
from gradsync.kernels.reference.blocks import GROUP
from gradsync.kernels.reference.rows import accumulation_dtype
from gradsync.kernels.reference.signs import levels_of
from gradsync.kernels.triton.blocks import blocks_of, sum_blocks
from gradsync.kernels.triton.boundary import (
    BLOCK,
    addresses,
    bits_of,
    blocks,
    check_contiguous,
    common_device,
    device_of,
    launch,
    on,
)
from gradsync.kernels.triton.rows import kind_of, narrowed, widened


@triton.jit
def _pack_bits(
    x: tl.tensor,
    count: tl.tensor,
    residual: tl.tensor,
    p: tl.tensor,
    words: tl.tensor,
    KIND: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the sign bits of BLOCK elements; `p` gets x + residual, or x without FEEDBACK."""
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    at = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    number = widened(tl.load(x + at, mask=at < count, other=0), KIND)
    if FEEDBACK:
        number = tl.load(residual + at, mask=at < count, other=0) + number
    tl.store(p + at, number, mask=at < count)
    bits = (number < 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(words + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def _subtract_levels(
    p: tl.tensor,
    begins: tl.tensor,
    counts: tl.tensor,
    owners: tl.tensor,
    positive: tl.tensor,
    negative: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program subtracts from each number of a group its decoded sign, in place; `owners`: the block of a group."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(counts + program)
    place = p + tl.load(begins + program) + lane
    number = tl.load(place, mask=inside, other=0)
    owner = tl.load(owners + program)
    level = tl.where(number < 0, tl.load(negative + owner), tl.load(positive + owner))
    tl.store(place, number - level.to(number.dtype), mask=inside)


@triton.jit
def _sum_levels(
    begins: tl.tensor,
    counts: tl.tensor,
    owners: tl.tensor,
    parts: tl.tensor,
    num_parts: tl.tensor,
    levels: tl.tensor,
    num_blocks: tl.tensor,
    factor: tl.tensor,
    out: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the sum of one group of elements, decoded, over all parts, in their order, times `factor`.

    `levels`: for each part and sign, the decoded number of each block.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(counts + program)
    at = tl.load(begins + program) + lane
    level = levels + tl.load(owners + program)
    scale = tl.load(factor)
    total = tl.zeros([BLOCK], scale.dtype)
    part = tl.zeros([], tl.int64)
    while part < num_parts:
        words = tl.load(parts + part).to(tl.pointer_type(tl.uint8))
        byte = tl.load(words + at // 8, mask=inside, other=0).to(tl.int32)
        negative = (byte >> (at % 8).to(tl.int32)) & 1
        chosen = tl.where(
            negative != 0, tl.load(level + (2 * part + 1) * num_blocks), tl.load(level + 2 * part * num_blocks)
        )
        total += chosen.to(total.dtype)
        part += 1
    tl.store(out + at, narrowed(total * scale, KIND), mask=inside)


def pack_signs(
    x: Tensor,
    sections: Sections,
    words: Tensor,
    scales: Tensor,
    *,
    block: int,
    scale: SignScale,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> None:
    check_sections("x", x, sections)
    check_signs(words, scales, sections, block, scale)
    check_residuals(x, residual, next_residual, accumulation_dtype(x.dtype))
    device = device_of(x=x, words=words, scales=scales, residual=residual, next_residual=next_residual)
    p = torch.empty_like(x, dtype=accumulation_dtype(x.dtype)) if next_residual is None else next_residual.detach()
    constants = {"KIND": kind_of("x", x), "FEEDBACK": residual is not None, "BLOCK": BLOCK}
    before = p if residual is None else residual.detach()
    launch(_pack_bits, blocks(len(x)), device, bits_of(x), len(x), before, p, words, **constants)
    lengths, groups = blocks_of(sections.lengths, block)
    if scale == "mean":
        scales.copy_(sum_blocks(p, lengths, groups, "magnitude") / on(device, lengths))
    elif scale == "rms":
        # Of float64, squares are rounded: made apart, where no compiler fuses them with the sums.
        squares, term = (p.square(), "sum") if p.dtype == torch.float64 else (p, "square")
        scales.copy_((sum_blocks(squares, lengths, groups, term) / on(device, lengths)).sqrt())
    elif scale == "two":
        below = sum_blocks(p, lengths, groups, "negatives")
        counts = torch.stack([on(device, lengths) - below, below], dim=1)
        sums = torch.stack([sum_blocks(p, lengths, groups, term) for term in ("others", "negative")], dim=1)
        scales.copy_((sums / counts).where(counts > 0, 0))
    if next_residual is not None:
        begins, counts, runs = (on(device, table) for table in groups)
        levels = (level.expand(len(lengths)).contiguous() for level in levels_of(scales, scale))
        launch(_subtract_levels, len(begins), device, p, begins, counts, runs, *levels, BLOCK=GROUP)


def unpack_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    sections: Sections,
    out: Tensor,
    *,
    block: int,
    scale: SignScale,
    factor: float = 1.0,
) -> None:
    check_some("unpack_signs", parts)
    check_sections("out", out, sections)
    device = common_device([out, *(tensor for part in parts for tensor in part)])
    check_contiguous("out", out)
    for words, scales in parts:
        check_signs(words, scales, sections, block, scale)
        check_contiguous("words", words)
    lengths, groups = blocks_of(sections.lengths, block)
    levels = torch.stack(
        [level.expand(len(lengths)) for _, scales in parts for level in levels_of(scales, scale)]
    )  # one row for each part and sign
    begins, counts, runs = (on(device, table) for table in groups)
    table = on(device, addresses([words for words, _ in parts]))
    number = on(device, torch.tensor(factor, dtype=accumulation_dtype(out.dtype)))
    arguments = begins, counts, runs, table, len(parts), levels, len(lengths), number, bits_of(out)
    launch(_sum_levels, len(begins), device, *arguments, KIND=kind_of("out", out), BLOCK=GROUP)
