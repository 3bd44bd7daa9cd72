"""Compressors of what a tensor becomes in another orthonormal basis, where its energy lies otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .. import kernels, memory
from ..bucket import FlatSpec
from ..expressions import register
from ..kernels import Grid
from .base import Compressor, Message, State, Summand, by_spec, check_payload, check_tensor, fields, fields_nbytes
from .law import Biased, Contraction, Law, Unbiased

_INT8_MOST = 127


@register
@dataclass(frozen=True)
class THC(Compressor[Summand]):
    """Integers that an all-reduce sums, of the tensor after a random rotation. (THC: Li et al., NSDI 2024)

    Signs that all ranks draw alike, and the Walsh-Hadamard transform of chunks of `chunk` elements (at the end of a
    tensor powers of two in descending order), make all elements of a chunk about as large. They are rounded to
    multiples of T / levels, up or down at random so that the mean is right. The ranks agree on T for each chunk: the
    largest element of any rank, so that nothing is cut off, or, with `clip`, so many standard deviations of the
    rank whose norm is the largest: beyond them is cut off, which is for ErrorFeedback to make good.
    levels = min(2^(bits - 1) - 1, 127 // summands): the sum of so many ranks' fits int8. With the T of all, the sum
    decodes to the sum of what each decodes to.
    Without clip unbiased. In a chunk of n elements, E T^2 <= 2 (ln 2n + 1) |x|^2 / n over the signs, so omega is at
    most (ln 2n + 1) / (2 levels^2), relative to the rank whose T is taken. A chunk with NaN or infinity decodes to NaN.
    Wire: a byte an element, and before it 4 bytes a chunk to agree on T.
    """

    payload = Summand

    summands: int = 16  # ranks, at most
    bits: int = 4  # of the levels, however they travel
    clip: float | None = None
    chunk: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.summands <= _INT8_MOST:
            raise ValueError(f"THC.summands must be in [1, {_INT8_MOST}], got {self.summands}")
        if not 2 <= self.bits <= 8:
            raise ValueError(f"THC.bits must be in [2, 8], got {self.bits}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"THC.clip must be positive or None, got {self.clip}")
        kernels.rotation_sizes((), self.chunk)

    @property
    def levels(self) -> int:
        """Of either sign."""
        return min((1 << self.bits - 1) - 1, _INT8_MOST // self.summands)

    @property
    def most_summands(self) -> int:
        return _INT8_MOST // self.levels

    @property
    def agrees(self) -> bool:
        return True

    def num_agreed(self, spec: FlatSpec) -> int:
        return len(kernels.rotation_sizes(spec.lengths, self.chunk))

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        return torch.int8

    def law(self, spec: FlatSpec) -> Law:
        if self.clip is not None:
            return Biased(f"what is beyond {self.clip} standard deviations is cut off")
        most = max(kernels.rotation_sizes(spec.lengths, self.chunk), default=1)
        return Unbiased((math.log(2 * most) + 1) / (2 * self.levels**2))

    @torch.no_grad()
    def observe(self, x: Tensor, state: State) -> Tensor:
        """T of each chunk; infinite, which a maximum keeps, where it is not a number."""
        check_tensor(x, state)
        sizes = self._sizes(state.spec, x.device)
        if self.clip is None:
            most = _of_chunks(self._rotated(x, state).abs(), "max", sizes)
        else:
            norms = _of_chunks(x.to(kernels.accumulation_dtype(x.dtype)).square(), "sum", sizes).sqrt()
            most = norms * (self.clip / sizes.sqrt()).clamp(max=1)
        return most.float().nan_to_num(nan=math.inf, posinf=math.inf)

    @torch.no_grad()
    def compress(self, x: Tensor, state: State) -> tuple[Summand, State]:
        check_tensor(x, state)
        if state.agreed is None:
            raise ValueError("THC needs what the ranks agreed on: see Compressor.observe")
        codes = self._quantised(self._rotated(x, state), state.agreed.to(x.device), state)
        return Summand(self, state.spec, state.step, codes, state.agreed), state.next()

    def decompress(self, payload: Summand) -> Tensor:
        check_payload(self, payload)
        return self._decoded(payload.data, payload, payload.spec.dtype)

    def sum_into(self, out: Tensor, payloads: Sequence[Summand], scale: float = 1.0) -> None:
        """One rotation for all, since they have one T."""
        for payload in payloads:
            check_payload(self, payload, out)
        total = payloads[0].data.to(torch.int32)
        for payload in payloads[1:]:
            total += payload.data
        wide = kernels.accumulation_dtype(out.dtype)
        out.copy_(self._decoded(total, payloads[0], wide).mul_(scale))

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return spec.numel

    def _sizes(self, spec: FlatSpec, device: torch.device) -> Tensor:
        return torch.tensor(kernels.rotation_sizes(spec.lengths, self.chunk), dtype=torch.int64, device=device)

    def _rotated(self, x: Tensor, state: State) -> Tensor:
        rotated = memory.empty_like(x, kernels.accumulation_dtype(x.dtype))
        kernels.hadamard(x, state.sections(self.seed, shared=True), rotated, chunk=self.chunk)
        return rotated

    def _quantised(self, rotated: Tensor, most: Tensor, state: State) -> Tensor:
        """(numel,) int8. A T that has no inverse counts as zero."""
        codes = memory.empty_like(rotated, torch.uint8)
        grid = Grid(self.levels, scale="given", stochastic=True)
        kernels.quantize(rotated, self._chunks(state.sections(self.seed)), grid, codes, most)
        return codes.view(torch.int8)

    def _chunks(self, sections: kernels.Sections) -> kernels.Sections:
        """The chunks as sections of their own, whose elements draw as in their tensors."""
        lengths: list[int] = []
        starts: list[int] = []
        seeds: list[int] = []
        for length, start, seed in zip(sections.lengths, sections.starts, sections.seeds, strict=True):
            sizes = kernels.rotation_sizes((length,), self.chunk)
            lengths += sizes
            starts += accumulate(sizes[:-1], initial=start) if sizes else ()
            seeds += [seed] * len(sizes)
        return kernels.Sections(tuple(lengths), tuple(starts), tuple(seeds))

    def _decoded(self, codes: Tensor, payload: Summand, dtype: torch.dtype) -> Tensor:
        if payload.agreed is None:
            raise ValueError("a payload of THC carries what the ranks agreed on, got none")
        wide = kernels.accumulation_dtype(dtype)
        unit = (payload.agreed.to(codes.device) / self.levels).to(wide)
        numbers = codes.to(wide).mul_(unit.repeat_interleave(self._sizes(payload.spec, codes.device)))
        out = memory.empty_like(numbers, dtype)
        sections = State(payload.spec, step=payload.step).sections(self.seed, shared=True)
        kernels.hadamard(numbers, sections, out, chunk=self.chunk, inverse=True)
        return out


def _of_chunks(values: Tensor, reduce: str, sizes: Tensor) -> Tensor:
    if len(sizes) == 0:
        return values.new_empty(0)
    return torch.segment_reduce(values, reduce, lengths=sizes, initial=0.0)


class Tiling(NamedTuple):
    """How a tensor is cut into equal rectangles, seen as a matrix with zeros at its lower and right edges."""

    rows: int
    columns: int
    height: int  # of a rectangle
    width: int

    @property
    def down(self) -> int:
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    @property
    def tiles(self) -> int:
        return self.down * self.across


@register
@dataclass(frozen=True)
class DCTTopK(Compressor[Message]):
    """The largest coefficients of each rectangle's discrete cosine transform. (DeMo: Peng et al., 2024)

    A tensor is seen as a matrix: its first dimension, and all others; a vector longer than `chunk`, and what a plan cut
    out of a tensor, as rows of `chunk` elements. Each side is cut into as few equal pieces of at most `chunk` as there
    can be, with zeros up to a whole piece (a multiple of `chunk` is cut into pieces of `chunk`, as in DeMo; its nearest
    divisor of a prime side would be 1). Of a rectangle of `chunk` x `chunk`, `k` of its chunk^2 coefficients are kept;
    of a smaller one the same share, at least one. The largest by magnitude; NaN is larger than infinity, and makes its
    whole rectangle NaN.
    The transform is orthonormal, so this is a contraction by kept / elements of a rectangle: wrap it in ErrorFeedback.
    Wire: 2 bytes a coefficient for its place in the rectangle, and the coefficient in the type of the tensor.
    """

    chunk: int = 64
    k: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chunk <= 256:
            raise ValueError(f"DCTTopK.chunk must be in [1, 256] for 16-bit places, got {self.chunk}")
        if not 1 <= self.k <= self.chunk**2:
            raise ValueError(f"DCTTopK.k must be in [1, chunk^2 = {self.chunk**2}], got {self.k}")

    def tiling(self, shape: tuple[int, ...]) -> Tiling:
        numel = math.prod(shape)
        if len(shape) >= 2:
            rows, columns = shape[0], numel // max(1, shape[0])
        else:
            rows, columns = -(-numel // self.chunk), min(numel, self.chunk)
        height, width = (max(1, -(-side // max(1, -(-side // self.chunk)))) for side in (rows, columns))
        return Tiling(rows, columns, height, width)

    def kept(self, tiling: Tiling) -> int:
        """Coefficients of a rectangle."""
        return max(1, round(self.k * tiling.height * tiling.width / self.chunk**2))

    def num_coefficients(self, spec: FlatSpec) -> int:
        """Those that are sent."""
        return sum(tiling.tiles * self.kept(tiling) for tiling in map(self.tiling, spec.shapes))

    def law(self, spec: FlatSpec) -> Law:
        tilings = [self.tiling(shape) for shape, n in zip(spec.shapes, spec.lengths, strict=True) if n]
        return Contraction(min((self.kept(t) / (t.height * t.width) for t in tilings), default=1.0))

    @torch.no_grad()
    def compress(self, x: Tensor, state: State) -> tuple[Message, State]:
        check_tensor(x, state)
        spec = state.spec
        payload = Message(self, spec, state.step, memory.zeros(self.nbytes(spec), torch.uint8, x.device))
        places, values = self._fields(payload)
        wide, most = kernels.accumulation_dtype(x.dtype), torch.finfo(x.dtype).max
        taken = offset = 0
        for shape, length in zip(spec.shapes, spec.lengths, strict=True):
            tiling = self.tiling(shape)
            coefficients = _tiles(x[offset : offset + length].to(wide), tiling)
            kept = coefficients.abs().topk(self.kept(tiling), dim=1, sorted=False).indices.sort(dim=1).values
            part = slice(taken, taken + kept.numel())
            places[part] = kept.flatten().to(torch.int16)  # wraps: the bits are those of uint16
            largest = coefficients.gather(1, kept).flatten()
            values[part] = torch.where(largest.isfinite(), largest.clamp(-most, most), math.nan)
            taken, offset = part.stop, offset + length
        return payload, state.next()

    def decompress(self, payload: Message) -> Tensor:
        out = memory.empty(payload.spec.numel, payload.spec.dtype, payload.data.device)
        self.sum_into(out, [payload])
        return out

    def sum_into(self, out: Tensor, payloads: Sequence[Message], scale: float = 1.0) -> None:
        """Sums coefficients, and transforms their sum."""
        parts = []
        for payload in payloads:
            check_payload(self, payload, out)
            parts.append(self._fields(payload))
        wide, taken, offset = kernels.accumulation_dtype(out.dtype), 0, 0
        spec = payloads[0].spec
        for shape, length in zip(spec.shapes, spec.lengths, strict=True):
            tiling = self.tiling(shape)
            size, kept = tiling.height * tiling.width, self.kept(tiling)
            coefficients = out.new_zeros(tiling.tiles, size, dtype=wide)
            part = slice(taken, taken + tiling.tiles * kept)
            for places, values in parts:
                at = (places[part].long() & 0xFFFF).view(tiling.tiles, kept)
                if bool((at >= size).any()):
                    raise ValueError(f"a payload of {self} has a place outside of its rectangle of {size} elements")
                coefficients.scatter_add_(1, at, values[part].view(tiling.tiles, kept).to(wide))
            out[offset : offset + length] = _untiled(coefficients, tiling)[:length].mul_(scale)
            taken, offset = part.stop, offset + length

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[tuple[torch.dtype, int], ...]:
        count = self.num_coefficients(spec)
        return (torch.int16, count), (spec.dtype, count)

    def _fields(self, payload: Message) -> tuple[Tensor, Tensor]:
        """Places and values, as views of the message."""
        places, values = fields(payload.data, *self._layout(payload.spec))
        return places, values


@cache
def cosines(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n, n): the orthonormal discrete cosine transform, DCT-II; its transpose is the inverse."""
    angles = torch.outer(torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64) + 0.5)
    matrix = (angles * (math.pi / n)).cos() * math.sqrt(2 / n)
    matrix[0] = math.sqrt(1 / n)
    return matrix.to(dtype).to(device)


