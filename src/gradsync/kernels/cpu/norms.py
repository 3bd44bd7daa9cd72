"""The native (C++) kernel for the squared norm of each block of consecutive elements."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.checks import Sections, check_block
from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.native import load


def squared_norms(x: Tensor, sections: Sections, norms: Tensor, *, block: int) -> None:
    check_block(block)
    threads = threads_for(x.numel())
    load().squared_norms(plain("x", x), list(sections.lengths), block, plain("norms", norms), threads)
