"""Element-sparse schemes: a flat bucket most of whose elements are zero, summed by owners of single elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import kernels
from ..bucket import Layout, TensorSpec
from ..cluster import Placement
from ..comm import Group
from ..density import DensityProfile
from ..sparse import index_dtype
from ..steps import Compute, Pattern, Step, Transfer
from .base import Scheme, State, register
from .dense import AllReduce
from .formats import Part, PartFormat

COUNT_BYTES = 8  # a number of elements, as the ranks tell it


@register
@dataclass(frozen=True)
class BalancedElements(Scheme[Tensor]):
    """Zen's Balanced Parallelism (OSDI 2025, section 3) for the non-zero elements of a flat bucket. Exact.

    In place of the paper's hash, element i = n q + r is owned by rank (r + rho(q)) mod n, rho a seeded mix: each run of
    n neighbours goes to n owners, so neither dense regions nor hot columns load one of them. The map is a bijection
    onto equal parts: no tables, no collisions, and positions within a part stay in order, and travel in the
    smallest format. Bits decide what is zero: NaN and infinity travel, -0.0 is zero and comes out as 0.0.
    Wire per rank: push (n-1)/n * (positions + values); pull (n-1)/n * (positions + values) of the union; where that
    might be no less than a ring all-reduce moves, an all-reduce; and 8(n-1)(n+1) bytes of counts.
    """

    owners: str = "rotated_stripe"  # who sums what; the only map for single elements so far
    seed: int = 0  # of the rotations; the same on every rank

    layout = Layout.FLAT

    def __post_init__(self) -> None:
        if self.owners != "rotated_stripe":
            raise ValueError(f"BalancedElements.owners must be 'rotated_stripe', got {self.owners!r}")
        if not isinstance(self.seed, int):
            raise ValueError(f"BalancedElements.seed must be an integer, got {self.seed!r}")

    def stages(self, size: int) -> tuple[str, ...]:
        """Of the sparse way; the dense one has its all-reduce at the turn of "push", and no others."""
        return ("sizes", "push", "counts", "pull")

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        flat = TensorSpec.of(x)
        mine = _NonZeros.of(x, group.size, self.seed)
        counts = torch.stack(await group.all_gather(mine.counts)).tolist()  # the host lays out messages by them
        most, most_summed = max(map(max, counts)), max(map(sum, zip(*counts, strict=True)))
        if not _sparse_pays(flat, group.size, most, most_summed):
            return await AllReduce().synchronize(x, state, group, scale)
        # Push: to each owner its elements.
        form = _format_of(flat, group.size)
        message, own, sent = mine.pack(form, group.rank)
        owned = [row[group.rank] for row in counts]
        received = [int(form.nbytes(count)) for count in owned]
        received[group.rank] = 0
        messages = await group.all_to_all(message, sent, received, largest=int(form.nbytes(most)))
        messages[group.rank] = own
        parts = [form.part(part, count) for part, count in zip(messages, owned, strict=True)]
        # Pull: from each owner its sums.
        message, count = _sum_elements(parts, form, scale)
        unions = [int(union) for union in await group.all_gather(count)]
        messages = await group.all_gather(message, [int(form.nbytes(union)) for union in unions])
        totals = [form.part(total, union) for total, union in zip(messages, unions, strict=True)]
        return _join(totals, self.seed, x), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        """The profile's rows are the elements of the flat tensor; without a profile none of them counts as zero."""
        (flat,) = specs
        n = placement.size
        profile = profiles[0] if profiles else DensityProfile(flat.numel, float(flat.numel))
        found = profile.rows * (index_dtype(flat.numel).itemsize + flat.itemsize)
        sizes = (
            Compute("find_elements", flat.nbytes + 3 * found),
            Transfer("sizes", Pattern.ALL_GATHER, (float(COUNT_BYTES * n),) * n),
        )
        if not _sparse_pays(flat, n, profile.rows / n, profile.rows):
            return (*sizes, *AllReduce().steps(specs, profiles, placement, round))
        form = _format_of(flat, n)
        push, pull = float(form.nbytes(profile.rows / n)), float(form.nbytes(profile.union_rows(n) / n))
        return (
            *sizes,
            Compute("pack_elements", found + n * push),
            Transfer("push", Pattern.ALL_TO_ALL, (push,) * n),
            Compute("sum_elements", n * push + pull),
            Transfer("counts", Pattern.ALL_GATHER, (float(COUNT_BYTES),) * n),
            Transfer("pull", Pattern.ALL_GATHER, (pull,) * n),
            Compute("join_elements", n * pull + flat.nbytes),
        )


