"""Values in a narrower type, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import check_floating, check_shape, describe

NARROW = (torch.bfloat16, torch.float16)


@torch.no_grad()
def narrow(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """See `gradsync.kernels.narrow`."""
    check_narrow(x, out)
    scaled, most = x * scale, torch.finfo(out.dtype).max
    out.copy_(torch.where(scaled.isinf(), scaled, scaled.clamp(-most, most)))


def check_narrow(x: Tensor, out: Tensor) -> None:
    """Refuses what is not to be narrowed, and outputs that it does not fit."""
    check_floating("x", x)
    if x.ndim != 1:
        raise ValueError(f"x must be 1-D, got {describe(x)}")
    if x.itemsize < 4:
        raise TypeError(f"x must be float32 or float64, got {describe(x)}")
    if out.dtype not in NARROW:
        raise TypeError(f"out must be bfloat16 or float16, got {describe(out)}")
    check_shape("out", out, len(x))
