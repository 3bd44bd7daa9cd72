"""Schemes that carry payloads of compressors, by all-reduce, all-gather, or with owners who compress the sums again.

The type of a compressor's payload decides which schemes can carry it (`ways`): an all-reduce adds numbers without
decoding them, so their sum must decode to something useful. In an all-gather each rank receives n - 1 payloads and
decodes n; with owners each rank moves 2 (n - 1) / n of a payload, and sums are compressed a second time. (ByteComp's
indivisible and divisible schemes)

A bucket's flags, the numbers behind the elements, travel with each payload, as a byte or number that is zero or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors import SENT, SUMS, Compressor, CompressorState, Feedback, Payload, SparseMessage, Summand
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..tensors import allocator as memory
from ..tensors.bucket import Bucket, FlatSpec, Layout, Segment, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.index_formats import aligned
from .base import Scheme, State, Traits
from .dense import even_ranges
from .elements import BalancedElements


class Compressed(Scheme[Tensor]):
    """The base class of schemes that send a flat bucket as payloads (encoded tensors) of a `compressor`."""

    compressor: Compressor[Any]

    @cached_property
    def traits(self) -> Traits:
        parts = [part.traits for part in self._parts]
        return Traits(
            Layout.FLAT,
            lossy=True,
            carries_flags=True,
            waits_for_device=any(part.waits_for_device for part in parts),
            follows_scale=all(part.follows_scale for part in parts),
        )

    @property
    def _parts(self) -> tuple[SchemeOrCompressor, ...]:
        """The compressors, and the scheme inside if there is one, from whose traits those of this scheme follow."""
        return (self.compressor,)

    @property
    def title(self) -> str:
        return f"{self.name} of {self.compressor.title}"

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the bucket has a floating-point dtype, which compressors need.

        Raises:
            ValueError: for other dtypes.
        """
        (flat,) = specs
        if not flat.dtype.is_floating_point:
            raise ValueError(f"{self.name} is for floating-point gradients, got {flat}")

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the compressor's state before the first step.

        Raises:
            ValueError: on every rank, if the group has more ranks than payloads can be summed, or another number than
                the compressor is made for.
        """
        self._check_ranks(group.size)
        most = self.compressor.traits.most_summands
        if issubclass(self.compressor.traits.payload, Summand) and most is not None and group.size > most:
            raise ValueError(
                f"{self.compressor.title} makes payloads of which {most} can be summed, there are {group.size} ranks: "
                "give it more summands, or fewer levels"
            )
        return {SENT: (self.compressor.init(bucket.flat_spec, group.rank),)}

    def _check_ranks(self, size: int) -> None:
        expected = self.compressor.traits.made_for_ranks
        if expected is not None and expected != size:
            raise ValueError(
                f"{self.compressor.title} is made for {expected} ranks, {size} compress together: set its ranks"
            )

    def agreement(self) -> tuple[str, ...]:
        """Returns ("agree",), the name of the exchange of numbers such as a common scale; () if ranks need none."""
        return ("agree",) if self.compressor.traits.agrees else ()

    async def agreed(self, values: Tensor, state: CompressorState, group: Group) -> CompressorState:
        """Returns `state` with what ranks must share before they compress `values`, (numel,), as common scales.

        These are maxima over the ranks of what `Compressor.observe` returns, in `state.agreed`. If the compressor needs
        none, `state` is returned as it is, and nothing is sent.
        """
        observed = self.compressor.observe(values, state) if self.compressor.traits.agrees else None
        if observed is None:
            return state
        return replace(state, agreed=torch.stack(await group.all_gather(observed)).amax(dim=0))

    def agreement_steps(self, spec: FlatSpec, size: int) -> tuple[Step, ...]:
        """Returns the computation and the transfer that `agreed` takes among `size` ranks; () if it sends nothing.

        `spec` is the layout of the tensor that is compressed.
        """
        if not self.compressor.traits.agrees:
            return ()
        nbytes = 4.0 * self.compressor.num_agreed(spec)
        return (
            Compute(self.compressor.kernel("observe"), float(spec.nbytes)),
            Transfer("agree", Pattern.ALL_GATHER, (nbytes,) * size),
        )

    def unchanged_since(self, step: int) -> int:
        return self.compressor.unchanged_since(step)

    def compute(self, what: str, spec: FlatSpec, payloads: int, step: int) -> Compute:
        """Returns what compressing or decoding a flat tensor costs, for cost models: bytes read and written, and calls.

        Args:
            what: the operation: "compress" or "decompress".
            spec: the layout of the tensor, which is read or written once.
            payloads: the number of payloads, each of which takes a call.
            step: how often the tensor was compressed before, as payloads may change in size.
        """
        nbytes = spec.nbytes + payloads * self.compressor.nbytes(spec, step)
        return Compute(self.compressor.kernel(what), float(nbytes), calls=payloads)


@register
@dataclass(frozen=True)
class CompressedAllReduce(Compressed):
    """An all-reduce of compressed tensors (payloads) that can be summed (`Summand`); the sum is decoded once.

    Ranks first agree on the numbers that the compressor needs from all, such as a common scale. Payloads in float16 are
    scaled before they are summed, others after.
    Wire: 2(n-1)/n of a payload.

    Attributes:
        compressor: the compressor of the gradients, whose payloads are `Summand`.
    """

    compressor: Compressor[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not issubclass(self.compressor.traits.payload, Summand):
            raise ValueError(
                f"no all-reduce can sum the payloads of {self.compressor.title}: use compressed_all_gather or "
                "compressed_two_way"
            )

    def stages(self, size: int) -> tuple[str, ...]:
        return (*self.agreement(), "all_reduce")

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        (own,) = state[SENT]
        values, behind = x[: own.spec.numel], x[own.spec.numel :]
        own = await self.agreed(values, own, group)
        payload, next_state = self.compressor.compress(values, own)
        numbers = payload.data.numel()
        small = payload.data.dtype is torch.float16  # sums may overflow float16, so the scale comes first
        sent = payload.data * scale if small else payload.data
        # All-reduce: the numbers, and whether those behind are zero.
        message = memory.empty(numbers + len(behind), sent.dtype, sent.device)
        torch.cat([sent, (behind != 0).to(sent.dtype)], out=message)
        summed = await group.all_reduce(message)
        self.compressor.sum_into(values, [replace(payload, data=summed[:numbers])], 1.0 if small else scale)
        behind.copy_(summed[numbers:] != 0)
        return x, {SENT: (next_state,)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        spec, behind = parted(specs)
        nbytes = self.compressor.nbytes(spec, step)
        itemsize = self.compressor.number_dtype(spec).itemsize
        return (
            *self.agreement_steps(spec, placement.size),
            self.compute("compress", spec, 1, step),
            Transfer("all_reduce", Pattern.ALL_REDUCE, (float(nbytes + behind * itemsize),) * placement.size),
            self.compute("decompress", spec, 1, step),
        )


@register
@dataclass(frozen=True)
class CompressedAllGather(Compressed):
    """A scheme that gathers all ranks' compressed gradients on each rank, which decodes them and adds them up.

    Ranks add in the order of ranks, in float32 (float64 for float64), and round once.
    Wire: n-1 payloads (compressed tensors), sent and received by each rank.

    Attributes:
        compressor: the compressor of the gradients.
    """

    compressor: Compressor[Any]

    def stages(self, size: int) -> tuple[str, ...]:
        return (*self.agreement(), "all_gather")

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        (own,) = state[SENT]
        values, behind = x[: own.spec.numel], x[own.spec.numel :]
        own = await self.agreed(values, own, group)
        payload, next_state = self.compressor.compress(values, own)
        # All-gather: from each rank its payload.
        messages = await group.all_gather(message_of(payload, behind))
        self.compressor.sum_into(values, [payload_of(message, payload) for message in messages], scale)
        behind.copy_(any_flags(messages, payload, len(behind)))
        return x, {SENT: (next_state,)}

    async def mix(self, x: Tensor, numel: int, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        """Returns what `synchronize` does; a rank keeps what compression leaves out of its values.

        `x` and the result are flat tensors, (`numel` + flags,).
        """
        (own,) = state[SENT]
        payload, _ = self.compressor.compress(x[:numel], own)  # as below: the same state draws the same random numbers
        sent = torch.empty_like(x[:numel])
        self.compressor.sum_into(sent, [payload], scale)
        rest = x[:numel].mul(scale * group.size).sub_(sent, alpha=group.size)
        x, next_state = await self.synchronize(x, state, group, scale)
        x[:numel].add_(rest)
        return x, next_state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        spec, behind = parted(specs)
        nbytes = message_nbytes(self.compressor.nbytes(spec, step), behind)
        return (
            *self.agreement_steps(spec, placement.size),
            self.compute("compress", spec, 1, step),
            Transfer("all_gather", Pattern.ALL_GATHER, (float(nbytes),) * placement.size),
            self.compute("decompress", spec, placement.size, step),
        )


@register
@dataclass(frozen=True)
class CompressedTwoWay(Compressed):
    """A scheme that sends gradients compressed, sums one range of them on each rank, and compresses the sums, too.

    Ranges are about equally long. Each rank compresses its sums and sends them to all ranks. `sums` is the compressor
    for that, by default `compressor`, with other random draws and without adding momentum a second time. With error
    feedback for gradients and sums there are two residuals; a rank keeps that of its sums, in units of the sum before
    the scale. A tensor that lies in several ranges is compressed in as many parts.
    Wire: 2(n-1)/n of a payload (compressed tensor).

    Attributes:
        compressor: the compressor of the gradients.
        sums: the compressor of the sums; None: `compressor`, by its `of_sums`.
    """

    compressor: Compressor[Any]
    sums: Compressor[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for way in (self.compressor, self._sums):
            if way.traits.agrees:
                raise ValueError(
                    f"{way.title} needs numbers that all ranks agree on, which schemes with owners do not exchange: "
                    "use compressed_all_reduce or compressed_all_gather"
                )
        if isinstance(self._sums, Feedback) and not isinstance(self.compressor, Feedback):
            raise ValueError(
                f"CompressedTwoWay.sums has error feedback and {self.compressor.title} has none: a plan with other "
                "buckets adds residuals of sums to those of gradients; give the compressor error feedback too"
            )

    @property
    def _parts(self) -> tuple[SchemeOrCompressor, ...]:
        return self.compressor, self._sums

    @property
    def _sums(self) -> Compressor[Any]:
        return self.sums if self.sums is not None else self.compressor.of_sums

    def stages(self, size: int) -> tuple[str, ...]:
        return ("push", "pull")

    def init(self, bucket: Bucket, group: Group) -> State:
        self._check_ranks(group.size)
        ranges = _ranges(bucket.flat_spec, group.size)
        sums = _sums_of(ranges[group.rank], kernels.accumulation_dtype(bucket.dtype))
        return {
            SENT: tuple(self.compressor.init(each, group.rank) for each in ranges),
            SUMS: (self._sums.init(sums, group.rank),),
        }

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        parts, (sums_state,) = state[SENT], state[SUMS]
        lengths = [part.spec.numel for part in parts]
        values, behind = x[: sum(lengths)], x[sum(lengths) :]
        ranges = torch.split(values, lengths)
        # Push: to each owner its range.
        sent = [self.compressor.compress(each, part) for each, part in zip(ranges, parts, strict=True)]
        sizes = [message_nbytes(payload.nbytes, len(behind)) for payload, _ in sent]
        outgoing = memory.empty(sum(sizes), torch.uint8, x.device)
        for room, (payload, _) in zip(outgoing.split(sizes), sent, strict=True):
            write_message(room, payload, behind)
        template = sent[group.rank][0]
        incoming = [sizes[group.rank]] * group.size
        messages = await group.all_to_all(outgoing, sizes, incoming, largest=max(sizes))
        total = memory.empty(lengths[group.rank], sums_state.spec.dtype, values.device)
        self.compressor.sum_into(total, [payload_of(message, template) for message in messages])
        behind.copy_(any_flags(messages, template, len(behind)))
        # Pull: from each owner its sums.
        payload, next_sums = self._sums.compress(total, sums_state)
        specs = [_sums_of(part.spec, total.dtype) for part in parts]
        pulled = [message_nbytes(self._sums.nbytes(spec, payload.step)) for spec in specs]
        summed = await group.all_gather(message_of(payload), pulled)
        for room, spec, message in zip(ranges, specs, summed, strict=True):
            self._sums.sum_into(room, [payload_of(message, replace(payload, spec=spec))], scale)
        return x, {SENT: tuple(next_state for _, next_state in sent), SUMS: (next_sums,)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        spec, behind = parted(specs)
        n, ranges = placement.size, _ranges(spec, placement.size)
        pushed = [float(message_nbytes(self.compressor.nbytes(each, step), behind)) for each in ranges]
        wide = kernels.accumulation_dtype(spec.dtype)
        pulled = [float(message_nbytes(self._sums.nbytes(_sums_of(each, wide), step))) for each in ranges]
        sums = self._sums
        return (
            replace(self.compute("compress", spec, 1, step), calls=n),
            Transfer("push", Pattern.ALL_TO_ALL, tuple(pushed)),
            self.compute("decompress", ranges[0], n, step),
            Compute(sums.kernel("compress"), wide.itemsize * ranges[0].numel + pulled[0]),
            Transfer("pull", Pattern.ALL_GATHER, tuple(pulled)),
            Compute(sums.kernel("decompress"), spec.nbytes + sum(pulled), calls=n),
        )

    def unchanged_since(self, step: int) -> int:
        return max(self.compressor.unchanged_since(step), self._sums.unchanged_since(step))


@register
@dataclass(frozen=True)
class Sparsified(Compressed):
    """A scheme that keeps some elements of each rank's gradient, such as the top k, and sums these by `inner`.

    `inner` is an exact scheme for flat tensors with few non-zero elements.
    Wire: that of `inner` for as many elements as the compressor keeps, assuming that ranks choose independently.

    Attributes:
        compressor: the sparsifier, whose payloads are `SparseMessage`.
        inner: the exact scheme that sums what it keeps.
    """

    compressor: Compressor[Any]
    inner: Scheme[Any] = BalancedElements()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not issubclass(self.compressor.traits.payload, SparseMessage):
            raise ValueError(
                f"{self.compressor.title} leaves no sparse elements: use a sparsifier, or another compressed scheme"
            )
        if self.inner.traits.layout is not Layout.FLAT or not self.inner.traits.exact:
            raise ValueError(f"Sparsified.inner must be an exact scheme of flat buckets, got {self.inner!r}")

    @property
    def _parts(self) -> tuple[SchemeOrCompressor, ...]:
        return self.compressor, self.inner

    @property
    def title(self) -> str:
        return f"{self.inner.title} of {self.compressor.title}"

    def stages(self, size: int) -> tuple[str, ...]:
        return self.inner.stages(size)

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the compressor's state before the first step.

        Raises:
            ValueError: if `inner` keeps state, or, on every rank, if the compressor is made for another number of
                ranks.
        """
        if self.inner.init(bucket, group):
            raise ValueError(
                f"Sparsified.inner must be a scheme without state, got {self.inner.name}, which keeps state"
            )
        return super().init(bucket, group)

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        (own,) = state[SENT]
        values = x[: own.spec.numel]
        payload, next_state = self.compressor.compress(values, own)
        self.compressor.sum_into(values, [payload])
        total, _ = await self.inner.synchronize(x, {}, group, scale)
        return total, {SENT: (next_state,)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        spec, behind = parted(specs)
        kept = DensityProfile(spec.numel + behind, float(self.compressor.num_kept(spec, step) + behind))
        return (
            self.compute("compress", spec, 1, step),
            self.compute("decompress", spec, 1, step),
            *self.inner.steps(specs, (kept,), placement, step),
        )

    def unchanged_since(self, step: int) -> int:
        return max(self.compressor.unchanged_since(step), self.inner.unchanged_since(step))


SchemeOrCompressor = Scheme[Any] | Compressor[Any]
"""What users may allow a planner: a scheme, or a compressor for which the planner chooses one of the `ways`."""


def ways(compressor: Compressor[Any]) -> tuple[Scheme[Any], ...]:
    """Returns all schemes that can exchange what the compressor makes, in no order of cost."""
    found: list[Scheme[Any]] = [CompressedAllGather(compressor)]
    if issubclass(compressor.traits.payload, Summand):
        found.append(CompressedAllReduce(compressor))
    if not compressor.traits.agrees:
        found.append(CompressedTwoWay(compressor))
    if issubclass(compressor.traits.payload, SparseMessage):
        found.append(Sparsified(compressor))
    return tuple(found)


def parted(specs: tuple[TensorSpec, ...]) -> tuple[FlatSpec, int]:
    """Returns the layout of a flat bucket without its flags, and the number of flags at its end.

    `specs` has the bucket's shape and dtype, as its only entry; flags say, for example, whether a rank used a
    parameter.
    """
    (whole,) = specs
    if whole.flat is None:
        return FlatSpec((Segment("", 0, whole.numel),), ((whole.numel,),), whole.dtype), 0
    return whole.flat, whole.numel - whole.flat.numel


def _ranges(spec: FlatSpec, size: int) -> list[FlatSpec]:
    """Returns the specs of the `size` equal ranges into which owners divide the flat tensor `spec`."""
    ends = [0]
    for length in even_ranges(spec.numel, size):
        ends.append(ends[-1] + length)
    return [spec.cut(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def _sums_of(spec: FlatSpec, dtype: torch.dtype) -> FlatSpec:
    """Returns the spec of a sum of tensors like `spec`: in `dtype`, with another salt for compressors' random draws."""
    return replace(spec.with_dtype(dtype), salt=spec.salt + 1)


def message_nbytes(payload_nbytes: int, behind: int = 0) -> int:
    """Returns the bytes of a message: a compressed tensor of `payload_nbytes` bytes, and `behind` flags, a byte each.

    A flag says whether a rank used a parameter. The number of bytes is a multiple of 8, so that the next message in a
    buffer begins where any dtype can be viewed.
    """
    return int(aligned(payload_nbytes + behind))


def message_of(payload: Payload, behind: Tensor | None = None) -> Tensor:
    """Returns a new message, (bytes,) uint8: the compressed tensor, and one byte, 0 or 1, for each flag in `behind`.

    A flag (was the parameter used?) is a number; its byte is 1 if it is not zero. `behind` is 1-D, of any dtype.
    """
    nbytes = message_nbytes(payload.nbytes, 0 if behind is None else len(behind))
    return write_message(memory.empty(nbytes, torch.uint8, payload.data.device), payload, behind)


def write_message(room: Tensor, payload: Payload, behind: Tensor | None = None) -> Tensor:
    """Writes a compressed tensor, and a byte for each flag in `behind`, 1-D, to `room`, and returns `room`.

    A flag (was the parameter used?) is a number; its byte is 1 if it is not zero, else 0. `room`:
    (message_nbytes(...),) uint8.
    """
    room[: payload.nbytes] = payload.data.view(torch.uint8)
    after = room[payload.nbytes :].zero_()
    if behind is not None:
        after[: len(behind)] = behind != 0
    return room


def payload_of(message: Tensor, template: Payload) -> Payload:
    """Returns the compressed tensor at the start of `message`, (bytes,) uint8, as a view.

    Only its `data` is from the message; everything else, such as shapes and dtype, is as in `template`, this rank's
    own.
    """
    nbytes = template.maker.nbytes(template.spec, template.step)
    return replace(template, data=message[:nbytes].view(template.data.dtype))


def any_flags(messages: Sequence[Tensor], payload: Payload, count: int) -> Tensor:
    """Returns for each flag whether any of the messages has it set, (count,) uint8 of 0 and 1.

    Args:
        messages: (bytes,) uint8 each: a compressed tensor and, behind it, `count` flags, a byte each.
        payload: a compressed tensor of as many bytes as each of those in the messages; it says where flags begin.
        count: the number of flags in a message.
    """
    return torch.stack([message[payload.nbytes : payload.nbytes + count] for message in messages]).amax(dim=0)
