"""Schemes at any point of Zen's design space, for tables and for flat buckets (Wang et al., OSDI 2025, section 3).

Points differ only in their schedules (`space.py`). This module runs a schedule: it writes partial sums into messages,
in the smallest format, reads and adds them. `AGSparse`, `BalancedParallelism` and `BalancedElements` go further than
their points demand; the schemes of this module serve for comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..comm import LENGTH_BYTES, Group
from ..compressors.expressions import Nameable, register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Step, Transfer
from ..inputs.settings import PositiveInt
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from ..tensors.index_formats import SPARSE_FORMATS, IndexFormat
from ..tensors.sparse import SparseRows
from .base import Scheme, State, Traits
from .elements import COUNT_BYTES, elements_of
from .formats import PartFormat
from .row_owners import EvenSplit, HashedRows, RotatedStripe, RowOwners
from .space import Aggregation, Balance, Communication, Merge, Message, PartialSum, Partition, Point, Schedule, schedule
from .tables import ABSENT, Tables, specs_of

SMALLEST = "smallest"
OWNERS = {None: (), Balance.BALANCED: ("rotated_stripe", "hash"), Balance.IMBALANCED: ("even_split",)}


@dataclass(frozen=True)
class DesignPoint(Nameable):
    """The settings that choose a scheme in Zen's design space of sparse exchanges, by default Balanced Parallelism.

    The choices are the path of messages, when ranks add, whether tensors are split, and whether parts are equally
    dense.

    Attributes:
        communication: the path of messages.
        aggregation: when a rank adds what arrives.
        partition: whether tensors travel whole or in parts, each of which one rank sums.
        balance: whether the parts have about equally many non-zeros; None for tensors sent whole.
        owners: the owner map; None: "rotated_stripe" if balanced, "even_split" if not.
        pull_by: the path on which complete sums reach all ranks; None: as `communication`.
        seed: the seed of a balanced owner map; the same on every rank.
        push_format: the format of positions: "smallest", or always the one named.
        pull_format: the same for sums over all ranks.
    """

    formats: ClassVar[tuple[IndexFormat, ...]]  # allowed for positions in this kind of bucket

    communication: Communication = Communication.POINT_TO_POINT
    aggregation: Aggregation = Aggregation.INCREMENTAL
    partition: Partition = Partition.PARALLELISM
    balance: Balance | None = Balance.BALANCED
    owners: str | None = None
    pull_by: Communication | None = None
    seed: int = 0
    push_format: str = SMALLEST
    pull_format: str = SMALLEST

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pull_by is not None and self.partition is Partition.CENTRALIZATION:
            raise ValueError(
                f"{type(self).__name__}.pull_by is for parallelism, whose owners hand out sums; got {self.pull_by} "
                "with centralization"
            )
        if self.owners not in (maps := [None, *OWNERS[self.balance]]):
            raise ValueError(
                f"{type(self).__name__}.owners must be one of {', '.join(map(repr, maps))} with balance "
                f"{self.balance}, got {self.owners!r}"
            )
        for setting in ("push_format", "pull_format"):
            if getattr(self, setting) not in (known := [SMALLEST, *self.formats]):
                raise ValueError(
                    f"{type(self).__name__}.{setting} must be one of {', '.join(known)}, got {getattr(self, setting)!r}"
                )
        _ = self.point

    @classmethod
    def at(cls, point: Point, **settings: Any) -> Self:
        """Returns the scheme that makes the choices of `point`: path of messages, when to add, how to split tensors.

        `settings` are values of its other fields.
        """
        return cls(point.communication, point.aggregation, point.partition, point.balance, **settings)

    @property
    def title(self) -> str:
        """The scheme's name in records and printed tables: one of `NAMES`, else its choices in words."""
        by_hash = " by hash" if self.owners == "hash" else ""
        pulled = f" pulled by {self.pull_by}" if self.pull_by is not None else ""
        return NAMES.get(self, f"{self.point}{by_hash}{pulled}")

    @property
    def point(self) -> Point:
        """The scheme's place in Zen's design space."""
        return Point(self.communication, self.aggregation, self.partition, self.balance)

    def owners_of(self, num_rows: int, count: int) -> RowOwners:
        """Returns which of `count` ranks sums which rows of a table with `num_rows` rows."""
        if count == 1 or self.balance is Balance.IMBALANCED:
            return EvenSplit(num_rows, count)
        return (HashedRows if self.owners == "hash" else RotatedStripe)(num_rows, count, self.seed)

    def stages(self, size: int) -> tuple[str, ...]:
        """Returns the names of the rounds of messages among `size` ranks, such as "push" (to ranks that sum)."""
        return tuple(each.stage for each in self.schedule(size).rounds)

    def schedule(self, size: int) -> Schedule:
        """Returns the rounds of messages and additions by which `size` ranks sum a tensor."""
        return schedule(self.point, size, self.pull_by)


