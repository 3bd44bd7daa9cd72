"""The figures of one step, from which places each rank touches: those of Zen (Wang et al., OSDI 2025, section 2.1).

Places are the elements of tensors laid end to end, or the rows of one. From samples of them, figures are estimates with
a standard error each: of a sum over the sampled units, rows as a rule, taken as drawn independently.

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
HISTOGRAM_BINS = 20  # of overlap ratios, which lie in [0, 1]
CHUNK = 1 << 16  # places counted at once


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(Frozen):
    """A figure and its standard error: 0 where everything was counted."""

    value: float
    error: float = 0.0


class Range(Frozen):
    """A figure over ranks, or over pairs of ranks; `error` is the standard error of the mean."""

    mean: float
    least: float
    most: float
    error: float = 0.0


class Sparsity(Frozen):
    """Of `size` places laid out one after the other. What is a ratio to nothing (no place is touched) is left out."""

    size: int
    looked_at: int  # places, on every rank in every step; `size`: all
    density: Range
    union_density: dict[int, Estimate]  # d^k by k: 2^j and the number of ranks; mean over groups of k adjacent ranks
    densification_ratio: dict[int, Estimate]  # gamma^k by k
    overlap_ratio: Range | None  # over pairs of ranks that both touch something
    overlap_histogram: tuple[float, ...] = ()  # share of pairs by overlap ratio, in equal bins of [0, 1]
    skewness_ratio: dict[int, Estimate]  # s^n by n, of one rank: mean over the ranks
    union_skewness_ratio: dict[int, Estimate]  # of the sum over all ranks
    shares: tuple[float, ...] = ()  # of the finest partitions 2^j, in what one rank touches
    union_shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class TouchedPlaces:
    """Which places, elements or rows, of one tensor the ranks touch, among those looked at."""

    size: int
    run: int  # places of a sampled unit
    sampling: Sampling
    places: Tensor  # (u,) int64 ascending: what any rank touches
    touched: Tensor  # bool (ranks, u)

    @cached_property
    def units_looked_at(self) -> int:
        units = self.size // self.run
        return units if self.sampling.step == 1 else len(self.sampling.places(units))

    @property
    def weight(self) -> float:
        """Places that one place looked at stands for."""
        return self.size / self.run / max(self.units_looked_at, 1)

    def variance(self, terms: Tensor) -> float:
        """Of the sum of `terms`, (u,) double, over the places looked at, as an estimate; 0 where all were.

        Units are drawn, and their places come along: what varies is the sum of a unit.
        """
        if self.sampling.step == 1:
            return 0.0
        _, unit = torch.unique_consecutive(self.places // self.run, return_inverse=True)
        by_unit = torch.bincount(unit, weights=terms) if len(terms) else terms
        spread = float(by_unit.square().sum()) - float(by_unit.sum()) ** 2 / max(self.units_looked_at, 1)
        return max(spread, 0.0) * (1 - 1 / self.sampling.step)


def elements_of(footprints: Sequence[Footprint]) -> TouchedPlaces:
    """All ranks' elements of one tensor."""
    first = footprints[0]
    run = first.shape.dim if first.shape.numel else 1
    if all(f.elements is None for f in footprints):  # whole rows: no need to sort their elements
        rows = rows_of(footprints)
        places = (rows.places[:, None] * run + torch.arange(run)).flatten()
        touched = rows.touched.repeat_interleave(run, dim=1) if run > 1 else rows.touched
        return TouchedPlaces(first.shape.numel, run, first.sampling, places, touched)
    return _part(first.shape.numel, run, first.sampling, [f.element_indices() for f in footprints])


def rows_of(footprints: Sequence[Footprint]) -> TouchedPlaces:
    """All ranks' rows of one tensor."""
    first = footprints[0]
    return _part(first.shape.units, 1, first.sampling, [f.units for f in footprints])


def _part(size: int, run: int, sampling: Sampling, index_sets: Sequence[Tensor]) -> TouchedPlaces:
    places, inverse = torch.unique(torch.cat(list(index_sets)), return_inverse=True)
    touched = torch.zeros(len(index_sets), len(places), dtype=torch.bool)
    ranks = torch.repeat_interleave(torch.arange(len(index_sets)), torch.tensor([len(s) for s in index_sets]))
    touched[ranks, inverse] = True
    return TouchedPlaces(size, run, sampling, places, touched)


