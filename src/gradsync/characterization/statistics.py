"""Figures of sparsity for one step: densities, overlaps and skewness of the indices that ranks' gradients touch.

A place is an element of tensors laid end to end, or a row of one tensor; a rank touches a place where its gradient is
not zero. Figures from a sample are estimates with a standard error, for which sampled units (rows as a rule) count as
drawn independently. Definitions are Zen's (Wang et al., OSDI 2025, section 2.1):

    density            d: share of places that are not zero; d^k: after summing k ranks
    overlap ratio      |A and B| / min(|A|, |B|), of the index sets of two ranks
    densification      gamma^k = d^k / d
    skewness ratio     s^n = largest density of n even contiguous partitions / d
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from .footprint import Footprint, Sampling

MOST_PARTITIONS = 128  # as in the paper's figure; n = 2, 4, ... up to this
HISTOGRAM_BINS = 20  # equal bins of [0, 1] for overlap ratios
CHUNK = 1 << 16  # places counted at once


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(Frozen):
    """An estimated figure and its standard error.

    Attributes:
        value: the estimate.
        error: its standard error; 0 if everything was counted.
    """

    value: float
    error: float = 0.0


class Range(Frozen):
    """A figure's mean, least and most over ranks or pairs of ranks.

    Attributes:
        mean, least, most: over ranks, or pairs of ranks.
        error: the standard error of the mean; 0 if everything was counted.
    """

    mean: float
    least: float
    most: float
    error: float = 0.0


class Sparsity(Frozen):
    """The sparsity figures of gradients: densities, also of sums over ranks, overlap of ranks' non-zeros, and skewness.

    They count `size` places: elements, or rows. Overlap, and the ratios of a sum's or a partition's density to that of
    one rank or the whole, are None or empty if all gradients are zero.

    Attributes:
        size: the number of places.
        looked_at: how many places were read on every rank in every step; `size` if all were.
        density: share of non-zero places in one rank's gradient.
        union_density: density of the sum over k ranks, by k; for k below all, a mean over groups of k adjacent ranks.
        densification_ratio: density of the sum over k ranks over that of one rank, by k.
        overlap_ratio: common non-zeros of two ranks over the non-zeros of the one with fewer, over the pairs that both
            have some.
        overlap_histogram: share of pairs of ranks in each of `HISTOGRAM_BINS` bins of that ratio.
        skewness_ratio, union_skewness_ratio: density of the densest of n even partitions over that of the whole, by n,
            for one rank (a mean over the ranks) and for the sum over all ranks.
        shares, union_shares: each partition's share of the non-zeros, for the largest n that is a power of two, for one
            rank and for the sum.
    """

    size: int
    looked_at: int
    density: Range
    union_density: dict[int, Estimate]
    densification_ratio: dict[int, Estimate]
    overlap_ratio: Range | None
    overlap_histogram: tuple[float, ...] = ()
    skewness_ratio: dict[int, Estimate]
    union_skewness_ratio: dict[int, Estimate]
    shares: tuple[float, ...] = ()
    union_shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class TouchedPlaces:
    """The places of one tensor (elements or rows, in a sample of them) where each rank's gradient is not zero."""

    size: int
    run: int  # places in a sampled unit: a row's length for elements, else 1
    sampling: Sampling
    places: Tensor  # (u,) int64, ascending: places that at least one rank touches
    touched: Tensor  # bool (ranks, u): which of `places` each rank touches

    @cached_property
    def units_looked_at(self) -> int:
        units = self.size // self.run
        return units if self.sampling.step == 1 else len(self.sampling.places(units))

    @property
    def weight(self) -> float:
        """The number of elements (or rows) for which each sampled one counts in estimates; 1 without sampling."""
        return self.size / self.run / max(self.units_looked_at, 1)

    def variance(self, terms: Tensor) -> float:
        """Returns the estimated variance, caused by sampling, of the sum of `terms`; 0 if the whole tensor was read.

        Runs of `run` neighbouring elements (a row, as a rule) are sampled as a whole, so terms are first summed in each
        run.

        Args:
            terms: (u,) float64, one number for each of `places`: elements (or rows) that are not zero on some rank.
        """
        if self.sampling.step == 1:
            return 0.0
        _, unit = torch.unique_consecutive(self.places // self.run, return_inverse=True)
        by_unit = torch.bincount(unit, weights=terms) if len(terms) else terms
        spread = float(by_unit.square().sum()) - float(by_unit.sum()) ** 2 / max(self.units_looked_at, 1)
        return max(spread, 0.0) * (1 - 1 / self.sampling.step)


def elements_of(footprints: Sequence[Footprint]) -> TouchedPlaces:
    """Returns which elements of one tensor are non-zero on each rank.

    `footprints`: for each rank, the indices of its gradient's non-zeros.
    """
    first = footprints[0]
    run = first.shape.dim if first.shape.numel else 1
    if all(f.elements is None for f in footprints):  # whole rows: no need to sort their elements
        rows = rows_of(footprints)
        places = (rows.places[:, None] * run + torch.arange(run)).flatten()
        touched = rows.touched.repeat_interleave(run, dim=1) if run > 1 else rows.touched
        return TouchedPlaces(first.shape.numel, run, first.sampling, places, touched)
    return _part(first.shape.numel, run, first.sampling, [f.element_indices() for f in footprints])


def rows_of(footprints: Sequence[Footprint]) -> TouchedPlaces:
    """Returns which rows of one tensor are not all zero on each rank.

    `footprints`: for each rank, the indices of its gradient's non-zeros.
    """
    first = footprints[0]
    return _part(first.shape.units, 1, first.sampling, [f.units for f in footprints])


def _part(size: int, run: int, sampling: Sampling, index_sets: Sequence[Tensor]) -> TouchedPlaces:
    places, inverse = torch.unique(torch.cat(list(index_sets)), return_inverse=True)
    touched = torch.zeros(len(index_sets), len(places), dtype=torch.bool)
    ranks = torch.repeat_interleave(torch.arange(len(index_sets)), torch.tensor([len(s) for s in index_sets]))
    touched[ranks, inverse] = True
    return TouchedPlaces(size, run, sampling, places, touched)


def sparsity_of(parts: Sequence[TouchedPlaces], partitions: int | None) -> Sparsity:
    """Returns the sparsity figures of one training step for several tensors laid end to end.

    Args:
        parts: for each tensor, where each rank's gradient is not zero; all have the same ranks.
        partitions: a number n for skewness ratios beside 2, 4, ... 128. A skewness ratio is the density of the densest
            of n even contiguous partitions over that of the whole.
    """
    size = sum(part.size for part in parts)
    common = _common(parts)
    counts = common.diagonal()
    sampled = any(part.sampling.step > 1 for part in parts)
    unions = {k: [_union(part.touched, k) for part in parts] for k in _powers_and(len(counts))}
    mean = float(counts.mean())
    overlap, histogram = _overlap(parts, common)

    def estimate(terms: Callable[[TouchedPlaces, Tensor], Tensor], k: int, value: float) -> Estimate:
        seen = zip(parts, unions[k], strict=True)
        variance = sum(part.variance(terms(part, union) * part.weight) for part, union in seen) if sampled else 0.0
        return Estimate(value=value, error=math.sqrt(variance))

    totals = {k: sum(float(u.sum()) * p.weight for p, u in zip(parts, us, strict=True)) for k, us in unions.items()}
    union_density = {k: estimate(lambda _, u: u / size, k, total / size) for k, total in totals.items() if size}
    growth = {k: total / mean for k, total in totals.items() if mean > 0}
    shares = _PartitionCounts(parts, size)
    numbers = _partition_numbers(size, partitions)
    finest = max((n for n in numbers if n <= MOST_PARTITIONS and n & (n - 1) == 0), default=1)
    return Sparsity(
        size=size,
        looked_at=sum(part.units_looked_at * part.run for part in parts),
        density=Range(
            mean=mean / size if size else 0.0,
            least=float(counts.min()) / size if size else 0.0,
            most=float(counts.max()) / size if size else 0.0,
            error=union_density[1].error if size else 0.0,
        ),
        union_density=union_density,
        densification_ratio={
            k: estimate(lambda p, u, g=g: (u - g * p.touched.double().mean(dim=0)) / mean, k, g)  # type: ignore[misc]  # mypy infers no lambda with a default
            for k, g in growth.items()
        }
        | ({1: Estimate(value=1.0)} if growth else {}),  # by definition, whatever the rounding
        overlap_ratio=overlap,
        overlap_histogram=histogram,
        skewness_ratio=shares.skewness_ratios(numbers, union=False) if mean > 0 else {},
        union_skewness_ratio=shares.skewness_ratios(numbers, union=True) if mean > 0 else {},
        shares=shares.shares(finest, union=False) if mean > 0 else (),
        union_shares=shares.shares(finest, union=True) if mean > 0 else (),
    )


def _powers_and(ranks: int) -> list[int]:
    """Returns the numbers of ranks for which sums are examined: 1, 2, 4, ... up to `ranks`, and `ranks`."""
    return sorted({2**j for j in range(32) if 2**j <= ranks} | {ranks})


def _union(touched: Tensor, k: int) -> Tensor:
    """Returns for each place the share of groups of k adjacent ranks with a non-zero gradient there, (u,) float64.

    `touched`: (ranks, u), which ranks' gradients are not zero. Ranks after the last full group are not counted.
    """
    groups = len(touched) // k
    grouped = touched[: groups * k].view(groups, k, -1).any(dim=1) if k > 1 else touched
    return grouped.sum(dim=0).double() / groups


def _common(parts: Sequence[TouchedPlaces]) -> Tensor:
    """Returns how many elements (or rows) of all tensors, `parts`, are non-zero on both ranks of each pair.

    The result is (ranks, ranks) float64; counts in a tensor's sample are scaled up to the tensor.
    """
    ranks = len(parts[0].touched)
    common = torch.zeros(ranks, ranks, dtype=torch.float64)
    for part in parts:
        for chunk in part.touched.split(CHUNK, dim=1):
            some = chunk.float()  # sums of fewer than 2^24 ones are exact
            common += (some @ some.T).double() * part.weight
    return common


def _overlap(parts: Sequence[TouchedPlaces], common: Tensor) -> tuple[Range | None, tuple[float, ...]]:
    """Returns the overlap ratio over all pairs of ranks with non-zeros, and the share of pairs in each histogram bin.

    The ratio is a pair's entry in `common`, the number of common non-zeros, over the number of the rank with fewer.
    Without such a pair, returns (None, ()).
    """
    counts = common.diagonal()
    pairs = [(a, b) for a in range(len(counts)) for b in range(a) if min(counts[a], counts[b]) > 0]
    if not pairs:
        return None, ()
    smaller = [a if counts[a] <= counts[b] else b for a, b in pairs]
    overlaps = torch.stack([common[a, b] / counts[s] for (a, b), s in zip(pairs, smaller, strict=True)])
    overlaps = overlaps.clamp(max=1.0)  # sums of weights round
    # The mean's error: the sum over places of what each adds to the pairs' |A and B| - overlap * min(|A|, |B|).
    both, less = torch.zeros_like(common), torch.zeros_like(counts)
    for (a, b), s, overlap in zip(pairs, smaller, overlaps, strict=True):
        both[a, b] += 1 / counts[s] / len(pairs)
        less[s] += overlap / counts[s] / len(pairs)
    variance = 0.0
    for part in parts:
        if part.sampling.step > 1:
            touched = part.touched.double()
            variance += part.variance((((both @ touched) * touched).sum(dim=0) - less @ touched) * part.weight)
    bins = torch.histc(overlaps, HISTOGRAM_BINS, 0.0, 1.0) / len(pairs)
    least, most = float(overlaps.min()), float(overlaps.max())
    ratio = Range(mean=float(overlaps.mean()), least=least, most=most, error=math.sqrt(variance))
    return ratio, tuple(bins.tolist())


def _partition_numbers(size: int, more: int | None) -> list[int]:
    """Returns the numbers of partitions for skewness ratios: 2, 4, ... 128 and `more`, without numbers above `size`."""
    wanted = {2**j for j in range(1, MOST_PARTITIONS.bit_length())} | ({more} if more is not None else set())
    return sorted(n for n in wanted if n <= size)


class _PartitionCounts:
    """Counts non-zero elements (or rows) in each of n even contiguous partitions of all tensors laid end to end."""

    def __init__(self, parts: Sequence[TouchedPlaces], size: int) -> None:
        self._parts, self._size = parts, size
        self._known: dict[tuple[int, bool], Tensor] = {}

    def counts(self, n: int, *, union: bool) -> Tensor:
        """Returns the number of non-zero elements (or rows) in each of n partitions, float64.

        The shape is (ranks, n), or (1, n) with `union`, for elements that are non-zero on any rank.
        """
        if (n, union) not in self._known:
            halves = 2 * n in {k for k, of_union in self._known if of_union is union}
            # floor(2 i n / size / 2) = floor(i n / size): of 2 n even partitions, two neighbours are one of n.
            finer = self.counts(2 * n, union=union) if halves else None
            self._known[n, union] = self._count(n, union=union) if finer is None else finer[:, ::2] + finer[:, 1::2]
        return self._known[n, union]

    def _count(self, n: int, *, union: bool) -> Tensor:
        total = torch.zeros(1 if union else len(self._parts[0].touched), n, dtype=torch.float64)
        start, starts = 0, torch.tensor(self._starts(n))
        for part in self._parts:
            cuts = torch.searchsorted(part.places, starts - start).tolist()
            for partition, (first, last) in enumerate(pairwise(cuts)):
                inside = torch.tensor([last - first]) if union else part.touched[:, first:last].sum(dim=1)
                total[:, partition] += inside * part.weight
            start += part.size
        return total

    def _starts(self, n: int) -> list[int]:
        """Returns where each of n partitions starts, and the end; place i is in partition floor(i n / size)."""
        return [-(-i * self._size // n) for i in range(n + 1)]

    def shares(self, n: int, *, union: bool) -> tuple[float, ...]:
        """Returns each partition's share of the non-zero elements: counted for each rank, or once for their `union`."""
        total = self.counts(n, union=union).sum(dim=0)
        return tuple((total / total.sum()).tolist())

    def skewness_ratios(self, numbers: Sequence[int], *, union: bool) -> dict[int, Estimate]:
        """Returns, for each n in `numbers`, the density of the densest of n partitions over the density of all tensors.

        `numbers` ascend. The ratio is a mean over ranks; with `union`, elements count that are non-zero on any rank.
        """
        found = {n: self.skewness(n, union=union) for n in reversed(numbers)}  # fine ones first: coarse ones are sums
        return {n: found[n] for n in numbers}

    def skewness(self, n: int, *, union: bool) -> Estimate:
        """Returns the largest density of n partitions over that of all tensors, as a mean over ranks with non-zeros.

        With `union`, elements count that are non-zero on any rank. Partitions differ in size by at most one element
        or row; each density is over the partition's own size.
        """
        sizes = torch.tensor(self._starts(n), dtype=torch.float64).diff()
        counts = self.counts(n, union=union)
        counts = counts[counts.sum(dim=1) > 0]
        density, partition = (counts / sizes).max(dim=1)
        ratios = density / counts.sum(dim=1) * self._size
        ratio = float(ratios.mean())
        step = max(part.sampling.step for part in self._parts)
        if step == 1:
            return Estimate(value=ratio)
        # The standard error of one partition's share is binomial over units; ranks do not count as independent.
        inside = counts.gather(1, partition[:, None]).squeeze(1)
        share = inside / counts.sum(dim=1)
        looked_at = inside / max(part.weight * part.run for part in self._parts)
        errors = ratios * ((1 - share) / looked_at * (1 - 1 / step)).sqrt()
        return Estimate(value=ratio, error=float(errors.mean()))


def full_sparsity(size: int, ranks: int, partitions: int | None) -> Sparsity:
    """Returns the sparsity figures, all 1, of a gradient without zeros, so that it need not be counted.

    Args:
        size: the number of its elements, or rows.
        ranks: the number of ranks.
        partitions: a number n for skewness ratios beside 2, 4, ... 128.
    """
    one = Estimate(value=1.0)
    everywhere = Range(mean=1.0, least=1.0, most=1.0)
    ks, numbers = _powers_and(ranks), _partition_numbers(size, partitions)
    return Sparsity(
        size=size,
        looked_at=0,
        density=everywhere,
        union_density=dict.fromkeys(ks, one),
        densification_ratio=dict.fromkeys(ks, one),
        overlap_ratio=everywhere if ranks > 1 else None,
        skewness_ratio=dict.fromkeys(numbers, one),
        union_skewness_ratio=dict.fromkeys(numbers, one),
    )


def mean_over_steps(steps: Sequence[Sparsity]) -> Sparsity:
    """Returns the mean of each sparsity figure over training steps; `least` and `most` are over all steps.

    Standard errors are averaged: all steps read the same sample, so more steps do not shrink them.
    """
    if len(steps) == 1:
        return steps[0]
    overlaps = [s.overlap_ratio for s in steps if s.overlap_ratio is not None]
    density = _mean_range([s.density for s in steps])
    assert density is not None
    return Sparsity(
        size=round(sum(s.size for s in steps) / len(steps)),
        looked_at=round(sum(s.looked_at for s in steps) / len(steps)),
        density=density,
        union_density=_mean_estimates(s.union_density for s in steps),
        densification_ratio=_mean_estimates(s.densification_ratio for s in steps),
        overlap_ratio=_mean_range(overlaps),
        overlap_histogram=_mean_shares(s.overlap_histogram for s in steps),
        skewness_ratio=_mean_estimates(s.skewness_ratio for s in steps),
        union_skewness_ratio=_mean_estimates(s.union_skewness_ratio for s in steps),
        shares=_mean_shares(s.shares for s in steps),
        union_shares=_mean_shares(s.union_shares for s in steps),
    )


def _mean_range(ranges: Sequence[Range]) -> Range | None:
    if not ranges:
        return None
    return Range(
        mean=math.fsum(r.mean for r in ranges) / len(ranges),
        least=min(r.least for r in ranges),
        most=max(r.most for r in ranges),
        error=math.fsum(r.error for r in ranges) / len(ranges),
    )


def _mean_estimates(steps: Iterable[Mapping[int, Estimate]]) -> dict[int, Estimate]:
    known = list(steps)
    keys = sorted({key for step in known for key in step})
    result = {}
    for key in keys:
        found = [step[key] for step in known if key in step]
        error = math.fsum(e.error for e in found) / len(found)
        result[key] = Estimate(value=math.fsum(e.value for e in found) / len(found), error=error)
    return result


def _mean_shares(steps: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    known = [step for step in steps if step]
    return tuple(math.fsum(column) / len(known) for column in zip(*known, strict=True)) if known else ()
