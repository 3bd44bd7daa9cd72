"""Routes: any leaf of ByteComp's decision tree, executed. One interpreter for all of them. (Wang et al., EuroSys 2023)

A plan names the tasks of a leaf (`tree.py`); `legs.py` says which ranges of the bucket each rank holds before and after
each of them. Here they are done: what a rank holds is a dense tensor, or payloads of pieces of it. Payloads that were
not summed yet travel on as bundles, and a decompression sums the bundle of each piece in the order of ranks; payloads
that can be added are added instead. Messages hold payloads one after the other, and behind them the bucket's flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import kernels, memory
from ..bucket import Bucket, FlatSpec, Layout, TensorSpec
from ..cluster import Placement
from ..comm import Group, Pending, Work
from ..compressors import SENT, Compressor, Payload, Summand, sums_point
from ..compressors import State as CompressorState
from ..density import DensityProfile
from ..expressions import register
from ..positions import aligned
from ..steps import OFFLOAD, Compute, Pattern, Step, Transfer
from .base import Scheme, State
from .compressed import parted, payload_of
from .legs import Held, Leg, legs_of, pieces_of_member
from .tree import WITH_SUMS, Kind, Leaf, Scope, is_flat

T = TypeVar("T")
WHOLE = "whole"  # in the state: the bucket's spec, as compressors keep those of pieces only


@register
@dataclass(frozen=True)
class Route(Scheme[Tensor]):
    """A leaf of the decision tree: dense or compressed, flat or by nodes, each task where the plan says.

    `tasks`: "compress@<device>", "decompress@<device>", and collectives: reduce_scatter or reduce, then all_gather or
    broadcast; all_to_all or gather of payloads, then the same; all_gather or all_reduce of payloads; all_reduce. Three
    collectives or four are inside nodes, across them (one or two), and inside again: these need `ranks_per_node`.

    `compressor` compresses at each "compress" with a state of its own, so that error feedback works at each: the first
    is what ranks send, later ones are of sums, for which it takes its `of_sums`, with draws of their own. A collective
    that hands every rank a part compresses as many pieces. Sums are made in float32 (float64 for float64), in the order
    of ranks, scaled once, at the last decompression, and travel so until they are complete.

    Devices: "compute" is the thread on which backward runs, "offload" a thread of its own on another core.
    A first "compress@compute" is done by the gradient hook that completes the bucket, before the bucket is handed on;
    later work for "compute" at the next gradient hook, or at the end of backward, and until then the turns behind it
    wait. What is for "offload" begins as soon as it can (a first one: once the bucket is complete), while the turns of
    other buckets go on. Sums of dense ranges are made by whoever issues.

    After reduce and gather only one rank of each group goes on; all of the others' data is on its link.
    Wire: of n members with S bytes (e, compressed): all_reduce 2(n-1)/n S; reduce_scatter, all_to_all (n-1)/n; an
    all_gather of payloads (n-1) e; of bundles as many times that as they have payloads.
    """

    tasks: tuple[str, ...]
    compressor: Compressor[Any] | None = None
    ranks_per_node: int = 1

    layout = Layout.FLAT

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tasks, list | tuple) or not all(isinstance(word, str) for word in self.tasks):
            raise ValueError(f"Route.tasks must be a list of words, got {self.tasks!r}")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        try:
            leaf = self.leaf
        except ValueError as error:
            raise ValueError(f"Route.tasks: {error}") from None
        compresses = any(task.kind is Kind.COMP for task in leaf)
        if compresses and not isinstance(self.compressor, Compressor):
            raise ValueError(f"Route.compressor must be a compressor, as the tasks compress, got {self.compressor!r}")
        if not compresses and self.compressor is not None:
            raise ValueError(f"Route.compressor must be None, as no task compresses, got {self.compressor!r}")
        if self.ranks_per_node < 1:
            raise ValueError(f"Route.ranks_per_node must be at least 1, got {self.ranks_per_node}")
        if is_flat(leaf) and self.ranks_per_node != 1:
            raise ValueError(
                f"Route.ranks_per_node must be 1 for tasks among all ranks, which know no nodes, got "
                f"{self.ranks_per_node}"
            )
        if compresses:
            self._check_payloads(leaf)
        object.__setattr__(self, "exact", not compresses)

    @property
    def leaf(self) -> Leaf:
        return _leaf_of(self.tasks)

    @property
    def carries_flags(self) -> bool:
        return True

    @property
    def title(self) -> str:
        of = f" of {self.compressor.title}" if self.compressor is not None else ""
        return f"{self.name}{of}: {', '.join(self.tasks)}"

    @property
    def prepares(self) -> bool:
        return self.leaf[0].kind is Kind.COMP and not self.compressor_at(0).agrees

    @property
    def offloads(self) -> bool:
        return any(task.choice == OFFLOAD for task in self.leaf)

    def compressor_at(self, point: int) -> Compressor[Any]:
        """Of the compression with this number."""
        assert self.compressor is not None
        return self.compressor.of_sums if point else self.compressor

    def legs(self, numel: int, placement: Placement) -> tuple[Leg, ...]:
        """What each rank holds on the way.

        Raises:
            ValueError: for nodes with another number of ranks, and for more payloads than can be added.
        """
        self._check_placement(placement)
        try:
            return legs_of(self.leaf, numel, placement, self._most_added)
        except ValueError as error:
            assert self.compressor is not None
            raise ValueError(f"{self.compressor.title} cannot take this route: {error}") from None

    def stages(self, size: int) -> tuple[str, ...]:
        if size % self.ranks_per_node:
            raise ValueError(f"Route is planned for {self.ranks_per_node} ranks a node, there are {size} ranks")
        placement = Placement.regular(size // self.ranks_per_node, self.ranks_per_node)
        return tuple(self._stages(self.legs(0, placement)))

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """
        Raises:
            ValueError: for element types that it does not sum.
        """
        (flat,) = specs
        if not flat.dtype.is_floating_point:
            raise ValueError(f"{self.name} is for floating-point gradients, got {flat}")

    def init(self, bucket: Bucket, group: Group) -> State:
        """What compressors keep of the pieces that this rank compresses.

        Raises:
            ValueError: on every rank, where nodes do not have as many ranks as planned, and for more or others than the
                compressor is made for.
        """
        legs = self.legs(bucket.numel, group.placement)
        for leg in legs:
            if leg.task.scope and not leg.idle:
                self._group(leg, group)  # made here, where all ranks come by between their operations
        if self.compressor is None:
            return {}
        whole = bucket.flat_spec
        state: dict[str, Any] = {WHOLE: (CompressorState(whole, group.rank),)}
        for leg in legs:
            if leg.task.kind is Kind.COMP:
                compressor, held = self.compressor_at(leg.point), leg.after[group.rank]
                pieces = held.pieces if held is not None else ()
                stream = leg.before.index(leg.before[group.rank]) if leg.copies > 1 else group.rank
                state[_point(leg)] = tuple(
                    compressor.init(_spec_of(whole, piece, leg.point, leg.wide), stream) for piece in pieces
                )
        first = next(leg for leg in self.legs(group.size**2, group.placement) if leg.task.kind is Kind.COMP)
        together = first.before.count(first.before[0]) // first.copies
        expected = self.compressor.made_for_ranks
        if expected is not None and expected != together:
            raise ValueError(
                f"{self.compressor.title} is made for {expected} ranks, {together} compress together: set its ranks"
            )
        return state

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        kept = state.get(WHOLE)
        whole = kept[0] if isinstance(kept, tuple) else None
        numel = x.numel() if whole is None else whole.spec.numel
        legs = self.legs(numel, group.placement)
        way = _Way(self, x, numel, whole, state, group, scale)
        for number, leg in enumerate(legs):
            if leg.task.kind is Kind.COMP:
                if self.compressor_at(leg.point).agrees:
                    await way.agree(leg, legs[number + 1])
                await Work(partial(way.compress, leg), leg.task.choice, leg.task.word)
            elif leg.task.kind is Kind.DECOMP:
                await Work(partial(way.decompress, leg), leg.task.choice, leg.task.word)
            elif leg.idle:
                way.take(leg, way.alone(leg))
            else:
                way.take(leg, await way.issue(leg))
        return way.result(), way.next_state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        """Of the rank that has most to do; what comes before and after a collective is done by whoever issues."""
        whole, behind = parted(specs) if self.compressor is not None else (_plain(specs), 0)
        legs = self.legs(whole.numel, placement)
        return tuple(
            step
            for number, leg in enumerate(legs)
            for step in self._steps_of(leg, legs[min(number + 1, len(legs) - 1)], whole, behind, round, placement.size)
        )

    def unchanged_since(self, round: int) -> int:
        if self.compressor is None:
            return 0
        return max(self.compressor.unchanged_since(round), self.compressor.of_sums.unchanged_since(round))

    # Below here: how.

    def item_nbytes(self, leg: Leg, held: Held, whole: FlatSpec, step: int) -> list[int]:
        """Of all that a message has which carries this before the leg: one tensor, or the bundles of its pieces."""
        if not leg.task.kind.of_payloads:
            return [held.numel * _dtype_of(whole, leg.wide).itemsize]
        compressor = self.compressor_at(leg.point)
        wide = self._is_wide_at(leg.point)
        specs = [_spec_of(whole, piece, leg.point, wide) for piece in held.pieces]
        return [nbytes for spec in specs for nbytes in [compressor.nbytes(spec, step)] * leg.bundle]

    def _is_wide_at(self, point: int) -> bool:
        """Whether a compression is of sums, which are in a wider type: all but one that comes first of all."""
        return point > 0 or self.leaf[0].kind is not Kind.COMP

    @property
    def _most_added(self) -> float:
        if self.compressor is None or not issubclass(self.compressor.payload, Summand):
            return 0.0
        most = self.compressor.most_summands
        return inf if most is None else float(most)

    def _check_payloads(self, leaf: Leaf) -> None:
        compressor = self.compressor_at(0)
        sums = [task.word for task in leaf if task.kind is Kind.COMM_L]
        if sums and not issubclass(compressor.payload, Summand):
            raise ValueError(
                f"Route.tasks: no {sums[0]} can sum the payloads of {compressor.title}: use all_gather, or all_to_all "
                "and all_gather"
            )
        for place, task in enumerate(leaf):
            kinds = [other.kind for other in leaf[place + 1 : place + 3]]
            if compressor.agrees and task.kind is Kind.COMP and kinds != [Kind.COMM_L, Kind.DECOMP]:
                raise ValueError(
                    f"Route.compressor: {compressor.title} makes payloads for an all-reduce: after each compress there "
                    "must come all_reduce and decompress"
                )

    def _check_placement(self, placement: Placement) -> None:
        if not is_flat(self.leaf) and placement.ranks_per_node != self.ranks_per_node:
            counts = [placement.nodes.count(node) for node in dict.fromkeys(placement.nodes)]
            raise ValueError(
                f"Route is planned for {self.ranks_per_node} ranks on each node, the nodes have "
                f"{', '.join(map(str, counts))}; make a plan for this placement"
            )

    def _stages(self, legs: Sequence[Leg]) -> Iterator[str]:
        """One for each await, but for a first compression, which is over when the bucket's turns begin."""
        seen: dict[str, int] = {}
        for number, leg in enumerate(legs):
            name = _stage(leg)
            if leg.task.kind is Kind.COMP and self.compressor_at(leg.point).agrees:
                yield _agree_stage(legs[number + 1])
            if leg.idle or (number == 0 and self.prepares):
                continue
            seen[name] = seen.get(name, 0) + 1
            yield name if seen[name] == 1 else f"{name} {seen[name]}"

    def _group(self, leg: Leg, group: Group) -> Group:
        match leg.task.scope:
            case Scope.NODE:
                return group.within_node()
            case Scope.ACROSS:
                return group.across_nodes()
        return group

    def _steps_of(
        self, leg: Leg, following: Leg, whole: FlatSpec, behind: int, round: int, size: int
    ) -> Iterator[Step]:
        first = leg.before[0]  # no rank holds more
        assert first is not None
        task, after = leg.task, leg.after[0]
        assert after is not None
        if task.kind is Kind.COMP:
            compressor, dense_nbytes = self.compressor_at(leg.point), first.numel * _dtype_of(whole, leg.wide).itemsize
            specs = [_spec_of(whole, piece, leg.point, leg.wide) for piece in after.pieces]
            if compressor.agrees:
                yield Compute(f"observe_{compressor.title}", float(dense_nbytes), calls=len(specs))
                if not following.idle:
                    yield self._agreement(leg, following, whole, size)
            nbytes = dense_nbytes + sum(compressor.nbytes(spec, round) for spec in specs)
            yield Compute(f"compress_{compressor.title}", float(nbytes), task.choice, len(specs))
            return
        if task.kind is Kind.DECOMP:
            compressor, wide = self.compressor_at(leg.point), self._is_wide_at(leg.point)
            specs = [_spec_of(whole, piece, leg.point, wide) for piece in first.pieces]
            payloads = leg.bundle * sum(compressor.nbytes(spec, round) for spec in specs)
            dense_nbytes = first.numel * _dtype_of(whole, leg.wide_after).itemsize
            calls = leg.bundle * len(specs)
            yield Compute(f"decompress_{compressor.title}", float(dense_nbytes + payloads), task.choice, calls)
            return
        if task.kind is Kind.COMM and leg.scales:
            yield Compute("scale", 2.0 * whole.nbytes)
        if not leg.idle:
            active = [group for group in leg.groups if leg.before[group[0]] is not None]
            each = [self._transfer(leg, group, whole, behind, round) for group in active]
            yield _at_once(_stage(leg), leg, each, size, active)
        yield from self._steps_behind(leg, whole, round)

    def _agreement(self, leg: Leg, following: Leg, whole: FlatSpec, size: int) -> Transfer:
        """What the members of the all-reduce that follows tell each other."""
        active = [(group, held) for group in following.groups if (held := leg.after[group[0]]) is not None]
        compressor, each = self.compressor_at(leg.point), []
        for group, held in active:
            specs = [_spec_of(whole, piece, leg.point, leg.wide) for piece in held.pieces]
            nbytes = 4.0 * sum(map(compressor.num_agreed, specs))
            each.append(Transfer("", Pattern.ALL_GATHER, (nbytes,) * len(group)))
        return _at_once(_agree_stage(following), following, each, size, [group for group, _ in active])

    def _steps_behind(self, leg: Leg, whole: FlatSpec, round: int) -> Iterator[Step]:
        """What is made of what a collective brought."""
        after = leg.after[0]
        assert after is not None
        nbytes = float(after.numel * _dtype_of(whole, leg.wide_after).itemsize)
        if leg.task.kind is Kind.COMM_1:
            yield Compute("sum_ranges", leg.members * self.item_nbytes(leg, after, whole, round)[0] + nbytes)
        elif leg.task.kind is Kind.COMM_2:
            yield Compute("join_ranges", 2 * nbytes)
        elif leg.adds and leg.task.kind is not Kind.COMM_L:
            one = sum(self.item_nbytes(leg, after, whole, round))
            yield Compute("add_payloads", float((leg.members + 1) * one), calls=len(after.pieces))

    def _transfer(self, leg: Leg, group: tuple[int, ...], whole: FlatSpec, behind: int, round: int) -> Transfer:
        """Among the members of one group."""
        flags = behind if leg.carries_flags else 0
        before, after = [leg.before[rank] for rank in group], [leg.after[rank] for rank in group]

        def sizes(what: Sequence[Held | None]) -> tuple[float, ...]:
            return tuple(
                0.0 if held is None else float(_room(self.item_nbytes(leg, held, whole, round), flags)) for held in what
            )

        match leg.task.kind:
            case Kind.COMM:
                (held,) = set(before)
                assert held is not None
                nbytes = float((held.numel + flags) * _dtype_of(whole, leg.wide).itemsize)
                return Transfer("", Pattern.ALL_REDUCE, (nbytes,) * len(group))
            case Kind.COMM_L:
                held = before[0]
                assert held is not None and self.compressor is not None
                itemsize = self.compressor.number_dtype(whole).itemsize
                nbytes = float(sum(self.item_nbytes(leg, held, whole, round)) + flags * itemsize)
                return Transfer("", Pattern.ALL_REDUCE, (nbytes,) * len(group))
            case Kind.COMM_C:
                return Transfer("", Pattern.ALL_GATHER, sizes(before))
            case kind if kind.is_first:
                return Transfer("", Pattern.ALL_TO_ALL, sizes(after))
        if leg.task.rooted:
            return Transfer("", Pattern.BROADCAST, sizes(before))
        return Transfer("", Pattern.ALL_GATHER, sizes(before))


