"""Fast code in torch operations for kernels whose definition in torch is slow, as it fixes the order of sums.

Each function returns a callable that writes the kernel's results into the same tensors. Results equal the kernel's up
to rounding, the choice among equal elements, and random draws. There are no checks; functions return None for sizes
that do not divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsync.kernels import AnyGrid, FloatGrid, SignScale
from gradsync.kernels.grids import LARGEST_EXPONENT, SMALLEST_EXPONENT

Run = Callable[[], object]
_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def top_k(
    x: Tensor,
    indices: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    counts: Sequence[int],
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> Run:
    """Returns a callable torch version of `kernels.top_k`: writes unsorted indices, values and `next_residual`."""

    def run() -> None:
        p, begin = _corrected(x, residual, next_residual), 0
        parts = zip(p.split(list(lengths)), indices.split(list(counts)), values.split(list(counts)), strict=True)
        for part, chosen, taken in parts:
            at = part.abs().topk(len(chosen), sorted=False).indices
            torch.index_select(part, 0, at, out=taken)
            if residual is not None:
                part[at] = 0
            chosen.copy_(at.add_(begin))
            begin += len(part)

    return run


def sum_parts(parts: Sequence[Tensor], out: Tensor, scale: float) -> Run:
    """Returns a callable torch version of `kernels.sum_parts`, which sums in the dtype of `out`."""

    def run() -> None:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)
        out.mul_(scale)

    return run


def squared_norms(x: Tensor, norms: Tensor, block: int) -> Run | None:
    if len(x) % block:
        return None
    return lambda: norms.copy_(torch.linalg.vector_norm(x.view(-1, block), dim=1, dtype=torch.float64).square_())


def take_chunks(
    x: Tensor, residual: Tensor, chosen: Tensor, payload: Tensor, left: Tensor, norms: Tensor, chunk: int
) -> Run | None:
    """Returns a callable torch version of `kernels.take_chunks`; None if `chunk` does not divide the length of `x`."""
    if len(x) % chunk:
        return None

    def run() -> None:
        rows = torch.add(residual, x, out=left).view(-1, chunk)
        sent = payload.view(-1, chunk).copy_(rows[chosen])
        rows[chosen] -= sent
        torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float64, out=norms)
        x.zero_()

    return run


def pack_signs(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    block: int,
    scale: SignScale,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> Run | None:
    """Returns a callable torch version of `kernels.pack_signs`.

    None for other scales than "mean" and "two", and if `block` or 8, the signs in a byte, do not divide the length.
    """
    if len(x) % (block or len(x)) or len(x) % 8 or scale not in ("mean", "two"):
        return None
    weights = 2 ** torch.arange(8, device=x.device, dtype=torch.uint8)

    def run() -> None:
        p = _corrected(x, residual, next_residual)
        rows = p.view(-1, block or len(x))
        negative = rows < 0
        torch.sum(negative.view(-1, 8) * weights, 1, dtype=torch.uint8, out=words)
        if scale == "mean":
            torch.div(torch.linalg.vector_norm(rows, 1, dim=1), rows.shape[1], out=scales)
            level = torch.copysign(scales[:, None], rows) if residual is not None else None
        else:
            below = negative.sum(1)
            sums = rows.clamp(max=0).sum(1)
            torch.div(rows.sum(1) - sums, rows.shape[1] - below, out=scales[:, 0])
            torch.div(sums, below, out=scales[:, 1])
            level = torch.where(negative, scales[:, 1:], scales[:, :1]) if residual is not None else None
        if level is not None:
            rows.sub_(level)

    return run


def quantize(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    grid: AnyGrid,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> Run | None:
    """Returns a callable torch version of `kernels.quantize`, with torch's random generator.

    None if a block or a byte of codes would be incomplete, and for the format "exponent" with a residual.
    """
    block, planes = grid.block or len(x), 8 // grid.bits
    if len(x) % block or block % planes:
        return None
    if isinstance(grid, FloatGrid) and grid.format == "exponent":
        return None if residual is not None else lambda: _powers_of_two(x, codes)

    def run() -> None:
        rows = _corrected(x, residual, next_residual).view(-1, block)
        torch.linalg.vector_norm(rows, math.inf if grid.scale == "max" else 2, dim=1, out=scales)
        step = scales[:, None] / grid.top
        levels = rows / step
        if isinstance(grid, FloatGrid):
            kept = levels.to(_FLOATS[grid.format])
            codes.copy_(kept.view(torch.uint8).flatten())
        else:
            kept = levels.add_(torch.rand_like(levels)).floor_() if grid.stochastic else levels.round_()
            if planes == 1:
                codes.copy_(kept.to(torch.int8).view(torch.uint8).flatten())
            else:
                parts = (kept + grid.top).to(torch.uint8).view(len(rows), planes, -1).unbind(1)
                packed = parts[0].clone()
                for plane in range(1, planes):
                    packed |= parts[plane] << grid.bits * plane
                codes.copy_(packed.flatten())
        if residual is not None:
            rows.sub_(kept.to(rows.dtype) * step)

    return run


def _powers_of_two(x: Tensor, codes: Tensor) -> None:
    """Rounds `x` randomly to powers of two, written to `codes`: adds noise to the fraction bits, keeps the exponent."""
    bits = x.view(torch.int32)
    exponent = (bits & 0x7FFFFFFF).add_(torch.randint_like(bits, 1 << 23)) >> 23
    exponent.add_(1 - SMALLEST_EXPONENT - 127).clamp_(0, LARGEST_EXPONENT - SMALLEST_EXPONENT + 1)
    codes.copy_(torch.where(exponent > 0, exponent | (bits >> 24 & 0x80), 0))


def dequantize(parts: Sequence[tuple[Tensor, Tensor]], out: Tensor, grid: AnyGrid) -> Run | None:
    """Returns a callable torch `kernels.dequantize` for one part of e4m3 or e5m2 codes in whole blocks; else None."""
    if not isinstance(grid, FloatGrid) or grid.format not in _FLOATS or len(parts) > 1 or len(out) % grid.block:
        return None
    ((codes, scales),) = parts

    def run() -> None:
        rows = out.view(-1, grid.block)
        rows.copy_(codes.view(_FLOATS[grid.format]).view(-1, grid.block))
        rows.mul_(scales[:, None] / grid.top)

    return run


def hadamard(x: Tensor, out: Tensor, chunk: int, inverse: bool) -> Run | None:
    """Returns a callable torch version of `kernels.hadamard`; None unless `chunk` is a square dividing the length."""
    root = math.isqrt(chunk)
    if root * root != chunk or len(x) % chunk:
        return None
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < root:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=x.device))
    matrix /= math.sqrt(root)

    def run() -> None:
        signs = torch.randint(2, (len(x),), dtype=torch.int8, device=x.device).mul_(2).sub_(1)
        squares = (x if inverse else x * signs).view(-1, root, root)
        torch.matmul(matrix @ squares, matrix, out=out.view_as(squares))
        if inverse:
            out.mul_(signs)

    return run


def _corrected(x: Tensor, residual: Tensor | None, next_residual: Tensor | None) -> Tensor:
    return x if residual is None or next_residual is None else torch.add(residual, x, out=next_residual)
