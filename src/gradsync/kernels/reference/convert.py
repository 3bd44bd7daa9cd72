"""Kernels that convert values to another dtype or sum them, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import check_dtype, check_flat, check_floating, check_shape
from gradsync.kernels.choice import dispatched

NARROW = (torch.bfloat16, torch.float16)


@dispatched("x", "out", entries="x")
@torch.no_grad()
def narrow(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """Writes `scale` times `x` to `out` in a narrower dtype, rounded to nearest, ties to even.

    A product that is finite in the dtype of `x` stays finite. Infinity and NaN stay; values below the range of the
    narrower dtype become zero.

    Args:
        x: (numel,) float32 or float64, which is rounded to float32 first.
        out: (numel,) bfloat16 or float16.

    Raises:
        ValueError: another shape of `out`.
        TypeError: other dtypes.
    """
    check_narrow(x, out)
    scaled, most = x * scale, torch.finfo(out.dtype).max
    out.copy_(torch.where(scaled.isinf(), scaled, scaled.clamp(-most, most)))


def check_narrow(x: Tensor, out: Tensor) -> None:
    """Checks the arguments of `narrow`, and raises the errors that its docstring lists."""
    check_floating("x", x)
    check_flat("x", x)
    check_dtype("x", x, torch.float32, torch.float64)
    check_dtype("out", out, *NARROW)
    check_shape("out", out, len(x))


@dispatched("parts", "out", entries="out")
@torch.no_grad()
def sum_parts(parts: Sequence[Tensor], out: Tensor, *, scale: float = 1.0) -> None:
    """Overwrites `out` by `scale` times the sum of the tensors in `parts`, added in their order.

    One pass, whatever the number of parts. The sum begins with the first part, is kept in float32 (float64 if the parts
    or `out` are), and is rounded once as torch rounds: to nearest, ties to even, overflow to infinity, and float64 to
    16 bits by way of float32. Without parts it is zero.

    Args:
        parts: each (numel,) floating, all of one dtype, narrower or wider than that of `out`.
        out: (numel,) floating. It may be one of the parts, but not lie in their memory otherwise.

    Raises:
        ValueError: parts of another shape.
        TypeError: other dtypes.
    """
    dtype = check_sum(parts, out)
    if not parts:
        out.zero_()
        return
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total.mul_(scale))


def check_sum(parts: Sequence[Tensor], out: Tensor) -> torch.dtype:
    """Checks the arguments of `sum_parts`, raising its errors, and returns the dtype in which it adds."""
    check_floating("out", out)
    check_flat("out", out)
    for part in parts:
        check_floating("parts", part, parts[0].dtype)
        check_shape("parts", part, len(out))
    return torch.float64 if torch.float64 in (out.dtype, *(part.dtype for part in parts)) else torch.float32
