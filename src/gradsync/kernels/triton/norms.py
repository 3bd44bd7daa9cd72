"""The Triton kernel for the squared norm of each block of consecutive elements."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.reference.norms import check_squared_norms
from gradsync.kernels.triton.blocks import blocks_of, sum_blocks
from gradsync.kernels.triton.boundary import check_contiguous, common_device


def squared_norms(x: Tensor, sections: Sections, norms: Tensor, *, block: int) -> None:
    check_squared_norms(x, sections, norms, block)
    common_device([x, norms])
    check_contiguous("x", x)
    norms.copy_(sum_blocks(x, *blocks_of(sections.lengths, block), "square"))
