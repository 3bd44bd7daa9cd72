"""Values in a narrower type, natively."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from gradsync.kernels.cpu.boundary import load, plain, threads_for


def narrow(
    x: Tensor, out: Tensor, *, scale: float = 1.0, threads: int | None = None, module: ModuleType | None = None
) -> None:
    """See `gradsync.kernels.narrow`."""
    (module or load()).narrow(plain("x", x), plain("out", out), scale, threads_for(threads, x.numel()))
