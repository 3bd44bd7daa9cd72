"""PowerSGD: gradients as products of two thin factors, which an all-reduce sums (Vogels et al., NeurIPS 2019).

Factors are stored transposed, P as (rank, rows) and Q as (rank, columns): products with a wide matrix then run at the
speed of memory; with (rows, rank) they take two to three times as long. Matrices of one shape that lie evenly spaced in
the bucket, such as the weights of equal layers, are views of the bucket, and are multiplied in one call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, cast

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors import SENT, CompressorState
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..inputs.settings import NonNegativeInt, PositiveInt
from ..tensors import allocator as memory
from ..tensors.bucket import Bucket, FlatSpec, Layout, TensorSpec
from ..tensors.density import DensityProfile
from .base import Scheme, State, Traits
from .compressed import parted
from .dense import even_ranges

RESIDUAL, Q = "residual", "q"  # names in the state: one number for each element, one factor for each segment


@register
@dataclass(frozen=True)
class PowerSGD(Scheme[Tensor]):
    """A low-rank scheme: one power iteration on each matrix in each training step, with a warm start. Not exact.

    Let M be a rank's gradient plus its residual. P is the sum of M Q over the ranks, made orthonormal; the new Q is the
    sum of M^T P; the result is `scale` P Q^T, and the next step begins with the new Q (warm start). So the result is
    the projection of the ranks' sum: n ranks compute what one rank would with the sum, and a sum of rank `rank` arrives
    as it is.

    A tensor of two or more dimensions is a matrix of the first dimension by all others, and is compressed if it has at
    least `min_compression` times as many elements as its factors. Everything else, also a tensor that the plan cuts,
    travels uncompressed in the message of P: there is one all-reduce for P and one for Q.

    Each rank's residual is the part of M that its own factors miss, M - P (M^T P)^T. In the sum over the ranks,
    sent + residual = gradient + former residual; on one rank the residual is never larger than M, as P is orthonormal.
    (The residual of torch's hook, M less the average of what all ranks sent, has the same sum; but then each rank's
    difference from the mean is never sent, and grows like a random walk. The residual here also needs no other rank's
    Q, and is computed while the all-reduce of Q runs.) A column of Q that comes out zero keeps the former values, so
    that a gradient that is zero in one step can be approximated again later.

    In the first `start_step` steps, and in buckets without matrices, gradients travel dense, one half of the bucket in
    each stage. Factors and uncompressed gradients travel in float32, for 16-bit gradients too (float64 for float64).
    Wire: 2(n-1)/n of rank (rows + columns) numbers for each matrix, and of everything uncompressed.

    Attributes:
        rank: the rank of the approximation of each matrix.
        min_compression: the least ratio of a matrix's elements to those of its factors, 1 or more.
        matrices: "tensors": as above. "bucket": the whole bucket is one matrix, as square as possible (torch's
            `batched_powerSGD_hook`): two products a bucket, and factors of about 2 `rank` times the root of its
            elements. But rows then mix unrelated tensors, biases too: far less accurate for the same rank, and Q begins
            anew in every plan with other buckets.
        start_step: the number of first training steps without compression.
        seed: the seed of the first Q, which also depends on the tensor's name.
    """

    rank: PositiveInt = 2
    min_compression: Annotated[float, Interval(ge=1, lt=math.inf)] = 2.0
    matrices: Literal["tensors", "bucket"] = "tensors"
    start_step: NonNegativeInt = 0
    seed: NonNegativeInt = 0

    name = "powersgd"
    traits = Traits(Layout.FLAT, lossy=True, carries_flags=True, depends_on_shapes=True)

    @property
    def title(self) -> str:
        return f"{self.name} of rank {self.rank}" + (" on whole buckets" if self.matrices == "bucket" else "")

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the bucket has a floating-point dtype.

        Raises:
            ValueError: for other dtypes.
        """
        (flat,) = specs
        if not flat.dtype.is_floating_point:
            raise ValueError(f"{self.name} is for floating-point gradients, got {flat}")

    def stages(self, size: int) -> tuple[str, ...]:
        return ("p", "q")

    def init(self, bucket: Bucket, group: Group) -> State:
        spec = bucket.flat_spec
        dtype, parts = kernels.accumulation_dtype(spec.dtype), self.parts_of(spec)
        fresh = FactoredState(spec, group.rank, parts=parts)
        factors = [torch.empty(0, dtype=dtype)] * len(spec.segments)
        seeds = fresh.sections(self.seed, shared=True).seeds
        for run in parts.runs:
            for place in run.places:
                generator = torch.Generator().manual_seed(seeds[place])
                factors[place] = torch.randn(self.rank * run.columns, generator=generator, dtype=dtype)
        residual = torch.zeros(spec.numel, dtype=dtype)
        return {SENT: (replace(fresh, elements={RESIDUAL: residual}, tensors={Q: tuple(factors)}),)}

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        own = cast(FactoredState, state[SENT][0])
        parts, residual = own.parts, own.elements[RESIDUAL].to(x.device)
        values, behind = x[: own.spec.numel], x[own.spec.numel :]
        kept = memory.empty_like(residual)
        torch.add(values, residual, out=kept)  # M, which becomes the next residual by the end of the step
        if not self._compresses(parts, own.step):
            values.copy_(kept)
            left = kept.sub_(values)  # the rounding error of 16-bit gradients
            x.mul_(scale)
            # All-reduce, one half after the other.
            for half in x.split(even_ranges(x.numel(), 2)):
                await group.all_reduce(half)
            return x, {SENT: (own.next(elements={RESIDUAL: left}),)}

        matrices, dense = parts.matrices(kept), parts.dense(kept)
        before = parts.joined(own.tensors[Q], x.device)
        message = memory.empty(self._message_numel(parts) + len(behind), kept.dtype, kept.device)
        p_numel = self.rank * parts.num_rows
        p_sums, others = message[:p_numel], message[p_numel:]
        ps = parts.factors(p_sums, self.rank, of_rows=True)
        for p, q, m in zip(ps, self._qs(parts, before), matrices, strict=True):
            torch.bmm(q, m.mT, out=p)
        torch.cat([*dense, behind.to(kept.dtype)], out=others)
        # All-reduce: P, what is not compressed, and the flags.
        await group.all_reduce(message)
        # QR by reflections: a zero or dependent column becomes one that is orthonormal to the others.
        ps = [torch.linalg.qr(p.mT)[0] for p in ps]
        own_q = torch.empty_like(before)
        for p, q, m in zip(ps, self._qs(parts, own_q), matrices, strict=True):
            torch.bmm(p.mT, m, out=q)
        # All-reduce: Q. This rank's residual, computed meanwhile, needs only its own Q.
        arriving = group.all_reduce(own_q.clone())
        for p, q, m in zip(ps, self._qs(parts, own_q), matrices, strict=True):
            m.baddbmm_(p, q, alpha=-1)
        torch._foreach_zero_(dense)
        others.mul_(scale)
        summed = await arriving

        sums = values if values.dtype is kept.dtype else memory.empty_like(kept)
        for p, q, m in zip(ps, self._qs(parts, summed * scale), parts.matrices(sums), strict=True):
            torch.bmm(p, q, out=m)
        if sums is not values:
            values.copy_(sums)
        torch._foreach_copy_([*parts.dense(values), behind], others.split([*parts.dense_lengths, len(behind)]))
        after = torch.empty_like(summed)
        for q, new, old in zip(*(self._qs(parts, each) for each in (after, summed, before)), strict=True):
            torch.where(new.any(dim=2, keepdim=True), new, old, out=q)
        factors = parts.by_segment(after, self.rank)
        return x, {SENT: (own.next(elements={RESIDUAL: kept}, tensors={Q: factors}),)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        spec, behind = parted(specs)
        n, parts = placement.size, self.parts_of(spec)
        if not self._compresses(parts, step):
            first, second = (float(length * spec.itemsize) for length in even_ranges(spec.numel + behind, 2))
            return (
                Compute("scale", 4 * spec.nbytes),
                Transfer("p", Pattern.ALL_REDUCE, (first,) * n),
                Transfer("q", Pattern.ALL_REDUCE, (second,) * n),
            )
        itemsize = kernels.accumulation_dtype(spec.dtype).itemsize
        numel, p_bytes = itemsize * spec.numel, itemsize * (self._message_numel(parts) + behind)
        q_bytes = itemsize * self.rank * parts.num_columns
        return (
            Compute("low_rank_rows", float(spec.nbytes + 3 * numel + p_bytes)),
            Transfer("p", Pattern.ALL_REDUCE, (float(p_bytes),) * n),
            Compute("low_rank_columns", float(numel + p_bytes + q_bytes)),
            Transfer("q", Pattern.ALL_REDUCE, (float(q_bytes),) * n),
            Compute("low_rank_product", float(2 * numel + spec.nbytes + p_bytes + q_bytes)),
        )

    def unchanged_since(self, step: int) -> int:
        return self.start_step if step >= self.start_step else 0

    def parts_of(self, spec: FlatSpec) -> Parts:
        """Returns which elements of a flat tensor are compressed, as matrices, and which travel uncompressed.

        `spec` has the shapes of the tensors that lie in it.
        """
        by_shape: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (offset, segment) of each matrix, by shape
        for offset, place, rows, columns in self._matrices(spec):
            if rows * columns >= self.min_compression * self.rank * (rows + columns):
                by_shape.setdefault((rows, columns), []).append((offset, place))
        runs = [
            Run(rows, columns, offsets[0], offsets[1] - offsets[0] if len(offsets) > 1 else rows * columns, places)
            for (rows, columns), found in by_shape.items()
            for offsets, places in _evenly_spaced(found)
        ]
        taken = sorted((run.offset + i * run.spacing, run.rows * run.columns) for run in runs for i in range(run.count))
        gaps, end = [], 0
        for offset, numel in taken:
            gaps += [offset - end, numel]
            end = offset + numel
        return Parts(tuple(runs), (*gaps, spec.numel - end), len(spec.segments))

    def _matrices(self, spec: FlatSpec) -> Iterator[tuple[int, int, int, int]]:
        """Yields (offset, segment, rows, columns) of each matrix, whether compression is worth it or not."""
        if self.matrices == "bucket":
            side = max(math.isqrt(spec.numel), 1)
            yield 0, 0, spec.numel // side, side
            return
        offset = 0
        for place, (shape, numel) in enumerate(zip(spec.shapes, spec.lengths, strict=True)):
            if len(shape) > 1 and numel:
                yield offset, place, shape[0], numel // shape[0]
            offset += numel

    def _compresses(self, parts: Parts, step: int) -> bool:
        return step >= self.start_step and bool(parts.runs)

    def _message_numel(self, parts: Parts) -> int:
        """Returns the number of elements of P and all uncompressed gradients, without flags (was a parameter used?)."""
        return self.rank * parts.num_rows + sum(parts.dense_lengths)

    def _qs(self, parts: Parts, flat: Tensor) -> list[Tensor]:
        return parts.factors(flat, self.rank, of_rows=False)


@dataclass(frozen=True)
class Run:
    """Matrices of one shape that lie at equal distances in a flat tensor, so that one strided view has them all.

    Attributes:
        rows, columns: the shape of each matrix.
        offset: the element at which the first matrix begins.
        spacing: the elements from the start of one matrix to the start of the next.
        places: for each matrix its place in the list of tensors (segments) of the flat tensor.
    """

    rows: int
    columns: int
    offset: int  # of the first matrix
    spacing: int  # from the start of one matrix to the start of the next
    places: tuple[int, ...]  # the segment of each matrix

    @property
    def count(self) -> int:
        return len(self.places)


@dataclass(frozen=True)
class Parts:
    """The division of a flat tensor into matrices, which PowerSGD compresses, and sections between, which it does not.

    Matrices of one shape at equal distances form a run. The factors P or Q of all matrices lie in one flat tensor, run
    by run.
    """

    runs: tuple[Run, ...] = ()
    lengths: tuple[int, ...] = ()  # of a dense section, a matrix, a dense section, ...; the last is dense
    num_segments: int = 0

    @cached_property
    def num_rows(self) -> int:
        return sum(run.count * run.rows for run in self.runs)

    @cached_property
    def num_columns(self) -> int:
        return sum(run.count * run.columns for run in self.runs)

    @property
    def dense_lengths(self) -> tuple[int, ...]:
        return self.lengths[::2]

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Returns each run of equal, evenly spaced matrices as a view of `flat`, (numel,): (count, rows, columns)."""
        start = flat.storage_offset()
        return [
            flat.as_strided((run.count, run.rows, run.columns), (run.spacing, run.columns, 1), start + run.offset)
            for run in self.runs
        ]

    def dense(self, flat: Tensor) -> list[Tensor]:
        """Returns the sections of `flat`, (numel,), that are not compressed, as 1-D views; there is at least one.

        Sections may be empty.
        """
        return list(flat.split(self.lengths)[::2])

    def factors(self, flat: Tensor, rank: int, *, of_rows: bool) -> list[Tensor]:
        """Returns the factors of all matrices, one view of `flat`, 1-D, for each run of equal matrices.

        Args:
            flat: all factors P, or all factors Q, one behind the other.
            rank: the rank of the approximation: the columns of P and Q.
            of_rows: whether these are factors P, views of (count, rank, rows); else Q, (count, rank, columns).
        """
        lengths = [run.rows if of_rows else run.columns for run in self.runs]
        numels = [run.count * rank * length for run, length in zip(self.runs, lengths, strict=True)]
        views = zip(flat.split(numels), self.runs, lengths, strict=True)
        return [view.view(run.count, rank, length) for view, run, length in views]

    def joined(self, factors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Joins the factors Q of all matrices on `device`, 1-D, in the order in which `Parts.factors` expects them.

        `factors` has one for each segment (tensor or slice in the bucket), (rank * columns,); those of segments that
        are not compressed are left out.
        """
        return torch.cat([factors[place] for place in self._places]).to(device)

    def by_segment(self, flat: Tensor, rank: int) -> tuple[Tensor, ...]:
        """Returns the factor Q of each segment (tensor or slice in the bucket), a view of `flat`, (rank * columns,).

        It is the inverse of `joined`. A segment that is not compressed has an empty one, (0,).
        """
        factors = [flat[:0]] * self.num_segments
        numels = [rank * run.columns for run in self.runs for _ in run.places]
        for place, factor in zip(self._places, flat.split(numels), strict=True):
            factors[place] = factor
        return tuple(factors)

    @cached_property
    def _places(self) -> list[int]:
        return [place for run in self.runs for place in run.places]


@dataclass(frozen=True)
class FactoredState(CompressorState):
    """A rank's PowerSGD state: its residual, the factor Q of each matrix, and which elements it compresses."""

    parts: Parts = field(default=Parts(), repr=False)


def _evenly_spaced(found: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Divides matrices, (offset, segment) each, into evenly spaced runs; yields (offsets, segments) of each run.

    Each run is the longest that begins with the first matrix left.
    """
    left = dict(found)
    while left:
        first, *others = left
        longest = [first]
        for second in others:
            run = [first]
            while (following := run[-1] + second - first) in left:
                run.append(following)
            longest = max(longest, run, key=len)
        yield longest, tuple(left.pop(offset) for offset in longest)
