"""Blocks of elements that share a scale, and sums over them, in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections

LANES = 32
GROUP = LANES * LANES  # addends


def ordered_sum(addends: Tensor) -> Tensor:
    """(n,) float64: the sums of the rows of (n, m), m > 0, in an order that all implementations keep.

    Of each group of 1024, as 32 rows of 32 lanes, every lane adds its own one after the other, from 0; then the upper
    half of the lanes is added to the lower one until one is left. The sums of the groups are summed in the same way.
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
    """Yields blocks of one length, and views of the flat tensors as these, (blocks, elements), section by section.

    The last block of a section may be shorter, 0 is one block a section.
    """
    first = begin = 0
    for length in sections.lengths:
        whole = block or max(length, 1)
        for count, width in ((length // whole, whole), (1, length % whole)):
            if count * width > 0:
                end = begin + count * width
                yield slice(first, first + count), [tensor[begin:end].view(count, width) for tensor in flat]
                first, begin = first + count, end
