"""Element-sparse schemes: flat buckets in which most elements are zero, summed by owners of single elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import kernels
from ..comm import LENGTH_BYTES, Group
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Pattern, Step, Transfer
from ..devices import host
from ..inputs.settings import NonNegativeInt
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.sparse import index_dtype
from .base import Scheme, State, Traits
from .capacity import with_margin
from .dense import AllReduce
from .formats import PartFormat, PartMessage

COUNT_BYTES = 8  # a number of elements in a message, int64


@register
@dataclass(frozen=True)
class BalancedElements(Scheme[Tensor]):
    """A scheme for flat buckets of mostly zeros: each of n ranks sums the non-zeros of a fixed n-th of the elements.

    Exact. This is Zen's Balanced Parallelism (OSDI 2025, section 3) for elements. In place of the paper's hash, element
    i = n q + r is owned by rank (r + rho(q)) mod n, where rho is pseudo-random: each run of n neighbours goes to n
    owners, so neither dense regions nor hot columns load one owner. The map is a bijection onto equal parts: no tables,
    no collisions; positions within a part stay in order, and travel in the smallest format. NaN and infinity count as
    non-zeros; -0.0 is zero and comes out as 0.0.
    Wire per rank: push (n-1)/n * (positions + values); pull (n-1)/n * (positions + values) of the union; an all-reduce
    instead where a ring all-reduce might move no more; and 8(n-1)(n+1) bytes of counts.

    With `capacity` no sizes are exchanged beforehand: counts travel with the elements. A rank whose elements do not
    fit, or would be no fewer bytes than dense, pushes counts only; all ranks see that, and then push by exact sizes or
    run an all-reduce.

    Attributes:
        owners: the owner map; "rotated_stripe" is the only one for single elements so far.
        seed: the seed of rho; the same on every rank.
        capacity: the most non-zeros of a rank, and of the union of all; (): ranks exchange sizes first.
    """

    owners: Literal["rotated_stripe"] = "rotated_stripe"
    seed: int = 0
    capacity: tuple[NonNegativeInt, ...] = ()

    traits = Traits(Layout.FLAT, waits_for_device=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.capacity) not in (0, 2):
            raise ValueError(
                "BalancedElements.capacity must be two numbers, the most non-zeros of a rank and of the union of all, "
                f"or none, got {list(self.capacity)}"
            )

    def planned_for(self, profiles: Sequence[DensityProfile]) -> BalancedElements:
        """Returns the scheme with room in messages for as many non-zeros as a measured density says, plus a margin.

        `profiles` has the bucket's density as its only entry, in which `rows` counts non-zero elements; if it is empty,
        ranks exchange sizes before messages.
        """
        if not profiles:
            return replace(self, capacity=())
        (known,) = profiles
        rows = (max(known.rows, known.most_rows), _union_rows(known))
        return replace(self, capacity=tuple(with_margin(count, known.num_rows) for count in rows))

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        if not profiles:
            return True
        (known,) = profiles
        most = max(known.rows, known.most_rows)
        return bool(self.capacity) and most <= self.capacity[0] and _union_rows(known) <= self.capacity[1]

    def stages(self, size: int) -> tuple[str, ...]:
        """Returns the names of the exchanges: "push" (to the ranks that sum) and "pull" (of their sums), among others.

        Without `capacity` (room in messages that was planned), two exchanges of sizes are added. In a step in which the
        bucket is too dense, the first exchange runs as named, and then an all-reduce.
        """
        return ("push", "pull") if self.capacity else ("sizes", "push", "counts", "pull")

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        form = part_format(TensorSpec.of(x), group.size)
        # Push: to each owner its elements.
        parts = await self._push(x, form, group)
        if not parts:
            return await AllReduce().synchronize(x, state, group, scale)
        # Pull: from each owner its sums.
        sums = Sums.of(parts, form, scale)
        del parts
        return join_parts(await self._pull(sums, form, group), self.seed, x), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the computations and transfers expected of each rank in one synchronisation, in any training step.

        Args:
            specs: shape and dtype of the flat bucket, as the only entry.
            profiles: its density, as the only entry, in which `rows` counts non-zero elements; empty: none is zero.
            placement: the ranks on their nodes.
            step: changes nothing.
        """
        (flat,) = specs
        n, form = placement.size, part_format(flat, placement.size)
        profile = elements_of(flat, profiles)
        found = profile.rows * (index_dtype(flat.numel).itemsize + flat.itemsize)
        push, union = float(form.nbytes(profile.rows / n)), profile.union_rows(n)
        most = max(profile.rows, profile.most_rows)  # by which all ranks choose
        at_once = bool(self.capacity) and most <= self.capacity[0]
        at_once = at_once and _sparse_pays(flat, n, most / n, form.length)
        find = Compute("find_elements", flat.nbytes + flat.numel / 4)  # the bucket, and a bitmap written and read
        if not (at_once or _sparse_pays(flat, n, most / n, profile.rows)):
            return (find, self._transfers("push", push, n, at_once=False)[0], *AllReduce().steps(specs, (), placement))
        pull = float(form.nbytes(union / n))
        return (
            find,
            Compute("pack_elements", found + n * push),
            *self._transfers("push", push, n, at_once=at_once),
            Compute("sum_elements", n * push + pull),
            *self._transfers("pull", pull, n, at_once=bool(self.capacity) and union <= self.capacity[1]),
            Compute("join_elements", n * pull + flat.nbytes),
        )

    def _transfers(self, stage: str, nbytes: float, n: int, *, at_once: bool) -> list[Transfer]:
        """Returns the transfers of a "push" or "pull" of messages of `nbytes`, and those of the counts of elements.

        `at_once`: the elements are expected to fit the capacity, and travel in one message with the counts.
        """
        pattern, counts = (Pattern.ALL_TO_ALL, n) if stage == "push" else (Pattern.ALL_GATHER, 1)
        if not self.capacity:
            name = "sizes" if stage == "push" else "counts"
            asked = Transfer(name, Pattern.ALL_GATHER, (float(COUNT_BYTES * counts),) * n)
            return [asked, Transfer(stage, pattern, (nbytes,) * n)]
        head = LENGTH_BYTES + COUNT_BYTES * counts
        first = Transfer(stage, Pattern.ALL_TO_ALL, (float(head + (nbytes if at_once else 0)),) * n)
        return [first] if at_once else [first, Transfer("repeat", pattern, (nbytes,) * n)]

    async def _push(self, x: Tensor, form: PartFormat, group: Group) -> list[PartMessage]:
        """Sends each owner its elements; returns all messages to this rank, [] if all-reduce may move no more bytes."""
        flat, mine = TensorSpec.of(x), kernels.partition_elements(x, group.size, self.seed)
        told, messages = host.numbers(mine.counts, x.device), list[Tensor]()
        if self.capacity:
            counts, messages = await self._push_at_once(mine, told, flat, form, group)
        else:
            counts = torch.stack(await group.all_gather(told)).tolist()  # to size the messages
        if not messages:
            if not _sparse_pays(flat, group.size, max(map(max, counts)), max(map(sum, zip(*counts, strict=True)))):
                return []
            messages = await _push_by_sizes(mine, told, counts, form, group)
        return [form.part(part, row[group.rank]) for part, row in zip(messages, counts, strict=True)]

    async def _push_at_once(
        self, mine: kernels.ElementPartition, told: Tensor, flat: TensorSpec, form: PartFormat, group: Group
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Sends each owner one message, bounded by `capacity`: `told`, this rank's counts for all owners, and elements.

        Returns the counts of elements, counts[rank][owner], and each rank's message to this one; no messages if some
        rank's elements did not fit, or might save no bytes over an all-reduce.
        """
        room = _room(self.capacity[0], form, group.size)

        def fits(counts: Sequence[int]) -> bool:
            """Whether a rank's elements, counts[owner], fit into messages, and surely save bytes over an all-reduce."""
            return max(counts) <= room and _sparse_pays(flat, group.size, max(counts), form.length)

        head = LENGTH_BYTES + COUNT_BYTES * group.size
        if fits(mine.counts):
            _, outgoing = _packed(mine, form, group.rank, told, head=head)
        else:
            outgoing = [told.new_empty(head, dtype=torch.uint8) for _ in range(group.size)]
        for message in outgoing:
            message[LENGTH_BYTES:head].copy_(told.view(torch.uint8))
        arrived = await group.exchange(outgoing, [head + int(form.nbytes(room))] * group.size)
        counts = counts_in(arrived, head)
        return counts, [message[head:] for message in arrived] if all(map(fits, counts)) else []

    async def _pull(self, sums: Sums, form: PartFormat, group: Group) -> list[PartMessage]:
        """Gathers the sums of all owners; with `capacity` again, by exact sizes, if some owner's sums did not fit."""
        if self.capacity:
            room = _room(self.capacity[1], form, group.size)
            message = sums.message if sums.count <= room else sums.message[: Sums.head]
            sums.write_count()
            bound = Sums.head + int(form.nbytes(room))
            arrived = await group.exchange([message] * group.size, [bound] * group.size)
            unions = [count for (count,) in counts_in(arrived, Sums.head)]
            if max(unions) <= room:
                return [form.part(part[Sums.head :], union) for part, union in zip(arrived, unions, strict=True)]
        else:
            count = host.numbers([sums.count], sums.message.device)
            unions = [int(union) for union in await group.all_gather(count)]
        body = sums.message[Sums.head :]
        messages = await group.all_gather(body, [int(form.nbytes(union)) for union in unions])
        return [form.part(part, union) for part, union in zip(messages, unions, strict=True)]


async def _push_by_sizes(
    mine: kernels.ElementPartition, told: Tensor, counts: Sequence[Sequence[int]], form: PartFormat, group: Group
) -> list[Tensor]:
    """Sends each owner its elements; returns the messages to this rank, whose sizes follow from counts[rank][owner].

    `told` only gives the device.
    """
    outgoing, parts = _packed(mine, form, group.rank, told)
    own, parts[group.rank] = parts[group.rank], outgoing[:0]
    received = [int(form.nbytes(row[group.rank])) for row in counts]
    received[group.rank] = 0
    largest = int(form.nbytes(max(map(max, counts))))
    messages = await group.all_to_all(outgoing, [len(part) for part in parts], received, largest=largest)
    messages[group.rank] = own
    return messages


def _packed(
    mine: kernels.ElementPartition, form: PartFormat, rank: int, like: Tensor, *, head: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Packs this rank's elements: returns the messages to other owners end to end, and a list of all owners' messages.

    The list has views of the former, and a tensor of its own for this rank. The caller fills the first `head` bytes of
    each message.
    """
    nbytes = [head + int(form.nbytes(count)) for count in mine.counts]
    own = like.new_empty(nbytes[rank], dtype=torch.uint8)
    nbytes[rank] = 0
    outgoing = own.new_empty(sum(nbytes))
    parts = list(torch.split(outgoing, nbytes))
    parts[rank] = own
    write_parts(mine, [part[head:] for part in parts], form)
    return outgoing, parts


def _union_rows(profile: DensityProfile) -> float:
    """Returns how many rows the measured ranks touch together; all rows of the table if no union was measured."""
    return profile.union_rows(max(profile.densification)) if profile.densification else float(profile.num_rows)


def _room(expected: int, form: PartFormat, size: int) -> int:
    """Returns how many elements a message for one of `size` owners has room for: the mean plus 8 standard deviations.

    `expected`: the elements for all owners together.
    """
    mean = expected / size
    return min(form.length, math.ceil(mean + 8 * math.sqrt(mean)))


def elements_of(flat: TensorSpec, profiles: Sequence[DensityProfile]) -> DensityProfile:
    """Returns the density of a flat bucket: the first of `profiles`, or, if there is none, one without any zero."""
    return profiles[0] if profiles else DensityProfile(flat.numel, float(flat.numel))


def nonzeros(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the non-zeros of a flat tensor: indices, (count,), ascending, int32 or int64, and values, (count,)."""
    found = kernels.nonzero_elements(x)
    indices = x.new_empty(found.count, dtype=index_dtype(x.numel()))
    values = x.new_empty(found.count)
    found.write(indices, values)
    return indices, values


def counts_in(arrived: Sequence[Tensor], head: int) -> list[list[int]]:
    """Returns the int64 numbers at the start of each message, (bytes,) uint8, such as the number of elements in it.

    They are the bytes from `LENGTH_BYTES`, behind the message's length, to `head`.
    """
    counts: list[list[int]] = (
        torch.stack([message[LENGTH_BYTES:head] for message in arrived]).view(torch.int64).tolist()
    )
    return counts  # the host needs the numbers to cut messages


def part_format(flat: TensorSpec, size: int) -> PartFormat:
    """Returns the layout of messages with some elements of the part of a flat bucket that one of `size` ranks sums.

    All parts count as equally long; some have an unused last place if `size` does not divide the number of elements.
    """
    return PartFormat(-(-flat.numel // size), 1, flat.dtype)


def _sparse_pays(flat: TensorSpec, size: int, pushed: float, summed: float) -> bool:
    """Whether push, counts and pull surely move fewer bytes on every rank than a ring all-reduce of the flat tensor.

    `pushed` is the most elements that a rank has for an owner, `summed` the most that an owner gets from all ranks, its
    own included. The sums that an owner sends are at most `summed`, and at most the elements of its part. A rank sends
    each other rank at most one push and one pull message; a ring all-reduce sends 2 (size-1)/size of the tensor, which
    is 2/size for each other rank.
    """
    form = part_format(flat, size)
    per_peer = form.nbytes(pushed) + COUNT_BYTES + form.nbytes(min(summed, form.length))
    return size > 1 and per_peer * size < 2 * flat.nbytes


def write_parts(mine: kernels.ElementPartition, parts: Sequence[Tensor], form: PartFormat) -> None:
    """Writes this rank's non-zero elements into the messages to the ranks that sum them.

    Args:
        mine: the elements, sorted by the rank that sums them (its owner).
        parts: the message to each owner, (form.nbytes(count),) uint8 for its number of elements; overwritten.
        form: the layout of messages.
    """
    owners = [form.part(part, count) for part, count in zip(parts, mine.counts, strict=True)]
    mine.write([owner.positions.as_packed for owner in owners], [owner.values.view(-1) for owner in owners])


@dataclass(frozen=True)
class Sums:
    """The non-zero sums of the part of a bucket that one rank sums, packed as its message to all ranks."""

    head: ClassVar[int] = LENGTH_BYTES + COUNT_BYTES  # bytes in front of the sums: the message's length, the count

    message: Tensor  # (bytes,) uint8; the group writes the length, `write_count` the count
    count: int  # non-zero sums

    @classmethod
    def of(cls, parts: Sequence[PartMessage], form: PartFormat, scale: float) -> Sums:
        """Returns the message with `scale` times the sum of `parts`, one from each rank, added in rank order.

        `form` is the layout of `parts` and of the message: positions of elements in this rank's part of the bucket, and
        values.
        """
        union = kernels.unite_elements([part.positions.as_packed for part in parts], form.length)
        message = parts[0].values.new_empty(cls.head + int(form.nbytes(union.count)), dtype=torch.uint8)
        total = form.part(message[cls.head :], union.count)
        values = [part.values.view(-1) for part in parts]
        union.sum(values, total.positions.as_packed, total.values.view(-1), scale=scale)
        return cls(message, union.count)

    def write_count(self) -> None:
        """Writes `count`, the number of sums, into the message, behind its first `LENGTH_BYTES` bytes.

        These are for the message's length.
        """
        self.message[LENGTH_BYTES : self.head].copy_(torch.tensor([self.count]).view(torch.uint8), non_blocking=True)


def join_parts(totals: Sequence[PartMessage], seed: int, x: Tensor) -> Tensor:
    """Overwrites flat `x`, (numel,), with the sums from all ranks, and with 0 where there is none; returns `x`.

    Args:
        totals: the message of each rank with the non-zero sums of its part of `x`.
        seed: decides which elements belong to which rank's part.
        x: the bucket.
    """
    kernels.join_elements([t.positions.as_packed for t in totals], [t.values.view(-1) for t in totals], seed, x)
    return x