def sparsity_of(parts: Sequence[TouchedPlaces], partitions: int | None) -> Sparsity:
    """Of parts laid end to end."""
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
    """1, 2, 4, ... up to `ranks`, and `ranks`."""
    return sorted({2**j for j in range(32) if 2**j <= ranks} | {ranks})


def _union(touched: Tensor, k: int) -> Tensor:
    """(u,) double: the share of the groups of k adjacent ranks that touch each place; ranks left over are left out."""
    groups = len(touched) // k
    grouped = touched[: groups * k].view(groups, k, -1).any(dim=1) if k > 1 else touched
    return grouped.sum(dim=0).double() / groups


def _common(parts: Sequence[TouchedPlaces]) -> Tensor:
    """(ranks, ranks) double: how many places two ranks both touch, estimated where only some were looked at."""
    ranks = len(parts[0].touched)
    common = torch.zeros(ranks, ranks, dtype=torch.float64)
    for part in parts:
        for chunk in part.touched.split(CHUNK, dim=1):
            some = chunk.float()  # sums of fewer than 2^24 ones are exact
            common += (some @ some.T).double() * part.weight
    return common


def _overlap(parts: Sequence[TouchedPlaces], common: Tensor) -> tuple[Range | None, tuple[float, ...]]:
    """Over all pairs of ranks that both touch something; and the histogram."""
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
    """2, 4, ... 128 and what the caller asks for; no more partitions than places."""
    wanted = {2**j for j in range(1, MOST_PARTITIONS.bit_length())} | ({more} if more is not None else set())
    return sorted(n for n in wanted if n <= size)


class _PartitionCounts:
    """How what is touched is spread over n even contiguous partitions of all parts laid end to end."""

    def __init__(self, parts: Sequence[TouchedPlaces], size: int) -> None:
        self._parts, self._size = parts, size
        self._known: dict[tuple[int, bool], Tensor] = {}

    def counts(self, n: int, *, union: bool) -> Tensor:
        """(ranks, n) double, or (1, n) of the union."""
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
        """Where partitions start, and the end: place i is in partition floor(i n / size)."""
        return [-(-i * self._size // n) for i in range(n + 1)]

    def shares(self, n: int, *, union: bool) -> tuple[float, ...]:
        """Of each partition in what all ranks touch, each rank's counted by itself."""
        total = self.counts(n, union=union).sum(dim=0)
        return tuple((total / total.sum()).tolist())

    def skewness_ratios(self, numbers: Sequence[int], *, union: bool) -> dict[int, Estimate]:
        """By number of partitions, ascending as `numbers` are."""
        found = {n: self.skewness(n, union=union) for n in reversed(numbers)}  # fine ones first: coarse ones are sums
        return {n: found[n] for n in numbers}

    def skewness(self, n: int, *, union: bool) -> Estimate:
        """Mean over the ranks that touch something; the density of a partition is over its own number of places."""
        sizes = torch.tensor(self._starts(n), dtype=torch.float64).diff()
        counts = self.counts(n, union=union)
        counts = counts[counts.sum(dim=1) > 0]
        density, partition = (counts / sizes).max(dim=1)
        ratios = density / counts.sum(dim=1) * self._size
        ratio = float(ratios.mean())
        step = max(part.sampling.step for part in self._parts)
        if step == 1:
            return Estimate(value=ratio)
        # Of the share of one partition, binomial over units: the ranks are not taken as independent.
        inside = counts.gather(1, partition[:, None]).squeeze(1)
        share = inside / counts.sum(dim=1)
        looked_at = inside / max(part.weight * part.run for part in self._parts)
        errors = ratios * ((1 - share) / looked_at * (1 - 1 / step)).sqrt()
        return Estimate(value=ratio, error=float(errors.mean()))


def full_sparsity(size: int, ranks: int, partitions: int | None) -> Sparsity:
    """Of a tensor without zeros on any rank."""
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
    """Means of all figures (least and most: over all steps). The sample is the same in all, so errors do not shrink."""
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
