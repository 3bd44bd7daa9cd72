"""Native (C++) kernels that pack a tensor's signs as bits with a scale for each block, and sum packed tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections, SignScale, check_block
from gradsync.kernels.cpu.boundary import plain, plain_or_none, plains, threads_for
from gradsync.kernels.native import load


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
    check_block(block)
    before = plain_or_none("residual", residual)
    after = plain_or_none("next_residual", next_residual)
    outs = plain("words", words), plain("scales", scales)
    threads = threads_for(x.numel())
    load().pack_signs(plain("x", x), sections.lengths, *outs, block, scale, before, after, threads)


def unpack_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    sections: Sections,
    out: Tensor,
    *,
    block: int,
    scale: SignScale,
    factor: float = 1.0,
) -> None:
    check_block(block)
    words = plains("words", [words for words, _ in parts])
    scales = plains("scales", [scales for _, scales in parts])
    threads = threads_for(out.numel() * len(parts))
    load().unpack_signs(words, scales, sections.lengths, plain("out", out), block, scale, factor, threads)
