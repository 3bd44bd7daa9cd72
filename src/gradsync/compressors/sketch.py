"""Sketches: summaries of a tensor, or of its largest elements, that are smaller than what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
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
from .expressions import PositiveInt, Ratio, register
from .law import Biased, Contraction, Law
from .sparsify import TopK


@register
@dataclass(frozen=True)
class SketchML(Sparsifier):
    """The largest elements of each tensor, each as the mean of a quantile bucket of them. (Jiang et al., 2018)

    Of the k elements that TopK(ratio) takes of a tensor, the negative ones and the others are each cut into buckets of
    about as many neighbours in value, min(buckets, k) together. An element is told by its bucket, and decodes to the
    bucket's mean: the sign stays, and so does the order. What the paper adds, a MinMax sketch of the bucket numbers, is
    not here: a number is a byte as it is.
    A contraction by k / elements over the largest bucket's size, at most ceil(2 k / buckets); much better where
    neighbours are alike. Wrap it in ErrorFeedback.
    Wire: a byte an element, float32 means (float64 for float64), and positions as of TopK.
    """

    ratio: Ratio  # kept share
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
            if bool((bucket >= buckets).any()):
                raise ValueError(f"a payload of {self} names a bucket that is none of {buckets}")
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
        """Positions, means and bucket numbers, as views of the message."""
        spec, count = payload.spec, self.num_kept(payload.spec)
        packed, means, numbers = fields(payload.data, *self._layout(spec))
        return Positions(packed, count, spec.numel, smallest(count, spec.numel)), means, numbers


def _bucketed(values: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
    """Of each row: its buckets' means, ascending, float64, and int64: of each value, which bucket it is in."""
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
    """Counters that each stand for many elements, summed by an all-reduce. (FetchSGD: Rothchild et al., 2020)

    Each of `rows` hashes, by the tensor's name and the step, gives every element a counter of its row and a sign; the
    counter adds up its elements with their signs. Up to 32 neighbours move together (`kernels.count_sketch`): they are
    never added to each other, but meet as many others side by side. An element's estimate is the median over the rows
    of its counters with its signs, and the `keep` largest estimates of a tensor are what comes back, the others zero.
    Counters are linear, what they decode to is not: the sum of the counters of all ranks decodes to what is large in
    the sum of the tensors, not to the sum of what each would decode to. The error is small only with a probability
    that grows with `rows`, and relative to the norm of what is not large. Error feedback as of one rank is not for it:
    what comes back is of the sum (FetchSGD keeps its residual in counters, which is not here).
    NaN reaches the elements that share a counter with it in any row, infinity those that do in most.
    Wire: float32 counters (float64 for float64), together `ratio` of the elements, a row of 4 and more rounded to a
    multiple of a power of two, up to 32, that is at most its root; at least one a row.
    """

    traits = CompressorTraits(Summand, feeds_back=False)

    ratio: Ratio  # counters for each element
    keep: Ratio  # elements that are kept
    rows: PositiveInt = 5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % 2 == 0:
            raise ValueError(f"CountSketch.rows must be odd, got {self.rows}")

    def columns(self, numel: int) -> int:
        """Counters of a row: a number with a power of two as divisor, by which neighbours move together."""
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
        return Biased("estimates are near with a probability only, relative to the norm of all elements")

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
        """Decodes the sum of the counters."""
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
