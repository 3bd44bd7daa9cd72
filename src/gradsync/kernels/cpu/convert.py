"""Native (C++) kernels that convert values to a narrower dtype, and sum several tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.cpu.boundary import plain, plains, threads_for
from gradsync.kernels.native import load


def narrow(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    load().narrow(plain("x", x), plain("out", out), scale, threads_for(x.numel()))


def sum_parts(parts: Sequence[Tensor], out: Tensor, *, scale: float = 1.0) -> None:
    threads = threads_for(out.numel() * len(parts))
    load().sum_parts(plains("parts", parts), plain("out", out), scale, threads)
