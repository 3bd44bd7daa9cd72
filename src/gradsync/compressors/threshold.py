"""Sparsifiers that send the elements above a threshold: how many depends on the data, up to a fixed capacity."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..devices import host
from ..inputs.settings import Ratio
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.sparse import SparseVector, index_dtype
from .base import (
    SPARSE_TRAITS,
    CompressorState,
    CompressorTraits,
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
from .expressions import register
from .law import Absolute, Biased, Law
from .sparsify import packed_layout, packed_positions, share_of

MOST_CORRECTIONS = 3  # how often GaussianK corrects its threshold (Shi et al., 2019)


class Thresholded(Sparsifier):
    """Base class of compressors that send the elements above a threshold, of each tensor at most the `most` largest."""

    @property
    def traits(self) -> CompressorTraits:
        return replace(SPARSE_TRAITS, waits_for_device=True)

    @abstractmethod
    def most(self, numel: int) -> int:
        """Returns how many elements of a tensor with `numel` elements are sent at most.

        Messages always have room for as many.
        """

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
        """Returns the message of the elements of x + residual above the thresholds; `left` gets the next residual.

        `x`, `residual` and `left`: (numel,). `thresholds`: (segments,), in the accumulation dtype.
        """
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
    """Keeps elements with a magnitude above `value`, of each tensor at most the share `most_ratio`. (Strom, 2015)

    A message has room for max(1, round(most_ratio * numel)) elements of a tensor. If more are above `value`, the
    largest are sent, and the others stay in the residual, to be sent later, however large. Otherwise the error of an
    element is at most `value`; most_ratio=1 always suffices. NaN and infinity are sent. Wrap it in ErrorFeedback. (See
    also Dryden et al., 2016.)
    Wire: 8 bytes, and values and positions of as many elements as there is room for, used or not, so that no rank needs
    to send its size.

    Attributes:
        value: the threshold, in the unit of the tensor; 0 or more.
        most_ratio: the capacity of a message, as a share of each tensor's elements, in (0, 1].
    """

    value: Annotated[float, Interval(ge=0, lt=math.inf)]
    most_ratio: Ratio = 0.1

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, follows_scale=self.value == 0)

    def most(self, numel: int) -> int:
        return share_of(self.most_ratio, numel)

    def law(self, spec: FlatSpec) -> Law:
        if all(self.most(length) == length for length in spec.lengths):
            return Absolute(self.value)
        return Biased("more elements may be above the threshold than fit: then errors are larger than the threshold")

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
    """Keeps about the `ratio` largest elements of each tensor, by a threshold for normal data. (Shi et al., 2019)

    The threshold is |mean| + z * standard deviation, with z the normal quantile of 1 - ratio / 2. With k as in TopK, it
    is halved if fewer than 2k/3 elements are above it, and raised by half if more than 4k/3 are, three times at most.
    Then the k' <= 4k/3 largest elements above it are sent: |error|^2 <= (1 - k' / numel) |x|^2. k' may be 0: for zeros,
    or if the last correction went too far. The residual holds what is not sent, so wrap it in ErrorFeedback. NaN and
    infinity are sent first. On CPUs TopK is exact and takes fewer passes.
    Wire: 8 bytes, and values and positions of 4k/3 elements, used or not.

    Attributes:
        ratio: the share of a tensor's elements to aim at, in (0, 1].
    """

    ratio: Ratio

    def most(self, numel: int) -> int:
        return min(4 * share_of(self.ratio, numel) // 3, numel)

    def law(self, spec: FlatSpec) -> Law:
        return Biased("a contraction by the share of elements above the threshold, which may be 0")

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[SparseMessage, CompressorState]:
        check_tensor(x, state)
        return self._message(x, self.thresholds(x, state.spec), state), state.next()

    def thresholds(self, x: Tensor, spec: FlatSpec) -> Tensor:
        """Returns the threshold of each tensor in the flat `x`, (numel,): (tensors,) float32, or float64 for float64.

        `spec` has the shapes of the tensors, or slices of them (segments).
        """
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
        thresholds.nan_to_num_(nan=0.0)  # so the largest elements are sent: NaN and infinity
        wanted = host.numbers([share_of(self.ratio, length) for length in spec.lengths], x.device)
        counts = torch.empty_like(wanted)
        for _ in range(MOST_CORRECTIONS):
            kernels.count_above(x, thresholds, counts, sections=spec.sections)
            thresholds *= torch.where(3 * counts < 2 * wanted, 0.5, torch.where(3 * counts > 4 * wanted, 1.5, 1.0))
        return thresholds