@register
@dataclass(frozen=True)
class RowPoint(DesignPoint, Scheme[Tables]):
    """A scheme for row-sparse tables at any point of Zen's design space (`space.Point`). Exact up to rounding.

    If tensors are split, each rank sums whole rows: the paper does not divide columns, as `BalancedParallelism` does.
    Wire: see `space.schedule`; a sum over some ranks travels as values of rows, and positions in the smallest format.
    """

    traits = Traits(Layout.ROWS, waits_for_device=True)
    formats = SPARSE_FORMATS  # not dense, which cannot tell a touched row of zeros from an untouched one

    async def synchronize(self, x: Tables, state: State, group: Group, scale: float) -> tuple[Tables, State]:
        space = _Space.of(self, specs_of(x), group.size)
        return await space.sum(tuple(map(_coalesced, x)), group, scale), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        tables = tuple(TensorSpec((spec.num_rows, spec.dim), spec.dtype) for spec in specs)
        return tuple(_Space.of(self, tables, placement.size).steps(profiles))


@register
@dataclass(frozen=True)
class ElementPoint(DesignPoint, Scheme[Tensor]):
    """A scheme for flat buckets with few non-zeros, at any point of Zen's design space (`space.Point`). Exact.

    A block of `block` elements travels whole if any of them is not zero. Sums that have become dense travel as dense
    messages (SparCML's switch). NaN and infinity travel, -0.0 is zero.

    Attributes:
        block: the number of elements in a block.
    """

    block: PositiveInt = 1

    traits = Traits(Layout.FLAT, waits_for_device=True)
    formats = tuple(IndexFormat)

    @property
    def title(self) -> str:
        in_blocks = f" in blocks of {self.block}" if self.block > 1 and self not in NAMES else ""
        return f"{super().title}{in_blocks}"

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        blocks = _in_blocks(x, self.block)
        space = _Space.of(self, (TensorSpec.of(blocks),), group.size)
        (total,) = await space.sum((SparseRows.from_dense(blocks),), group, scale)
        blocks.zero_()
        total.write_to(blocks)
        blocks.add_(0.0)  # turns -0.0, which scaling makes in dense messages, into 0.0: the sender has no such zeros
        return x.copy_(blocks.view(-1)[: x.numel()]), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the computations and transfers of the rank with the most to do in one synchronisation, in order.

        Args:
            specs: shape and dtype of the flat bucket, as the only entry.
            profiles: its density, as the only entry, in which `rows` counts non-zero elements; empty: none is zero.
            placement: the ranks on their nodes.
            step: changes nothing.
        """
        (flat,) = specs
        profile = elements_of(flat, profiles)
        blocks = TensorSpec((-(-flat.numel // self.block), self.block), flat.dtype)
        space = _Space.of(self, (blocks,), placement.size)
        found = Compute("find_elements", 2 * flat.nbytes)
        return (found, *space.steps((profile.in_blocks(self.block),)), Compute("join_elements", 2 * flat.nbytes))


_DOUBLING = Point(Communication.HIERARCHY, Aggregation.INCREMENTAL, Partition.CENTRALIZATION)
_SERVERS = Point(Communication.POINT_TO_POINT, Aggregation.INCREMENTAL, Partition.PARALLELISM, Balance.IMBALANCED)
_BLOCKS = Point(Communication.POINT_TO_POINT, Aggregation.ONE_SHOT, Partition.PARALLELISM, Balance.IMBALANCED)

# SparCML's sparse all-reduce by recursive doubling. Unlike in SparCML, a sum becomes dense as soon as that takes fewer
# bytes, any number of ranks is allowed, and 16-bit sums travel in float32.
DOUBLING_OF_ROWS = RowPoint.at(_DOUBLING)
"""SparCML's recursive doubling (Renggli et al., SC 2019), Zen's Hierarchical Centralization, for rows of tables."""
DOUBLING_OF_ELEMENTS = ElementPoint.at(_DOUBLING)
"""SparCML's recursive doubling, for elements of flat buckets."""
PARAMETER_SERVER_OF_ROWS = RowPoint.at(_SERVERS)
"""Sparse parameter servers, one on each rank (Zen's Sparse PS): each owns consecutive rows of a table."""
PARAMETER_SERVER_OF_ELEMENTS = ElementPoint.at(_SERVERS)
"""Sparse parameter servers, one on each rank: each owns consecutive elements of a flat bucket."""
# SSAR_Split_allgather in SparCML; DSAR where sums become dense. A rank sends rows straight to the owner of an even
# part, and sums go from pair to pair, in log2 n messages. The bytes are those of parameter servers. Unlike in SparCML,
# a rank sends to one owner at a time, any number of ranks is allowed, and every part takes the smallest of all formats,
# not one of two.
_SPLIT = {"pull_by": Communication.HIERARCHY}
SPLIT_OF_ROWS = RowPoint.at(_SERVERS, **_SPLIT)
"""SparCML's split all-gather, for rows: they go straight to owners, and sums from pair to pair."""
SPLIT_OF_ELEMENTS = ElementPoint.at(_SERVERS, **_SPLIT)
"""SparCML's split all-gather, for elements of flat buckets."""
# Unlike in OmniReduce, the ranks are the aggregators, and there is no pipeline of blocks over RDMA.
BLOCKS_OF_256 = ElementPoint.at(_BLOCKS, block=256)
"""OmniReduce (Fei et al., SIGCOMM 2021): blocks of 256 elements travel whole unless all of them are zero."""

