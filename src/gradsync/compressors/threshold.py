"""Sparsifiers that send what is above a threshold: how much that is depends on the data, up to a fixed capacity."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.sparse import SparseVector, index_dtype
from .base import (
    CompressorState,
    Field,
    SparseMessage,
    Sparsifier,
    alike,
    by_spec,
    check_payload,
    check_tensor,
    fields,
    fields_nbytes,
    stacked,
)
from .expressions import Ratio, register
from .law import Absolute, Biased, Law
from .sparsify import packed_layout, packed_positions, share_of

MOST_CORRECTIONS = 3  # of the threshold of Gaussian-k with error feedback (Shi et al., 2019)


class Thresholded(Sparsifier):
    """Sends what is above a threshold of each tensor; what does not fit its capacity, the smallest, is not sent."""

    @abstractmethod
    def most(self, numel: int) -> int:
        """The most elements that are sent of so many."""

    def elements(self, payload: SparseMessage) -> SparseVector:
        check_payload(self, payload)
        spec, most = payload.spec, self.num_kept(payload.spec)
        header, packed, values = fields(payload.data, *self._layout(spec))
        count = int(header)  # the host must know: it decides what there is to be decoded
        if not 0 <= count <= most:
            raise ValueError(f"a payload of {spec.numel} elements by {self} has at most {most} of them, got {count}")
        return SparseVector(packed_positions(packed, most, spec.numel, count).decode(), values[:count], spec.numel)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[Field, ...]:
        return (torch.int64, 1), *packed_layout(sum(self._counts(spec)), spec.numel, spec.dtype)

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return self._layout(spec)[2][1]

    @by_spec
    def _counts(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(map(self.most, spec.lengths))

    def _message(
        self,
        x: Tensor,
        thresholds: Tensor,
        state: CompressorState,
        residual: Tensor | None = None,
        left: Tensor | None = None,
    ) -> SparseMessage:
        """Of what is above the thresholds, one a tensor, in `x` or x + residual."""
        spec = state.spec
        data = memory.zeros(self.nbytes(spec), torch.uint8, x.device)
        header, packed, values = fields(data, *self._layout(spec))
        indices = memory.empty(len(values), index_dtype(spec.numel), x.device)
        count = kernels.select_above(
            x,
            thresholds,
            indices,
            values,
            sections=spec.sections,
            counts=self._counts(spec),
            residual=residual,
            next_residual=left,
        )
        header.fill_(count)
        packed_positions(packed, len(values), spec.numel, count).encode(indices[:count])
        values[count:] = 0
        return SparseMessage(self, spec, state.step, data)


@register
@dataclass(frozen=True)
class Threshold(Thresholded):
    """Keeps the elements whose magnitude is above `value`, of each tensor at most the `most_ratio` largest.

    NaN and infinity are sent. The error of an element is at most `value`, unless more are above it than the capacity,
    max(1, round(most_ratio * numel)), has room for: the others then stay in the residual, however large. A capacity of
    all (1) always has room. Wrap it in ErrorFeedback. (Strom, 2015; Dryden et al., 2016)
    Wire: 8 bytes, and values and positions of the full capacity, used or not: all ranks know the size without asking.
    """

    value: Annotated[float, Interval(ge=0, lt=math.inf)]  # what is not above it stays
    most_ratio: Ratio = 0.1  # capacity

    def most(self, numel: int) -> int:
        return share_of(self.most_ratio, numel)

    def law(self, spec: FlatSpec) -> Law:
        if all(self.most(length) == length for length in spec.lengths):
            return Absolute(self.value)
        return Biased("above the threshold are at times more than fit: then the error may be larger than it")

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[SparseMessage, CompressorState]:
        check_tensor(x, state)
        return self._message(x, self._thresholds(x, state), state), state.next()

    @torch.no_grad()
    def compress_with_feedback(
        self, x: Tensor, residual: Tensor, state: CompressorState
    ) -> tuple[SparseMessage, Tensor, CompressorState]:
        check_tensor(x, state)
        left = memory.empty_like(residual)
        return self._message(x, self._thresholds(x, state), state, residual, left), left, state.next()

    def _thresholds(self, x: Tensor, state: CompressorState) -> Tensor:
        dtype = kernels.accumulation_dtype(x.dtype)
        return torch.full((len(state.spec.lengths),), self.value, dtype=dtype, device=x.device)


@register
@dataclass(frozen=True)
class GaussianK(Thresholded):
    """Keeps about the `ratio` largest elements of each tensor, as if they were normal. (Shi et al., 2019)

    The threshold is |mean| + z * standard deviation, z the normal quantile of 1 - ratio / 2. With k as of TopK it is
    halved where fewer than 2k/3 are above, and raised by half where more than 4k/3 are, three times at most. Then the
    k' <= 4k/3 largest above it are sent: a contraction by k' / numel, with the k' that is found. It may be 0, for zeros
    or where the last correction was too much; what is not sent is in the residual, so wrap it in ErrorFeedback. In
    tensors with NaN or infinity these are sent first. For CPUs TopK is exact and takes fewer passes.
    Wire: 8 bytes, and values and positions of 4k/3 elements, used or not.
    """

    ratio: Ratio  # of a tensor, aimed at

    def most(self, numel: int) -> int:
        return min(4 * share_of(self.ratio, numel) // 3, numel)

    def law(self, spec: FlatSpec) -> Law:
        return Biased("a contraction by the share that is above the threshold, which may be none of a tensor")

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[SparseMessage, CompressorState]:
        check_tensor(x, state)
        return self._message(x, self.thresholds(x, state.spec), state), state.next()

    def thresholds(self, x: Tensor, spec: FlatSpec) -> Tensor:
        """Of each tensor, (segments,), in the accumulation dtype."""
        dtype, quantile = kernels.accumulation_dtype(x.dtype), -NormalDist().inv_cdf(self.ratio / 2)
        thresholds = torch.zeros(len(spec.lengths), dtype=dtype, device=x.device)
        parts = x.split(spec.lengths)
        for length, places in alike(spec.lengths).items():
            if length:
                rows = stacked(parts, places).to(dtype)
                mean = rows.mean(dim=1, keepdim=True)
                centred = torch.sub(rows, mean, out=memory.empty(rows.numel(), dtype, x.device).view_as(rows))
                deviation = torch.linalg.vector_norm(centred, dim=1) / length**0.5
                thresholds[places] = mean[:, 0].abs() + quantile * deviation
        thresholds.nan_to_num_(nan=0.0)  # nothing is known of it: the largest are sent, and those are NaN and infinity
        wanted = torch.tensor([share_of(self.ratio, length) for length in spec.lengths], device=x.device)
        counts = torch.empty_like(wanted)
        for _ in range(MOST_CORRECTIONS):
            kernels.count_above(x, thresholds, counts, sections=spec.sections)
            factors = torch.ones_like(thresholds)
            factors[3 * counts < 2 * wanted] = 0.5
            factors[3 * counts > 4 * wanted] = 1.5
            thresholds *= factors
        return thresholds
