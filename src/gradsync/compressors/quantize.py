"""Quantisers: each element becomes a code of at most 8 bits, and each block of elements has a scale.

In docstrings L is the length of a block, or of the longest tensor if that is shorter.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..inputs.settings import NonNegativeInt, PositiveFloat, PositiveInt
from ..kernels import AnyGrid, FloatGrid, Grid, Sections
from ..kernels.grids import MOST_LEVELS, draws, runs
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from .base import (
    Compressor,
    CompressorState,
    CompressorTraits,
    Message,
    P,
    Summand,
    check_payload,
    check_tensor,
    fields,
    fields_nbytes,
)
from .expressions import register
from .law import Biased, Contraction, Law, Unbiased

Summands = Annotated[int, Interval(ge=1, le=MOST_LEVELS[8])]  # ranks that sum int8 codes: each has at least one level


class Quantizer(Compressor[P]):
    """A compressor that rounds each element to a code of few bits, times a scale that each block of elements has.

    The numbers that codes stand for are a `grid`; a block is a run of consecutive elements of one tensor.
    """

    @property
    @abstractmethod
    def grid(self) -> AnyGrid:
        """The numbers that codes stand for, in units of their block's scale, and the length of blocks."""

    @property
    def seed(self) -> int:
        """The seed of random rounding; 0 where rounding is not random."""
        return 0

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[P, CompressorState]:
        payload, _, next_state = self._compress(x, None, state)
        return payload, next_state

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[P, Tensor, CompressorState]:
        payload, left, next_state = self._compress(x, residual, state)
        assert left is not None
        return payload, left, next_state

    def decompress(self, payload: P) -> Tensor:
        out = memory.empty(payload.spec.numel, payload.spec.dtype, payload.data.device)
        self.sum_into(out, [payload])
        return out

    @torch.no_grad()
    def sum_into(self, out: Tensor, payloads: Sequence[P], scale: float = 1.0) -> None:
        if not payloads:
            out.zero_()
            return
        parts = []
        for payload in payloads:
            check_payload(self, payload, out)
            parts.append(self._parts(payload))
        kernels.dequantize(parts, payloads[0].spec.sections, self.grid, out, scale=scale)

    def _compress(
        self, x: Tensor, residual: Tensor | None, state: CompressorState
    ) -> tuple[P, Tensor | None, CompressorState]:
        check_tensor(x, state)
        payload, sections = self._empty(x, state), self._sections(state)
        codes, scales = self._parts(payload)
        self._fill_scales(scales, x, residual, sections)
        left = None if residual is None else memory.empty_like(residual)
        kernels.quantize(x, sections, self.grid, codes, scales, residual=residual, next_residual=left)
        return payload, left, state.next()

    def _sections(self, state: CompressorState) -> Sections:
        return state.sections(self.seed) if draws(self.grid) else state.spec.sections

    def _fill_scales(self, scales: Tensor, x: Tensor, residual: Tensor | None, sections: Sections) -> None:
        """Fills `scales`, (blocks,) float32, where the kernel does not compute them; by default does nothing."""

    @abstractmethod
    def _empty(self, x: Tensor, state: CompressorState) -> P:
        """Returns a payload with room for codes and scales."""

    @abstractmethod
    def _parts(self, payload: P) -> tuple[Tensor, Tensor]:
        """Returns the codes, (nbytes,) uint8, and the scales, (blocks,) float32, as views of the payload."""


class MessageQuantizer(Quantizer[Message]):
    """A quantiser whose scales are each rank's own: a rank sends one message with its scales, then its codes."""

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    def _empty(self, x: Tensor, state: CompressorState) -> Message:
        data = memory.empty(self.nbytes(state.spec), torch.uint8, x.device)
        _, (_, codes) = self._layout(state.spec)
        data[: len(data) - codes].zero_()  # the padding between scales and codes
        return Message(self, state.spec, state.step, data)

    def _parts(self, payload: Message) -> tuple[Tensor, Tensor]:
        scales, codes = fields(payload.data, *self._layout(payload.spec))
        return codes, scales

    def _layout(self, spec: FlatSpec) -> tuple[tuple[torch.dtype, int], ...]:
        grid = self.grid
        scales, codes = kernels.num_scales(spec.sections, grid), kernels.codes_nbytes(spec.sections, grid)
        return (torch.float32, scales), (torch.uint8, codes)


