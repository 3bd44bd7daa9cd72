"""Kernels that quantise tensors to codes of few bits and back, in plain torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections, check_dtype, check_floating, check_shape
from gradsync.kernels.choice import dispatched
from gradsync.kernels.grids import LARGEST_EXPONENT, AnyGrid, Run, check_drawn, codes_nbytes, num_scales, runs
from gradsync.kernels.reference.blocks import ordered_sum
from gradsync.kernels.reference.draws import noise
from gradsync.kernels.reference.rows import accumulation_dtype

_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_EXPONENTS = 126  # codes of the powers of two
_BIAS = 127 + LARGEST_EXPONENT - _EXPONENTS  # from the exponent field of a float32 to the code
_INFINITY = 0x7F800000


@dispatched("x", "codes", "scales", "residual", "next_residual")
@torch.no_grad()
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
    """Quantises x + residual: writes a code of few bits for each element, and a scale for each block of elements.

    Computed in float32, or float64 for float64. With p = x + residual, s = `grid.top` and the block's scale a, rounded
    to float32: the level is p * (s / a), rounded as the grid says and clamped to [-s, s]; it decodes to
    level * (a / s), and next_residual = p - level * (a / s). If s / a overflows float32 (a block of zeros, or nearly
    subnormal), the block counts as zero and has the scale 0. If a overflows float32, as with NaN or infinity among the
    elements, the scale is infinite, and the whole block decodes to NaN. Stochastic rounding: the level is cut to a
    multiple of 2^-24, a number below 2^24 is added in these units (drawn: the upper bits of `noise`), and the sum is
    rounded down. The squares of a norm are summed in float64 in a fixed order (`csrc/blocks.hpp`).

    Codes of 8 bits are the level in two's complement, or the bits of the small float. Codes of 4 and 2 bits are
    level + s; byte j of a block with h bytes has the codes of elements j, j + h and so on, from its lowest bits on;
    unused bits of the last bytes are 0.

    Args:
        x: (numel,) floating.
        sections: with seeds if the grid rounds at random. Blocks begin anew in each section.
        codes: (codes_nbytes(sections, grid),) uint8. Overwritten.
        scales: (num_scales(sections, grid),) float32. Overwritten, unless `grid.scale` is "given": then read, and
            infinite for blocks with an element that is not finite, which would count as zero otherwise.
        residual: (numel,) float32, or float64 for float64; None: zero.
        next_residual: as `residual`, in other memory. Overwritten.

    Raises:
        ValueError: sizes that do not fit; a grid that rounds at random, without seeds.
        TypeError: other dtypes.
    """
    check_quantize(x, sections, grid, scales, residual, next_residual)
    check_codes(codes, sections, grid)
    check_drawn(sections, grid)
    for run in runs(sections, grid):
        p = _corrected(x, residual, run)
        if grid.scale in ("max", "norm"):
            scales[run.scales] = _scales(p, grid)
        inverse, step = _steps(scales[run.scales], grid, p.dtype)
        code, level = _rounded(p * inverse, run, grid)
        codes[run.bytes] = _packed(code, run.nbytes, grid).flatten()
        if next_residual is not None:
            next_residual[run.elements] = (p - level.to(p.dtype) * step).flatten()


@dispatched("x", "scales", "residual")
@torch.no_grad()
def block_scales(
    x: Tensor, sections: Sections, grid: AnyGrid, scales: Tensor, *, residual: Tensor | None = None
) -> None:
    """Writes the scale of each block of x + residual that `quantize` would write, and no codes.

    Args:
        x, sections, residual: as in `quantize`.
        grid: with the scale "max" or "norm".
        scales: (num_scales(sections, grid),) float32. Overwritten.

    Raises:
        ValueError: sizes that do not fit; a grid with other scales.
        TypeError: other dtypes.
    """
    check_quantize(x, sections, grid, scales, residual)
    check_found(grid)
    for run in runs(sections, grid):
        scales[run.scales] = _scales(_corrected(x, residual, run), grid)


@dispatched("parts", "out")
@torch.no_grad()
def dequantize(
    parts: Sequence[tuple[Tensor, Tensor]], sections: Sections, grid: AnyGrid, out: Tensor, *, scale: float = 1.0
) -> None:
    """Overwrites `out` by `scale` times the sum of several quantised tensors, which it decodes and adds in order.

    One pass over `out`, whatever the number of parts. The sum is made in float32 (float64 for float64) from 0 on, and
    rounded once. Codes may be damaged: every code decodes to some number.

    Args:
        parts: (codes, scales), as from `quantize`.
        sections, grid: as in `quantize`.
        out: (numel,) floating. Overwritten.
        scale: a factor of the sum.

    Raises:
        ValueError: sizes that do not fit.
        TypeError: other dtypes.
    """
    check_dequantize(parts, sections, grid, out)
    for run in runs(sections, grid):
        total = out.new_zeros(run.blocks, run.length, dtype=accumulation_dtype(out.dtype))
        for codes, scales in parts:
            _, step = _steps(scales[run.scales], grid, total.dtype)
            code = _unpacked(codes[run.bytes].view(run.blocks, run.nbytes), run.length, grid)
            total += _levels(code, grid).to(total.dtype) * step
        out[run.elements] = (total * scale).flatten().to(out.dtype)


def check_quantize(
    x: Tensor,
    sections: Sections,
    grid: AnyGrid,
    scales: Tensor,
    residual: Tensor | None,
    next_residual: Tensor | None = None,
) -> None:
    """Checks shapes and dtypes of the arguments of `quantize` except `codes`; raises ValueError or TypeError."""
    check_floating("x", x)
    check_shape("x", x, sum(sections.lengths))
    _check_scales(scales, sections, grid)
    for name, kept in (("residual", residual), ("next_residual", next_residual)):
        if kept is not None:
            check_floating(name, kept, accumulation_dtype(x.dtype))
            check_shape(name, kept, len(x))


def check_found(grid: AnyGrid) -> None:
    """Raises ValueError unless the grid's scales are computed from the elements, as their largest or their norm."""
    if grid.scale not in ("max", "norm"):
        raise ValueError(f"block_scales needs a grid with scales of its own, got {grid}")


