"""Compressors that transform a tensor to another orthonormal basis first: a random rotation, or cosines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Annotated, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..devices import host, streams
from ..inputs.settings import PositiveFloat, PositiveInt
from ..kernels import Grid, Sections
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.sparse import SparseVector, index_dtype
from .base import (
    Compressor,
    CompressorState,
    CompressorTraits,
    Message,
    Summand,
    alike,
    by_spec,
    check_payload,
    check_tensor,
    fields,
    fields_nbytes,
    stacked,
    unstack,
)
from .expressions import register
from .law import Biased, Contraction, Law, Unbiased

_INT8_MOST = 127


@register
@dataclass(frozen=True)
class THC(Compressor[Summand]):
    """Rotates each tensor at random, and rounds it to int8 codes that an all-reduce sums. (Li et al., NSDI 2024)

    Random signs, the same on all ranks, and the Walsh-Hadamard transform of chunks of `chunk` elements (at the end of a
    tensor: of powers of two in descending order) make all elements of a chunk about equally large. They are rounded to
    multiples of T / levels, up or down at random so that the mean is right. The ranks agree on one T for each chunk:
    the largest magnitude on any rank, so that nothing is cut off; or, with `clip`, `clip` standard deviations of the
    rank with the largest norm: elements beyond are cut off, for which ErrorFeedback makes up.
    levels = min(2^(bits - 1) - 1, 127 // summands), so that the sum over `summands` ranks fits int8. As all ranks use
    the same T, the sum of codes decodes to the sum of the decoded tensors.
    Without clip unbiased: in a chunk of n elements, E T^2 <= 2 (ln 2n + 1) |x|^2 / n over the signs, so E |error|^2 <=
    omega |x|^2 with an omega of at most (ln 2n + 1) / (2 levels^2), where x is the tensor of the rank with the largest
    T. A chunk with NaN or infinity decodes to NaN.
    Wire: a byte an element, after an all-reduce of 4 bytes a chunk (maxima).

    Attributes:
        summands: the most ranks whose codes are summed, from 1 to 127.
        bits: the bits of a code, from 2 to 8: they determine `levels`; a code is sent as a byte whatever they are.
        clip: T in standard deviations; None: T is the largest magnitude.
        chunk: the number of elements in a chunk, a power of two.
        seed: the seed of signs and rounding.
    """

    summands: Annotated[int, Interval(ge=1, le=_INT8_MOST)] = 16
    bits: Annotated[int, Interval(ge=2, le=8)] = 4
    clip: PositiveFloat | None = None
    chunk: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        kernels.rotation_sizes((), self.chunk)

    @property
    def levels(self) -> int:
        """The largest code: codes are integers from -levels to levels."""
        return min((1 << self.bits - 1) - 1, _INT8_MOST // self.summands)

    @cached_property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(Summand, agrees=True, most_summands=_INT8_MOST // self.levels)

    def num_agreed(self, spec: FlatSpec) -> int:
        return len(kernels.rotation_sizes(spec.lengths, self.chunk))

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        return torch.int8

    def law(self, spec: FlatSpec) -> Law:
        if self.clip is not None:
            return Biased(f"elements beyond {self.clip} standard deviations are cut off")
        most = max(kernels.rotation_sizes(spec.lengths, self.chunk), default=1)
        return Unbiased((math.log(2 * most) + 1) / (2 * self.levels**2))

    @torch.no_grad()
    def observe(self, x: Tensor, state: CompressorState) -> Tensor:
        """Returns, for each chunk of the tensor `x`, the range T to which this rank would round it, (chunks,) float32.

        `x`, (numel,), is not rotated yet. T is the largest magnitude in the chunk after the rotation or, with `clip`,
        `clip` standard deviations; infinity for a chunk with NaN or infinity. A scheme makes the maximum over the ranks
        the T of all.
        """
        check_tensor(x, state)
        chunks, _ = self._chunks(state.spec)
        most = torch.empty(len(chunks.lengths), device=x.device)
        if self.clip is None:
            kernels.block_scales(self._rotated(x, state), chunks, Grid(1), most)
        else:
            kernels.block_scales(x, chunks, Grid(1, scale="norm"), most)
            sizes = host.numbers(chunks.lengths, x.device)
            most *= (self.clip / sizes.sqrt()).clamp(max=1)
        return most

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Summand, CompressorState]:
        check_tensor(x, state)
        if state.agreed is None:
            raise ValueError(
                "THC needs the T that the ranks agreed on, got none: set CompressorState.agreed to the maxima of "
                "observe() over the ranks"
            )
        rotated, (chunks, tensors) = self._rotated(x, state), self._chunks(state.spec)
        seeds = state.sections(self.seed).seeds
        chunks = replace(chunks, seeds=tuple(seeds[tensor] for tensor in tensors))
        codes = memory.empty_like(rotated, torch.uint8)
        kernels.quantize(rotated, chunks, self._grid, codes, state.agreed.to(x.device))
        return Summand(self, state.spec, state.step, codes.view(torch.int8), state.agreed), state.next()

    def decompress(self, payload: Summand) -> Tensor:
        out = memory.empty_like(payload.data, payload.spec.dtype)
        self.sum_into(out, [payload])
        return out

    @torch.no_grad()
    def sum_into(self, out: Tensor, payloads: Sequence[Summand], scale: float = 1.0) -> None:
        """Overwrites `out`, (numel,) floating, by `scale` times the sum of the decoded payloads, all of one step.

        Payloads are added while they are still rotated, and the sum is rotated back once.
        """
        if not payloads:
            out.zero_()
            return
        parts = []
        for payload in payloads:
            check_payload(self, payload, out)
            if payload.agreed is None:
                raise ValueError("a payload of THC comes with the T that the ranks agreed on, got agreed=None")
            parts.append((payload.data.view(torch.uint8), payload.agreed.to(out.device)))
        spec, step = payloads[0].spec, payloads[0].step
        numbers = memory.empty_like(out, kernels.accumulation_dtype(out.dtype))
        kernels.dequantize(parts, self._chunks(spec)[0], self._grid, numbers, scale=scale)
        kernels.hadamard(numbers, self._signs(CompressorState(spec, step=step)), out, chunk=self.chunk, inverse=True)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return spec.numel

    @property
    def _grid(self) -> Grid:
        """The numbers codes stand for: multiples of T / `levels`, T a chunk's scale; 0 if `levels` / T overflows."""
        return Grid(self.levels, scale="given", stochastic=True)

    def _signs(self, state: CompressorState) -> Sections:
        return state.sections(self.seed, shared=True)

    def _rotated(self, x: Tensor, state: CompressorState) -> Tensor:
        rotated = memory.empty_like(x, kernels.accumulation_dtype(x.dtype))
        kernels.hadamard(x, self._signs(state), rotated, chunk=self.chunk)
        return rotated

    @by_spec
    def _chunks(self, spec: FlatSpec) -> tuple[Sections, list[int]]:
        """Returns all chunks with their offsets, on which random numbers depend, and each chunk's tensor by index."""
        lengths: list[int] = []
        starts: list[int] = []
        tensors: list[int] = []
        for tensor, segment in enumerate(spec.segments):
            sizes = kernels.rotation_sizes((segment.numel,), self.chunk)
            lengths += sizes
            starts += accumulate(sizes[:-1], initial=segment.start) if sizes else ()
            tensors += [tensor] * len(sizes)
        return Sections(tuple(lengths), tuple(starts)), tensors


class Tiling(NamedTuple):
    """Dimensions of a matrix and of the equal rectangles into which it is cut.

    Rectangles that reach beyond the lower or right edge of the matrix are filled up with zeros.

    Attributes:
        rows: of the matrix.
        columns: of the matrix.
        height: rows of a rectangle.
        width: columns of a rectangle.
    """

    rows: int
    columns: int
    height: int  # of a rectangle
    width: int

    @property
    def down(self) -> int:
        """The number of rectangles from the top of the matrix to the bottom."""
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def tiles(self) -> int:
        return self.down * self.across

    @property
    def size(self) -> int:
        """The number of elements in a rectangle."""
        return self.height * self.width


@dataclass(frozen=True)
class Tiles:
    """The rectangles into which all tensors of one shape in a flat tensor are cut, tensor by tensor.

    Attributes:
        tiling: how each of the tensors is cut.
        places: the tensors' numbers among those of the flat tensor (segments).
        elements: their part of the coefficients of all tensors.
        kept: their part of the coefficients that are sent.
    """

    tiling: Tiling  # the same for each tensor
    places: tuple[int, ...]  # the tensors' numbers among the segments
    elements: slice  # their part of all coefficients
    kept: slice  # their part of the coefficients that are sent

    @property
    def count(self) -> int:
        return len(self.places) * self.tiling.tiles

    def starts(self, device: torch.device) -> Tensor:
        """Returns where the coefficients of each rectangle begin among those of all tensors, (rectangles, 1) int64."""
        size = self.tiling.size
        return torch.arange(self.elements.start, self.elements.stop, size, device=device)[:, None]


@register
@dataclass(frozen=True)
class DCTTopK(Compressor[Message]):
    """Keeps the largest coefficients of a discrete cosine transform of rectangles. (DeMo: Peng et al., 2024)

    A tensor is viewed as a matrix: its first dimension by all others. A vector longer than `chunk`, and a segment that
    a plan cut out of a tensor, is viewed as rows of `chunk` elements. Each side is cut into the fewest equal pieces of
    at most `chunk`, padded with zeros to whole pieces. (A multiple of `chunk` is cut into pieces of `chunk`, as in
    DeMo. DeMo takes the nearest divisor of other sides, 1 for a prime.) Of a rectangle of `chunk` x `chunk`, the `k`
    coefficients of the largest magnitude are kept; of a smaller one the same share, at least one. NaN is larger than
    infinity, and makes its whole rectangle NaN.
    The transform is orthonormal: |error|^2 <= (1 - kept / elements of a rectangle) |x|^2. Wrap it in ErrorFeedback.
    Wire: for each kept coefficient 2 bytes (the place in its rectangle), and its value in the dtype of the tensor.

    Attributes:
        chunk: the longest side of a rectangle, in elements, up to 256: places fit 16 bits.
        k: how many of chunk^2 coefficients are sent.
    """

    chunk: Annotated[int, Interval(ge=1, le=256)] = 64
    k: PositiveInt = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.chunk**2:
            raise ValueError(f"DCTTopK.k must be at most chunk^2 = {self.chunk**2}, got {self.k}")

    def tiling(self, shape: tuple[int, ...]) -> Tiling:
        """Returns the rectangles into which a tensor of this shape is cut for the transform."""
        numel = math.prod(shape)
        if len(shape) >= 2:
            rows, columns = shape[0], numel // max(1, shape[0])
        else:
            rows, columns = -(-numel // self.chunk), min(numel, self.chunk)
        height, width = (max(1, -(-side // max(1, -(-side // self.chunk)))) for side in (rows, columns))
        return Tiling(rows, columns, height, width)

    def kept(self, tiling: Tiling) -> int:
        """Returns how many coefficients of each rectangle of a tensor that is cut like `tiling` are sent."""
        return max(1, round(self.k * tiling.size / self.chunk**2))

    def num_coefficients(self, spec: FlatSpec) -> int:
        """Returns how many coefficients are sent of all tensors whose shapes `spec` has."""
        return sum(tiling.tiles * self.kept(tiling) for tiling in map(self.tiling, spec.shapes))

    def law(self, spec: FlatSpec) -> Law:
        tilings = [self.tiling(shape) for shape, n in zip(spec.shapes, spec.lengths, strict=True) if n]
        return Contraction(min((self.kept(t) / t.size for t in tilings), default=1.0))

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Message, CompressorState]:
        check_tensor(x, state)
        spec = state.spec
        payload = Message(self, spec, state.step, memory.zeros(self.nbytes(spec), torch.uint8, x.device))
        places, values = self._fields(payload)
        sections, counts = self._rectangles(spec)
        parts, wide = x.split(spec.lengths), kernels.accumulation_dtype(x.dtype)
        coefficients = memory.empty(sum(sections.lengths), wide, x.device)
        for tiles in self._tiles(spec):
            coefficients[tiles.elements] = _coefficients(stacked(parts, tiles.places).to(wide), tiles.tiling).flatten()
        indices = memory.empty(len(places), index_dtype(len(coefficients)), x.device)
        kernels.top_k(coefficients, indices, values, sections=sections, counts=counts)
        for tiles in self._tiles(spec):
            found = indices[tiles.kept].view(tiles.count, -1) - tiles.starts(x.device)
            places[tiles.kept] = found.flatten().to(torch.int16)  # wraps: the bits are those of uint16
        values.masked_fill_(~values.isfinite(), math.nan)
        return payload, state.next()

    def decompress(self, payload: Message) -> Tensor:
        out = memory.empty(payload.spec.numel, payload.spec.dtype, payload.data.device)
        self.sum_into(out, [payload])
        return out

    def sum_into(self, out: Tensor, payloads: Sequence[Message], scale: float = 1.0) -> None:
        """Overwrites `out`, (numel,) floating, by `scale` times the sum of the decoded payloads.

        Coefficients of the cosine transform are added first, and the sum is transformed back once.
        """
        if not payloads:
            out.zero_()
            return
        spec, wide = payloads[0].spec, kernels.accumulation_dtype(out.dtype)
        coefficients = memory.zeros(sum(self._rectangles(spec)[0].lengths), wide, out.device)
        for payload in payloads:
            check_payload(self, payload, out)
            places, values = self._fields(payload)
            indices = places.long() & 0xFFFF
            for tiles in self._tiles(spec):
                found = indices[tiles.kept].view(tiles.count, -1)
                expected = f"a payload of {self} has places in its rectangles of {tiles.tiling.size} elements"
                streams.require((found < tiles.tiling.size).all(), expected, found.max)
                found += tiles.starts(out.device)
            SparseVector(indices, values, len(coefficients)).add_to(coefficients)
        parts = out.split(spec.lengths)
        for tiles in self._tiles(spec):
            found = _elements(coefficients[tiles.elements].view(len(tiles.places), -1), tiles.tiling)
            unstack(found[:, : len(parts[tiles.places[0]])].mul_(scale), parts, tiles.places)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    @by_spec
    def _tiles(self, spec: FlatSpec) -> tuple[Tiles, ...]:
        """Returns the rectangles of all tensors, one entry for each shape."""
        found: list[Tiles] = []
        begin = taken = 0
        for shape, places in alike(spec.shapes).items():
            tiling = self.tiling(shape)
            count = len(places) * tiling.tiles
            if count:
                elements, kept = count * tiling.size, count * self.kept(tiling)
                found.append(Tiles(tiling, tuple(places), slice(begin, begin + elements), slice(taken, taken + kept)))
                begin, taken = begin + elements, taken + kept
        return tuple(found)

    @by_spec
    def _rectangles(self, spec: FlatSpec) -> tuple[Sections, tuple[int, ...]]:
        """Returns each rectangle as a section of the flat coefficients, and how many coefficients of each are sent."""
        lengths: list[int] = []
        counts: list[int] = []
        for tiles in self._tiles(spec):
            lengths += [tiles.tiling.size] * tiles.count
            counts += [self.kept(tiles.tiling)] * tiles.count
        return Sections(tuple(lengths)), tuple(counts)

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[tuple[torch.dtype, int], ...]:
        count = self.num_coefficients(spec)
        return (torch.int16, count), (spec.dtype, count)

    def _fields(self, payload: Message) -> tuple[Tensor, Tensor]:
        """Returns the places, int16 holding uint16, and the values, (coefficients,) each, as views of the message."""
        places, values = fields(payload.data, *self._layout(payload.spec))
        return places, values


@cache
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the orthonormal discrete cosine transform (DCT-II) as a matrix, (n, n); its transpose is the inverse."""
    angles = torch.outer(torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64) + 0.5)
    matrix = (angles * (math.pi / n)).cos() * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    placed = matrix.to(dtype).to(device)
    streams.settle(device)
    return placed


def _coefficients(x: Tensor, tiling: Tiling) -> Tensor:
    """Returns the cosine transforms of the rectangles of `x`, (tensors, numel): (tensors, tiles, height * width)."""
    rows, columns, height, width = tiling
    tensors, numel = x.shape
    padded = x.new_zeros(tensors, tiling.down * height, tiling.across * width)
    if numel == rows * columns:
        padded[:, :rows, :columns] = x.view(tensors, rows, columns)
    else:  # the last row of a vector is not full
        padded.view(tensors, -1)[:, :numel] = x
    left, right = cosines(height, x.dtype, x.device), cosines(width, x.dtype, x.device)
    rotated = (padded.view(-1, width) @ right.T).view(-1, height, tiling.across * width)
    tiles = (left @ rotated).view(tensors, tiling.down, height, tiling.across, width)
    return tiles.transpose(2, 3).reshape(tensors, tiling.tiles, height * width)


def _elements(coefficients: Tensor, tiling: Tiling) -> Tensor:
    """Returns the tensors that have these coefficients, (tensors, rows * columns): the inverse of `_coefficients`.

    `coefficients`: (tensors, tiles * height * width). Behind the elements of a vector whose last row is not full is
    padding, which the caller cuts off; it is zero only if all coefficients were kept.
    """
    rows, columns, height, width = tiling
    tensors = len(coefficients)
    left, right = (cosines(side, coefficients.dtype, coefficients.device) for side in (height, width))
    tiles = coefficients.view(tensors, tiling.down, tiling.across, height, width).transpose(2, 3)
    rotated = left.T @ tiles.reshape(-1, height, tiling.across * width)
    padded = (rotated.view(-1, width) @ right).view(tensors, tiling.down * height, tiling.across * width)
    return padded[:, :rows, :columns].flatten(1)
