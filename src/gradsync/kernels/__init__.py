"""The inner loops: one function a kernel, one table of implementations, chosen once for the process.

`reference` (plain torch) defines what a kernel does; `native` (C++, CPU) and `triton` (CUDA) give the same bits faster.
`auto`, the default, takes triton for tensors on a CUDA device and native for those on the CPU, where they can be loaded
and know the dtypes, and says in one log line what cannot be loaded.

The caller owns every output. Where its size is known only after a look at the input, a kernel has two phases: the
function counts and returns an object with `count`; its methods then write into buffers of that size. The object keeps
its inputs alive; they must not change between the phases. Tensors are rows of adjacent elements: a row stride that is
larger, as in a slice of columns, is fine. The native and Triton kernels never copy: any other stride, dtype, device or
layout is a TypeError.
A NaN stays a NaN in every conversion, but not which one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from gradsync.kernels import cpu, device, reference
from gradsync.kernels.checks import (
    PackedPositions,
    RowsPart,
    Sections,
    SignScale,
    Stripes,
    offsets_nbytes,
    packed_nbytes,
    sign_scales_shape,
)
from gradsync.kernels.draws import rotation_sizes
from gradsync.kernels.grids import AnyGrid, FloatGrid, Grid, codes_nbytes, num_scales
from gradsync.kernels.hierarchy import HashedIndices
from gradsync.kernels.phases import (
    ElementPartition,
    ElementUnion,
    HashedPartition,
    NonzeroElements,
    NonzeroRows,
    RotatedPartition,
    RowUnion,
)
from gradsync.kernels.reference import accumulation_dtype

__all__ = [
    "AnyGrid",
    "ElementPartition",
    "ElementUnion",
    "FloatGrid",
    "Grid",
    "HashedIndices",
    "HashedPartition",
    "Implementation",
    "NonzeroElements",
    "NonzeroRows",
    "PackedPositions",
    "RotatedPartition",
    "RowUnion",
    "RowsPart",
    "Sections",
    "SignScale",
    "Stripes",
    "accumulation_dtype",
    "active",
    "block_scales",
    "codes_nbytes",
    "count_above",
    "count_bits",
    "decode_bitmap",
    "decode_offsets",
    "dequantize",
    "encode_bitmap",
    "encode_offsets",
    "hadamard",
    "hierarchical_hash",
    "join_columns",
    "join_elements",
    "narrow",
    "nonzero_elements",
    "nonzero_rows",
    "num_scales",
    "offsets_nbytes",
    "owned_by_hash",
    "owners_by_hash",
    "pack_signs",
    "packed_nbytes",
    "partition_elements",
    "partition_hashed",
    "partition_rotated",
    "positions_in",
    "quantize",
    "random_k",
    "rotated_index",
    "rotation_sizes",
    "scatter_rows",
    "select_above",
    "sign_scales_shape",
    "sum_rows",
    "top_k",
    "unite_elements",
    "unite_rows",
    "unpack_signs",
    "use",
]

Implementation = Literal["native", "triton", "reference", "auto"]

_logger = logging.getLogger(__name__)
_KERNELS = (
    "sum_rows", "unite_rows", "join_columns", "scatter_rows", "nonzero_rows", "nonzero_elements", "encode_bitmap",
    "decode_bitmap", "count_bits", "encode_offsets", "decode_offsets", "partition_elements", "unite_elements",
    "join_elements", "partition_rotated", "rotated_index", "owners_by_hash", "partition_hashed", "owned_by_hash",
    "positions_in", "hierarchical_hash", "top_k", "select_above", "count_above", "narrow", "quantize", "block_scales",
    "dequantize", "random_k", "hadamard", "pack_signs", "unpack_signs",
)  # fmt: skip
_TABLE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # kernel: (reference, native)
    kernel: (getattr(reference, kernel), getattr(cpu, kernel)) for kernel in _KERNELS
}
_requested: Implementation = "auto"
_fallback_logged = False


def use(implementation: Implementation) -> ExitStack:
    """Chooses the implementation of every kernel, for the whole process; as a `with` block, until its end.

    Raises:
        ImportError: `native` was asked for and is not built, or `triton` and Triton cannot be imported.
        ValueError: an unknown name.
    """
    if implementation not in ("native", "triton", "reference", "auto"):
        raise ValueError(f"implementation must be native, triton, reference or auto, got {implementation!r}")
    if implementation == "native":
        cpu.load()
    if implementation == "triton":
        device.load()
    restore = ExitStack()
    restore.callback(_request, _requested)
    _request(implementation)
    return restore


def active() -> str:
    """The implementation in use, under `auto` that on the CPU: a kernel may still run as another, see above."""
    if _requested != "auto":
        return _requested
    try:
        cpu.load()
    except ImportError as error:
        _log_fallback_once(error)
        return "reference"
    return "native"


def sum_rows(parts: Sequence[RowsPart], num_rows: int, *, scale: float = 1.0, out: RowsPart | None = None) -> RowsPart:
    """The sum of row-sparse parts of one (num_rows, dim) table, times `scale`; of one part, its coalesced form.

    Sums run in the order of the parts, then of occurrence within a part, in float32 (float64 for float64), and are
    rounded once: the bits depend neither on the implementation (the reference but on the CPU only) nor on the number
    of threads. Parts that are strided within a row are copied first. `unite_rows` is the same in two phases.

    Args:
        parts: each indices (nnz,) int64 or int32, in any order, duplicates allowed; values (nnz, dim) floating.
        num_rows: all indices are in [0, num_rows).
        out: indices and values buffers with room for at least u rows; what is returned are views of their first u.

    Returns:
        indices (u,) int64, or as in `out`: the sorted union of all indices; values (u, dim) in the dtype of the parts.

    Raises:
        ValueError: an index out of range, no part, or shapes and devices that do not fit together.
        TypeError: dtypes other than said above.
    """
    tensors = [tensor for part in parts for tensor in part]
    total: RowsPart = _pick("sum_rows", tensors, num_rows)(parts, num_rows, scale=scale, out=out)
    return total


def unite_rows(indices: Sequence[Tensor], num_rows: int) -> RowUnion:
    """First phase of the sum of row-sparse parts of one table: which rows occur.

    Native: by a bitmap that ranks them or, where it would have more than about four words for each index, by sorting;
    either way, time and memory grow with the number of indices, not with that of rows.

    Args:
        indices: per part (nnz,) int64 or int32, in any order, duplicates allowed.
        num_rows: all indices are in [0, num_rows).

    Raises:
        ValueError: an index out of range, no part; native: more than 2^34 rows or 2^32 - 1 indices.
        TypeError: other dtypes.
    """
    union: RowUnion = _pick("unite_rows", indices, num_rows)(indices, num_rows)
    return union


def join_columns(parts: Sequence[Tensor], stripes: Stripes, out: Tensor) -> None:
    """Puts stripes of columns back together to whole rows: out[:, start:stop] = part.

    Args:
        parts: per stripe (u, stop - start), floating.
        stripes: [start, stop) of the columns of each part; columns of no stripe stay, of several get the last.
        out: (u, dim) in the dtype of the parts.

    Raises:
        ValueError: shapes that do not fit, stripes outside the columns.
        TypeError: different dtypes.
    """
    _pick("join_columns", [*parts, out])(parts, stripes, out)


def scatter_rows(indices: Tensor, values: Tensor, dense: Tensor, *, accumulate: bool) -> None:
    """Writes rows into `dense`, or adds them to it, in order: of equal indices the last is kept, or all are added.

    Args:
        indices: (nnz,) int64 or int32, in any order.
        values: (nnz, dim) floating.
        dense: (num_rows, dim) in the dtype of the values; each addition is rounded to it.

    Raises:
        ValueError: an index outside [0, num_rows), before anything is written; shapes that do not fit.
        TypeError: other or different dtypes.
    """
    _pick("scatter_rows", [indices, values, dense])(indices, values, dense, accumulate=accumulate)


def nonzero_rows(dense: Tensor) -> NonzeroRows:
    """Finds the rows of `dense`, (num_rows, dim) floating, that are not zero, by their bits.

    -0.0 is zero; NaN, infinity and subnormals are not.
    """
    found: NonzeroRows = _pick("nonzero_rows", [dense], len(dense))(dense)
    return found


def nonzero_elements(x: Tensor) -> NonzeroElements:
    """Finds the elements of `x`, (numel,) floating, that are not zero; tested as in `nonzero_rows`."""
    found: NonzeroElements = _pick("nonzero_elements", [x], x.numel())(x)
    return found


def top_k(
    x: Tensor,
    indices: Tensor,
    values: Tensor,
    *,
    sections: Sections | None = None,
    counts: Sequence[int] | None = None,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> None:
    """Writes the elements of the largest magnitude of p = x + residual, in the order of their indices.

    Exact. Magnitudes compare by their bits: a NaN is larger than infinity. Of equal ones, those with the smallest
    indices are taken. With a residual, one pass over memory adds it, finds what to take and keeps the rest.

    Args:
        x: (numel,) floating.
        indices: (k,) int64, or int32 for up to 2^31 elements; of the whole `x`.
        values: (k,) floating: p rounded to its dtype; what is finite stays finite.
        sections: of each, its own largest are taken; by default all of `x` is one.
        counts: how many of each section, together k.
        residual: (numel,), in the accumulation dtype of `x`: added to it first.
        next_residual: as `residual`, and not its memory: p without what was taken, as rounded.

    Raises:
        ValueError: more than a section has; shapes that do not fit; native: more than 2^34 elements.
        TypeError: other or different dtypes.
    """
    tensors = _given(x, indices, values, residual, next_residual)
    options = {"sections": sections, "counts": counts, "residual": residual, "next_residual": next_residual}
    _pick("top_k", tensors, x.numel())(x, indices, values, **options)


def select_above(
    x: Tensor,
    thresholds: Tensor,
    indices: Tensor,
    values: Tensor,
    *,
    sections: Sections | None = None,
    counts: Sequence[int] | None = None,
    residual: Tensor | None = None,
    next_residual: Tensor | None = None,
) -> int:
    """Writes the elements of p = x + residual that are not within the threshold of their section; returns how many.

    Where there are more than its count, the largest of them, as `top_k` takes them. They are written one behind the
    other, in the order of their indices; what is behind the last is unspecified. A NaN is within no threshold, and
    nothing is within one that is NaN or negative.

    Args:
        thresholds: (sections,), in the accumulation dtype of `x`.
        indices: (most,) as of `top_k`.
        values: (most,) as of `top_k`.
        counts: at most how many of each section, together `most`.
        x, sections, residual, next_residual: as of `top_k`.

    Raises:
        ValueError, TypeError: as `top_k`.
    """
    tensors = _given(x, thresholds, indices, values, residual, next_residual)
    options = {"sections": sections, "counts": counts, "residual": residual, "next_residual": next_residual}
    written: int = _pick("select_above", tensors, x.numel())(x, thresholds, indices, values, **options)
    return written


def count_above(x: Tensor, thresholds: Tensor, counts: Tensor, *, sections: Sections | None = None) -> None:
    """Counts the elements of each section that are not within its threshold, as `select_above` finds them.

    Args:
        x: (numel,) floating.
        thresholds: (sections,), in the accumulation dtype of `x`.
        counts: (sections,) int64.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    _pick("count_above", [x, thresholds, counts], x.numel())(x, thresholds, counts, sections=sections)