def check_dequantize(parts: Sequence[tuple[Tensor, Tensor]], sections: Sections, grid: AnyGrid, out: Tensor) -> None:
    """Checks the arguments of `dequantize`, and raises the errors that its docstring lists."""
    check_floating("out", out)
    check_shape("out", out, sum(sections.lengths))
    for codes, scales in parts:
        check_codes(codes, sections, grid)
        _check_scales(scales, sections, grid)


def check_codes(codes: Tensor, sections: Sections, grid: AnyGrid) -> None:
    check_dtype("codes", codes, torch.uint8)
    check_shape("codes", codes, codes_nbytes(sections, grid))


def _check_scales(scales: Tensor, sections: Sections, grid: AnyGrid) -> None:
    check_floating("scales", scales, torch.float32)
    check_shape("scales", scales, num_scales(sections, grid))


def _corrected(x: Tensor, residual: Tensor | None, run: Run) -> Tensor:
    """Returns x + residual in a run of equally long blocks, (blocks, length) float32, or float64 for float64."""
    p = x[run.elements].to(accumulation_dtype(x.dtype))
    return (p if residual is None else residual[run.elements] + p).view(run.blocks, run.length)


def _scales(p: Tensor, grid: AnyGrid) -> Tensor:
    """Computes the scales of the blocks `p`, (blocks, length), and returns them as stored, (blocks,) float32."""
    found = p.abs().amax(dim=1) if grid.scale == "max" else ordered_sum(p.double().square()).sqrt()
    return stored_scales(found, grid)


def stored_scales(found: Tensor, grid: AnyGrid) -> Tensor:
    """Returns scales of blocks as they are stored, (blocks,) float32.

    A scale that overflows or is NaN becomes infinity, one so small that `grid.top` / scale overflows becomes 0.

    Args:
        found: (blocks,) floating: the largest magnitude, or the norm, of each block.
        grid: the grid to which elements are rounded; `grid.top` is its largest level.
    """
    scales = found.float()
    scales = torch.where(scales.isfinite(), scales, float("inf"))
    return torch.where(_in_levels(scales, grid).isfinite(), scales, 0.0)


def _in_levels(scales: Tensor, grid: AnyGrid) -> Tensor:
    """Returns `grid.top` / scales, correctly rounded; torch's `number / tensor` would multiply by the reciprocal."""
    return torch.full_like(scales, grid.top) / scales


