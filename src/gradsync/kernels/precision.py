"""Kernels that change the numbers' format: narrower floats and their sums, quantised codes, packed signs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradsync.kernels.checks import Sections, SignScale
from gradsync.kernels.choice import pick
from gradsync.kernels.grids import AnyGrid


def narrow(x: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
    """Writes `scale` times `x` in a narrower type, rounded to nearest, ties to even.

    A product that is finite in the type of `x` stays finite. Infinity and NaN stay what they are; values below the
    range of the narrower type become zero.

    Args:
        x: (numel,) float32 or float64, which is rounded to float32 first.
        out: (numel,) bfloat16 or float16.

    Raises:
        ValueError: another shape of `out`.
        TypeError: other dtypes.
    """
    pick("narrow", [x, out], x.numel())(x, out, scale=scale)


def sum_parts(parts: Sequence[Tensor], out: Tensor, *, scale: float = 1.0) -> None:
    """Overwrites `out` by `scale` times the sum of the parts, made in their order, one addition after the other.

    One pass, whatever the number of parts. The sum begins with the first part, is kept in float32 (float64 where the
    parts or `out` are), and is rounded once as torch rounds: to nearest, ties to even, what is beyond the type to
    infinity, and float64 to 16 bits by way of float32. Of no parts it is zero.

    Args:
        parts: each (numel,) floating, all of one dtype, narrower or wider than that of `out`.
        out: (numel,) floating. It may be one of the parts, but not lie in their memory otherwise.

    Raises:
        ValueError: parts of another shape.
        TypeError: other dtypes.
    """
    pick("sum_parts", [*parts, out], out.numel())(parts, out, scale=scale)


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
    """Writes a code of few bits for each element and a scale for each block; of x + residual, where there is one.

    All in the type of sums, float32 or float64. With p = x + residual, s = `grid.top` and the block's scale a, rounded
    to float32: the level is p * (s / a), rounded as the grid says and kept in [-s, s]; it counts as level * (a / s),
    and next_residual = p - that. A block whose s / a float32 does not hold, all zero or nearly subnormal, counts as
    zero and has the scale 0. Where float32 does not hold a, as with NaN or infinity among the elements, the scale is
    infinite, and the whole block decodes to NaN. Stochastic: in units of 2^-24 of a level, to which it is cut, a number
    below 2^24 is added (drawn: the upper bits of `reference.noise`), and the sum rounded down. The squares of a norm
    are summed in float64 in a fixed order (`csrc/blocks.hpp`).

    Codes of 8 bits are the level in two's complement, or the bits of the small float. Of 4 and 2 bits they are level +
    s, and byte j of a block with h bytes has those of elements j, j + h and so on, from its lowest bits on; what is
    left of the last bytes is 0.

    Args:
        x: (numel,) floating.
        sections: with seeds where the grid draws. Blocks begin anew in each.
        codes: (codes_nbytes(sections, grid),) uint8.
        scales: (num_scales(sections, grid),) float32; read where the grid says `given`. Those must be infinite where
            an element is not finite: it counts as zero under a finite one.
        residual: (numel,) float32, float64 for float64.
        next_residual: as `residual`, other memory.

    Raises:
        ValueError: sizes that do not fit; a grid that draws, without seeds.
        TypeError: other dtypes.
    """
    tensors = [tensor for tensor in (x, codes, scales, residual, next_residual) if tensor is not None]
    run = pick("quantize", tensors)
    run(x, sections, grid, codes, scales, residual=residual, next_residual=next_residual)


def block_scales(
    x: Tensor, sections: Sections, grid: AnyGrid, scales: Tensor, *, residual: Tensor | None = None
) -> None:
    """Writes the scales that `quantize` would, and no codes: for a grid of `max` or `norm`.

    Raises:
        ValueError: sizes that do not fit; a grid without such scales.
        TypeError: other dtypes.
    """
    tensors = [tensor for tensor in (x, scales, residual) if tensor is not None]
    pick("block_scales", tensors)(x, sections, grid, scales, residual=residual)


def dequantize(
    parts: Sequence[tuple[Tensor, Tensor]], sections: Sections, grid: AnyGrid, out: Tensor, *, scale: float = 1.0
) -> None:
    """Overwrites `out` by `scale` times the sum of what all codes and scales decode to, in their order.

    One pass over `out`, whatever the number of parts. The sum is made in float32 (float64 for float64) from 0 on, and
    rounded once. Codes may be damaged: each decodes to something.

    Args:
        parts: codes and scales, as of `quantize`.
        out: (numel,) floating.

    Raises:
        ValueError: sizes that do not fit.
        TypeError: other dtypes.
    """
    tensors = [*(tensor for part in parts for tensor in part), out]
    pick("dequantize", tensors)(parts, sections, grid, out, scale=scale)


def pack_signs(
    x: Tensor,
    sections: Sections,
    words: Tensor,
    scales: Tensor,
    *,
    block: int,
    scale: SignScale,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> None:
    """Writes the signs of p = x + residual as bits, and what stands for the magnitudes of each block.

    Bit i % 8 of byte i // 8 is set where p[i] < 0: neither zero is negative, nor is NaN, of which the scales tell. A
    scale is a float32, of sums in float64 whose order is fixed (`csrc/blocks.hpp`):
    - "mean": the mean of |p|;
    - "rms": the root of the mean of p^2;
    - "two": the mean of the elements that are not negative, and of those that are; of none, 0;
    - "one": none, signs are of 1.
    Where elements are NaN or infinite, so is what each element of the block decodes to, with "two" of its class.

    Args:
        x: (numel,) floating.
        words: (ceil(numel / 8),) uint8.
        scales: `sign_scales_shape`: (blocks,) float32, of "two" (blocks, 2), of "one" (0,).
        block: elements of a section that share a scale, 0: all; the last block of a section may be shorter.
        residual: (numel,) in `accumulation_dtype(x.dtype)`.
        next_residual: likewise, elsewhere: what the decoded tensor lacks of p. With a residual, and only then.

    Raises:
        ValueError: shapes that do not fit, an unknown scale.
        TypeError: other dtypes.
    """
    given = [tensor for tensor in (x, words, scales, residual, next_residual) if tensor is not None]
    pick("pack_signs", given)(
        x, sections, words, scales, block=block, scale=scale, residual=residual, next_residual=next_residual
    )


def unpack_signs(
    parts: Sequence[tuple[Tensor, Tensor]],
    sections: Sections,
    out: Tensor,
    *,
    block: int,
    scale: SignScale,
    factor: float = 1.0,
) -> None:
    """`factor` times the sum of what several `pack_signs` of the same sections stand for.

    Sums run in the order of the parts, in float32 (float64 for float64), and are rounded once. With "one", they are the
    votes for the positive less those for the negative sign.

    Args:
        parts: words and scales of each.
        out: (numel,) floating; overwritten.
        block, scale: as they were packed with.

    Raises:
        ValueError: no part, shapes that do not fit, an unknown scale.
        TypeError: other dtypes.
    """
    tensors = [tensor for part in parts for tensor in part]
    pick("unpack_signs", [*tensors, out])(parts, sections, out, block=block, scale=scale, factor=factor)
