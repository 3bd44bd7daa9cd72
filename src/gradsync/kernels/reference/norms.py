"""The kernel that computes squared norms of blocks, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_floating, check_sections, check_shape, section_blocks
from gradsync.kernels.choice import dispatched
from gradsync.kernels.reference.blocks import in_blocks, ordered_sum


def check_squared_norms(x: Tensor, sections: Sections, norms: Tensor, block: int) -> None:
    """Checks the arguments of `squared_norms`, and raises the errors that its docstring lists."""
    check_sections("x", x, sections)
    check_floating("norms", norms, torch.float64)
    check_shape("norms", norms, section_blocks(sections, block))


@dispatched("x", "norms", entries="x")
@torch.no_grad()
def squared_norms(x: Tensor, sections: Sections, norms: Tensor, *, block: int) -> None:
    """Writes the squared Euclidean norm of each block, in float64, where squares of float32 do not over- or underflow.

    Squares are added in the order of `reference.blocks.ordered_sum`. Square roots are not taken, as torch rounds them
    differently on different machines.

    Args:
        x: (numel,) floating.
        sections: the sections of x; blocks begin anew in each section.
        norms: (blocks,) float64. Overwritten.
        block: elements of a block; the last one of a section may be shorter. 0: a section is one block.

    Raises:
        ValueError: a negative block, shapes that do not fit.
        TypeError: other dtypes.
    """
    check_squared_norms(x, sections, norms, block)
    for number, (part,) in in_blocks(sections, block, x):
        norms[number] = ordered_sum(part.double().square())
