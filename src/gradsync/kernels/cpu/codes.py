"""Native (C++) kernels that quantise tensors to codes of few bits, decode the codes and sum the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.cpu.boundary import plain, plain_or_none, plains, threads_for
from gradsync.kernels.grids import AnyGrid, check_drawn
from gradsync.kernels.native import load
from gradsync.kernels.reference.codes import check_found

_ROUNDINGS = ("nearest", "stochastic", "e4m3", "e5m2", "exponent")  # as in quantize.hpp
_SCALES = ("max", "norm", "given", "none")


def quantize(
    x: Tensor,
    sections: Sections,
    grid: AnyGrid,
    codes: Tensor,
    scales: Tensor,
    *,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> None:
    check_drawn(sections, grid)
    _quantizer(sections, grid).quantize(
        plain("x", x),
        plain("codes", codes),
        plain("scales", scales),
        plain_or_none("residual", residual),
        plain_or_none("next_residual", next_residual),
        threads_for(x.numel()),
    )


def block_scales(
    x: Tensor, sections: Sections, grid: AnyGrid, scales: Tensor, *, residual: Tensor | None = None
) -> None:
    check_found(grid)
    kept = plain_or_none("residual", residual)
    quantizer = _quantizer(sections, grid)
    quantizer.block_scales(plain("x", x), plain("scales", scales), kept, threads_for(x.numel()))


def dequantize(
    parts: Sequence[tuple[Tensor, Tensor]], sections: Sections, grid: AnyGrid, out: Tensor, *, scale: float = 1.0
) -> None:
    codes, scales = plains("codes", [codes for codes, _ in parts]), plains("scales", [scales for _, scales in parts])
    threads = threads_for(out.numel() * len(parts))
    _quantizer(sections, grid).dequantize(codes, scales, plain("out", out), scale, threads)


def _quantizer(sections: Sections, grid: AnyGrid) -> Any:
    rounding, scale = _ROUNDINGS.index(grid.rounding), _SCALES.index(grid.scale)
    layout = sections.lengths, sections.starts, sections.seeds
    return load().Quantizer(*layout, rounding, scale, grid.top, grid.bits, grid.block)
