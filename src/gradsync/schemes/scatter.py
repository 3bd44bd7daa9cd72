"""A sparse all-reduce as push to owners and pull, for flat buckets with mostly zeros; meant for ranks of one node.

Zen (OSDI 2025) always sums densely inside a node, however few elements are non-zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..comm import LENGTH_BYTES, Group
from ..compressors.expressions import register
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import index_dtype
from .base import Partitioned, State, Traits
from .dense import OwnedRange
from .elements import elements_of, join_parts, nonzeros, part_format, write_parts
from .formats import PartFormat, PartMessage

HEAD_BYTES = LENGTH_BYTES + 8  # in front of the elements: the message's length, the count of elements


@register
@dataclass(frozen=True)
class SparseReduceScatter(Partitioned[Tensor, OwnedRange]):
    """A sparse all-reduce: each rank sums the non-zeros of its part (push), and sends non-zero sums (pull). Exact.

    Parts are those of `BalancedElements`: which rank (owner) sums an element does not depend on data, and every part is
    equally long. Messages contain their counts, so no sizes are exchanged. An owner's sum is dense, in float32 (float64
    for float64), added in rank order, rounded once.
    Wire per rank: push (n-1)/n * (positions + values); pull the same for the non-zero sums; 16 bytes a message.

    Attributes:
        seed: the seed of the owner map; the same on every rank.
    """

    seed: int = 0

    traits = Traits(Layout.FLAT, waits_for_device=True)

    def push_stages(self, size: int) -> tuple[str, ...]:
        return ("push",)

    def pull_stages(self, size: int) -> tuple[str, ...]:
        return ("pull",)

    async def push(
        self, x: Tensor, state: State, group: Group, scale: float, *, keep_fp32: bool = False
    ) -> tuple[OwnedRange, State]:
        # Push: to each owner its elements.
        form, accumulated = part_format(TensorSpec.of(x), group.size), kernels.accumulation_dtype(x.dtype)
        mine, bound = kernels.partition_elements(x, group.size, self.seed), HEAD_BYTES + form.most_nbytes
        messages = [_message(count, form, x) for count in mine.counts]
        write_parts(mine, [message[HEAD_BYTES:] for message in messages], form)
        arrived = await group.exchange(messages, [bound] * group.size)
        total = x.new_zeros(form.length, 1, dtype=accumulated)
        for message in arrived:
            positions, values = _part(message, form).get()
            kernels.scatter_rows(positions, values.to(accumulated), total, accumulate=True)
        total = total.view(-1).mul_(scale)
        return OwnedRange(total if keep_fp32 else total.to(x.dtype), x), state

    async def pull(self, shard: OwnedRange, state: State, group: Group) -> Tensor:
        # Pull: from each owner its sums.
        whole = shard.whole
        form = part_format(TensorSpec.of(whole), group.size)
        indices, values = nonzeros(shard.values)
        message, bound = _message(len(indices), form, values), HEAD_BYTES + form.most_nbytes
        _part(message, form).put(indices, values[:, None])
        totals = await group.exchange([message] * group.size, [bound] * group.size)
        return join_parts([_part(total, form) for total in totals], self.seed, whole)

    def part(self, shard: OwnedRange) -> Tensor:
        return shard.values

    def with_part(self, shard: OwnedRange, part: Tensor) -> OwnedRange:
        return OwnedRange(part.to(shard.whole.dtype), shard.whole)

    def push_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int
    ) -> tuple[Step, ...]:
        """Returns what each of `size` ranks is expected to compute and send in push, the first half, in order.

        In push, each rank sends its non-zero elements to their owners, which add them up.

        Args:
            specs: shape and dtype of the bucket, as the only entry.
            profiles: the bucket's density, as the only entry, in which `rows` counts non-zero elements; empty: all are.
            size: the number of ranks.
        """
        (flat,) = specs
        form, rows = part_format(flat, size), elements_of(flat, profiles).rows
        push, found = HEAD_BYTES + form.nbytes(rows / size), rows * (index_dtype(flat.numel).itemsize + flat.itemsize)
        part_bytes = form.length * kernels.accumulation_dtype(flat.dtype).itemsize
        return (
            Compute("scatter_elements", flat.nbytes + 4 * found + size * push),
            Transfer("push", Pattern.ALL_TO_ALL, (float(push),) * size),
            Compute("sum_scattered", size * push + 2 * part_bytes),
        )

    def pull_steps(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, summed: int
    ) -> tuple[Step, ...]:
        (flat,) = specs
        form = part_format(flat, size)
        pull = HEAD_BYTES + form.nbytes(elements_of(flat, profiles).union_rows(summed) / size)
        return (
            Compute("gather_elements", form.length * flat.itemsize + 2 * pull),
            Transfer("pull", Pattern.ALL_TO_ALL, (float(pull),) * size),
            Compute("join_elements", size * pull + flat.nbytes),
        )

    def part_of(
        self, specs: tuple[TensorSpec, ...], profiles: tuple[DensityProfile, ...], size: int, owner: int
    ) -> tuple[tuple[TensorSpec, ...], tuple[DensityProfile, ...]]:
        (flat,) = specs
        length = part_format(flat, size).length
        sums = [profile.of_sums(size) for profile in profiles]
        parts = (DensityProfile(length, min(p.rows / size, float(length)), p.densification) for p in sums)
        return (TensorSpec((length,), kernels.accumulation_dtype(flat.dtype)),), tuple(parts)


def _message(count: int, form: PartFormat, like: Tensor) -> Tensor:
    """Returns a uint8 message with room for `count` elements; writes the count, but not the length, into it."""
    message = like.new_empty(HEAD_BYTES + int(form.nbytes(count)), dtype=torch.uint8)
    message[LENGTH_BYTES:HEAD_BYTES].copy_(torch.tensor([count]).view(torch.uint8), non_blocking=True)
    return message


def _part(message: Tensor, form: PartFormat) -> PartMessage:
    """Returns views of the positions and values in a message, which lie behind its length and its count."""
    count = int(message[LENGTH_BYTES:HEAD_BYTES].clone().view(torch.int64))  # the host cuts the message
    return form.part(message[HEAD_BYTES:], count)