def _steps(scales: Tensor, grid: AnyGrid, dtype: torch.dtype) -> tuple[Tensor | float, Tensor | float]:
    """Returns largest level `grid.top` / scale (0 on overflow), and scale / top, (blocks, 1); 1.0 without scales."""
    if grid.scale == "none":
        return 1.0, 1.0
    wide = scales.to(dtype)
    inverse = torch.where(_in_levels(scales, grid).isfinite(), _in_levels(wide, grid), 0.0)
    return inverse[:, None], (wide / torch.full_like(wide, grid.top))[:, None]


def _rounded(scaled: Tensor, run: Run, grid: AnyGrid) -> tuple[Tensor, Tensor]:
    """Rounds scaled elements to the grid; returns their codes, (blocks, length) uint8, and the levels they stand for.

    Codes of 2 and 4 bits are level + `grid.top`; those of 8 bits are the level in two's complement, or a small float.
    """
    if grid.rounding == "exponent":
        code = _exponent_codes(_in_float(scaled), _noise(scaled, run))
        return code, _levels(code, grid)
    if grid.rounding in _FLOATS:
        level = scaled.float().nan_to_num(0.0).clamp(-grid.top, grid.top).to(_FLOATS[grid.rounding])
        return level.view(torch.uint8), level.float()
    kept = scaled.nan_to_num(0.0).clamp(-grid.top, grid.top)
    if grid.rounding == "nearest":
        level = kept.round()
    else:
        fixed = (kept * 2**24).long()  # towards zero
        level = ((fixed + (_noise(kept, run) >> 8)) >> 24).to(kept.dtype)
    level = level + 0.0  # of a negative zero: its code has no sign
    shifted = level if grid.bits == 8 else level + grid.top
    return shifted.to(torch.int8).view(torch.uint8), level


def _noise(p: Tensor, run: Run) -> Tensor:
    return noise(run.seed, run.place, p.numel(), p.device).view_as(p)


def _in_float(x: Tensor) -> Tensor:
    """Converts a tensor of any shape to float32; finite numbers beyond its range become the largest one."""
    most = torch.finfo(torch.float32).max
    return torch.where(x.isfinite(), x.clamp(-most, most), x).float()


def _exponent_codes(x: Tensor, drawn: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 24 & 0x80
    up = magnitude + (drawn >> 9).int()  # the carry out of the fraction; infinity and NaN may wrap
    code = ((up >> 23) - _BIAS).clamp(0, _EXPONENTS)
    code = torch.where(code == 0, 0, code | sign)
    return torch.where(magnitude >= _INFINITY, 0x7F, code).to(torch.uint8)


def _levels(code: Tensor, grid: AnyGrid) -> Tensor:
    """Returns the levels (multiples of a block's scale over `grid.top`) that codes, one in each byte, stand for."""
    if grid.rounding in _FLOATS:
        return code.view(_FLOATS[grid.rounding]).float()
    if grid.rounding == "exponent":
        magnitude = code.int() & 0x7F
        bits = torch.where(magnitude == 0, 0, (magnitude + _BIAS) << 23)
        value = torch.where(magnitude == 0x7F, float("nan"), bits.view(torch.float32))
        return torch.where(code >= 0x80, -value, value)
    return code.view(torch.int8).float() if grid.bits == 8 else code.float() - grid.top


def _packed(code: Tensor, nbytes: int, grid: AnyGrid) -> Tensor:
    """Packs codes of few bits, one in each byte of (blocks, length), into full bytes, (blocks, nbytes).

    Byte j has the codes of elements j, j + nbytes, j + 2 nbytes, ... from its lowest bits on.
    """
    per_byte = 8 // grid.bits
    parts = torch.nn.functional.pad(code, (0, per_byte * nbytes - code.shape[1])).chunk(per_byte, dim=1)
    packed = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        packed = packed | part << number * grid.bits
    return packed


def _unpacked(packed: Tensor, length: int, grid: AnyGrid) -> Tensor:
    """Unpacks codes of few bits from bytes, (blocks, nbytes), into one byte for each code, (blocks, length)."""
    if grid.bits == 8:
        return packed
    most = (1 << grid.bits) - 1
    parts = [packed >> shift & most for shift in range(0, 8, grid.bits)]
    return torch.cat(parts, dim=1)[:, :length]