NAMES: dict[DesignPoint, str] = {  # in records and tables
    DOUBLING_OF_ROWS: "recursive_doubling",
    DOUBLING_OF_ELEMENTS: "recursive_doubling",
    SPLIT_OF_ROWS: "recursive_doubling_split",
    SPLIT_OF_ELEMENTS: "recursive_doubling_split",
    PARAMETER_SERVER_OF_ROWS: "sparse_ps",
    PARAMETER_SERVER_OF_ELEMENTS: "sparse_ps",
    BLOCKS_OF_256: "blocks256",
}


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Returns a flat tensor as (blocks, block): a view, or a copy padded with zeros if the last block is not full."""
    blocks = -(-x.numel() // block)
    if blocks * block == x.numel():
        return x.view(blocks, block)
    padded = x.new_zeros(blocks * block)
    padded[: x.numel()] = x
    return padded.view(blocks, block)


@dataclass(frozen=True)
class _Space:
    """A schedule of messages that sums the tables of one bucket, with each table's owner map and message formats."""

    plan: Schedule
    specs: tuple[TensorSpec, ...]
    owners: tuple[RowOwners, ...]  # of each table
    own_formats: tuple[PartFormat, ...]  # for one rank's own rows of a block
    partial_formats: tuple[PartFormat, ...]  # for sums over some of the ranks
    total_formats: tuple[PartFormat, ...]  # for sums over all ranks

    @classmethod
    def of(cls, settings: DesignPoint, specs: tuple[TensorSpec, ...], size: int) -> _Space:
        plan = settings.schedule(size)
        owners = tuple(settings.owners_of(spec.num_rows, plan.blocks) for spec in specs)

        def formats(setting: str, *, partial: bool = False) -> tuple[PartFormat, ...]:
            allowed = settings.formats if setting == SMALLEST else (IndexFormat(setting),)
            return tuple(
                PartFormat(of.length, s.dim, kernels.accumulation_dtype(s.dtype) if partial else s.dtype, allowed)
                for of, s in zip(owners, specs, strict=True)
            )

        push, pull = settings.push_format, settings.pull_format
        return cls(plan, specs, owners, formats(push), formats(push, partial=True), formats(pull))

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.plan.size))

    async def sum(self, x: Tables, group: Group, scale: float) -> Tables:
        """Returns `scale` times the sum of all ranks' tables, whose rows must be sorted and distinct."""
        device = x[0].values.device
        for owners in self.owners:
            owners.prepare(group, device)
        held = self._split(x, group.rank)
        for each in self.plan.rounds:
            outgoing = {m.destination: self._pack(held, m) for m in each.messages if m.source == group.rank}
            incoming = {m.source: m for m in each.messages if m.destination == group.rank}
            bound, in_pairs = self._bound(each.messages), each.in_pairs
            arrived = await group.swap(outgoing, list(incoming), bound, device, in_pairs=in_pairs)
            for source, message in incoming.items():
                held.update(self._unpack(arrived[source], message))
            for merge in each.merges:
                if merge.rank == group.rank:
                    self._merge(held, merge, scale)
        total = [held[block, self.everyone] for block in range(self.plan.blocks)]
        return tuple(owners.join(parts) for owners, parts in zip(self.owners, zip(*total, strict=True), strict=True))

    def steps(self, profiles: Sequence[DensityProfile]) -> Iterator[Step]:
        """Yields the work and transfers that `sum` is expected to take for tables of these densities."""
        known: dict[tuple[int, int], float] = {}

        def nbytes(partials: Sequence[PartialSum]) -> float:
            for block, ranks in partials:
                if (block, len(ranks)) not in known:
                    known[block, len(ranks)] = self._expected_nbytes((block, ranks), profiles)
            return LENGTH_BYTES + sum(known[block, len(ranks)] for block, ranks in partials)

        own, tables = [(block, (0,)) for block in range(self.plan.blocks)], len(self.specs)
        yield Compute("sum_rows", 2 * nbytes(own), calls=tables)
        if self.plan.blocks > 1:
            yield Compute("split_rows", 2 * nbytes(own), calls=tables * len(own))
        for each in self.plan.rounds:
            sizes = [(message.source, message.destination, nbytes(message.partials)) for message in each.messages]
            transfer = Transfer.of_messages(each.stage, self.plan.size, sizes)
            packed = Counter({m.source: 0 for m in each.messages})
            for message in each.messages:
                packed[message.source] += len(message.partials)
            yield Compute("pack_rows", 2 * transfer.busiest_bytes, calls=tables * max(packed.values(), default=0))
            yield transfer
            merged: dict[int, float] = {}
            for merge in each.merges:
                merged[merge.rank] = merged.get(merge.rank, 0.0) + nbytes((*merge.partials, merge.sum))
            if merged:
                merges = Counter(merge.rank for merge in each.merges)
                yield Compute("sum_rows", max(merged.values()), calls=tables * max(merges.values()))
        if self.plan.blocks > 1:
            whole = [(block, self.everyone) for block in range(self.plan.blocks)]
            yield Compute("join_rows", 2 * nbytes(whole), calls=tables * len(whole))

    def _split(self, x: Tables, rank: int) -> dict[PartialSum, Tables]:
        """Divides tables among owners; returns the rows of each owner's block as a partial sum over this rank alone."""
        parts = [owners.split(table) for owners, table in zip(self.owners, x, strict=True)]
        return {(block, (rank,)): tables for block, tables in enumerate(zip(*parts, strict=True))}

    def _pack(self, held: dict[PartialSum, Tables], message: Message) -> Tensor:
        """Returns the message's bytes, uint8: room for the length, the counts of all partial sums, then their rows."""
        tables = [table for partial in message.partials for table in held[partial]]
        counts = [table.nnz if table.present else ABSENT for table in tables]
        forms = [form for partial in message.partials for form in self._formats_of(partial)]
        sizes = [int(form.nbytes(table.nnz)) for form, table in zip(forms, tables, strict=True)]
        head = LENGTH_BYTES + COUNT_BYTES * len(counts)
        packed = tables[0].values.new_empty(head + sum(sizes), dtype=torch.uint8)
        packed[LENGTH_BYTES:head].copy_(torch.tensor(counts).view(torch.uint8), non_blocking=True)
        for form, table, room in zip(forms, tables, torch.split(packed[head:], sizes), strict=True):
            form.part(room, table.nnz).put(table.indices, table.values)
        return packed

    def _unpack(self, packed: Tensor, message: Message) -> dict[PartialSum, Tables]:
        """Returns the partial sums in a message's bytes: the inverse of `_pack`."""
        forms = [form for partial in message.partials for form in self._formats_of(partial)]
        head = LENGTH_BYTES + COUNT_BYTES * len(forms)
        counts = packed[LENGTH_BYTES:head].clone().view(torch.int64).tolist()  # the host cuts the message
        sizes = [int(form.nbytes(max(count, 0))) for form, count in zip(forms, counts, strict=True)]
        tables = []
        for form, count, part in zip(forms, counts, torch.split(packed[head:], sizes), strict=True):
            positions, values = form.part(part, max(count, 0)).get()
            tables.append(SparseRows(positions, values, form.length, count != ABSENT))
        by_sum = zip(*[iter(tables)] * len(self.specs), strict=True)
        return dict(zip(message.partials, by_sum, strict=True))

    def _merge(self, held: dict[PartialSum, Tables], merge: Merge, scale: float) -> None:
        """Replaces partial sums of a block in `held` by their sum, scaled and rounded if it is over all ranks."""
        parts = [held.pop(partial) for partial in merge.partials]
        last = merge.sum[1] == self.everyone
        sums = (_added(tables, scale if last else 1.0) for tables in zip(*parts, strict=True))
        held[merge.sum] = tuple(
            replace(total, values=total.values.to(spec.dtype)) if last else total
            for total, spec in zip(sums, self.specs, strict=True)
        )

    def _formats_of(self, partial: PartialSum) -> tuple[PartFormat, ...]:
        """Returns each table's message format: 16-bit sums over only some ranks travel in float32, to round once."""
        if len(partial[1]) == 1:
            return self.own_formats
        return self.total_formats if partial[1] == self.everyone else self.partial_formats

    def _bound(self, messages: Sequence[Message]) -> int:
        """Returns a bound on the bytes of each message of a round; the same on every rank."""
        most_partials = max((len(message.partials) for message in messages), default=0)
        kinds = (self.own_formats, self.partial_formats, self.total_formats)
        largest = max(sum(COUNT_BYTES + form.most_nbytes for form in forms) for forms in kinds)
        return LENGTH_BYTES + most_partials * largest

    def _expected_nbytes(self, partial: PartialSum, profiles: Sequence[DensityProfile]) -> float:
        """Returns the expected bytes of a partial sum in a message, counts included."""
        (block, ranks), total = partial, 0.0
        for form, owners, profile in zip(self._formats_of(partial), self.owners, profiles, strict=True):
            rows = owners.share(block, profile, len(ranks)) * profile.union_rows(len(ranks))
            total += COUNT_BYTES + form.nbytes(min(rows, float(form.length)))
        return total


def _coalesced(table: SparseRows) -> SparseRows:
    """Returns the table with sorted distinct rows; repeated rows are summed."""
    indices, values = kernels.sum_rows([(table.indices, table.values)], table.num_rows)
    return replace(table, indices=indices, values=values)


def _added(tables: Sequence[SparseRows], scale: float) -> SparseRows:
    """Returns `scale` times the sum of sorted tables, added in this order; for 16-bit floats in float32."""
    wide = kernels.accumulation_dtype(tables[0].values.dtype)
    parts = [(table.indices, table.values.to(wide)) for table in tables]
    indices, total = kernels.sum_rows(parts, tables[0].num_rows, scale=scale)
    return SparseRows(indices, total, tables[0].num_rows, any(table.present for table in tables))
