"""The native (C++) kernel that moves chosen chunks of a flat tensor into a payload to send."""

from __future__ import annotations

from torch import Tensor

from gradsync.kernels.cpu.boundary import plain, threads_for
from gradsync.kernels.native import load
from gradsync.kernels.reference.chunks import check_layout


def take_chunks(
    x: Tensor,
    residual: Tensor,
    chosen: Tensor,
    payload: Tensor,
    next_residual: Tensor,
    norms: Tensor,
    *,
    chunk: int,
    scale: float = 1.0,
) -> None:
    check_layout(x, chosen, payload, norms, chunk, scale)
    before, after = plain("residual", residual), plain("next_residual", next_residual)
    arguments = plain("x", x), before, plain("chosen", chosen), plain("payload", payload), after, plain("norms", norms)
    load().take_chunks(*arguments, chunk, scale, threads_for(x.numel()))
