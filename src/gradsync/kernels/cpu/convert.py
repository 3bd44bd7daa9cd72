"""Values in another type and their sums, natively."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from gradsync.kernels.cpu.boundary import plain, plains, threads_for
from gradsync.kernels.native import load


def narrow(
    x: Tensor, out: Tensor, *, scale: float = 1.0, threads: int | None = None, module: ModuleType | None = None
) -> None:
    """See `gradsync.kernels.narrow`."""
    (module or load()).narrow(plain("x", x), plain("out", out), scale, threads_for(threads, x.numel()))


def sum_parts(
    parts: Sequence[Tensor],
    out: Tensor,
    *,
    scale: float = 1.0,
    threads: int | None = None,
    module: ModuleType | None = None,
) -> None:
    """See `gradsync.kernels.sum_parts`."""
    threads = threads_for(threads, out.numel() * len(parts))
    (module or load()).sum_parts(plains("parts", parts), plain("out", out), scale, threads)