def _tiles(x: Tensor, tiling: Tiling) -> Tensor:
    """The coefficients, (tiles, height * width)."""
    rows, columns, height, width = tiling
    padded = x.new_zeros(tiling.down * height, tiling.across * width)
    if x.numel() == rows * columns:
        padded[:rows, :columns] = x.view(rows, columns)
    else:  # the last row of a vector is not full
        padded.view(-1)[: x.numel()] = x
    left, right = cosines(height, x.dtype, x.device), cosines(width, x.dtype, x.device)
    rotated = (padded.view(-1, width) @ right.T).view(tiling.down, height, tiling.across * width)
    tiles = (left @ rotated).view(tiling.down, height, tiling.across, width)
    return tiles.transpose(1, 2).reshape(tiling.tiles, height * width)


def _untiled(coefficients: Tensor, tiling: Tiling) -> Tensor:
    """The elements, in order; behind them zeros, where the last row of a vector is not full."""
    rows, columns, height, width = tiling
    left, right = (cosines(side, coefficients.dtype, coefficients.device) for side in (height, width))
    tiles = coefficients.view(tiling.down, tiling.across, height, width).transpose(1, 2)
    rotated = left.T @ tiles.reshape(tiling.down, height, tiling.across * width)
    padded = (rotated.view(-1, width) @ right).view(tiling.down * height, tiling.across * width)
    return padded[:rows, :columns].flatten()
