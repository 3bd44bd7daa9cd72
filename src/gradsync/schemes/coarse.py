"""Coarse-grained sparse communication: whole chunks of a bucket, the same on all ranks, summed densely.

GradientFlow (Sun et al., 2019) publishes the idea: ranks agree on the chunks of 32 Ki elements whose gradients have the
largest summed L1 norms, and all-reduce these alone. So no positions travel, and messages do not grow with the number of
ranks, as messages of element-wise sparsifiers do. The publication does not say when norms are exchanged, nor what
becomes of chunks that are not sent; the rules here are gradsync's own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, cast

import torch
from annotated_types import Interval
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors import RESIDUAL, SENT, CompressorState
from ..compressors.expressions import register
from ..compressors.momentum import MOMENTUM
from ..costs.cluster import Placement
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..inputs.settings import Decay, NonNegativeInt, PositiveInt, Ratio
from ..kernels import Sections
from ..tensors import allocator as memory
from ..tensors.bucket import Bucket, FlatSpec, Layout, TensorSpec
from ..tensors.density import DensityProfile, joined
from ..tensors.scaling import multiply
from .base import Scheme, State, Traits
from .compressed import parted
from .dense import AllReduce
from .precision import HalfPrecision

SCORES, AGES, AGREEMENT, LEVELS, IDLE = "scores", "ages", "agreement", "levels", "idle"  # numbers kept for each chunk
LEVEL_STEPS = 10  # steps over which a tensor's level is a running mean, about


@register
@dataclass(frozen=True)
class CoarseGrained(Scheme[Tensor]):
    """A scheme that sums a share `ratio` of a bucket's chunks (`chunk` elements each), those with the largest norms.

    Not exact. Let p be a rank's gradient plus its residual. The ranks send p in the chosen chunks, and keep p in all
    others as the next residual (error feedback), so sent + residual = gradient + former residual, to the bit. The
    result is `scale` times the sum of p in the chosen chunks, and 0 elsewhere. A chunk's score is the L1 norm of p,
    summed over the ranks. Chunks cross the borders of tensors. NaN or infinity on any rank, in whichever chunk, makes
    the first element of the result NaN.

    When a plan with other buckets replaces this one, residuals stay with their tensors and scores begin anew. With one
    chunk, or a ratio of 1, the scheme is `scheme` with error feedback for the rounding.
    Wire: that of `scheme` for max(1, ratio x chunks) chunks, the last one padded with zeros, and one number a chunk.
    Where its bytes depend on zeros, `steps` predicts a usual step: a chunk gathers 1 / ratio gradients before it goes.

    Attributes:
        scheme: sums the message: the chosen chunks end to end, one number for each chunk of the bucket if `choice` is
            "late", and flags that say which parameters a rank used. It is exact and keeps no state, or is
            `HalfPrecision` of such a scheme; then each rank scales p by a power of two before rounding, and the
            rounding error goes to the residual. (The rounding error of the sum itself is lost.)
        ratio: the share of chunks that travel, in (0, 1].
        chunk: the elements of a chunk.
        choice: "late" chooses by scores that the last step predicts. The message of each step also carries the mean
            magnitude of each chunk's residual, or of p in chosen chunks, so that no rank ever waits for a choice. A
            residual gathered over k steps is expected to be larger by one k-th in the next step. (By p itself the ranks
            would choose again the chunks just emptied; by the residual alone, the chunks with the largest gradients
            only every other time.) The first step, which has no scores, takes the first chunks. "exact" chooses by this
            step's scores, at the price of an all-reduce of one number a chunk ahead of the chunks.
        scoring: "norm" ranks chunks by the score. "agreement" multiplies the score by the share of it that the sum kept
            when the chunk was sent last: where ranks cancel out, there is little but noise. "relative" divides the
            score by a running mean over steps of the scores in the same tensor (the tensor with most of the chunk), so
            that tensors with small gradients are served as well. In all three, chunks whose parameters no rank used in
            the last n steps get 1 / (n + 1) of their score.
        history: the share of the residual that is added to the next gradient, in [0, 1]; 0 drops the residual. Below 1,
            gradients that were not sent fade, so that no residual consists of very old ones.
        max_age: chunks that were not sent for so many steps are chosen first, the oldest first, up to half of the
            chosen chunks; then none waits longer than max_age + 2 / ratio steps.
        freeze: the optimiser changes neither weights nor optimiser state where no chunk arrived. Otherwise the
            optimiser sees a gradient of 0 there: momentum goes on to move the weights, and fades; weight decay goes on.
        momentum: the coefficient m of a momentum that replaces the optimiser's: each rank computes u = m u + g ahead of
            the choice, and sends u in place of gradients (deep gradient compression).
        masking: sets u to 0 in the chunks that were sent, except in dense steps.
        warmup: the ratios of the first steps; 1 is dense.
        steps_per_ratio: the number of steps with each ratio of `warmup`.
    """

    scheme: Scheme[Any] = AllReduce()
    ratio: Ratio = 0.1
    chunk: PositiveInt = 1 << 15
    choice: Literal["late", "exact"] = "late"
    scoring: Literal["norm", "agreement", "relative"] = "norm"
    history: Annotated[float, Interval(ge=0, le=1)] = 1.0
    max_age: PositiveInt | None = None
    freeze: bool = False
    momentum: Decay = 0.0
    masking: bool = True
    warmup: tuple[Ratio, ...] = ()
    steps_per_ratio: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        carrier = self._carrier
        if carrier.traits.layout is not Layout.FLAT or not carrier.traits.exact:
            raise ValueError(
                f"{name}.scheme must be exact and for flat buckets, or HalfPrecision of such a scheme, "
                f"got {self.scheme!r}"
            )
        if self.momentum and (self.freeze or self.history < 1):
            raise ValueError(
                f"{name}.momentum needs freeze=False and history=1, got freeze={self.freeze}, history={self.history}"
            )
        if bool(self.warmup) != (self.steps_per_ratio > 0):
            raise ValueError(
                f"{name}.steps_per_ratio must be at least 1 with a warmup, and 0 without; got warmup {self.warmup} and "
                f"{self.steps_per_ratio} steps"
            )

    @property
    def title(self) -> str:
        return f"{self.scheme.title} of {self.ratio:g} of chunks"

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            Layout.FLAT,
            lossy=True,
            carries_flags=True,
            shows_infinity=True,
            freezes=self.freeze,
            waits_for_device=True,  # optimisers and the host must know which chunks were sent
        )

    @property
    def _carrier(self) -> Scheme[Any]:
        """The exact scheme that sums the message: `scheme`, or the one inside it if that is `HalfPrecision`."""
        return self.scheme.inner if isinstance(self.scheme, HalfPrecision) else self.scheme

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the bucket has a floating-point dtype, and that `scheme` can sum a message of chosen chunks.

        Raises:
            ValueError: if not.
        """
        (flat,) = specs
        if not flat.dtype.is_floating_point:
            raise ValueError(f"{self.name} is for floating-point gradients, got {flat}")
        self._carrier.check(self._message(specs, 0))

    def stages(self, size: int) -> tuple[str, ...]:
        stages = self._carrier.stages(size)
        return ("scores", *stages) if self.choice == "exact" else stages

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the state before the first step: zero residuals, and start values of each chunk's score, age etc.

        Raises:
            ValueError: if `scheme` keeps state.
        """
        if self._carrier.init(bucket, group):
            raise ValueError(
                f"{self.name}.scheme must be a scheme without state, got {self.scheme.title}, which keeps state"
            )
        spec, chunks = bucket.flat_spec, self.num_chunks(bucket.numel)
        zeros = torch.zeros(spec.numel, dtype=kernels.accumulation_dtype(spec.dtype))
        elements = {RESIDUAL: zeros, **({MOMENTUM: zeros.clone()} if self.momentum else {})}
        numbers = {name: torch.full((chunks,), first) for name, first in self._kept_of_chunks.items()}
        return {SENT: (ChunkState(spec, group.rank, elements=elements, together=numbers, chunk=self.chunk),)}

    @property
    def _kept_of_chunks(self) -> dict[str, float]:
        """The names of the numbers that the state has for each chunk (score, age, ...), with their first values."""
        late, kept = self.choice == "late", {IDLE: 0.0}
        if late:
            kept[SCORES] = 0.0
        if late or self.max_age is not None:
            kept[AGES] = 0.0
        if self.scoring != "norm":
            kept |= {AGREEMENT: 1.0} if self.scoring == "agreement" else {LEVELS: 0.0}
        return kept

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        own = cast(ChunkState, state[SENT][0])
        numel = own.spec.numel
        values, behind = x[:numel], x[numel:]
        chunks, count = self.num_chunks(numel), self.num_chosen(numel, own.step)
        kept = {name: numbers.to(x.device) for name, numbers in own.together.items()}
        elements = {name: flat.to(x.device) for name, flat in own.elements.items()}
        residual = elements[RESIDUAL] * self.history if self.history < 1 else elements[RESIDUAL]
        brought, following = values, {RESIDUAL: memory.empty_like(residual)}
        if self.momentum:
            following[MOMENTUM] = elements[MOMENTUM].mul(self.momentum).add_(values)
            brought = following[MOMENTUM].clone()
        left = following[RESIDUAL]
        norms = torch.empty(chunks, dtype=torch.float64, device=x.device)
        wire, factors = self._wire(x.dtype), self._factors(x.dtype, scale)
        riding = chunks if self.choice == "late" else 0
        message = memory.empty(count * self.chunk + riding + len(behind), wire, x.device)
        payload, scores, flags = message.split([count * self.chunk, riding, len(behind)])

        if self.choice == "late":
            chosen = self._chosen(kept[SCORES], kept, count)
            kernels.take_chunks(brought, residual, chosen, payload, left, norms, chunk=self.chunk, scale=factors.before)
            magnitudes = norms.mul(factors.before / self.chunk)
            magnitudes[chosen] = _magnitudes(payload, self.chunk)
            most = torch.finfo(wire).max / (
                2 * group.size
            )  # keeps the sum in range, so that infinity comes from infinity only
            scores.copy_(torch.where(norms.isfinite(), magnitudes.clamp_(max=most), torch.nan))
        else:
            nothing = torch.empty(0, dtype=torch.int64, device=x.device)
            kernels.take_chunks(brought, residual, nothing, payload[:0], left, norms, chunk=self.chunk)
            # Agree: on the chunks with the largest norms.
            summed_norms = await group.all_reduce(norms.to(torch.float32))
            kept |= self._levels(summed_norms, kept, own.spec)
            chosen = self._chosen(summed_norms, kept, count)
            _take_more(left, chosen.tolist(), payload, self.chunk, factors.before)
        flags.copy_(behind)
        # Exchange: the chosen chunks.
        summed, _ = await self._carrier.synchronize(message, {}, group, factors.through)
        sums, scores, flags = summed.split([count * self.chunk, riding, len(behind)])
        sent: list[int] = chosen.tolist()  # the device has chosen long ago
        self._put(values, sums, sent, factors.after, following.get(MOMENTUM))
        behind.copy_(flags)

        if self.choice == "late":
            found = scores.float()  # of the residuals, and in chosen chunks of p
        else:
            found = summed_norms * (factors.before * factors.through / self.chunk)
        # All ranks see that some rank's values are not finite, also in chunks that were not sent.
        values[:1] = torch.where(found.sum(dtype=torch.float64).isfinite(), values[:1], torch.nan)
        kept |= self._numbers_after(kept, found, sums, chosen, own.spec)
        return x, {SENT: (own.next(elements=following, together=kept, sent=tuple(sent)),)}

    def _put(self, values: Tensor, sums: Tensor, chosen: Sequence[int], factor: float, momentum: Tensor | None) -> None:
        """Overwrites the chosen chunks of `values` by `factor` times `sums`; with `momentum`, zeros all other chunks.

        With `momentum` and `masking`, also zeros the momentum in the chosen chunks, except in a dense step.
        """
        if momentum is not None:
            values.zero_()
        if parts := _parts(values, chosen, self.chunk):
            torch._foreach_copy_(parts, [s[: len(p)] for s, p in zip(sums.split(self.chunk), parts, strict=True)])
            if factor != 1:
                multiply(parts, factor)
        if momentum is not None and self.masking and len(chosen) < self.num_chunks(len(values)):
            torch._foreach_zero_(_parts(momentum, chosen, self.chunk))

    def _numbers_after(
        self, kept: Mapping[str, Tensor], found: Tensor, sums: Tensor, chosen: Tensor, spec: FlatSpec
    ) -> dict[str, Tensor]:
        """Returns the state's numbers for each chunk (score, age, ...) after a step which summed the chunks `chosen`.

        `kept`: the numbers before; `found`: for each chunk the mean magnitude of gradient plus residual, added up over
        ranks; `sums`: the sums of the chosen chunks.
        """
        after: dict[str, Tensor] = {}
        if AGREEMENT in kept:
            agreement = self._root_mean_squares(sums) / found[chosen]
            after[AGREEMENT] = kept[AGREEMENT].index_copy(0, chosen, agreement.nan_to_num_(1.0, 1.0))
        if AGES in kept:
            ages = kept[AGES] + 1
            after[AGES] = ages.index_fill(0, chosen, 0)
            if self.choice == "late":
                share = found / ages  # what one step adds
                after[SCORES] = (found + share).index_copy(0, chosen, share[chosen])
                after |= self._levels(after[SCORES], kept, spec)
        return after

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        spec, _ = parted(specs)
        (message,) = self._message(specs, step)
        wide = kernels.accumulation_dtype(spec.dtype).itemsize
        sent = self.num_chosen(spec.numel, step) * self.chunk
        passed = float(
            2 * spec.nbytes + 2 * wide * spec.numel
        )  # gradients read, zeros written; residuals read and written
        passed += float(self.momentum > 0) * (2 * spec.nbytes + 4 * wide * spec.numel)
        taken, put = float(message.itemsize * sent), float((message.itemsize + spec.itemsize) * sent)
        carried = self._carrier.steps((message,), self._message_profiles(specs, profiles, step), placement, step)
        if self.choice == "late":
            return Compute("take_chunks", passed + taken), *carried, Compute("put_chunks", put)
        return (
            Compute("take_chunks", passed),
            Transfer("scores", Pattern.ALL_REDUCE, (4.0 * self.num_chunks(spec.numel),) * placement.size),
            Compute("take_more_chunks", taken + 2 * wide * sent),
            *carried,
            Compute("put_chunks", put),
        )

    def unchanged_since(self, step: int) -> int:
        return self.steps_per_ratio * min(step // self.steps_per_ratio, len(self.warmup)) if self.warmup else 0

    def num_chunks(self, numel: int) -> int:
        """Returns the number of chunks of a bucket with `numel` elements; the last chunk may be shorter."""
        return -(-numel // self.chunk)

    def num_chosen(self, numel: int, step: int) -> int:
        """Returns how many chunks of a bucket with `numel` elements are sent in the training step of this number."""
        starts = [self.steps_per_ratio * place for place in range(1, len(self.warmup) + 1)]
        ratio = (*self.warmup, self.ratio)[bisect_right(starts, step)]
        chunks = self.num_chunks(numel)
        return min(max(1, round(ratio * chunks)), chunks)

    def _message(self, specs: tuple[TensorSpec, ...], step: int) -> tuple[TensorSpec, ...]:
        """Returns the message's shape and dtype: chunks, scores if `choice` is "late", flags (is a parameter used?)."""
        spec, behind = parted(specs)
        riding = self.num_chunks(spec.numel) if self.choice == "late" else 0
        numel = self.num_chosen(spec.numel, step) * self.chunk + riding + behind
        return (TensorSpec((numel,), self._wire(spec.dtype)),)

    def _message_profiles(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], step: int
    ) -> tuple[DensityProfile, ...]:
        """Returns the density profile of a usual step's message by that of the gradients.

        A chunk has the non-zero elements of all steps since it was sent last, which count as independent; scores and
        flags count as non-zero, the zeros that fill up the last chunk do not. Chunks fill up where something stays in
        elements once sent: the rounding errors of a 16-bit message, or a momentum that is not masked. They count as
        full as well where nothing is known of the gradients.
        """
        spec, _ = parted(specs)
        (message,) = self._message(specs, step)
        chunks, count = self.num_chunks(spec.numel), self.num_chosen(spec.numel, step)
        if not count:
            return ()
        taken = spec.numel * count / chunks  # of the elements; the last chunk is padded
        gathered = chunks / count if self.history else 1.0  # steps
        fills_up = (self.history > 0 and message.itemsize == 2) or (self.momentum > 0 and not self.masking)
        gradients = DensityProfile(1, 1.0, {2: 1.0}) if fills_up or not profiles else profiles[0]

        def rows(ranks: int) -> float:
            filled = min(gradients.union_rows(ranks) / max(gradients.num_rows, 1), 1.0)  # roundings apart
            empty: float = (1 - filled) ** gathered
            return taken * (1 - empty)

        growth = {ranks: rows(ranks) / rows(1) for ranks in gradients.densification if rows(1)}
        behind = message.numel - count * self.chunk
        return (joined([DensityProfile(count * self.chunk, rows(1), growth), DensityProfile(behind, float(behind))]),)

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the message for gradients of `dtype`: 16-bit if `scheme` rounds them, else `dtype`."""
        return self.scheme.dtype if isinstance(self.scheme, HalfPrecision) and self.scheme.rounds(dtype) else dtype

    def _factors(self, dtype: torch.dtype, scale: float) -> Factors:
        if self._wire(dtype).itemsize > 2:
            return Factors(through=scale)
        before = 2.0 ** math.floor(math.log2(abs(scale))) if scale else 1.0
        return Factors(before=before, after=scale / before)

    def _chosen(self, norms: Tensor, kept: Mapping[str, Tensor], count: int) -> Tensor:
        """Returns the indices of the `count` chunks with the largest scores, (count,) int64, ascending.

        Scores are `norms`, changed as `scoring` says by the numbers `kept`; of equal scores the first is chosen. Up to
        half of `count`, rounded up, are chunks not sent for `max_age` steps or more, the oldest ones.
        """
        scores = norms / (1 + kept[IDLE])
        if AGREEMENT in kept:
            scores = scores * kept[AGREEMENT]
        if LEVELS in kept:
            scores = scores / kept[LEVELS].clamp_min(torch.finfo(torch.float32).tiny)
        order = scores.sort(descending=True, stable=True).indices
        if self.max_age is not None:
            ages = kept[AGES]
            oldest = ages.sort(descending=True, stable=True).indices[: -(-count // 2)]
            forced = oldest[ages[oldest] >= self.max_age]
            order = torch.cat([forced, order[~torch.isin(order, forced)]])
        return order[:count].sort().values

    def _levels(self, norms: Tensor, kept: Mapping[str, Tensor], spec: FlatSpec) -> dict[str, Tensor]:
        """Returns {LEVELS: for each chunk the running mean over steps of its tensor's mean norm}, updated by `norms`.

        Returns {} if `kept` has no LEVELS, as only one scoring needs them. Norms are divided by their mean over the
        bucket, so that a change of the loss scale has no effect.
        """
        if LEVELS not in kept:
            return {}
        tensor_of = torch.tensor(_owners(tuple(spec.lengths), self.chunk), dtype=torch.int64)  # also of no chunks
        known = norms.double().cpu()
        sums = torch.zeros(len(spec.segments), dtype=torch.float64).index_add_(0, tensor_of, known)
        counts = torch.bincount(tensor_of, minlength=len(spec.segments))
        means = (sums / counts)[tensor_of]
        means = (means / means[means.isfinite()].mean()).float().to(norms.device)
        before = kept[LEVELS]
        after = torch.where(before > 0, before + (means - before) / LEVEL_STEPS, means)
        return {LEVELS: torch.where(means.isfinite(), after, before)}  # all may be 0

    def _root_mean_squares(self, sums: Tensor) -> Tensor:
        """Returns the root mean square of the elements of each chunk of `sums`, gradients summed over ranks.

        Shape (chunks,), float32; the same bits on all ranks.
        """
        squares = torch.empty(len(sums) // self.chunk, dtype=torch.float64, device=sums.device)
        kernels.squared_norms(sums, Sections((len(sums),)), squares, block=self.chunk)
        return squares.div_(self.chunk).sqrt_().float()


@dataclass(frozen=True)
class ChunkState(CompressorState):
    """The state of `CoarseGrained` on one rank: residuals, and for each chunk a score by which chunks are chosen.

    Residuals, what was not sent yet, are in `elements`; scores, and steps since a chunk was sent, in `together`, alike
    on all ranks.

    Attributes:
        chunk: the elements of a chunk.
        sent: the numbers of the chunks that the last step sent; None: not known.
    """

    chunk: int = 1  # elements
    sent: tuple[int, ...] | None = None

    @property
    def arrived(self) -> list[tuple[int, int]] | None:
        numel = self.spec.numel
        if self.sent is None or len(self.sent) == -(-numel // self.chunk):
            return None
        return [(first * self.chunk, min((first + 1) * self.chunk, numel)) for first in self.sent]

    def unused(self, names: Collection[str]) -> ChunkState:
        """Returns the state to keep after a step in which no rank used the parameters `names`.

        It counts, for each chunk, the steps in a row in which no rank used any of its parameters. Such chunks get lower
        scores: otherwise what was not sent of them (residuals) would be chosen for ever.
        """
        if names:
            idle, start = self.together[IDLE] + 1, 0
            for segment in self.spec.segments:
                if segment.numel and segment.name not in names:
                    idle[start // self.chunk : -(-(start + segment.numel) // self.chunk)] = 0
                start += segment.numel
        else:
            idle = torch.zeros_like(self.together[IDLE])
        return replace(self, together={**self.together, IDLE: idle})


@dataclass(frozen=True)
class Factors:
    """Three factors whose product is the scale of a sum of messages over ranks.

    With 16-bit messages `before` is a power of two, which rounds nothing, and `through` is 1.

    Attributes:
        before: multiplies each rank's message before it is rounded and sent.
        through: the scale that the scheme which sums the messages applies.
        after: multiplies the sum.
    """

    before: float = 1.0  # of the message, on each rank
    through: float = 1.0  # by the carrier
    after: float = 1.0  # of the sum


@lru_cache(maxsize=256)
def _owners(lengths: tuple[int, ...], chunk: int) -> list[int]:
    """Returns for each chunk the number of the tensor with most of its elements; of equal ones the first."""
    found: list[tuple[int, int]] = [(0, 0)] * -(-sum(lengths) // chunk)  # (elements, tensor)
    start = 0
    for tensor, length in enumerate(lengths):
        for number in range(start // chunk, -(-(start + length) // chunk)):
            inside = min(start + length, (number + 1) * chunk) - max(start, number * chunk)
            if inside > found[number][0]:
                found[number] = inside, tensor
        start += length
    return [tensor for _, tensor in found]


def _parts(flat: Tensor, chosen: Sequence[int], chunk: int) -> list[Tensor]:
    return [flat[number * chunk : (number + 1) * chunk] for number in chosen]


def _magnitudes(payload: Tensor, chunk: int) -> Tensor:
    """Returns the mean magnitude of each chunk in `payload`, (chunks,) float64."""
    return payload.view(-1, chunk).abs().mean(dim=1, dtype=torch.float32).double()


def _take_more(left: Tensor, chosen: Sequence[int], payload: Tensor, chunk: int, scale: float) -> None:
    """Moves the chosen chunks of the residual `left`, times `scale`, to `payload`; rounding errors stay in `left`."""
    parts = _parts(left, chosen, chunk)
    if not parts:
        return
    together = torch.zeros(len(payload), dtype=left.dtype, device=left.device)
    rest, norms = torch.empty_like(together), torch.empty(len(parts), dtype=torch.float64, device=left.device)
    torch._foreach_copy_([t[: len(p)] for t, p in zip(together.split(chunk), parts, strict=True)], parts)
    every = torch.arange(len(parts), device=left.device)
    kernels.take_chunks(torch.zeros_like(together), together, every, payload, rest, norms, chunk=chunk, scale=scale)
    torch._foreach_copy_(parts, [r[: len(p)] for r, p in zip(rest.split(chunk), parts, strict=True)])
