"""Squared norms of blocks, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_floating, check_sections, check_shape, section_blocks
from gradsync.kernels.reference.blocks import in_blocks, ordered_sum


def check_squared_norms(x: Tensor, sections: Sections, norms: Tensor, block: int) -> None:
    """Refuses what `squared_norms` cannot work on."""
    check_sections("x", x, sections)
    check_floating("norms", norms, torch.float64)
    check_shape("norms", norms, section_blocks(sections, block))


@torch.no_grad()
def squared_norms(x: Tensor, sections: Sections, norms: Tensor, *, block: int) -> None:
    """See `gradsync.kernels.squared_norms`."""
    check_squared_norms(x, sections, norms, block)
    for number, (part,) in in_blocks(sections, block, x):
        norms[number] = ordered_sum(part.double().square())
