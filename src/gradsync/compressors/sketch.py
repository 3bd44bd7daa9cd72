"""Sketches: small summaries of a tensor (`CountSketch`) or of its largest elements (`SketchML`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..devices import streams
from ..inputs.settings import PositiveInt, Ratio
from ..kernels.draws import most_lanes
from ..tensors import allocator as memory
from ..tensors.bucket import FlatSpec
from ..tensors.index_formats import Positions, smallest
from ..tensors.sparse import SparseVector
from .base import (
    Compressor,
    CompressorState,
    CompressorTraits,
    Field,
    SparseMessage,
    Sparsifier,
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
from .law import Biased, Contraction, Law
from .sparsify import TopK


@register
@dataclass(frozen=True)
class SketchML(Sparsifier):
    """Keeps the largest elements of each tensor, rounded to the means of quantile buckets. (Jiang et al., 2018)

    The k elements that TopK(ratio) selects are sorted by value, and the negative ones and the others are each cut into
    quantile buckets of about equal size, min(buckets, k) together. An element is sent as the number of its quantile
    bucket and decoded as the mean of that bucket: signs and order stay. The paper's MinMax sketch of the numbers is
    left out: a number is one byte.
    |error|^2 <= (1 - delta) |x|^2 with delta = (k / numel) / (size of the largest quantile bucket), a size of at most
    ceil(2 k / buckets); much better if neighbouring values are similar. Wrap it in ErrorFeedback.
    Wire: a byte for each kept element, float32 means (float64 for float64), and positions as TopK.

    Attributes:
        ratio: the share of a tensor's elements that is sent, in (0, 1].
        buckets: the number of quantile buckets of a tensor, from 2 to 256.
    """

    ratio: Ratio
    buckets: Annotated[int, Interval(ge=2, le=256)] = 256

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return TopK(self.ratio).num_kept(spec, step)

    def law(self, spec: FlatSpec) -> Law:
        kept = [(TopK(self.ratio).kept(n), n) for n in spec.lengths if n]
        return Contraction(min((k / n / -(-2 * k // min(self.buckets, k)) for k, n in kept), default=1.0))

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[SparseMessage, CompressorState]:
        check_tensor(x, state)
        largest = TopK(self.ratio)
        sparse = largest.elements(largest.compress(x, state)[0])
        data = memory.zeros(self.nbytes(state.spec), torch.uint8, x.device)
        payload = SparseMessage(self, state.spec, state.step, data)
        positions, means, numbers = self._parts(payload)
        positions.encode(sparse.indices)
        counts = self._counts(state.spec)
        values, rooms, offset = sparse.values.split(counts), numbers.split(counts), 0
        for count, places in alike(counts).items():
            found, number = _bucketed(stacked(values, places), min(self.buckets, count))
            means[offset : offset + found.numel()] = found.flatten()
            unstack(number, rooms, places)
            offset += found.numel()
        return payload, state.next()

    def elements(self, payload: SparseMessage) -> SparseVector:
        check_payload(self, payload)
        positions, means, numbers = self._parts(payload)
        values = torch.empty(len(numbers), dtype=payload.spec.dtype, device=means.device)
        counts, offset = self._counts(payload.spec), 0
        parts, rooms = numbers.split(counts), values.split(counts)
        for count, places in alike(counts).items():
            bucket, buckets = stacked(parts, places).long(), min(self.buckets, count)
            expected = f"a payload of {self} has quantile buckets in [0, {buckets})"
            streams.require((bucket < buckets).all(), expected, bucket.max)
            found = means[offset : offset + len(places) * buckets].view(len(places), buckets)
            unstack(found.gather(1, bucket), rooms, places)
            offset += found.numel()
        return SparseVector(positions.decode(), values, payload.spec.numel)

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return fields_nbytes(*self._layout(spec))

    @by_spec
    def _counts(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(map(TopK(self.ratio).kept, spec.lengths))

    @by_spec
    def _layout(self, spec: FlatSpec) -> tuple[Field, ...]:
        count = self.num_kept(spec)
        positions = int(smallest(count, spec.numel).nbytes(count, spec.numel))
        means = kernels.accumulation_dtype(spec.dtype), sum(min(self.buckets, count) for count in self._counts(spec))
        return (torch.uint8, positions), means, (torch.uint8, count)

    def _parts(self, payload: SparseMessage) -> tuple[Positions, Tensor, Tensor]:
        """Returns positions, means (1-D) and quantile bucket numbers, (kept,) uint8, as views of the message."""
        spec, count = payload.spec, self.num_kept(payload.spec)
        packed, means, numbers = fields(payload.data, *self._layout(spec))
        return Positions(packed, count, spec.numel, smallest(count, spec.numel)), means, numbers


def _bucketed(values: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Cuts each row into quantile buckets; returns their means, (rows, buckets) float64, and numbers, (rows, count).

    `values`: (rows, count) floating. Means ascend; numbers, int64, say in which quantile bucket each value is.
    """
    rows, count = values.shape
    ascending, order = values.double().sort(dim=1, stable=True)
    ranks = torch.arange(count, device=values.device)
    negative = (ascending < 0).sum(dim=1, keepdim=True)
    other = count - negative
    below = (negative * buckets + count // 2) // max(1, count)  # buckets of the negative ones
    below = below.clamp(min=(negative > 0).long(), max=buckets - (other > 0).long())
    lower = ranks * below // negative.clamp(min=1)
    upper = below + (ranks - negative) * (buckets - below) // other.clamp(min=1)
    bucket = torch.where(ranks < negative, lower, upper)
    sums = torch.zeros(rows, buckets, dtype=torch.float64, device=values.device).scatter_add_(1, bucket, ascending)
    sizes = torch.zeros_like(sums).scatter_add_(1, bucket, torch.ones_like(ascending))
    return sums / sizes.clamp(min=1), torch.empty_like(order).scatter_(1, order, bucket)


@register
@dataclass(frozen=True)
class CountSketch(Compressor[Summand]):
    """Sums many elements in each counter of a sketch, which an all-reduce sums. (FetchSGD: Rothchild et al., 2020)

    A sketch has `rows` rows of counters. In each row a hash, by the tensor's name and the step, maps every element to a
    counter and a sign, and the counter sums its elements times their signs. Up to 32 neighbours are hashed together
    (`kernels.count_sketch`): they never share a counter with each other, but collide with as many others side by side.
    The estimate of an element is the median over the rows of its counters times its signs. The share `keep` of each
    tensor with the largest estimates is decoded as these, the other elements as zero.
    Counters are linear, decoding is not: the sum of the counters of all ranks decodes to the large elements of the sum
    of tensors, not to the sum of the decoded tensors. The error is small only with a probability that grows with
    `rows`, and relative to the norm of the elements that are not large. ErrorFeedback refuses it, as no rank knows what
    was left out of its own tensor (FetchSGD keeps a residual in counters, which is not implemented here).
    NaN spoils all elements that share a counter with it in any row, infinity those that do in most rows.
    Wire: float32 counters (float64 for float64), together `ratio` of the elements. A row of 4 counters or more is
    rounded to a multiple of the largest power of two that is at most its square root and 32; a row has at least one.

    Attributes:
        ratio: counters for each element, over all rows, in (0, 1].
        keep: the share of a tensor's elements that are decoded as non-zero, in (0, 1].
        rows: the number of rows of counters.
        seed: the seed of the hashes, the same on all ranks.
    """

    traits = CompressorTraits(Summand, feeds_back=False)

    ratio: Ratio
    keep: Ratio
    rows: PositiveInt = 5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % 2 == 0:
            raise ValueError(f"CountSketch.rows must be odd, got {self.rows}")

    def columns(self, numel: int) -> int:
        """Returns the number of counters in one of the sketch's `rows`, for a tensor of `numel` elements."""
        if numel == 0:
            return 0
        columns = max(1, round(self.ratio * numel / self.rows))
        lanes = most_lanes(columns)
        return round(columns / lanes) * lanes

    def num_kept(self, spec: FlatSpec, step: int = 0) -> int:
        return TopK(self.keep).num_kept(spec, step)

    def number_dtype(self, spec: FlatSpec) -> torch.dtype:
        return kernels.accumulation_dtype(spec.dtype)

    def law(self, spec: FlatSpec) -> Law:
        return Biased("estimates are near only with a probability, relative to the norm of all elements")

    @torch.no_grad()
    def compress(self, x: Tensor, state: CompressorState) -> tuple[Summand, CompressorState]:
        check_tensor(x, state)
        sections, columns = state.sections(self.seed, shared=True), self._columns(state.spec)
        counters = memory.empty(self.rows * sum(columns), self.number_dtype(state.spec), x.device)
        kernels.count_sketch(x, sections, columns, counters, rows=self.rows)
        return Summand(self, state.spec, state.step, counters), state.next()

    def decompress(self, payload: Summand) -> Tensor:
        check_payload(self, payload)
        spec, keep = payload.spec, TopK(self.keep)
        sections = CompressorState(spec, step=payload.step).sections(self.seed, shared=True)
        estimates = memory.empty(spec.numel, spec.dtype, payload.data.device)
        kernels.sketch_estimates(payload.data, sections, self._columns(spec), estimates, rows=self.rows)
        largest = torch.empty(keep.num_kept(spec), dtype=torch.int64, device=estimates.device)
        values = estimates.new_empty(len(largest))
        kernels.top_k(estimates, largest, values, sections=sections, counts=[keep.kept(n) for n in spec.lengths])
        return estimates.zero_().index_copy_(0, largest, values)

    def sum_into(self, out: Tensor, payloads: Sequence[Summand], scale: float = 1.0) -> None:
        """Overwrites `out`, (numel,) floating, by `scale` times an estimate of the sum of the tensors in the payloads.

        Counters are added first and decoded once, so that the large elements of the sum are found.

        Raises:
            ValueError: for a payload of another compressor, or if `out` has another number of elements.
        """
        for payload in payloads:
            check_payload(self, payload, out)
        total = torch.empty_like(payloads[0].data)
        kernels.sum_parts([payload.data for payload in payloads], total)
        summed = Summand(self, payloads[0].spec.with_dtype(total.dtype), payloads[0].step, total)
        out.copy_(self.decompress(summed).mul_(scale))

    def nbytes(self, spec: FlatSpec, step: int = 0) -> int:
        return self.rows * sum(map(self.columns, spec.lengths)) * self.number_dtype(spec).itemsize

    @by_spec
    def _columns(self, spec: FlatSpec) -> tuple[int, ...]:
        return tuple(map(self.columns, spec.lengths))
