"""Values in a narrower type, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.convert import check_narrow
from gradsync.kernels.triton.boundary import BLOCK, bits_of, blocks, check_contiguous, common_device, launch
from gradsync.kernels.triton.rows import kind_of, narrowed


@triton.jit
def _narrow(
    x: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    scale: tl.tensor,
    MOST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program writes its own values."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0)
    value = value * tl.load(scale).to(value.dtype)
    below = tl.where(value > MOST, MOST, value)
    within = tl.where(below < -MOST, -MOST, below)
    kept = tl.where(value - value == 0, within, value).to(tl.float32)
    tl.store(out + at, narrowed(kept, KIND), mask=at < count)


def narrow(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """See `gradsync.kernels.narrow`."""
    check_narrow(x, out)
    device = common_device([x, out])
    check_contiguous("x", x)
    check_contiguous("out", out)
    factor = torch.tensor([scale], dtype=x.dtype, device=device)  # in the type of x: as torch multiplies
    constants = {"MOST": torch.finfo(out.dtype).max, "KIND": kind_of("out", out), "BLOCK": BLOCK}
    launch(_narrow, blocks(len(x)), device, x.detach(), bits_of(out), len(x), factor, **constants)