class SharedScaleQuantizer(Quantizer[Summand]):
    """A quantiser whose scales are maxima over the ranks, the same on all: an all-reduce can sum the int8 codes.

    The largest code is 127 // summands at most, so that no sum of `summands` codes overflows. The error bound (`law`)
    is about all ranks together, as if their tensors were one with blocks `summands` times as long: it bounds the sum of
    the squared errors over ranks by the sum of the squared norms over ranks.
    """

    summands: int

    @cached_property
    def traits(self) -> CompressorTraits:
        return CompressorTraits(Summand, agrees=True, most_summands=self.summands)

    def num_agreed(self, spec: FlatSpec) -> int:
        return kernels.num_scales(spec.sections, self.grid)

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        return torch.int8

    @property
    def found(self) -> Grid:
        """The grid with which `observe` finds scales: a block's scale is its largest magnitude.

        Blocks are those of `grid`.
        """
        return Grid(1, block=self.grid.block)

    @torch.no_grad()
    def observe(self, x: Tensor, state: CompressorState) -> Tensor:
        """Returns this rank's largest magnitude in each block of `x`, (blocks,) float32; `x` is (numel,).

        A scheme makes their maxima over the ranks the scales.
        """
        check_tensor(x, state)
        sections = state.spec.sections
        scales = x.new_empty(self.num_agreed(state.spec), dtype=torch.float32)
        kernels.block_scales(x, sections, self.found, scales)
        return scales

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return spec.numel

    def _empty(self, x: Tensor, state: CompressorState) -> Summand:
        if state.agreed is None:
            raise ValueError(
                f"{self} needs scales that the ranks agreed on, got none: set CompressorState.agreed to the maxima of "
                "observe() over the ranks"
            )
        data = memory.empty(state.spec.numel, torch.int8, x.device)
        return Summand(self, state.spec, state.step, data, agreed=state.agreed)

    def _parts(self, payload: Summand) -> tuple[Tensor, Tensor]:
        if payload.agreed is None:
            raise ValueError(f"a payload of {self} comes with the scales that the ranks agreed on, got agreed=None")
        return payload.data.view(torch.uint8), payload.agreed


@register
@dataclass(frozen=True)
class BlockInt(MessageQuantizer):
    """Rounds each element to a multiple of a / s, with a the largest magnitude of its block. (Dettmers, 2016)

    s = 127 for 8 bits, 7 for 4 bits. Rounded to nearest, an element is off by a / (2 s) at most, so |error|^2 / |x|^2
    is at most r / (1 + r) with r = (L - 1) / (4 s^2) for blocks of L elements: a contraction; error feedback helps.
    `stochastic` rounds up with a probability equal to the fraction: unbiased, with E |error|^2 <= omega |x|^2, omega =
    (sqrt(1 + (L - 1) / s^2) - 1) / 2.
    Blocks whose magnitudes are all below s / 3.4e38 count as zero. For blocks: Dettmers et al., 2022.
    Wire: bits / 8 bytes an element, 4 bytes a block.

    Attributes:
        bits: the bits of a code: 8 or 4.
        block: the number of elements that share a scale.
        stochastic: whether rounding is random; False: to nearest.
        seed: the seed of random rounding.
    """

    bits: Literal[8, 4] = 8
    block: PositiveInt = 256
    stochastic: bool = False
    seed: int = 0

    @property
    def grid(self) -> Grid:
        return Grid(MOST_LEVELS[self.bits], self.bits, self.block, stochastic=self.stochastic)

    def law(self, spec: FlatSpec) -> Law:
        return of_largest(_length(spec, self.block), MOST_LEVELS[self.bits], self.stochastic)