class _Way:
    """What one rank holds while a bucket is on its way."""

    def __init__(
        self,
        route: Route,
        x: Tensor,
        numel: int,
        whole: CompressorState | None,
        state: State,
        group: Group,
        scale: float,
    ) -> None:
        self.route = route
        self.x, self.values, self.behind = x, x[:numel], x[numel:]
        self.step = 0 if whole is None else whole.step
        self.spec = _plain((TensorSpec((numel,), x.dtype),)) if whole is None else whole.spec
        self.state, self.group, self.rank, self.scale = state, group, group.rank, scale
        self.next_state: dict[str, Any] = dict(state) if whole is None else {WHOLE: (whole.next(),)}
        self.flags = self.behind != 0
        self.dense = self.values
        self.bundles: list[list[Payload]] = []  # of each piece
        self.template: Payload | None = None  # of the payloads on their way
        self.agreed: list[Tensor] = []  # for each piece

    def compress(self, leg: Leg) -> None:
        compressor, point = self.route.compressor_at(leg.point), _point(leg)
        held = leg.after[self.rank]
        if held is None:  # nothing but to learn what payloads are like
            self.next_state[point] = ()
            spec = _spec_of(self.spec, (0, 0), leg.point, leg.wide)
            nothing = memory.empty(0, spec.dtype, self.x.device)
            fresh = replace(compressor.init(spec, self.rank), step=self.step)
            self.template, _ = compressor.compress(nothing, fresh)
            return
        kept: Any = self.state[point]
        if self.agreed:
            kept = [replace(part, agreed=agreed) for part, agreed in zip(kept, self.agreed, strict=True)]
        lengths = [stop - start for start, stop in held.pieces]
        made = [compressor.compress(x, part) for x, part in zip(self.dense.split(lengths), kept, strict=True)]
        self.bundles = [[payload] for payload, _ in made]
        self.template = made[0][0]
        self.next_state[point] = tuple(following for _, following in made)

    def decompress(self, leg: Leg) -> None:
        held = leg.after[self.rank]
        if held is None:
            return
        compressor, dtype = self.route.compressor_at(leg.point), _dtype_of(self.spec, leg.wide_after)
        in_place = held.numel == self.values.numel() and dtype is self.values.dtype
        out = self.values if in_place else memory.empty(held.numel, dtype, self.x.device)
        before = leg.before[self.rank]
        assert before is not None
        assert self.template is not None
        scale = _counterweight(self.template, leg.added) * (self.scale if leg.scales else 1.0)
        lengths = [stop - start for start, stop in before.pieces]
        for room, bundle in zip(out.split(lengths), self.bundles, strict=True):
            compressor.sum_into(room, bundle, scale)
        self.dense, self.bundles = out, []

    def agree(self, leg: Leg, following: Leg) -> Pending[None]:
        """The members of the all-reduce that follows agree on what their compressor needs."""
        held = leg.after[self.rank]
        if held is None:
            return Pending(lambda timeout_s: None)
        compressor, kept = self.route.compressor_at(leg.point), self.state[_point(leg)]
        lengths = [stop - start for start, stop in held.pieces]
        observed = [compressor.observe(x, part) for x, part in zip(self.dense.split(lengths), kept, strict=True)]
        found = [part for part in observed if part is not None]

        def told(all_of_them: list[Tensor]) -> None:
            self.agreed = list(torch.stack(all_of_them).amax(dim=0).split([len(part) for part in found]))

        own = torch.cat(found)
        if following.idle:
            return Pending(lambda timeout_s: told([own]))
        return _then(self.route._group(following, self.group).all_gather(own), told)

    def alone(self, leg: Leg) -> list[Tensor]:
        """What a collective among one member brings."""
        if leg.task.kind in (Kind.COMM, Kind.COMM_L):
            return [self._summand(leg)]
        held = leg.before[self.rank]
        return [] if held is None else [self._message(leg, held, slice(None))]

    def issue(self, leg: Leg) -> Pending[list[Tensor]]:
        """Starts a collective. What it brings: the messages of the members that have sent this rank some, in order."""
        mine, task = leg.before[self.rank], leg.task
        if mine is None and not (task.kind.is_second and leg.after[self.rank] is not None):
            return Pending(lambda timeout_s: [])  # it is among others, whose turn it is all the same
        group, members = self.route._group(leg, self.group), leg.group_of(self.rank)
        if task.kind in (Kind.COMM, Kind.COMM_L):
            return _then(group.all_reduce(self._summand(leg)), lambda total: [total])
        if task.kind.is_first:
            assert mine is not None
            return self._push(leg, mine, group, members)
        before = [leg.before[rank] for rank in members]
        sizes = [0 if held is None else self._nbytes(leg, held) for held in before]
        if task.rooted:
            buffer = memory.empty(sizes[0], torch.uint8, self.x.device)
            if mine is not None:
                buffer = self._message(leg, mine, slice(None))
            return _then(group.broadcast(buffer), lambda arrived: [arrived])
        assert mine is not None
        return group.all_gather(self._message(leg, mine, slice(None)), sizes)

    def take(self, leg: Leg, arrived: list[Tensor]) -> None:
        """What a collective brought becomes what this rank holds."""
        held, kind = leg.after[self.rank], leg.task.kind
        if held is None or not arrived:
            self.dense, self.bundles = self.values[:0], []
            return
        if kind in (Kind.COMM, Kind.COMM_L):
            self._take_sum(leg, arrived[0])
            return
        sent = self._sent_here(leg, held)
        items = [self._items(leg, message, each, len(self.flags)) for message, each in zip(arrived, sent, strict=True)]
        if not kind.of_payloads:
            self._take_dense(leg, held, [parts[0] for parts in items])
            return
        pieces = [each.pieces for each in sent]
        bundles = [self._bundles(leg, parts, each) for parts, each in zip(items, pieces, strict=True)]
        if kind.is_second:
            self.bundles = [bundle for theirs in bundles for bundle in theirs]
            return
        met = [[payload for bundle in each for payload in bundle] for each in zip(*bundles, strict=True)]
        self.bundles = [[self._added(bundle)] for bundle in met] if leg.adds else met

    def result(self) -> Tensor:
        """The bucket, in its own memory."""
        if self.dense is not self.values:
            self.values.copy_(self.dense)
        self.behind.copy_(self.flags)
        return self.x

    def _push(self, leg: Leg, mine: Held, group: Group, members: tuple[int, ...]) -> Pending[list[Tensor]]:
        after = [leg.after[rank] for rank in members]
        sent = [0 if held is None else self._nbytes(leg, held) for held in after]
        outgoing = memory.empty(sum(sent), torch.uint8, self.x.device)
        divided = not leg.task.rooted
        for member, (room, held) in enumerate(zip(outgoing.split(sent), after, strict=True)):
            if held is not None:
                self._write(room, leg, held, pieces_of_member(mine, member, len(members), divided=divided))
        incoming = [sent[group.rank]] * group.size
        arriving = group.all_to_all(outgoing, sent, incoming, largest=max(sent))
        return arriving if after[group.rank] is not None else _then(arriving, lambda messages: [])

    def _sent_here(self, leg: Leg, held: Held) -> list[Held]:
        """What each message that arrives carries."""
        before = [leg.before[rank] for rank in (leg.group_of(self.rank))]
        if not leg.task.kind.is_second:
            return [held] * len(before)  # of each member what this one goes on with
        return [each for each in before if each is not None]

    def _take_dense(self, leg: Leg, held: Held, parts: Sequence[Tensor]) -> None:
        dtype = _dtype_of(self.spec, leg.wide)
        numbers = [part.view(dtype) for part in parts]
        if leg.task.kind is Kind.COMM_1:
            self.dense = memory.empty(held.numel, _dtype_of(self.spec, leg.wide_after), self.x.device)
            kernels.sum_parts(numbers, self.dense, scale=self.scale if leg.scales else 1.0)
            return
        whole = held.numel == self.values.numel() and dtype is self.values.dtype
        self.dense = self.values if whole else memory.empty(held.numel, dtype, self.x.device)
        torch.cat(numbers, out=self.dense)

    def _take_sum(self, leg: Leg, total: Tensor) -> None:
        numbers, flags = total.split([len(total) - len(self.flags), len(self.flags)])
        self.flags = flags != 0
        if leg.task.kind is Kind.COMM:
            dtype = _dtype_of(self.spec, leg.wide_after)
            self.dense = numbers.to(dtype) if len(self.flags) or dtype is not total.dtype else total
            return
        lengths = [payload.data.numel() for (payload,) in self.bundles]
        self.bundles = [
            [replace(payload, data=data)] for (payload,), data in zip(self.bundles, numbers.split(lengths), strict=True)
        ]

    def _summand(self, leg: Leg) -> Tensor:
        """What an all-reduce sums: numbers, and behind them whether flags are set."""
        if leg.task.kind is Kind.COMM:
            if leg.scales:
                self.dense.mul_(self.scale)  # before the sum, which keeps one in half precision inside its range
            parts = [self.dense]
        else:
            parts = [payload.data for (payload,) in self.bundles]
            factor = 1 / _counterweight(self.bundles[0][0], leg.members)
            parts = [data * factor for data in parts] if factor != 1 else parts
        if len(parts) == 1 and not len(self.flags):
            return parts[0]
        numbers = sum(map(len, parts))
        message = memory.empty(numbers + len(self.flags), parts[0].dtype, self.x.device)
        return torch.cat([*parts, self.flags.to(message.dtype)], out=message)

    def _added(self, bundle: Sequence[Payload]) -> Payload:
        """One payload that decodes to the sum, or in half precision to the mean."""
        first = bundle[0]
        total = memory.empty_like(first.data)
        if total.dtype.is_floating_point:
            factor = 1 / _counterweight(first, len(bundle))
            kernels.sum_parts([payload.data for payload in bundle], total, scale=factor)
        else:
            total.copy_(first.data)
            for payload in bundle[1:]:
                total += payload.data
        return replace(first, data=total)

    def _bundles(self, leg: Leg, parts: Sequence[Tensor], pieces: Sequence[tuple[int, int]]) -> list[list[Payload]]:
        """What one message brings of each piece."""
        assert self.template is not None
        wide = self.route._is_wide_at(leg.point)
        specs = [_spec_of(self.spec, piece, leg.point, wide) for piece in pieces]
        templates = [replace(self.template, spec=spec) for spec in specs]
        return [
            [payload_of(data, template) for data in parts[place * leg.bundle : (place + 1) * leg.bundle]]
            for place, template in enumerate(templates)
        ]

    def _nbytes(self, leg: Leg, held: Held) -> int:
        """Of a message that carries this."""
        sizes = self.route.item_nbytes(leg, held, self.spec, self.step)
        return _room(sizes, len(self.flags) if leg.carries_flags else 0)

    def _message(self, leg: Leg, held: Held, which: slice) -> Tensor:
        room = memory.empty(self._nbytes(leg, held), torch.uint8, self.x.device)
        return self._write(room, leg, held, which)

    def _write(self, room: Tensor, leg: Leg, held: Held, which: slice) -> Tensor:
        """Overwrites a message's room by the pieces, or the range, and the flags."""
        if leg.task.kind.of_payloads:
            items = [payload.data.view(torch.uint8) for bundle in self.bundles[which] for payload in bundle]
        else:
            mine = leg.before[self.rank]
            assert mine is not None
            items = [self.dense[held.start - mine.start : held.stop - mine.start].view(torch.uint8)]
        end = 0
        for place, start in zip(items, _starts(list(map(len, items))), strict=True):
            room[start : start + len(place)] = place
            end = start + len(place)
        if leg.carries_flags:
            room[end : end + len(self.flags)] = self.flags
        return room

    def _items(self, leg: Leg, message: Tensor, held: Held, flags: int) -> list[Tensor]:
        """What lies in a message; its flags are joined to those that are known."""
        sizes = self.route.item_nbytes(leg, held, self.spec, self.step)
        starts = _starts(sizes)
        if leg.carries_flags:
            end = starts[-1] + sizes[-1]
            self.flags = self.flags | (message[end : end + flags] != 0)
        return [message[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@lru_cache(maxsize=1024)
def _leaf_of(words: tuple[str, ...]) -> Leaf:
    return WITH_SUMS.parse(words)


@lru_cache(maxsize=4096)
def _spec_of(whole: FlatSpec, piece: tuple[int, int], point: int, wide: bool) -> FlatSpec:
    """Of a piece; what is drawn for sums is not what was drawn for what they are of."""
    spec = whole.cut(*piece)
    return replace(spec, dtype=_dtype_of(whole, wide), salt=spec.salt + point)


def _plain(specs: tuple[TensorSpec, ...]) -> FlatSpec:
    """One tensor of which nothing is known, with what lies behind it."""
    (flat,) = specs
    return FlatSpec.of(torch.empty(flat.numel, dtype=flat.dtype, device="meta"))


def _dtype_of(whole: FlatSpec, wide: bool) -> torch.dtype:
    return kernels.accumulation_dtype(whole.dtype) if wide else whole.dtype


def _counterweight(payload: Payload, members: int) -> float:
    """By what a sum is divided, so that numbers in float16 stay in their range."""
    return float(members) if payload.data.dtype is torch.float16 else 1.0


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where items begin in a message: all of them where any element type can be viewed."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + int(aligned(size)))
    return starts[:-1]


def _room(sizes: Sequence[int], flags: int) -> int:
    """Bytes of a message of these items, with a byte for each flag behind the last one."""
    return int(sum(map(aligned, sizes[:-1])) + aligned(sizes[-1] + flags))


def _point(leg: Leg) -> str:
    """Where a compression keeps its state: what is sent first belongs to this rank alone, unless it is a sum of all
    ranks that several of them hold."""
    if leg.point == 0 and leg.copies == 1:
        return SENT
    return sums_point(max(leg.point, 1), leg.copies)


def _stage(leg: Leg) -> str:
    scope = leg.task.scope
    return leg.task.word if scope in (None, Scope.ALL) else f"{scope} {leg.task.word}"


def _agree_stage(following: Leg) -> str:
    return "agree" if following.task.scope is Scope.ALL else f"{following.task.scope} agree"


def _at_once(stage: str, leg: Leg, each: Sequence[Transfer], size: int, groups: Sequence[tuple[int, ...]]) -> Transfer:
    """The same collective in several groups of `size` ranks; of all ranks it is one."""
    if leg.task.scope is Scope.ALL:
        return replace(each[0], stage=stage)
    return Transfer.at_once(stage, size, groups, each)


def _then(pending: Pending[T], make: Any) -> Pending[Any]:
    """What `make` makes of an operation's result."""
    following: Pending[Any] = Pending(lambda timeout_s: make(pending.wait(timeout_s)))
    following.sent_bytes = pending.sent_bytes
    return following
