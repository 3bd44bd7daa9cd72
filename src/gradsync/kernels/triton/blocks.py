"""Sums over blocks of elements in Triton, in the order of `gradsync.kernels.reference.blocks`.

One program sums one group of at most 1024 elements of a block; the same kernel then sums the groups' sums until each
block has one number.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.blocks import GROUP, LANES
from gradsync.kernels.triton.boundary import bits_of, launch, on
from gradsync.kernels.triton.rows import kind_of, widened

Groups = tuple[Tensor, Tensor, Tensor]  # begin, length and block of each


@triton.jit
def sum_of_lanes(lanes: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Returns the sum of LANES = 32 numbers: adds the upper half to the lower half until one number is left."""
    halves = tl.sum(tl.reshape(lanes, [2, LANES // 2]), 0)
    halves = tl.sum(tl.reshape(halves, [2, LANES // 4]), 0)
    halves = tl.sum(tl.reshape(halves, [2, LANES // 8]), 0)
    halves = tl.sum(tl.reshape(halves, [2, LANES // 16]), 0)
    return tl.sum(halves, 0)


@triton.jit
def _sum_groups(
    addends: tl.tensor,
    begins: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    TERM: tl.constexpr,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """One program sums one group of addends: each of 32 lanes adds every 32nd one, then the lanes are added."""
    program = tl.program_id(0).to(tl.int64)
    begin, count = tl.load(begins + program), tl.load(counts + program)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    row = tl.zeros([], tl.int64)
    while row < count:
        number = widened(tl.load(addends + begin + row + lane, mask=row + lane < count, other=0), KIND)
        wide = number.to(tl.float64)
        if TERM == "magnitude":
            wide = tl.abs(wide)
        elif TERM == "square":
            wide = wide * wide
        elif TERM == "others":
            wide = tl.where(number < 0, 0.0, wide)
        elif TERM == "negative":
            wide = tl.where(number < 0, wide, 0.0)
        elif TERM == "negatives":
            wide = (number < 0).to(tl.float64)
        total += wide
        row += LANES
    tl.store(sums + program, sum_of_lanes(total, LANES))


@lru_cache(maxsize=16)  # the same buckets come at every step
def blocks_of(lengths: tuple[int, ...], block: int) -> tuple[Tensor, Groups]:
    """Returns the length of each block, (blocks,) int64, and all blocks cut into groups of at most 1024 elements.

    `lengths`: elements of each section; `block`: elements of a block, 0 if a section is one block.
    """
    found = [torch.empty(0, dtype=torch.int64)]
    for length in lengths:
        whole = block or max(length, 1)
        found.append(torch.full((length // whole,), whole))
        found.append(torch.tensor([length % whole])[: length % whole])
    joined = torch.cat(found)
    return joined, _groups_of(joined)


def _groups_of(lengths: Tensor) -> Groups:
    """Returns the groups of at most 1024 elements in blocks of these lengths, (blocks,) int64, that lie end to end."""
    per_block = -(-lengths // GROUP)
    blocks = torch.repeat_interleave(torch.arange(len(lengths)), per_block)
    nth = torch.arange(len(blocks)) - (per_block.cumsum(0) - per_block)[blocks]
    begins = (lengths.cumsum(0) - lengths)[blocks] + nth * GROUP
    return begins, torch.minimum(lengths[blocks] - nth * GROUP, torch.tensor(GROUP)), blocks


def sum_blocks(p: Tensor, lengths: Tensor, groups: Groups, term: str) -> Tensor:
    """Returns the sum of each block of consecutive elements of `p`, (numel,), as (blocks,) float64.

    Args:
        lengths: elements of each block, (blocks,) int64.
        groups: the groups of all blocks, see `blocks_of`.
        term: "sum" adds elements, "magnitude" their magnitudes, "square" their squares, "negative" only negative ones,
            "others" only the other ones, "negatives" 1 for each negative one.
    """
    addends = p
    while True:
        begins, counts, blocks = groups
        sums = torch.empty(len(begins), dtype=torch.float64, device=p.device)
        tables = on(p.device, begins), on(p.device, counts)
        constants = {"TERM": term, "KIND": kind_of("addends", addends), "LANES": LANES}
        launch(_sum_groups, len(sums), p.device, bits_of(addends), *tables, sums, **constants)
        if len(sums) == len(lengths):
            return sums
        addends, lengths, term = sums, torch.bincount(blocks, minlength=len(lengths)), "sum"
        groups = _groups_of(lengths)