def random_k(sections: Sections, counts: Sequence[int], indices: Tensor, *, block: int = 1) -> None:
    """Draws elements of each section, all different, by its seed: the first of a permutation that is never stored.

    A Feistel network over [0, a) x [0, b), a and b about the root of the number of runs. What is drawn is a run of
    `block` neighbours (of a shorter section, the whole of it) from a random place on, the section seen as a ring: so
    every element is drawn with the same probability, and exactly `block` elements with every run. Parts of one tensor
    that begin elsewhere have permutations of their own.

    Args:
        sections: with seeds.
        counts: of each section, how many runs are drawn.
        indices: (k,) int64, or int32 for up to 2^31 elements, k = counts times the elements of a run: indices into the
            flat tensor, section by section, in the order of the draws.

    Raises:
        ValueError: more runs than there are, no seeds, another size of `indices`.
        TypeError: other dtypes.
    """
    _pick("random_k", [indices], sum(sections.lengths))(sections, counts, indices, block=block)


def hadamard(x: Tensor, sections: Sections, out: Tensor, *, chunk: int, inverse: bool = False) -> None:
    """A random rotation: each chunk's signs are drawn, then it is transformed by Walsh and Hadamard; orthonormal.

    out = H D x / sqrt(n), with n the elements of the chunk; inverse: D H x / sqrt(n). A section is cut into chunks of
    `chunk` elements and, at its end, powers of two in descending order (`rotation_sizes`): nothing is padded. The sign
    of the element at place i of its tensor is bit i mod 32 of what is drawn for place i // 32: 1 is negative. Computed
    in float32 (float64 for float64), stages from neighbours to halves, and scaled last.

    Args:
        x: (numel,) floating; inverse: float32 or float64.
        sections: with seeds.
        out: (numel,) float32, float64 for float64; inverse: of any type that is computed in x's. It may be `x`.
        chunk: a power of two up to 8192.

    Raises:
        ValueError: another chunk, no seeds, shapes that do not fit.
        TypeError: other dtypes.
    """
    _pick("hadamard", [x, out], x.numel())(x, sections, out, chunk=chunk, inverse=inverse)


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
    _pick("pack_signs", given)(
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
    _pick("unpack_signs", [*tensors, out])(parts, sections, out, block=block, scale=scale, factor=factor)


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
    _pick("narrow", [x, out], x.numel())(x, out, scale=scale)


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
    infinite, and the whole block decodes to NaN. Stochastic: of f + r, f whole, the level is f + 1 if the element's
    draw in [0, 1) is less than r, else f (what is drawn: `reference.uniform`). The squares of a norm are summed in
    float64 in a fixed order.

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
    run = _pick("quantize", tensors)
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
    _pick("block_scales", tensors)(x, sections, grid, scales, residual=residual)


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
    _pick("dequantize", tensors)(parts, sections, grid, out, scale=scale)


def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    """Sets bit i % 64 of word i // 64 of `out`, (ceil(size / 64),) int64, for each index, and clears all others.

    Raises:
        ValueError: an index outside [0, size), before anything is written; another shape of `out`.
        TypeError: indices not int64 or int32; `out` not int64.
    """
    _pick("encode_bitmap", [indices, out])(indices, size, out)


def decode_bitmap(words: Tensor, out: Tensor) -> None:
    """Writes the ascending positions of the set bits of `words` into `out`.

    Args:
        words: (n,) int64.
        out: (count_bits(words),) int64, or int32 for up to 2^31 bits.

    Raises:
        ValueError: another size of `out`, or positions beyond int32.
        TypeError: other dtypes.
    """
    _pick("decode_bitmap", [words, out])(words, out)


def count_bits(words: Tensor) -> int:
    """The number of set bits of `words`, (n,) int64."""
    count: int = _pick("count_bits", [words])(words)
    return count


def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    """Writes ascending indices as offsets within blocks of 2^bits: between a list and a bitmap in density.

    Layout: the count of each of ceil(size / 2^bits) blocks, then the offsets, index mod 2^bits, block by block. With 16
    bits, counts are int32 and offsets uint16, in the byte order of the machine. With 8 bits, an offset is one byte, and
    counts are what is shorter:
    - a byte each: 255 counts 255 indices or, where the first offset is 255, a full block of 256, whose offsets are 255,
      0, 1, ..., 254; no 255 ascending offsets begin so;
    - a one for each index and a zero behind each block, from the lowest bit of a byte on (the upper bits of Elias and
      Fano's code; about one bit more than the entropy of the indices where a block has one or two).
    The size of a message thus follows from the number of indices alone.

    Args:
        indices: (nnz,) int64 or int32, ascending, without duplicates.
        size: all indices are in [0, size).
        bits: 8 or 16.
        out: (offsets_nbytes(nnz, size, bits),) uint8.

    Raises:
        ValueError: an index out of range or order, or a duplicate, before anything is written; other bits or sizes.
        TypeError: other dtypes.
    """
    _pick("encode_offsets", [indices, out])(indices, size, bits, out)


def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    """The inverse of `encode_offsets`, for messages that may be damaged.

    Args:
        message: (offsets_nbytes(nnz, size, bits),) uint8.
        out: (nnz,) int64, or int32 for sizes up to 2^31.

    Raises:
        ValueError: a message of another size, or one that no nnz ascending indices of [0, size) have; `out` may then
            have been written to.
        TypeError: other dtypes.
    """
    _pick("decode_offsets", [message, out])(message, size, bits, out)


def partition_rotated(indices: Tensor, size: int, n: int, seed: int) -> RotatedPartition:
    """Splits sorted indices among n owners by rotated stripe: i = n q + r is owner (r + rho(q)) mod n's q-th.

    As `partition_elements` does, which finds the indices itself.

    Args:
        indices: (nnz,) int64 or int32, ascending.
        size: all indices are in [0, size), size <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: an index out of range or order, another n, a size whose positions int32 cannot hold.
        TypeError: other dtypes.
    """
    partition: RotatedPartition = _pick("partition_rotated", [indices])(indices, size, n, seed)
    return partition


def partition_elements(x: Tensor, n: int, seed: int) -> ElementPartition:
    """Finds the elements of `x` that are not zero, and which of n owners each of them has, by rotated stripe.

    Element i = n q + r is owner (r + rho(q)) mod n's q-th: each run of n neighbours goes to n different owners in a
    rotation that the seed decides, so neither dense regions nor hot columns load one owner, and an owner's positions q
    stay in order. All ranks compute the same map. What is zero is tested as in `nonzero_rows`.

    Args:
        x: (numel,) floating, numel <= n * 2^31.
        n: owners, at most 2^16.

    Raises:
        ValueError: another n, a size whose positions int32 cannot hold; native: more than 2^34 elements.
        TypeError: other dtypes.
    """
    partition: ElementPartition = _pick("partition_elements", [x], x.numel())(x, n, seed)
    return partition


def unite_elements(parts: Sequence[PackedPositions], size: int) -> ElementUnion:
    """First phase of the sum of several parts of [0, size): which positions occur.

    Args:
        parts: messages that may be damaged.

    Raises:
        ValueError: a message of another size, or one that no such positions have; no part; native: a size above 2^34.
        TypeError: other dtypes.
    """
    tensors = [part.packed for part in parts]
    union: ElementUnion = _pick("unite_elements", tensors, size)(parts, size)
    return union


def join_elements(parts: Sequence[PackedPositions], values: Sequence[Tensor], seed: int, out: Tensor) -> None:
    """The inverse of `partition_elements`: the elements of all owners where they belong in `out`, zero everywhere else.

    Args:
        parts: per owner, messages that may be damaged.
        values: per owner (count,), in the dtype of `out`.
        out: (size,) floating; overwritten.

    Raises:
        ValueError: a message of another size or one that no such positions have, a position without an element in
            `out`, before anything is written; no owner, or too many.
        TypeError: other or different dtypes.
    """
    tensors = [*(part.packed for part in parts), *values, out]
    _pick("join_elements", tensors, out.numel())(parts, values, seed, out)


def rotated_index(owner: int, positions: Tensor, n: int, seed: int, out: Tensor) -> None:
    """The elements at local positions q of one owner in `partition_rotated`: n q + (owner - rho(q)) mod n.

    Args:
        positions: (count,) int32.
        out: (count,) int64, or int32 where all results fit.

    Raises:
        ValueError: an owner or position out of range, another size of `out`.
        TypeError: other dtypes.
    """
    _pick("rotated_index", [positions, out])(owner, positions, n, seed, out)


def owners_by_hash(indices: Tensor, n: int, seed: int, out: Tensor) -> None:
    """The owner of each index by hash, h0 of Zen (OSDI 2025): the same on all ranks.

    MurmurHash3's 64-bit finaliser of the index, xored with a key that the seed gives, scaled to n by its upper half.

    Args:
        indices: (nnz,) int64 or int32, not negative, in any order.
        n: owners, at most 2^16.
        out: (nnz,) int64 or int32.

    Raises:
        ValueError: a negative index, another n, another size of `out`.
        TypeError: other dtypes.
    """
    _pick("owners_by_hash", [indices, out])(indices, n, seed, out)


def partition_hashed(indices: Tensor, size: int, n: int, seed: int) -> HashedPartition:
    """Splits sorted element indices among n owners by hash, as `owners_by_hash` says.

    Beside `partition_rotated`: an owner's elements may lie anywhere, so they travel by their indices in the whole, or
    as positions in the list of all that it may own (`owned_by_hash`, `positions_in`).

    Args:
        indices: (nnz,) int64 or int32, ascending.
        size: all indices are in [0, size).
        n: owners, at most 2^16.

    Raises:
        ValueError: an index out of range or order, another n.
        TypeError: other dtypes.
    """
    partition: HashedPartition = _pick("partition_hashed", [indices])(indices, size, n, seed)
    return partition


def owned_by_hash(size: int, n: int, seed: int, *, device: torch.device | None = None) -> list[Tensor]:
    """Per owner all indices of [0, size) that hash to it, ascending: the lists behind the hash bitmaps of Zen.

    Together they are as large as an int32 (from 2^31 elements on, int64) for each element, on every rank: made once per
    size and seed, and kept.

    Args:
        device: where the lists are made; by default the CPU, of `triton` the current CUDA device.

    Raises:
        ValueError: a negative size, or n not in [1, 2^16].
        TypeError: native: another device than the CPU.
    """
    like = [] if device is None else [torch.empty(0, dtype=torch.int32, device=device)]
    owned: list[Tensor] = _pick("owned_by_hash", like, size)(size, n, seed, device=device)
    return owned


def positions_in(owned: Tensor, indices: Tensor, out: Tensor) -> None:
    """The positions of an owner's indices in the list of all that it may own: the bits of its hash bitmap.

    `encode_bitmap` makes them a bitmap; back, the indices are `owned[positions]`.

    Args:
        owned: (m,) int64 or int32, ascending without duplicates (which is not checked).
        indices: (nnz,) int64 or int32, ascending.
        out: (nnz,) int64, or int32 for up to 2^31 owned.

    Raises:
        ValueError: an index that is not owned or out of order, another size of `out`, which may have been written to.
        TypeError: other dtypes.
    """
    _pick("positions_in", [owned, indices, out])(owned, indices, out)


def hierarchical_hash(
    indices: Tensor, n: int, *, slots: int, serial: int, rehashes: int = 3, seed: int, threads: int | None = None
) -> HashedIndices:
    """Splits indices among n owners as Zen does (OSDI 2025, algorithm 1): by hashing into memory of a fixed size.

    The owner is that of `owners_by_hash`. In the owner's memory, an index takes the first slot that is empty of those
    that its rehashes name, else the next place of a serial part. Unlike in the paper, slots are taken by compare-and-
    swap (its write, read back and compare can lose an index), empty is all ones and indices begin with 0, and what
    finds no place is returned. A rival to measure `partition_rotated` against, which needs no memory. Which index has
    which slot differs by implementation and number of threads; together, all that is returned is what was given.

    Args:
        indices: (nnz,) int64 or int32, not negative, distinct (what occurs twice is returned twice), in any order.
        n: owners, at most 2^16.
        slots: of the parallel memory of all owners, each of which has ceil(slots / n); the paper: twice nnz.
        serial: of the serial memory, likewise; the paper: a tenth of `slots`.
        rehashes: slots that an index may try.
        threads: native: how many insert at the same time; by default torch's number, and 1 for little work.

    Raises:
        ValueError: a negative index, another n, no slots, or more than 2^31 - 1 for one owner.
        TypeError: other dtypes.
    """
    found: HashedIndices = _pick("hierarchical_hash", [indices])(
        indices, n, slots=slots, serial=serial, rehashes=rehashes, seed=seed, threads=threads
    )
    return found


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _pick(kernel: str, tensors: Sequence[Tensor], entries: int = 0) -> Callable[..., Any]:
    """The implementation of a kernel for these tensors, of a table with so many rows or elements."""
    fallback, native = _TABLE[kernel]
    if _requested == "triton" or (_requested == "auto" and device.supports(tensors)):
        return _on_device(kernel, fallback)
    if active() == "reference" or (_requested == "auto" and not cpu.supports(tensors, entries)):
        return fallback
    return native


def _on_device(kernel: str, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's version of a kernel; what has none, and all where Triton is missing, runs as torch operations there."""
    try:
        chosen: Callable[..., Any] = getattr(device.load(), kernel, fallback)
    except ImportError as error:
        _log_fallback_once(error)
        return fallback
    return chosen


def _request(implementation: Implementation) -> None:
    global _requested  # noqa: PLW0603 (the choice is the whole process's)
    _requested = implementation


def _log_fallback_once(error: ImportError) -> None:
    global _fallback_logged  # noqa: PLW0603 (once a process)
    if not _fallback_logged:
        _logger.warning("gradsync.kernels: using the torch reference implementation: %s", error)
    _fallback_logged = True
