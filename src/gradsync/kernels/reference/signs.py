"""Kernels that pack the signs of a tensor, with scales, and decode them, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    Sections,
    SignScale,
    check_residuals,
    check_sections,
    check_signs,
    check_some,
)
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.blocks import in_blocks, ordered_sum
from gradsync.kernels.reference.rows import accumulation_dtype


@dispatched("x", "words", "scales", "residual", "next_residual")
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
    """Writes the signs of p = x + residual as bits, and a scale in place of the magnitudes of each block.

    Bit i % 8 of byte i // 8 is set if p[i] < 0: zeros of either sign are not negative, nor is NaN, which shows in the
    scales. A scale is a float32, from sums in float64 in a fixed order (`csrc/blocks.hpp`):
    - "mean": the mean of |p|;
    - "rms": the root of the mean of p^2;
    - "two": two scales, the means of the elements that are not negative and of the negative ones; 0 if there are none;
    - "one": no scale, signs are decoded as 1 and -1.
    If an element is NaN or infinite, all elements of its block are decoded so; with "two", those of its sign.

    Args:
        x: (numel,) floating.
        words: (ceil(numel / 8),) uint8. Overwritten.
        scales: float32 of `sign_scales_shape`: (blocks,), for "two" (blocks, 2), for "one" (0,). Overwritten.
        block: elements of a section that share a scale, 0: all; the last block of a section may be shorter.
        residual: (numel,) in `accumulation_dtype(x.dtype)`; None: zero.
        next_residual: as `residual`, in other memory: p less the decoded tensor. Given if and only if `residual` is.

    Raises:
        ValueError: shapes that do not fit, an unknown scale.
        TypeError: other dtypes.
    """
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
    """Returns the scales of the blocks `p`, (blocks, elements), in float64: (blocks,), or (blocks, 2) for "two"."""
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
    """Returns the tensor that signs and scales of blocks stand for, (numel,) in the dtype of `like`."""
    numbers = torch.empty_like(negative, dtype=like.dtype)
    for blocks, (below, out) in in_blocks(sections, block, negative, numbers):
        positive, other = levels_of(scales[blocks], scale)
        out.copy_(torch.where(below, other[:, None], positive[:, None]))
    return numbers


def levels_of(scales: Tensor, scale: SignScale) -> tuple[Tensor, Tensor]:
    """Returns the numbers to which a positive and a negative sign in each block are decoded, (blocks,) each.

    `scales`: (blocks,), for "two" (blocks, 2), for "one" (0,): then the result has one block.
    """
    if scale == "two":
        return scales[:, 0], scales[:, 1]
    if scale == "one":
        scales = scales.new_ones(1)
    return scales, -scales


@dispatched("parts", "out")
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
    """Overwrites `out` by `factor` times the sum of several tensors, decoded from signs and scales of `pack_signs`.

    Sums run in the order of the parts, in float32 (float64 for float64), and are rounded once. With `scale="one"`, a
    sum is the number of positive signs less the number of negative ones.

    Args:
        parts: (words, scales) of each part, packed with the same sections.
        out: (numel,) floating; overwritten.
        sections, block, scale: those that were given to `pack_signs` for the parts.

    Raises:
        ValueError: no part, shapes that do not fit, an unknown scale.
        TypeError: other dtypes.
    """
    check_some("unpack_signs", parts)
    check_sections("out", out, sections)
    total = torch.zeros_like(out, dtype=accumulation_dtype(out.dtype))
    places = torch.arange(8, dtype=torch.uint8, device=out.device)
    for words, scales in parts:
        check_signs(words, scales, sections, block, scale)
        negative = ((words[:, None] >> places) & 1).bool().flatten()[: len(out)]
        total += _decoded(negative, scales, sections, block, scale, total)
    out.copy_(total.mul_(factor))
