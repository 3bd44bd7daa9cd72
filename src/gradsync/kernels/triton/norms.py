"""Squared norms of blocks, in Triton: a program for each 1024 elements of a block, then one for 1024 of these sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.reference.blocks import LANES
from gradsync.kernels.reference.norms import check_squared_norms
from gradsync.kernels.triton.blocks import blocks_of, sum_of_groups, sum_of_lanes
from gradsync.kernels.triton.boundary import bits_of, check_contiguous, common_device, launch, on
from gradsync.kernels.triton.rows import kind_of, widened


@triton.jit
def _sum_squares(
    x: tl.tensor,
    begins: tl.tensor,
    counts: tl.tensor,
    sums: tl.tensor,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Each program sums one group: lanes row by row."""
    program = tl.program_id(0).to(tl.int64)
    begin, count = tl.load(begins + program), tl.load(counts + program)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float64)
    row = tl.zeros([], tl.int64)
    while row < count:
        number = widened(tl.load(x + begin + row + lane, mask=row + lane < count, other=0), KIND).to(tl.float64)
        total += number * number
        row += LANES
    tl.store(sums + program, sum_of_lanes(total, LANES))


def squared_norms(x: Tensor, sections: Sections, norms: Tensor, *, block: int) -> None:
    """See `gradsync.kernels.squared_norms`."""
    check_squared_norms(x, sections, norms, block)
    device = common_device([x, norms])
    check_contiguous("x", x)
    lengths, (begins, counts, blocks) = blocks_of(sections.lengths, block)
    sums = torch.empty(len(begins), dtype=torch.float64, device=device)
    tables = on(device, begins), on(device, counts)
    launch(_sum_squares, len(sums), device, bits_of(x), *tables, sums, KIND=kind_of("x", x), LANES=LANES)
    norms.copy_(sum_of_groups(sums, blocks, len(lengths)))