def _format_of(flat: TensorSpec, size: int) -> PartFormat:
    """Parts of equal capacity; a few places of the last run stay empty where `size` does not divide the elements."""
    return PartFormat(-(-flat.numel // size), 1, flat.dtype)


def _sparse_pays(flat: TensorSpec, size: int, pushed: float, summed: float) -> bool:
    """Whether push, counts and pull surely move fewer bytes on every rank than a ring all-reduce of the flat tensor.

    `pushed`: the most elements that a rank has for an owner; `summed`: the most that an owner gets from all ranks, own
    ones included. Its sums are no more, nor more than its part; this bound stands for their number, which only the
    owner will know. In the sparse way a rank exchanges at most one push and one pull message with each of the others;
    a ring sends and receives (size-1)/size of the tensor twice, as if it were two parts with each.
    """
    form = _format_of(flat, size)
    per_peer = form.nbytes(pushed) + COUNT_BYTES + form.nbytes(min(summed, form.length))
    return size > 1 and per_peer * size < 2 * flat.nbytes


@dataclass(frozen=True)
class _NonZeros:
    """What a rank brings: its elements that are not zero, in order, and how the owners share them."""

    values: Tensor  # (nnz,)
    partition: kernels.RotatedPartition

    @classmethod
    def of(cls, x: Tensor, size: int, seed: int) -> _NonZeros:
        found = kernels.nonzero_elements(x)
        indices = x.new_empty(found.count, dtype=index_dtype(x.numel()))
        values = x.new_empty(found.count)
        found.write(indices, values)
        return cls(values, kernels.partition_rotated(indices, x.numel(), size, seed))

    @property
    def counts(self) -> Tensor:
        """Elements for each owner, (size,) int64."""
        return torch.tensor(self.partition.counts, device=self.values.device)

    def pack(self, form: PartFormat, rank: int) -> tuple[Tensor, Tensor, list[int]]:
        """One message for each other owner, one after the other; this rank's own; the sizes in bytes (own: 0)."""
        counts = self.partition.counts
        nbytes = [int(form.nbytes(count)) for count in counts]
        own = self.values.new_empty(nbytes[rank], dtype=torch.uint8)
        nbytes[rank] = 0
        message = own.new_empty(sum(nbytes))
        parts = list(torch.split(message, nbytes))
        parts[rank] = own
        owners = [form.part(part, count) for part, count in zip(parts, counts, strict=True)]
        self.partition.write(self.values, [e.positions.indices for e in owners], [e.values.view(-1) for e in owners])
        for elements in owners:
            elements.positions.encode()
        return message, own, nbytes


def _sum_elements(parts: Sequence[Part], form: PartFormat, scale: float) -> tuple[Tensor, Tensor]:
    """`scale` times the sum of all ranks' parts, in rank order: as a message, and the number of its elements."""
    for part in parts:
        part.positions.decode()
    union = kernels.unite_rows([part.positions.indices for part in parts], form.length)
    message = parts[0].values.new_empty(int(form.nbytes(union.count)), dtype=torch.uint8)
    total = form.part(message, union.count)
    union.write_indices(total.positions.indices)
    union.sum([part.values for part in parts], [total.values], scale=scale)
    total.positions.encode()
    return message, torch.tensor([union.count], device=message.device)


def _join(totals: Sequence[Part], seed: int, x: Tensor) -> Tensor:
    """Overwrites the flat tensor: the owners' sums where they belong, zero everywhere else."""
    for total in totals:
        total.positions.decode()
    kernels.join_rotated([t.positions.indices for t in totals], [t.values.view(-1) for t in totals], seed, x)
    return x
