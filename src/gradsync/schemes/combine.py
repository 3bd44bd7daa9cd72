"""Schemes made of two schemes: one inside nodes, where links are fast, one between nodes (Zen, OSDI 2025).

Zen always reduces densely inside a node, however few elements are non-zero; here both levels take any scheme, and the
cost model tells which pair is fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..comm import Group, Pending
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Step, Transfer
from ..inputs.settings import PositiveInt
from ..tensors.bucket import Bucket, FlatSpec, Layout, Segment, TensorSpec
from ..tensors.density import DensityProfile
from .base import Partitioned, Scheme, State, Traits
from .dense import AllReduce, ReduceScatter

T = TypeVar("T")
SumOf = Coroutine[Any, Any, tuple[T, State]]  # what a scheme's `synchronize` or `mix` makes, before it is awaited


@register
@dataclass(frozen=True)
class Hierarchical(Scheme[Any]):
    """A two-level scheme: it sums inside nodes, then each part across nodes, and hands the sums out inside nodes.

    Exact if `intra` and `inter` are. First (push) each rank of a node gets the node's sum of one part of the bucket, so
    that one sum a node travels between nodes, not every rank's tensor. Then `inter` sums each part across nodes; last
    (pull) the ranks of a node send each other their parts. Sums of 16-bit floats stay in float32
    until they are complete; then they are rounded. With one rank a node only `inter` runs, on a single node only
    `intra`.
    Wire: the traffic of both halves of `intra` among a node's ranks, and of `inter`, for a part, among as many ranks as
    nodes.

    Attributes:
        intra: the scheme that sums inside a node, in two halves (push and pull).
        inter: the scheme that sums one part across nodes.
        ranks_per_node: the number of ranks on a node, the same on all nodes.
        nodes_per_rack: so many consecutive nodes count as one, such as the nodes of a rack with a narrow uplink.
    """

    intra: Partitioned[Any, Any] = ReduceScatter()
    inter: Scheme[Any] = AllReduce()
    ranks_per_node: PositiveInt = 1
    nodes_per_rack: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inter.traits.layout is not self.intra.traits.layout:
            raise ValueError(
                f"Hierarchical.intra and inter must be for the same kind of bucket, got {self.intra.name} for "
                f"{self.intra.traits.layout} buckets and {self.inter.name} for {self.inter.traits.layout} buckets"
            )
        if self.inter.traits.mixes:
            raise ValueError(
                f"Hierarchical.inter must sum over all nodes, got {self.inter.name}, which averages some of them: "
                "average groups of ranks by Shuffled(rounds, scheme=Hierarchical(...)); earlier plans had it the other "
                "way round, so make a new plan"
            )
        if self.together > 1 and self.inter.traits.freezes:
            raise ValueError(
                "Hierarchical.inter must not freeze parameters, as a rank knows only of its own part what arrived, got "
                f"{self.inter!r}"
            )
        if not self.intra.owns_alike:
            raise ValueError(
                "Hierarchical.intra must give the same parts to the same ranks of all nodes, whatever the data, as "
                f"BalancedParallelism with owners='table_stripe' does, got {self.intra!r}"
            )

    @cached_property
    def traits(self) -> Traits:
        inside, across = self.intra.traits, self.inter.traits
        return Traits(
            inside.layout,
            lossy=inside.lossy or across.lossy,
            depends_on_shapes=across.depends_on_shapes,
            freezes=across.freezes,
            waits_for_device=inside.waits_for_device or across.waits_for_device,
            follows_scale=inside.follows_scale and across.follows_scale,
        )

    @property
    def together(self) -> int:
        """The number of ranks among which `intra` runs: the ranks of a node, or of all nodes of a rack."""
        return self.ranks_per_node * self.nodes_per_rack

    @property
    def title(self) -> str:
        return f"{self.name} of {self.intra.title} and {self.inter.title}"

    def planned_for(self, profiles: Sequence[DensityProfile]) -> Scheme[Any]:
        """Returns the hierarchy with the settings that follow from measured densities, such as the room in messages.

        Settings of `intra` follow from `profiles`, those of `inter` from the expected densities of the nodes' sums.
        """
        sums = self._across(profiles)
        parts: dict[str, Any] = {"intra": self.intra.planned_for(profiles), "inter": self.inter.planned_for(sums)}
        return replace(self, **parts)

    def has_room_for(self, profiles: Sequence[DensityProfile]) -> bool:
        return self.intra.has_room_for(profiles) and self.inter.has_room_for(self._across(profiles))

    def _across(self, profiles: Sequence[DensityProfile]) -> Sequence[DensityProfile]:
        """Returns the density profiles of the sums that `inter` gets; for a flat bucket, that of the densest part."""
        if self.traits.layout is Layout.ROWS or not profiles:
            return [profile.of_sums(self.together) for profile in profiles]
        (known,) = profiles
        flat = (TensorSpec((known.num_rows,), torch.float32),)  # any dtype will do: only numbers of elements matter
        owners = range(self.together)
        parts = [self.intra.part_of(flat, (known,), self.together, owner)[1] for owner in owners]
        return max(parts, key=lambda part: part[0].rows)

    def stages(self, size: int) -> tuple[str, ...]:
        nodes = self._nodes(size)
        if self.together == 1:
            return self.inter.stages(nodes)
        if nodes == 1:
            return self.intra.stages(size)
        push, pull = self.intra.push_stages(self.together), self.intra.pull_stages(self.together)
        return (
            *(f"node {stage}" for stage in push),
            *(f"across {stage}" for stage in self.inter.stages(nodes)),
            *(f"node {stage}" for stage in pull),
        )

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        self.intra.check(specs)
        self.inter.check(self.intra.part_of(specs, (), self.together, 0)[0])

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the state before the first step: that of `inter`, for the part that this rank sums across nodes.

        Raises:
            ValueError: on every rank, if nodes have another number of ranks than planned, or a scheme keeps state that
                Hierarchical cannot hold.
        """
        placement = self._placement(group.placement)
        if self.intra.init(bucket, group):
            raise ValueError(
                f"Hierarchical.intra must be a scheme without state, got {self.intra.name}, which keeps state"
            )
        if self.together == 1:
            return self.inter.init(bucket, group)
        if not placement.is_hierarchy:
            return {}
        # Process groups are made here, because all ranks call `init` in the same order.
        node, across = (group.subgroup(find(group.rank)) for find in (placement.within, placement.across))
        if bucket.layout is Layout.ROWS:
            part = bucket
        else:
            (spec,), _ = self.intra.part_of(bucket.specs, (), self.together, node.rank)
            part = bucket if spec.flat is None else _bucket_of(bucket, spec.flat)
        state = self.inter.init(part, across)
        if part is bucket and state:
            raise ValueError(
                f"Hierarchical.inter must be a scheme without state beside {self.intra.name}, got {self.inter.name}, "
                "which keeps state"
            )
        for point, kept in state.items():
            if isinstance(kept, Tensor):
                raise ValueError(
                    f"Hierarchical.inter must keep state of the part that it sums, got {self.inter.name}, which keeps "
                    f"{point!r} of the whole bucket"
                )
        return state

    async def synchronize(self, x: Any, state: State, group: Group, scale: float) -> tuple[Any, State]:
        return await self._in_two_levels(self.inter.synchronize, x, state, group, scale)

    async def mix(self, x: Tensor, numel: int, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        """Returns what `synchronize` does; a node keeps what `inter` leaves out of the sum of its ranks' values.

        `x` and the result are flat tensors, (`numel` + flags,).
        """
        within = self._placement(group.placement).within(group.rank)
        known = FlatSpec((Segment("", 0, numel),), ((numel,),), x.dtype)
        specs = (TensorSpec((x.numel(),), x.dtype, known),)
        (part,), _ = self.intra.part_of(specs, (), self.together, within.index(group.rank) % self.together)
        assert part.flat is not None
        return await self._in_two_levels(partial(self._mix_part, part.flat.numel), x, state, group, scale)

    def _mix_part(self, numel: int, part: Tensor, state: State, across: Group, scale: float) -> SumOf[Tensor]:
        return self.inter.mix(part, numel, state, across, scale)

    async def _in_two_levels(
        self, between: Callable[..., SumOf[Any]], x: Any, state: State, group: Group, scale: float
    ) -> tuple[Any, State]:
        """Sums inside nodes, then each part by `between` across nodes: `synchronize` or `mix` of `inter`."""
        placement = self._placement(group.placement)
        g, nodes = self.together, placement.num_nodes
        if g == 1:
            return await between(x, state, group, scale)
        if nodes == 1:
            return await self.intra.synchronize(x, state, group, scale)
        node, across = (group.subgroup(find(group.rank)) for find in (placement.within, placement.across))
        early, late = (scale, 1.0) if self.inter.traits.scales_first and not state else (1.0, scale)
        # Push: to each rank of the node its part.
        push = self.intra.push(x, {}, node, early, keep_fp32=True)
        shard, _ = await in_turns(push, len(self.intra.push_stages(g)))
        # Across the nodes.
        sums = between(self.intra.part(shard), state, across, late)
        part, next_state = await in_turns(sums, len(self.inter.stages(nodes)))
        # Pull: from each rank of the node its part of the sum.
        pull = self.intra.pull(self.intra.with_part(shard, part), {}, node)
        return await in_turns(pull, len(self.intra.pull_stages(g))), next_state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        placement = self._placement(placement)
        g, nodes, n = self.together, placement.num_nodes, placement.size
        if g == 1:
            return self.inter.steps(specs, profiles, placement, step)
        if nodes == 1:
            return self.intra.steps(specs, profiles, placement, step)
        within = tuple(dict.fromkeys(map(placement.within, range(n))))
        across = tuple(map(placement.across, within[0]))
        parts = [self.intra.part_of(specs, profiles, g, owner) for owner in range(g)]
        between = [self.inter.steps(*part, Placement.one_per_node(nodes), step) for part in parts]
        return (
            *at_once("node", n, within, [self.intra.push_steps(specs, profiles, g)] * nodes),
            *at_once("across", n, across, between),
            *at_once("node", n, within, [self.intra.pull_steps(specs, profiles, g, n)] * nodes),
        )

    def unchanged_since(self, step: int) -> int:
        return max(self.intra.unchanged_since(step), self.inter.unchanged_since(step))

    def _nodes(self, size: int) -> int:
        """Returns the number of nodes, or of racks if `nodes_per_rack` is above 1, that `size` ranks fill.

        Raises:
            ValueError: if `size` is no multiple of the ranks in a node or rack.
        """
        if size % self.together:
            raise ValueError(
                f"Hierarchical is planned for {self.together} ranks a node, there are {size} ranks; make a new plan"
            )
        return size // self.together

    def _placement(self, placement: Placement) -> Placement:
        """Returns the placement in which each rack, if nodes are joined to racks, counts as one node.

        Raises:
            ValueError: if the number of ranks a node, or of nodes a rack, is not as planned.
        """
        if placement.ranks_per_node != self.ranks_per_node:
            counts = [placement.nodes.count(node) for node in dict.fromkeys(placement.nodes)]
            raise ValueError(
                f"Hierarchical is planned for {self.ranks_per_node} ranks on each node, the nodes have "
                f"{', '.join(map(str, counts))}; make a plan for this placement"
            )
        if self.nodes_per_rack == 1:
            return placement
        if placement.num_nodes % self.nodes_per_rack:
            raise ValueError(
                f"Hierarchical is planned for {self.nodes_per_rack} nodes in each rack, there are "
                f"{placement.num_nodes} nodes; make a plan for this placement"
            )
        order = {node: number for number, node in enumerate(dict.fromkeys(placement.nodes))}
        return Placement(tuple(order[node] // self.nodes_per_rack for node in placement.nodes))


def _bucket_of(bucket: Bucket, part: FlatSpec) -> Bucket:
    """Returns a bucket of the segments of `part`, in its dtype, without flags behind them (was a parameter used?)."""
    specs = dict(zip(bucket.names, bucket.tensors, strict=True))
    tensors = tuple(replace(specs[segment.name], dtype=part.dtype) for segment in part.segments)
    return replace(bucket, segments=part.segments, tensors=tensors, flags_ride=False)


async def in_turns(coroutine: Coroutine[Any, Any, T], turns: int) -> T:
    """Runs a subgroup's `coroutine` (a scheme's `synchronize`) in exactly `turns` awaits, and returns its result.

    One subgroup may need an additional collective, for instance when rows do not fit, while others do not. If ranks had
    different numbers of awaits, they would issue later collectives in different orders. So collectives beyond the
    planned number run within the last await, and empty awaits take the place of missing ones.
    """
    value = None
    for turn in range(turns):
        try:
            pending: Pending[Any] = coroutine.send(value)
        except StopIteration as done:
            for _ in range(turn, turns):
                await Pending(lambda timeout_s: None)
            result: T = done.value
            return result
        if turn < turns - 1:
            value = await pending
    last: Pending[T] = Pending(lambda timeout_s: _ended(coroutine, pending, timeout_s))
    last.sent_bytes = pending.sent_bytes
    return await last


def _ended(coroutine: Coroutine[Any, Any, T], pending: Pending[Any], timeout_s: float) -> T:
    """Runs a coroutine that awaits `pending` to its end, waiting for each operation here; returns its result."""
    try:
        while True:
            pending = coroutine.send(pending.wait(timeout_s))
    except StopIteration as done:
        result: T = done.value
        return result


def at_once(word: str, size: int, groups: Sequence[tuple[int, ...]], each: Sequence[Sequence[Step]]) -> Iterator[Step]:
    """Yields the computations and transfers of several groups of ranks that work at the same time, as one sequence.

    Computations are those of the group with the most to do; transfers of the same kind become one transfer of all
    ranks.

    Args:
        word: a prefix of the transfers' stage names, such as "node".
        size: the number of all ranks.
        groups: the ranks of each group.
        each: the computations and transfers of each group, in order.
    """
    for turn in zip_longest(*map(_turns, each), fillvalue=((), None)):
        yield from max((work for work, _ in turn), key=lambda work: sum(step.nbytes for step in work))
        alike: dict[object, list[tuple[tuple[int, ...], Transfer]]] = {}
        for group, (_, transfer) in zip(groups, turn, strict=True):
            if transfer is not None:
                alike.setdefault((transfer.stage, transfer.pattern), []).append((group, transfer))
        for found in alike.values():  # several if groups choose different collectives, as by the density of their parts
            members, transfers = zip(*found, strict=True)
            yield Transfer.at_once(f"{word} {transfers[0].stage}", size, members, transfers)


def _turns(steps: Sequence[Step]) -> Iterator[tuple[tuple[Compute, ...], Transfer | None]]:
    """Splits steps at transfers: yields (computations, the transfer after them); the last transfer may be None."""
    work: tuple[Compute, ...] = ()
    for step in steps:
        if isinstance(step, Compute):
            work = (*work, step)
        else:
            yield work, step
            work = ()
    if work:
        yield work, None
