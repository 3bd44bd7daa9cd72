"""Blocks of elements that share a scale, and sums over them, in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections

LANES = 32
GROUP = LANES * LANES  # addends that are summed together


def ordered_sum(addends: Tensor) -> Tensor:
    """Returns the sum of each row of `addends`, (n, m) with m > 0, as (n,) float64, added in a fixed order.

    Every 1024 addends are viewed as 32 rows of 32 lanes (columns): each lane adds its addends one after the other, from
    0; then the upper half of the lanes is added to the lower half until one is left. These sums are summed in the same
    way. All implementations keep this order, so that they return the same bits.
    """
    sums = addends.double()
    while True:
        rows = min(LANES, -(-sums.shape[1] // LANES))  # of one short group not all
        padded = torch.nn.functional.pad(sums, (0, -sums.shape[1] % (rows * LANES))).unflatten(1, (-1, rows, LANES))
        lanes = torch.zeros_like(padded[:, :, 0])
        for row in padded.unbind(2):
            lanes += row
        while lanes.shape[2] > 1:
            lower, upper = lanes.chunk(2, dim=2)
            lanes = lower + upper
        sums = lanes[:, :, 0]
        if sums.shape[1] == 1:
            return sums[:, 0]


def in_blocks(sections: Sections, block: int, *flat: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yields the blocks of each section, blocks of equal length together: their numbers, and views of the tensors.

    Views of the tensors in `flat`, (numel,) each, are (blocks, elements). A block has `block` elements, the last one of
    a section fewer; with 0, a section is one block.
    """
    first = begin = 0
    for length in sections.lengths:
        whole = block or max(length, 1)
        for count, width in ((length // whole, whole), (1, length % whole)):
            if count * width > 0:
                end = begin + count * width
                yield slice(first, first + count), [tensor[begin:end].view(count, width) for tensor in flat]
                first, begin = first + count, end
