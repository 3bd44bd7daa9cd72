"""Dense schemes: all elements of a flat bucket travel, zeros too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..comm import Group
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..tensors import allocator as memory
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from .base import Partitioned, Scheme, State, Traits


@register
@dataclass(frozen=True)
class AllReduce(Scheme[Tensor]):
    """A scheme that calls the backend's all-reduce on the whole bucket, as DDP does. Exact.

    Wire: 2(n-1)/n of the bucket, sent and received by each rank (in a ring; backends may use another algorithm).
    """

    traits = Traits(Layout.FLAT, scales_first=True)

    def stages(self, size: int) -> tuple[str, ...]:
        return ("all_reduce",)

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        # Scaling before the sum keeps a half-precision sum inside its range. The engine did so as it filled the bucket.
        if scale != 1:
            x.mul_(scale)
        return await group.all_reduce(x), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        (flat,) = specs
        return (Transfer("all_reduce", Pattern.ALL_REDUCE, (float(flat.nbytes),) * placement.size),)


@dataclass(frozen=True)
class OwnedRange:
    """The sums that one rank made of its range of a flat bucket, before it sends them to all ranks.

    Attributes:
        values: the sums, (the longest range,), padded with zeros, in the bucket's dtype or, for further sums, a wider
            one.
        whole: the bucket, (numel,), which the sums of all ranks will overwrite.
    """

    values: Tensor  # (the longest range,), in the bucket's dtype or the dtype of sums
    whole: Tensor  # the bucket, (numel,), which `pull` overwrites


@register
@dataclass(frozen=True)
class ReduceScatter(Partitioned[Tensor, OwnedRange]):
    """A dense all-reduce in two halves: each rank sums a range of the bucket (push), then all gather the sums (pull).

    Exact. Ranges are about equally long. Unlike in `AllReduce` sums are added in a fixed order, by rank, in float32 or
    float64, and rounded once.
    Wire: (n-1)/n of the bucket in each half, sent and received by each rank.
    """

    traits = Traits(Layout.FLAT)

    def push_stages(self, size: int) -> tuple[str, ...]:
        return ("push",)

    def pull_stages(self, size: int) -> tuple[str, ...]:
        return ("pull",)

    async def push(
        self, x: Tensor, state: State, group: Group, scale: float, *, keep_fp32: bool = False
    ) -> tuple[OwnedRange, State]:
        # Push: to each owner its range.
        ranges = even_ranges(x.numel(), group.size)
        mine = ranges[group.rank]
        parts = await group.all_to_all(x, ranges, [mine] * group.size, largest=ranges[0])
        total = memory.empty(ranges[0], kernels.accumulation_dtype(x.dtype) if keep_fp32 else x.dtype, x.device)
        total[mine:] = 0
        kernels.sum_parts(parts, total[:mine], scale=scale)
        return OwnedRange(total, x), state

    async def pull(self, shard: OwnedRange, state: State, group: Group) -> Tensor:
        # Pull: from each owner its range of the sum.
        whole = shard.whole
        parts = await group.all_gather(shard.values)
        for room, part in zip(torch.split(whole, even_ranges(whole.numel(), group.size)), parts, strict=True):
            room.copy_(part[: len(room)])
        return whole

    def part(self, shard: OwnedRange) -> Tensor:
        return shard.values

    def with_part(self, shard: OwnedRange, part: Tensor) -> OwnedRange:
        return OwnedRange(part.to(shard.whole.dtype), shard.whole)

    def push_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> tuple[Step, ...]:
        (flat,) = specs
        ranges = tuple(float(length * flat.itemsize) for length in even_ranges(flat.numel, size))
        return (
            Transfer("push", Pattern.ALL_TO_ALL, ranges),
            Compute("sum_ranges", (size + 1) * ranges[0]),
        )

    def pull_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, summed: int
    ) -> tuple[Step, ...]:
        (flat,) = specs
        length = float(even_ranges(flat.numel, size)[0] * flat.itemsize)
        return Transfer("pull", Pattern.ALL_GATHER, (length,) * size), Compute("join_ranges", 2 * size * length)

    def part_of(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, owner: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[DensityProfile, ...]]:
        (flat,) = specs
        length = even_ranges(flat.numel, size)[0]
        sums = tuple(profile.of_sums(size) for profile in profiles)
        wide, start = kernels.accumulation_dtype(flat.dtype), owner * length
        known = None if flat.flat is None else flat.flat.cut(start, start + length).with_dtype(wide)
        part = TensorSpec((length,), wide, known)
        return (part,), tuple(profile.of_range(start, start + length) for profile in sums)


def even_ranges(numel: int, size: int) -> list[int]:
    """Returns the lengths of `size` equal consecutive ranges that cover `numel` elements.

    The last ones may be shorter, or empty.
    """
    length = -(-numel // size)
    return [max(min(length, numel - owner * length), 0) for owner in range(size)]