@register
@dataclass(frozen=True)
class SharedBlockInt(SharedScaleQuantizer):
    """Rounds each element to an int8 multiple of a / s, with a the largest magnitude of its block on any rank.

    s = 127 // summands, so that an all-reduce can sum the codes of `summands` ranks. Otherwise as `BlockInt` in 8 bits.
    Wire: 1 byte an element in an all-reduce of int8, after an all-reduce of 4 bytes a block (maxima).

    Attributes:
        summands: the most ranks whose codes are summed.
        block: the number of elements that share a scale.
        stochastic: whether rounding is random; False: to nearest.
        seed: the seed of random rounding.
    """

    summands: Summands
    block: PositiveInt = 256
    stochastic: bool = False
    seed: int = 0

    @property
    def grid(self) -> Grid:
        return Grid(127 // self.summands, 8, self.block, "given", self.stochastic)

    def law(self, spec: FlatSpec) -> Law:
        return of_largest(self.summands * _length(spec, self.block), self.grid.levels, self.stochastic)


@register
@dataclass(frozen=True)
class QSGD(MessageQuantizer):
    """Rounds each element at random to a multiple of norm / s, with the norm of its block. (Alistarh et al., 2017)

    s is `levels`; a block has L = `bucket` elements, as the paper calls it. An element is rounded up with a probability
    equal to the fraction: unbiased, with E |error|^2 <= omega |x|^2, where omega = sqrt(L) / s - 1 if sqrt(L) >= 2 s,
    else L / (4 s^2). Exactly, E |error|^2 is (norm / s)^2 times the sum of f (1 - f) over the fractions f. `norm="max"`
    takes the largest magnitude in place of the Euclidean norm, with the error bound of a stochastic `BlockInt`.
    Wire: 2, 4 or 8 bits an element for s of 1, up to 7, up to 127; 4 bytes a block. No Elias codes.

    Attributes:
        levels: s, from 1 to 127.
        bucket: the number of elements that share a norm.
        norm: "l2", the Euclidean norm, or "max", the largest magnitude.
        seed: the seed of random rounding.
    """

    levels: Annotated[int, Interval(ge=1, le=MOST_LEVELS[8])]
    bucket: PositiveInt = 512
    norm: Literal["l2", "max"] = "l2"
    seed: int = 0

    @property
    def grid(self) -> Grid:
        bits = min(bits for bits, most in MOST_LEVELS.items() if self.levels <= most)
        return Grid(self.levels, bits, self.bucket, "norm" if self.norm == "l2" else "max", stochastic=True)

    def law(self, spec: FlatSpec) -> Law:
        length, s = _length(spec, self.bucket), self.levels
        if self.norm == "max":
            return of_largest(length, s, stochastic=True)
        return Unbiased(math.sqrt(length) / s - 1 if length >= 4 * s * s else length / (4 * s * s))


@register
@dataclass(frozen=True)
class TernGrad(MessageQuantizer):
    """Rounds each element at random to -a, 0 or a, with a the largest magnitude of its block. (Wen et al., 2017)

    An element x becomes a or -a with the probability |x| / a: unbiased, with E |error|^2 <= omega |x|^2, omega =
    (sqrt(L) - 1) / 2 for blocks of L elements; exactly, E |error|^2 is the sum of a |x| - x^2. With `clip`, a is at
    most clip times the root mean square of the block, and larger elements count as a: unbiased for the clipped tensor,
    so biased for the tensor. The paper clips at 2.5.
    Wire: 2 bits an element, 4 bytes a block.

    Attributes:
        block: the number of elements that share a scale; 0: a whole tensor. The paper has one scale a tensor.
        clip: the bound of a, in root mean squares of the block; None: no clipping.
        seed: the seed of random rounding.
    """

    block: NonNegativeInt = 0
    clip: PositiveFloat | None = None
    seed: int = 0

    @property
    def grid(self) -> Grid:
        return Grid(1, 2, self.block, "max" if self.clip is None else "given", stochastic=True)

    def law(self, spec: FlatSpec) -> Law:
        return ternary(_length(spec, self.block), self.clip)

    def _fill_scales(self, scales: Tensor, x: Tensor, residual: Tensor | None, sections: Sections) -> None:
        if self.clip is not None:
            find_clipped_scales(scales, x, residual, sections, self.block, self.clip)


@register
@dataclass(frozen=True)
class SharedTernGrad(SharedScaleQuantizer):
    """`TernGrad` with the largest scale over all ranks, so that the sum of int8 codes (-1, 0, 1) decodes to the sum.

    Wire: 1 byte an element in an all-reduce of int8, after an all-reduce of 4 bytes a block (maxima).

    Attributes:
        summands: the most ranks whose codes are summed.
        block: the number of elements that share a scale; 0: a whole tensor.
        clip: the bound of a, in root mean squares of the block; None: no clipping.
        seed: the seed of random rounding.
    """

    summands: Summands = 127
    block: NonNegativeInt = 0
    clip: PositiveFloat | None = None
    seed: int = 0

    @property
    def grid(self) -> Grid:
        return Grid(1, 8, self.block, "given", stochastic=True)

    def law(self, spec: FlatSpec) -> Law:
        return ternary(self.summands * _length(spec, self.block), self.clip)

    @torch.no_grad()
    def observe(self, x: Tensor, state: CompressorState) -> Tensor:
        scales = super().observe(x, state)
        if self.clip is not None:
            find_clipped_scales(scales, x, None, state.spec.sections, self.block, self.clip)
        return scales


@register
@dataclass(frozen=True)
class Natural(MessageQuantizer):
    """Rounds each magnitude at random to one of the two neighbouring powers of two. (Horvath et al., 2019)

    The probability keeps the mean: unbiased, with E |error|^2 <= |x|^2 / 8, reached at 4/3 of a power of two. This
    holds for magnitudes of 2^-109 to 2^16: larger ones count as 2^16, smaller ones as 2^-109 or zero. NaN and infinity
    become NaN.
    Wire: 1 byte an element.

    Attributes:
        seed: the seed of random rounding.
    """

    seed: int = 0

    @property
    def grid(self) -> FloatGrid:
        return FloatGrid("exponent")

    def law(self, spec: FlatSpec) -> Law:
        return Unbiased(1 / 8)


@register
@dataclass(frozen=True)
class Float8(MessageQuantizer):
    """Rounds each element to the nearest 8-bit float times the scale of its block. (Micikevicius et al., 2022)

    The scale maps the largest magnitude of a block to the largest 8-bit float. e4m3 keeps 4 significant bits, e5m2
    keeps 3 in a wider range: the error is at most 2^-4 or 2^-3 of an element; of an element too small for that,
    2^-10 / 448 or 2^-17 / 57344 of the block's largest magnitude.
    Wire: 1 byte an element, 4 bytes a block.

    Attributes:
        format: "e4m3" or "e5m2".
        block: the number of elements that share a scale; 0: a whole tensor.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: NonNegativeInt = 0

    @property
    def grid(self) -> FloatGrid:
        return FloatGrid(self.format, self.block)

    def law(self, spec: FlatSpec) -> Law:
        relative, least = (2.0**-4, 2.0**-10) if self.format == "e4m3" else (2.0**-3, 2.0**-17)
        small = _length(spec, self.block) * (least / self.grid.top) ** 2  # of elements that are rounded to zero
        return Contraction(1 - relative**2 - small / (1 + small))


def of_largest(length: int, levels: int, stochastic: bool) -> Law:
    """Returns the error bound of rounding a block to multiples of a / `levels`, with a the block's largest magnitude.

    The error reaches the bound if all elements but the largest have one value: half of a / levels (rounding to
    nearest), or 1 / (2 (1 + omega)) of it (`stochastic`, with the omega that is returned).

    Args:
        length: the number of elements in a block.
        levels: the largest multiple.
        stochastic: whether elements are rounded up or down at random, so that their mean is right.
    """
    others = (length - 1) / levels**2
    if stochastic:
        return Unbiased((math.sqrt(1 + others) - 1) / 2)
    return Contraction(1 / (1 + others / 4))


def ternary(length: int, clip: float | None) -> Law:
    """Returns TernGrad's error bound for blocks of `length` elements; with a `clip` there is none (`Biased`)."""
    if clip is not None:
        return Biased("unbiased only for the clipped tensor: what clipping cuts off is lost")
    return of_largest(length, 1, stochastic=True)


def find_clipped_scales(
    scales: Tensor, x: Tensor, residual: Tensor | None, sections: Sections, block: int, clip: float
) -> None:
    """Writes the scale of each block: the largest magnitude, or `clip` times the root mean square if that is less.

    Args:
        scales: (blocks,) float32, overwritten.
        x: (numel,) floating.
        residual: (numel,), added to `x` before; None: zero.
        sections: the tensors in `x`, each of which is cut into blocks of its own.
        block: elements of a block; 0: a block is a tensor.
        clip: a factor of the root mean square.
    """
    kernels.block_scales(x, sections, Grid(1, block=block), scales, residual=residual)
    norms = torch.empty_like(scales)
    kernels.block_scales(x, sections, Grid(1, block=block, scale="norm"), norms, residual=residual)
    counts = [torch.full((run.blocks,), float(run.length)) for run in runs(sections, Grid(1, block=block))]
    roots = torch.cat([torch.empty(0), *counts]).sqrt().to(scales.device, non_blocking=True)
    torch.minimum(scales, norms * clip / roots, out=scales)


def _length(spec: FlatSpec, block: int) -> int:
    """Returns the number of elements in the longest block, at least 1; with `block` 0 a block is a tensor."""
    longest = max(spec.lengths, default=0)
    return max(1, min(block or longest, longest))
