"""The density of sparse gradients, alone and summed over ranks, in the terms of Zen (OSDI 2025, section 2).

Sparse gradients are counted exactly. Dense ones are sampled: an embedding with dense gradients, tied or not, has rows
of zeros, dead units have columns of zeros, and nothing announces them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import kernels
from .bucket import TensorSpec

SAMPLES = 8192  # rows and elements sampled in a dense gradient: a density of 1 % is found to within a tenth of it
FEWEST_SAMPLED = 1 << 16  # elements; a smaller tensor gains nothing from a sparse exchange
FEWEST_HITS = 20  # from so many hits in a sample on, the overlap of ranks is estimated
PARTITIONS = 1024  # the resolution of skew
MOST_FOUND = 0.5  # density up to which a dense gradient may be worth a sparse exchange


@dataclass(frozen=True)
class DensityProfile:
    """The number of non-zero rows in one rank's gradient (rows that it touches), and its growth in sums over ranks.

    In the profile of a tensor seen element by element, the elements are the rows.

    Attributes:
        num_rows: the number of rows, zero or not.
        rows: distinct rows that one rank touches, a mean over the ranks.
        densification: the densification ratio gamma^k, by k: the density of the sum over k ranks over that of one rank.
        pattern: a name that tables with the same non-zero rows on every rank share; "": not known.
        most_rows: the most rows that any rank touches; 0: not known.
        shares: the shares of one rank's non-zero rows in even contiguous partitions; (): taken as even.
        union_shares: the same in the union over all ranks, which has less skew.
        blocks: profiles of a flat tensor in blocks, by their length in elements.
    """

    num_rows: int
    rows: float
    densification: Mapping[int, float] = field(default_factory=dict)
    pattern: str = ""
    most_rows: float = 0.0
    shares: tuple[float, ...] = ()
    union_shares: tuple[float, ...] = ()
    blocks: Mapping[int, DensityProfile] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """The share of rows that are non-zero in one rank's gradient, in [0, 1]."""
        return self.rows / self.num_rows if self.num_rows else 0.0

    def may_have_rows_of(self, other: DensityProfile) -> bool:
        """Whether the non-zero rows of this table and of the `other` may be the same ones.

        They may be if both have equally many and, unless that is 0, an equal `pattern` or one that is not known. A
        `pattern` is a name that tables share if their non-zero rows are the same on every rank.
        """
        unknown = not (self.pattern and other.pattern)
        return self.rows == other.rows and (unknown or self.pattern == other.pattern or self.rows == 0)

    def share(self, start: int, stop: int, ranks: int) -> float:
        """Returns which share of the non-zero rows of a sum over `ranks` ranks lies in rows [start, stop), in [0, 1].

        It is measured for one rank and for all; in between it is interpolated by the logarithm of the number of ranks.
        """
        everything = max(self.num_rows, 1)
        begin, end = start / everything, stop / everything
        one, everybody = _share(self.shares, begin, end), _share(self.union_shares, begin, end)
        most = max(self.densification, default=1)
        weight = min(math.log(ranks) / math.log(most), 1.0) if ranks > 1 and most > 1 else 0.0
        return one * (1 - weight) + everybody * weight

    def in_blocks(self, length: int) -> DensityProfile:
        """Returns the profile of a flat tensor whose rows are blocks of `length` consecutive elements each.

        Unless such blocks were measured, the non-zero elements are assumed to be spread evenly.
        """
        if length == 1 or length in self.blocks:
            return self.blocks.get(length, self)
        blocks = -(-self.num_rows // length)

        def touched(rows: float) -> float:
            return float(blocks * (1 - (1 - rows / self.num_rows) ** length)) if self.num_rows else 0.0

        rows = touched(self.rows)
        growth = {k: touched(self.union_rows(k)) / rows for k in self.densification} if rows else {}
        return DensityProfile(blocks, rows, growth, shares=self.shares, union_shares=self.union_shares)

    def of_sums(self, ranks: int) -> DensityProfile:
        """Returns the profile of gradients that were already summed over `ranks` ranks each, as inside a node.

        Planners use it for what nodes then exchange with each other.
        """
        rows, most = self.union_rows(ranks), max(self.densification, default=1)
        counts = {most / ranks, *(2**j for j in range(1, 32) if ranks * 2**j < most)}
        growth = {int(k): self.union_rows(int(k) * ranks) / rows for k in counts if k == int(k) > 1 and rows}
        blocks = {length: profile.of_sums(ranks) for length, profile in self.blocks.items()}
        most_rows = rows * max(self.most_rows / self.rows, 1.0) if self.rows else 0.0
        return replace(self, rows=rows, densification=growth, most_rows=most_rows, blocks=blocks)

    def of_range(self, start: int, stop: int) -> DensityProfile:
        """Returns the profile of rows [start, stop) as a table of their own, assumed to be filled evenly."""
        length = stop - start
        rows = min(self.rows * self.share(start, stop, 1), float(length))
        growth = {k: min(ratio, length / rows) for k, ratio in self.densification.items() if rows}
        blocks = {size: of.of_range(start // size, -(-stop // size)) for size, of in self.blocks.items()}
        return DensityProfile(length, rows, growth, self.pattern, blocks=blocks)

    def union_rows(self, ranks: int) -> float:
        """Returns the number of non-zero rows in the sum over `ranks` ranks: measured, or interpolated by a power law.

        If sums were not measured, ranks count as independent, and non-zero rows as spread evenly, which overstates the
        number for skewed data.
        """
        if ranks <= 1 or self.rows == 0:
            return self.rows
        if ranks in self.densification:
            return self.rows * float(self.densification[ranks])
        if not self.densification:
            return self.num_rows * float(1.0 - (1.0 - self.density) ** ranks)
        nearest = min(self.densification, key=lambda k: abs(math.log(k / ranks)))
        if nearest <= 1:
            return float(min(self.rows * ranks, self.num_rows))
        grown = self.densification[nearest]  # 0 where values cancelled out, which those of fewer ranks need not do
        exponent = math.log(grown) / math.log(nearest) if grown > 0 else 0.0
        return float(min(self.rows * ranks**exponent, self.num_rows))


@dataclass(frozen=True)
class ParameterProfile:
    """A parameter's shape, and its gradient's layout, density and place in the order of readiness.

    It is what the first training steps showed; planners get the same profiles on every rank.

    Attributes:
        name: the parameter's name.
        tensor: its shape and dtype.
        sparse: whether some rank's gradient has the sparse layout.
        density: the density of its rows; None before a measurement, and if measuring does not pay.
        position: the place in the order in which gradients become ready, from 0; equal before a measurement.
        elements: the density of its elements, where a dense gradient was sampled; else None.
    """

    name: str
    tensor: TensorSpec
    sparse: bool
    density: DensityProfile | None = None
    position: int = 0
    elements: DensityProfile | None = None

    @property
    def found(self) -> bool:
        """Whether a gradient of dense layout was measured to have at most half of its rows or elements non-zero."""
        return not self.sparse and any(d is not None and d.density <= MOST_FOUND for d in (self.density, self.elements))


def _share(shares: Sequence[float], start: float, stop: float) -> float:
    """Returns the share of non-zero rows that lies in [start, stop) of a table whose rows are scaled to [0, 1].

    `shares` are those of even contiguous partitions of the table; without any the rows are assumed to be spread evenly.
    """
    low, high = min(start, 1.0), min(stop, 1.0)
    if not shares:
        return high - low
    overlaps = (min(high * len(shares), i + 1) - max(low * len(shares), i) for i in range(len(shares)))
    return sum(share * max(overlap, 0.0) for share, overlap in zip(shares, overlaps, strict=True))


def partition_shares(rows: Tensor, num_rows: int) -> tuple[float, ...]:
    """Returns which share of the indices `rows` lies in each of up to `PARTITIONS` even partitions of [0, num_rows).

    `rows`: sorted distinct indices, (rows,) int64; those out of range are left out.
    """
    partitions = min(PARTITIONS, num_rows)
    rows = rows[(rows >= 0) & (rows < num_rows)]  # a scheme will refuse indices out of range
    if not len(rows):
        return ()
    counts = torch.bincount(rows * partitions // num_rows, minlength=partitions)
    return tuple((counts.double() / len(rows)).tolist())


def profile_rows(index_lists: Sequence[Tensor], num_rows: int) -> DensityProfile:
    """Returns the exact density profile of one step's table with `num_rows` rows.

    `index_lists`: for each rank the indices of its non-zero rows, (indices,) int64, in any order, repeats allowed.
    """
    unique = [torch.unique(indices) for indices in index_lists]
    rows = sum(u.numel() for u in unique) / max(len(unique), 1)
    densification: dict[int, float] = {}
    for k in sorted({2**j for j in range(1, 32) if 2**j <= len(unique)} | {len(unique)}):
        if k > 1 and rows > 0:
            densification[k] = torch.unique(torch.cat(unique[:k])).numel() / rows
    everything = torch.cat(unique) if unique else torch.empty(0, dtype=torch.int64)
    return DensityProfile(
        num_rows,
        rows,
        densification,
        most_rows=float(max((u.numel() for u in unique), default=0)),
        shares=partition_shares(everything, num_rows),
        union_shares=partition_shares(torch.unique(everything), num_rows),
    )


def profile_tables(tables: Sequence[tuple[int, Sequence[Tensor]]]) -> tuple[DensityProfile, ...]:
    """Returns the exact density profiles of several tables in one step, each given as (num_rows, row indices by rank).

    Row indices are (indices,) int64. Tables in which each rank lists equal rows in equal order get an equal `pattern`:
    the index of the first of these tables, as text.
    """
    profiles: list[DensityProfile] = []
    for position, (num_rows, lists) in enumerate(tables):
        first = next(
            (
                p
                for p, (other_rows, others) in enumerate(tables[:position])
                if other_rows == num_rows and all(map(torch.equal, lists, others))
            ),
            position,
        )
        profiles.append(replace(profile_rows(lists, num_rows), pattern=str(first)))
    return tuple(profiles)


def joined(profiles: Sequence[DensityProfile]) -> DensityProfile:
    """Returns the density profile of several tensors laid one after the other, from the profile of each.

    It does not say how the non-zero rows are spread over the tensor (`shares`).
    """
    rows = sum(p.rows for p in profiles)
    ranks = {k for p in profiles for k in p.densification}
    growth = {k: sum(p.union_rows(k) for p in profiles) / rows for k in sorted(ranks) if rows > 0}
    return DensityProfile(sum(p.num_rows for p in profiles), rows, growth)


@dataclass(frozen=True)
class ZeroSample:
    """A sample of a dense gradient: whether sampled rows and elements are non-zero, and how many of all are non-zero.

    All ranks sample the same indices. `num_rows` and `num_elements` count non-zero rows and elements exactly. But a
    gradient that is mostly non-zero in the sample counts as non-zero throughout, which saves counting.
    """

    rows: Tensor  # bool (rows_sampled(spec),)
    elements: Tensor  # bool (min(SAMPLES, numel),)
    num_rows: int
    num_elements: int

    @classmethod
    def of(cls, gradient: Tensor) -> ZeroSample:
        """Returns the sample of a dense gradient of any shape but 0-D.

        A gradient that is mostly non-zero, or not contiguous, counts as non-zero throughout.
        """
        spec = TensorSpec.of(gradient)
        if not gradient.is_contiguous():  # as in channels-last convolutions: taken as full, which saves a copy
            return cls.full(spec)
        elements = gradient.view(-1)[sample_places(spec.numel, gradient.device)] != 0
        if float(elements.float().mean()) > MOST_FOUND:
            return cls.full(spec)
        table = gradient.detach().view(spec.num_rows, spec.dim)
        rows = (table[sample_places(spec.num_rows, gradient.device)] != 0).any(dim=1)[: rows_sampled(spec)]
        return cls(rows.cpu(), elements.cpu(), kernels.nonzero_rows(table).count, int(table.count_nonzero()))

    @classmethod
    def full(cls, spec: TensorSpec) -> ZeroSample:
        """Returns the sample that stands for a gradient of this shape without any zeros."""
        rows, elements = torch.ones(rows_sampled(spec)), torch.ones(min(SAMPLES, spec.numel))
        return cls(rows.bool(), elements.bool(), spec.num_rows if spec.shape else 1, spec.numel)

    @classmethod
    def unused(cls, spec: TensorSpec) -> ZeroSample:
        """Returns the sample for a parameter without a gradient on this rank: nothing in it is non-zero."""
        return cls(torch.zeros(rows_sampled(spec)).bool(), torch.zeros(min(SAMPLES, spec.numel)).bool(), 0, 0)


def rows_sampled(spec: TensorSpec) -> int:
    """Returns how many rows of a tensor of this shape are sampled for zeros; 0 if each row is a single element."""
    return min(SAMPLES, spec.num_rows) if len(spec.shape) > 1 and spec.dim > 1 else 0


def sample_places(size: int, device: torch.device) -> Tensor:
    """Returns the indices in [0, size) that are sampled for zeros, ascending, the same on all ranks.

    They are (min(SAMPLES, size),) int64 on `device`, drawn at random by a seed that is `size`.
    """
    if size <= SAMPLES:
        return torch.arange(size, device=device)
    generator = torch.Generator().manual_seed(size)
    return torch.randint(size, (SAMPLES,), generator=generator).sort().values.to(device)


def profile_sample(hits: Tensor, counts: Tensor, size: int) -> DensityProfile | None:
    """Returns the density profile of `size` rows (or elements) from the ranks' samples.

    The rows of sums over ranks are estimated from the sampled ones, if enough are non-zero; else ranks count as
    independent.

    Args:
        hits: whether each sampled row is non-zero, (ranks, samples) bool.
        counts: the number of non-zero rows that each rank counted, (ranks,).
        size: the number of all rows.

    Returns:
        The profile; None if no rank counted any. Such a gradient of zeros does not predict the next step: a
        zero-initialised layer behind the parameter gives one in the first step.
    """
    rows, mean_hits = float(counts.double().mean()), float(hits.sum()) / len(hits)
    if rows == 0:
        return None
    ranks = sorted({2**j for j in range(1, 32) if 2**j <= len(hits)} | ({len(hits)} - {1}))
    known = ranks if mean_hits > 0 and (mean_hits >= FEWEST_HITS or hits.shape[1] == size) else []
    growth = {k: float(hits[:k].any(dim=0).sum()) / mean_hits for k in known}
    return DensityProfile(size, rows, growth, most_rows=float(counts.max()))


def denser(a: DensityProfile | None, b: DensityProfile | None) -> DensityProfile | None:
    """Returns the denser of two profiles of one tensor; if one is None (not known), the other one, if any.

    The denser one is kept because a gradient that was full once may be full again.
    """
    if a is None or b is None:
        return a or b
    return a if a.rows >= b.rows else b
