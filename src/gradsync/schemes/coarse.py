"""Coarse-grained sparse communication: whole chunks of a bucket, the same on all ranks, summed densely.

GradientFlow (Sun et al., 2019) publishes the idea: chunks of 32 Ki elements, the ranks agree on those whose gradients
have the largest L1 norms together, and all-reduce these alone. So no position travels, and messages do not grow with
the number of ranks, as those of element-wise sparsifiers do. When norms are exchanged, and what becomes of chunks that
are not sent, is not published; here it is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from .. import kernels, memory
from ..bucket import Bucket, Layout, TensorSpec
from ..cluster import Placement
from ..comm import Group
from ..compressors import SENT
from ..compressors import State as CompressorState
from ..density import DensityProfile
from ..expressions import register
from ..kernels import Sections
from ..steps import Compute, Pattern, Step, Transfer
from .base import Scheme, State
from .compressed import parted
from .dense import AllReduce
from .precision import HalfPrecision

RESIDUAL, SCORES, AGES = "residual", "scores", "ages"  # what is kept: for each element, and for each chunk
CHOICES = ("late", "exact")


@register
@dataclass(frozen=True)
class CoarseGrained(Scheme[Tensor]):
    """A share `ratio` of a bucket's chunks, those with the largest summed norms, by `scheme`. Not exact.

    With p a rank's gradient and what it has not sent yet: the ranks send p of the chosen chunks and keep that of all
    others (error feedback), so sent + residual = gradient + residual before, to the bit. The result is `scale` times
    the sum of p in chosen chunks and 0 elsewhere. A chunk's score is the L1 norm of p, summed over the ranks.

    `choice="late"`: the scores are those of the last step, of what was left when it had sent. They ride behind its
    chunks as their mean magnitudes, so that no rank ever waits for a choice. (Of p before it was sent they would choose
    again what was just emptied, while other chunks starve.) The first step, which has none, takes the first chunks.
    `choice="exact"`: the scores are this step's, for an all-reduce of one number a chunk ahead of the chunks.

    `scheme` gets the chunks end to end, with the flags behind them: one that is exact and keeps no state, or
    `HalfPrecision` of such a one. Then each rank's sums are scaled by a power of two before they are rounded, and what
    rounding takes away is kept. (What the sum itself loses in 16 bits is lost.)

    `history`: of what is kept, the share that is added to the next gradient; 0: it is dropped. Below 1 it is lost by
    and by, and nothing is older than it should be. `max_age`: chunks that were not sent for so many steps go first, the
    oldest of them, in up to half of the places; then none waits longer than max_age + 2 / ratio steps.
    `warmup`: the ratios of the first steps, `steps_per_ratio` with each; 1 is dense.

    Chunks lie across the borders of tensors. State goes with the tensors: under other buckets residuals stay, and
    scores begin anew. Of one chunk, or with a ratio of 1, it is `scheme` with error feedback for its rounding.
    Wire: that of `scheme` for max(1, ratio x chunks) chunks, the last one filled up with zeros, and one number a chunk.
    """

    scheme: Scheme[Any] = AllReduce()
    ratio: float = 0.1
    chunk: int = 1 << 15
    choice: str = "late"  # or "exact"
    history: float = 1.0
    max_age: int | None = None
    warmup: tuple[float, ...] = ()
    steps_per_ratio: int = 0

    layout = Layout.FLAT
    exact = False

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if not isinstance(self.scheme, Scheme):
            raise ValueError(f"{name}.scheme must be a scheme, got {self.scheme!r}")
        carrier = self._carrier
        if carrier.layout is not Layout.FLAT or not carrier.exact:
            raise ValueError(
                f"{name}.scheme must be exact and for flat buckets, or HalfPrecision of such a one, got {self.scheme!r}"
            )
        if not isinstance(self.warmup, list | tuple):
            raise ValueError(f"{name}.warmup must be ratios, got {self.warmup!r}")
        object.__setattr__(self, "warmup", tuple(self.warmup))  # a list, if a plan was read from a file
        for ratio in (self.ratio, *self.warmup):
            if type(ratio) not in (int, float) or not 0 < ratio <= 1:
                raise ValueError(f"{name}.ratio, and those of warmup, must be in (0, 1], got {ratio!r}")
        if self.chunk < 1:
            raise ValueError(f"{name}.chunk must be at least 1 element, got {self.chunk!r}")
        if self.choice not in CHOICES:
            raise ValueError(f"{name}.choice must be one of {', '.join(CHOICES)}, got {self.choice!r}")
        if not 0 <= self.history <= 1:
            raise ValueError(f"{name}.history must be in [0, 1], got {self.history}")
        if self.max_age is not None and self.max_age < 1:
            raise ValueError(f"{name}.max_age must be at least 1 step or None, got {self.max_age}")
        if bool(self.warmup) != (self.steps_per_ratio > 0) or self.steps_per_ratio < 0:
            raise ValueError(
                f"{name}.warmup needs steps_per_ratio of at least 1, and only it does; got {self.warmup} and "
                f"{self.steps_per_ratio}"
            )

    @property
    def title(self) -> str:
        return f"{self.scheme.title} of {self.ratio:g} of chunks"

    @property
    def carries_flags(self) -> bool:
        return True

    @property
    def _carrier(self) -> Scheme[Any]:
        """Who has the message."""
        return self.scheme.inner if isinstance(self.scheme, HalfPrecision) else self.scheme

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """
        Raises:
            ValueError: for element types that have no norms, and what `scheme` does not take.
        """
        (flat,) = specs
        if not flat.dtype.is_floating_point:
            raise ValueError(f"{self.name} is for floating-point gradients, got {flat}")
        self._carrier.check(self._message(specs, 0))

    def stages(self, size: int) -> tuple[str, ...]:
        stages = self._carrier.stages(size)
        return ("scores", *stages) if self.choice == "exact" else stages

    def init(self, bucket: Bucket, group: Group) -> State:
        """
        Raises:
            ValueError: for a `scheme` that keeps state.
        """
        if self._carrier.init(bucket, group):
            raise ValueError(
                f"{self.name} cannot carry its chunks by {self.scheme.title}, which keeps state of its own"
            )
        spec = bucket.flat_spec
        residual = torch.zeros(spec.numel, dtype=kernels.accumulation_dtype(spec.dtype))
        chunks = self.num_chunks(spec.numel)
        kept = {AGES: torch.zeros(chunks)} if self.max_age is not None else {}
        if self.choice == "late":
            kept[SCORES] = torch.zeros(chunks)
        tensors = {name: _of_bucket(numbers, len(spec.segments)) for name, numbers in kept.items()}
        return {SENT: (CompressorState(spec, group.rank, elements={RESIDUAL: residual}, tensors=tensors),)}

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        own = cast(CompressorState, state[SENT][0])
        numel = own.spec.numel
        values, behind = x[:numel], x[numel:]
        chunks, count = self.num_chunks(numel), self.num_chosen(numel, own.step)
        kept = {name: tensors[0].to(x.device) for name, tensors in own.tensors.items()}
        residual = own.elements[RESIDUAL].to(x.device)
        if self.history < 1:
            residual = residual * self.history
        left = memory.empty_like(residual)
        norms = torch.empty(chunks, dtype=torch.float64, device=x.device)
        wire, factors = self._wire(x.dtype), self._factors(x.dtype, scale)
        late = self.choice == "late"
        riding = chunks if late else 0
        message = memory.empty(count * self.chunk + riding + len(behind), wire, x.device)
        payload, scores, flags = message.split([count * self.chunk, riding, len(behind)])

        if late:
            chosen = self._chosen(kept[SCORES], kept.get(AGES), count)
            kernels.take_chunks(values, residual, chosen, payload, left, norms, chunk=self.chunk, scale=factors.before)
        else:
            nothing = torch.empty(0, dtype=torch.int64, device=x.device)
            kernels.take_chunks(values, residual, nothing, payload[:0], left, norms, chunk=self.chunk)
            # Agree: on the chunks with the largest norms.
            summed_norms = await group.all_reduce(norms.to(torch.float32))
            chosen = self._chosen(summed_norms, kept.get(AGES), count)
            _take_more(left, chosen, payload, self.chunk, factors.before)
        if late:
            scores.copy_(norms.mul_(factors.before / self.chunk))
        flags.copy_(behind)
        # Exchange: the chosen chunks.
        summed, _ = await self._carrier.synchronize(message, {}, group, factors.through)
        sums, scores, flags = summed.split([count * self.chunk, riding, len(behind)])
        for place, number in enumerate(chosen.tolist()):
            part = values[number * self.chunk : (number + 1) * self.chunk]
            part.copy_(sums[place * self.chunk :][: len(part)])
            if factors.after != 1:
                part.mul_(factors.after)
        behind.copy_(flags)

        following: dict[str, Tensor] = {}
        if late:
            # Nothing is left of a dense step: where its sums were large, the next gradients will be.
            following[SCORES] = scores.float() if count < chunks else self._norms(values)
        if AGES in kept:
            following[AGES] = (kept[AGES] + 1).index_fill_(0, chosen, 0)
        tensors = {name: _of_bucket(numbers, len(own.spec.segments)) for name, numbers in following.items()}
        return x, {SENT: (own.next(elements={RESIDUAL: left}, tensors=tensors),)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        spec, _ = parted(specs)
        (message,) = self._message(specs, round)
        wide = kernels.accumulation_dtype(spec.dtype).itemsize
        sent = self.num_chosen(spec.numel, round) * self.chunk
        passed = float(2 * spec.nbytes + 2 * wide * spec.numel)  # the gradient, and zeros in its place; the residuals
        taken, put = float(message.itemsize * sent), float((message.itemsize + spec.itemsize) * sent)
        carried = self._carrier.steps((message,), (), placement, round)
        if self.choice == "late":
            return Compute("take_chunks", passed + taken), *carried, Compute("put_chunks", put)
        return (
            Compute("take_chunks", passed),
            Transfer("scores", Pattern.ALL_REDUCE, (4.0 * self.num_chunks(spec.numel),) * placement.size),
            Compute("take_more_chunks", taken + 2 * wide * sent),
            *carried,
            Compute("put_chunks", put),
        )

    def unchanged_since(self, round: int) -> int:
        return self.steps_per_ratio * min(round // self.steps_per_ratio, len(self.warmup)) if self.warmup else 0

    def num_chunks(self, numel: int) -> int:
        """Of a bucket of so many elements; the last one may be shorter."""
        return -(-numel // self.chunk)

    def num_chosen(self, numel: int, step: int) -> int:
        """How many of them travel in a step of this number."""
        starts = [self.steps_per_ratio * place for place in range(1, len(self.warmup) + 1)]
        ratio = (*self.warmup, self.ratio)[bisect_right(starts, step)]
        chunks = self.num_chunks(numel)
        return min(max(1, round(ratio * chunks)), chunks)

    def _message(self, specs: tuple[TensorSpec, ...], step: int) -> tuple[TensorSpec, ...]:
        """What the carrier sees."""
        spec, behind = parted(specs)
        riding = self.num_chunks(spec.numel) if self.choice == "late" else 0
        numel = self.num_chosen(spec.numel, step) * self.chunk + riding + behind
        return (TensorSpec((numel,), self._wire(spec.dtype)),)

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the message for gradients of this one."""
        return self.scheme.dtype if isinstance(self.scheme, HalfPrecision) and self.scheme.rounds(dtype) else dtype

    def _factors(self, dtype: torch.dtype, scale: float) -> Factors:
        if self._wire(dtype).itemsize > 2:
            return Factors(through=scale)
        before = 2.0 ** math.floor(math.log2(abs(scale))) if scale else 1.0
        return Factors(before=before, after=scale / before)

    def _chosen(self, scores: Tensor, ages: Tensor | None, count: int) -> Tensor:
        """(count,) int64, ascending: the chunks with the largest scores, of equal ones the first."""
        order = scores.sort(descending=True, stable=True).indices
        if ages is not None and self.max_age is not None:
            oldest = ages.sort(descending=True, stable=True).indices[: -(-count // 2)]
            forced = oldest[ages[oldest] >= self.max_age]
            order = torch.cat([forced, order[~torch.isin(order, forced)]])
        return order[:count].sort().values

    def _norms(self, values: Tensor) -> Tensor:
        """The root mean squares of chunks, in an order of additions that all ranks keep."""
        squares = torch.empty(self.num_chunks(len(values)), dtype=torch.float64, device=values.device)
        kernels.squared_norms(values, Sections((len(values),)), squares, block=self.chunk)
        return squares.div_(self.chunk).sqrt_().float()


@dataclass(frozen=True)
class Factors:
    """Whose product is the scale of the sum: what a rank brings in 16 bits is scaled by a power of two only."""

    before: float = 1.0
    through: float = 1.0  # by the carrier
    after: float = 1.0


def _of_bucket(numbers: Tensor, num_segments: int) -> tuple[Tensor, ...]:
    """What goes with the bucket as a whole, kept with its first segment."""
    return numbers, *[numbers[:0]] * (num_segments - 1)


def _take_more(left: Tensor, chosen: Tensor, payload: Tensor, chunk: int, scale: float) -> None:
    """As `take_chunks` of what is left already, but for the norms."""
    for place, number in enumerate(chosen.tolist()):
        room, part = payload[place * chunk : (place + 1) * chunk], left[number * chunk : (number + 1) * chunk]
        rest, nothing = torch.empty_like(part), torch.zeros_like(part)
        first = torch.zeros(1, dtype=torch.int64, device=part.device)
        norm = torch.empty(1, dtype=torch.float64, device=part.device)
        kernels.take_chunks(nothing, part, first, room, rest, norm, chunk=chunk, scale=scale)
        part.copy_(rest)
