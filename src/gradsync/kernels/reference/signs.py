"""Kernels on signs, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, SignScale, check_residuals, check_sections, check_signs, check_some
from gradsync.kernels.reference.blocks import in_blocks, ordered_sum
from gradsync.kernels.reference.rows import accumulation_dtype


@torch.no_grad()
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
    """See `gradsync.kernels.pack_signs`."""
    check_sections("x", x, sections)
    check_signs(words, scales, sections, block, scale)
    check_residuals(x, residual, next_residual, accumulation_dtype(x.dtype))
    p = x if residual is None else residual + x
    negative = p < 0
    bits = torch.nn.functional.pad(negative, (0, -len(x) % 8)).view(-1, 8)
    words.copy_((bits.byte() << torch.arange(8, dtype=torch.uint8, device=x.device)).sum(1))
    if scale != "one":
        for blocks, (numbers, below) in in_blocks(sections, block, p, negative):
            scales[blocks] = _scales_of(numbers, below, scale).float()
    if next_residual is not None:
        next_residual.copy_(p - _decoded(negative, scales, sections, block, scale, next_residual))


def _scales_of(p: Tensor, negative: Tensor, scale: SignScale) -> Tensor:
    """Of (blocks, elements) the scales of each block, in float64."""
    p = p.double()
    if scale == "mean":
        return ordered_sum(p.abs()) / p.shape[1]
    if scale == "rms":
        return (ordered_sum(p.square()) / p.shape[1]).sqrt()
    sums = torch.stack([ordered_sum(p.where(~negative, 0)), ordered_sum(p.where(negative, 0))], dim=1)
    counts = torch.stack([(~negative).sum(1), negative.sum(1)], dim=1)
    return (sums / counts).where(counts > 0, 0)


def _decoded(
    negative: Tensor, scales: Tensor, sections: Sections, block: int, scale: SignScale, like: Tensor
) -> Tensor:
    """What signs stand for, in the dtype of `like`."""
    numbers = torch.empty_like(negative, dtype=like.dtype)
    for blocks, (below, out) in in_blocks(sections, block, negative, numbers):
        positive, other = levels_of(scales[blocks], scale)
        out.copy_(torch.where(below, other[:, None], positive[:, None]))
    return numbers


def levels_of(scales: Tensor, scale: SignScale) -> tuple[Tensor, Tensor]:
    """Of each block what a sign that is not negative stands for, and a negative one; without scales, of one block."""
    if scale == "two":
        return scales[:, 0], scales[:, 1]
    if scale == "one":
        scales = scales.new_ones(1)
    return scales, -scales


@torch.no_grad()
def unpack_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    sections: Sections,
    out: Tensor,
    *,
    block: int,
    scale: SignScale,
    factor: float = 1.0,
) -> None:
    """See `gradsync.kernels.unpack_signs`."""
    check_some("unpack_signs", parts)
    check_sections("out", out, sections)
    total = torch.zeros_like(out, dtype=accumulation_dtype(out.dtype))
    places = torch.arange(8, dtype=torch.uint8, device=out.device)
    for words, scales in parts:
        check_signs(words, scales, sections, block, scale)
        negative = ((words[:, None] >> places) & 1).bool().flatten()[: len(out)]
        total += _decoded(negative, scales, sections, block, scale, total)
    out.copy_(total.mul_(factor))
