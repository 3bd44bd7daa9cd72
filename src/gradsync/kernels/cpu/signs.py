"""Native kernels on signs."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from gradsync.kernels.checks import Sections, SignScale, check_block
from gradsync.kernels.cpu.boundary import plain, plains, threads_for
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
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.pack_signs`."""
    check_block(block)
    before = None if residual is None else plain("residual", residual)
    after = None if next_residual is None else plain("next_residual", next_residual)
    outs = plain("words", words), plain("scales", scales)
    threads = threads_for(threads, x.numel())
    (module or load()).pack_signs(plain("x", x), sections.lengths, *outs, block, scale, before, after, threads)


def unpack_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    sections: Sections,
    out: Tensor,
    *,
    block: int,
    scale: SignScale,
    factor: float = 1.0,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.unpack_signs`."""
    check_block(block)
    words = plains("words", [words for words, _ in parts])
    scales = plains("scales", [scales for _, scales in parts])
    threads = threads_for(threads, out.numel() * len(parts))
    (module or load()).unpack_signs(words, scales, sections.lengths, plain("out", out), block, scale, factor, threads)
