"""Routes: one interpreter that runs any leaf of ByteComp's decision tree as a scheme (Wang et al., EuroSys 2023).

A plan names the tasks of a leaf (`tree.py`). `legs.py` computes which ranges of the bucket each rank holds before and
after each task, `Route.steps` the work and bytes, and `transit.py` runs the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import inf
from typing import Any

from torch import Tensor

from ..comm import Group, Work
from ..compressors import Compressor, CompressorState, Summand
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import OFFLOAD, Compute, Pattern, Step, Transfer
from ..inputs.settings import PositiveInt
from ..tensors.bucket import Bucket, FlatSpec, Layout, TensorSpec
from ..tensors.density import DensityProfile
from .base import Scheme, State, Traits
from .compressed import parted
from .legs import Held, Leg, legs_of
from .parcels import dtype_of, plain, point_name, room_nbytes, spec_of
from .transit import WHOLE, Transit, is_on_host
from .tree import DEVICES, WITH_SUMS, Kind, Leaf, LeafConstraints, RouteTask, Scope, compressions, is_flat, words_of


@register
@dataclass(frozen=True)
class Route(Scheme[Tensor]):
    """A scheme that runs one leaf of ByteComp's decision tree: a sequence of collectives and coding tasks.

    Tasks are "compress@<device>", "decompress@<device>", and collectives: reduce_scatter or reduce, then all_gather or
    broadcast; all_to_all or gather of payloads, then the same; all_gather or all_reduce of payloads; all_reduce. With
    three or four collectives, the first and the last run inside nodes, the others across: these need `ranks_per_node`.

    Each "compress" has a state of its own, so that error feedback works at each. The first compresses gradients, later
    ones sums, by the compressor's `of_sums`, with other random draws. Before a collective that divides data among
    ranks, each share is compressed as a piece of its own. Sums are in float32 (float64 for float64), added in the order
    of ranks, scaled once, at the last decompression or else the first task, and travel in float32 until they are
    complete; but an all_reduce adds in the dtype that it sends, in the order of its backend.

    Devices: "compute" is the thread on which backward runs, "offload" another thread on a core of its own. A first
    "compress@compute" runs in the gradient hook that completes the bucket; later work for "compute" runs in the next
    gradient hook, or at the end of backward, and collectives that the plan orders after it wait until then. Work for
    "offload" begins as soon as possible (a first one: once the bucket is complete), while collectives of other buckets
    go on. The thread that issues collectives sums dense ranges.

    After reduce and gather only one rank of each process group has data; the data of all others passes its link.
    Wire: for n ranks with S bytes (e compressed): all_reduce 2(n-1)/n S; reduce_scatter (n-1)/n S; all_to_all
    (n-1)/n e; all_gather of payloads (n-1) e, or m times that if a rank sends payloads of m ranks, not added up.

    Attributes:
        tasks: the tasks by their names, in order.
        compressor: the compressor; None if no task compresses.
        ranks_per_node: the number of ranks on each node; 1 for tasks among all ranks.
    """

    tasks: tuple[str, ...]
    compressor: Compressor[Any] | None = None
    ranks_per_node: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            leaf = self.leaf
        except ValueError as error:
            raise ValueError(f"Route.tasks: {error}") from None
        compresses = any(task.kind is Kind.COMP for task in leaf)
        if compresses and self.compressor is None:
            raise ValueError(f"Route.compressor must be a compressor, as the tasks compress, got {self.compressor!r}")
        if not compresses and self.compressor is not None:
            raise ValueError(f"Route.compressor must be None, as no task compresses, got {self.compressor!r}")
        if is_flat(leaf) and self.ranks_per_node != 1:
            raise ValueError(
                f"Route.ranks_per_node must be 1 for tasks among all ranks, which use no nodes, got "
                f"{self.ranks_per_node}"
            )
        if compresses:
            assert self.compressor is not None
            if (why := _illegal(leaf, self.compressor)) is not None:
                raise ValueError(why)

    @classmethod
    def of(cls, leaf: Leaf, compressor: Compressor[Any] | None = None, ranks_per_node: int = 1) -> Route:
        """Returns the scheme that runs the tasks of `leaf`, one after the other.

        A `compressor` that no task uses is left out, and `ranks_per_node` is left out if all collectives are among all
        ranks.

        Raises:
            ValueError: if a collective among the tasks cannot send, or sum, the compressor's payloads.
        """
        return cls(words_of(leaf), compressor if compressions(leaf) else None, 1 if is_flat(leaf) else ranks_per_node)

    @property
    def leaf(self) -> Leaf:
        """The route's tasks as a leaf of the decision tree."""
        return _leaf_of(self.tasks)

    @cached_property
    def traits(self) -> Traits:
        leaf = self.leaf
        return Traits(
            Layout.FLAT,
            lossy=self.compressor is not None,
            carries_flags=True,
            prepares=leaf[0].kind is Kind.COMP and not self.compressor_at(0).traits.agrees,
            offloads=any(task.choice == OFFLOAD for task in leaf),
            waits_for_device=self.compressor is not None
            and (self.compressor.traits.waits_for_device or any(is_on_host(task, self.compressor) for task in leaf)),
            follows_scale=self.compressor is None or self.compressor.traits.follows_scale,
        )

    @property
    def title(self) -> str:
        of = f" of {self.compressor.title}" if self.compressor is not None else ""
        return f"{self.name}{of}: {', '.join(self.tasks)}"

    def compressor_at(self, point: int) -> Compressor[Any]:
        """Returns the compressor that the route's "compress" task number `point` uses, counted from 0.

        Task 0 uses `self.compressor`; later tasks use its variant for sums over ranks, `Compressor.of_sums`.
        """
        assert self.compressor is not None
        return self.compressor.of_sums if point else self.compressor

    def legs(self, numel: int, placement: Placement) -> tuple[Leg, ...]:
        """Returns one `Leg` for each task: which elements of a bucket of `numel` each rank holds before and after it.

        Raises:
            ValueError: if nodes have another number of ranks than planned, or an all-reduce would add more payloads
                than the compressor allows.
        """
        self._check_placement(placement)
        try:
            return legs_of(self.leaf, numel, placement, self._most_added)
        except ValueError as error:
            assert self.compressor is not None
            raise ValueError(f"{self.compressor.title} cannot take this route: {error}") from None

    def check_ranks(self, placement: Placement) -> None:
        """Checks that the ranks, placed on nodes like this, can run the route (a sequence of tasks).

        Tasks are compressions, decompressions and collectives.

        Raises:
            ValueError: if nodes have another number of ranks than planned, an all-reduce would add more payloads
                (compressed tensors) than the compressor allows, or more or fewer ranks compress the same range than the
                compressor is made for.
        """
        legs = self.legs(placement.size**2, placement)
        expected = None if self.compressor is None else self.compressor.traits.made_for_ranks
        if expected is None:
            return
        first = next(leg for leg in legs if leg.task.kind is Kind.COMP)
        together = first.before.count(first.before[0]) // first.copies
        if expected != together:
            assert self.compressor is not None
            raise ValueError(
                f"{self.compressor.title} is made for {expected} ranks, {together} compress together: set its ranks"
            )

    def stages(self, size: int) -> tuple[str, ...]:
        if size % self.ranks_per_node:
            raise ValueError(
                f"Route is planned for {self.ranks_per_node} ranks a node, there are {size} ranks; make a new plan"
            )
        placement = Placement.regular(size // self.ranks_per_node, self.ranks_per_node)
        return tuple(self._stages(self.legs(0, placement)))

    def check(self, specs: tuple[TensorSpec, ...]) -> None:
        """Checks that the bucket has a floating-point dtype.

        Raises:
            ValueError: for other dtypes.
        """
        (flat,) = specs
        if not flat.dtype.is_floating_point:
            raise ValueError(f"{self.name} is for floating-point gradients, got {flat}")

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the states of the compressors on this rank, and makes the process groups that the collectives need.

        Raises:
            ValueError: on every rank, if nodes have another number of ranks than planned, or the compressor does not
                allow so many (see `check_ranks`).
        """
        legs = self.legs(bucket.numel, group.placement)
        for leg in legs:
            if leg.task.scope and not leg.idle:
                self.group_of(leg, group)  # made here, because all ranks call `init` in the same order
        if self.compressor is None:
            return {}
        whole = bucket.flat_spec
        state: dict[str, Any] = {WHOLE: (CompressorState(whole, group.rank),)}
        for leg in legs:
            if leg.task.kind is Kind.COMP:
                compressor, held = self.compressor_at(leg.point), leg.after[group.rank]
                pieces = held.pieces if held is not None else ()
                stream = leg.before.index(leg.before[group.rank]) if leg.copies > 1 else group.rank
                state[point_name(leg)] = tuple(
                    compressor.init(spec_of(whole, piece, leg.point, leg.keep_fp32), stream) for piece in pieces
                )
        self.check_ranks(group.placement)
        return state

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        kept = state.get(WHOLE)
        whole = kept[0] if isinstance(kept, tuple) else None
        numel = x.numel() if whole is None else whole.spec.numel
        legs = self.legs(numel, group.placement)
        transit = Transit(self, x, numel, whole, state, group, scale)
        for number, leg in enumerate(legs):
            if leg.task.kind is Kind.COMP:
                if self.compressor_at(leg.point).traits.agrees:
                    await transit.agree(leg, legs[number + 1])
                await Work(partial(transit.compress, leg), leg.task.choice, leg.task.word, transit.tensors)
            elif leg.task.kind is Kind.DECOMP:
                await Work(partial(transit.decompress, leg), leg.task.choice, leg.task.word, transit.tensors)
            elif leg.idle:
                transit.take(leg, transit.alone(leg))
            else:
                transit.take(leg, await transit.issue(leg))
        return transit.result(), transit.next_state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        """Returns the computations and transfers of the rank with the most to do, in order, for a cost model.

        The thread that issues collectives also does the work before and after each, such as adding up what arrived.
        """
        whole, behind = parted(specs) if self.compressor is not None else (plain(specs), 0)
        legs = self.legs(whole.numel, placement)
        return tuple(
            one
            for number, leg in enumerate(legs)
            for one in self._steps_of(leg, legs[min(number + 1, len(legs) - 1)], whole, behind, step, placement.size)
        )

    def unchanged_since(self, step: int) -> int:
        if self.compressor is None:
            return 0
        return max(self.compressor.unchanged_since(step), self.compressor.of_sums.unchanged_since(step))

    # Below: helpers of `steps`, and the methods that `transit.Transit` calls.

    def item_nbytes(self, leg: Leg, held: Held, whole: FlatSpec, step: int) -> list[int]:
        """Returns the bytes of each item in the message of a task: of each payload, or of one dense range.

        Args:
            leg: the task, a collective.
            held: the elements in the message.
            whole: the layout of the bucket.
            step: the number of the training step, on which the size of payloads may depend.
        """
        if not leg.task.kind.of_payloads:
            return [held.numel * dtype_of(whole, leg.keep_fp32).itemsize]
        compressor = self.compressor_at(leg.point)
        keep_fp32 = self.keeps_fp32_at(leg.point)
        specs = [spec_of(whole, piece, leg.point, keep_fp32) for piece in held.pieces]
        return [nbytes for spec in specs for nbytes in [compressor.nbytes(spec, step)] * leg.bundle]

    def keeps_fp32_at(self, point: int) -> bool:
        """Whether the "compress" task number `point`, from 0, compresses sums, which are in float32 or float64.

        It is false only where a route begins with a compression, that of a rank's own gradient.
        """
        return point > 0 or self.leaf[0].kind is not Kind.COMP

    @property
    def _most_added(self) -> float:
        if self.compressor is None or not issubclass(self.compressor.traits.payload, Summand):
            return 0.0
        most = self.compressor.traits.most_summands
        return inf if most is None else float(most)

    def _check_placement(self, placement: Placement) -> None:
        if not is_flat(self.leaf) and placement.ranks_per_node != self.ranks_per_node:
            counts = [placement.nodes.count(node) for node in dict.fromkeys(placement.nodes)]
            raise ValueError(
                f"Route is planned for {self.ranks_per_node} ranks on each node, the nodes have "
                f"{', '.join(map(str, counts))}; make a plan for this placement"
            )

    def _stages(self, legs: Sequence[Leg]) -> Iterator[str]:
        """Yields a name for each await of `synchronize`, except for a first task without a turn (trait `prepares`)."""
        seen: dict[str, int] = {}
        for number, leg in enumerate(legs):
            name = _stage(leg)
            if leg.task.kind is Kind.COMP and self.compressor_at(leg.point).traits.agrees:
                yield _agree_stage(legs[number + 1])
            if leg.idle or (number == 0 and self.traits.prepares):
                continue
            seen[name] = seen.get(name, 0) + 1
            yield name if seen[name] == 1 else f"{name} {seen[name]}"

    def group_of(self, leg: Leg, group: Group) -> Group:
        """Returns the ranks among which a leg's collective runs: all of `group`, or those inside or across nodes."""
        match leg.task.scope:
            case Scope.NODE:
                return group.within_node()
            case Scope.ACROSS:
                return group.across_nodes()
        return group

    def _steps_of(self, leg: Leg, following: Leg, whole: FlatSpec, behind: int, step: int, size: int) -> Iterator[Step]:
        first = leg.before[0]  # no rank holds more
        assert first is not None
        task, after = leg.task, leg.after[0]
        assert after is not None
        if task.kind is Kind.COMP:
            compressor = self.compressor_at(leg.point)
            dense_nbytes = first.numel * dtype_of(whole, leg.keep_fp32).itemsize
            specs = [spec_of(whole, piece, leg.point, leg.keep_fp32) for piece in after.pieces]
            if compressor.traits.agrees:
                yield Compute(compressor.kernel("observe"), float(dense_nbytes), calls=len(specs))
                if not following.idle:
                    yield self._agreement(leg, following, whole, size)
            payloads = sum(compressor.nbytes(spec, step) for spec in specs)
            yield _work(task, compressor, "compress", len(specs), read=dense_nbytes, written=payloads)
            return
        if task.kind is Kind.DECOMP:
            compressor, keep_fp32 = self.compressor_at(leg.point), self.keeps_fp32_at(leg.point)
            specs = [spec_of(whole, piece, leg.point, keep_fp32) for piece in first.pieces]
            payloads = leg.bundle * sum(compressor.nbytes(spec, step) for spec in specs)
            dense_nbytes = first.numel * dtype_of(whole, leg.keep_fp32_after).itemsize
            calls = leg.bundle * len(specs)
            yield _work(task, compressor, "decompress", calls, read=payloads, written=dense_nbytes)
            return
        if task.kind is Kind.COMM and leg.scales:
            yield Compute("scale", 2.0 * whole.nbytes)
        if not leg.idle:
            active = [group for group in leg.groups if leg.before[group[0]] is not None]
            each = [self._transfer(leg, group, whole, behind, step) for group in active]
            yield _at_once(_stage(leg), leg, each, size, active)
        yield from self._steps_behind(leg, whole, step)

    def _agreement(self, leg: Leg, following: Leg, whole: FlatSpec, size: int) -> Transfer:
        """Returns the all-gather, before the compression `leg`, of the numbers that `Compressor.observe` returns.

        It runs among the ranks that will sum their payloads in the all-reduce `following`.
        """
        active = [(group, held) for group in following.groups if (held := leg.after[group[0]]) is not None]
        compressor, each = self.compressor_at(leg.point), []
        for group, held in active:
            specs = [spec_of(whole, piece, leg.point, leg.keep_fp32) for piece in held.pieces]
            nbytes = 4.0 * sum(map(compressor.num_agreed, specs))
            each.append(Transfer("", Pattern.ALL_GATHER, (nbytes,) * len(group)))
        return _at_once(_agree_stage(following), following, each, size, [group for group, _ in active])

    def _steps_behind(self, leg: Leg, whole: FlatSpec, step: int) -> Iterator[Step]:
        """Yields the local work after a collective: summing or joining ranges of elements, or adding payloads."""
        after = leg.after[0]
        assert after is not None
        nbytes = float(after.numel * dtype_of(whole, leg.keep_fp32_after).itemsize)
        if leg.task.kind is Kind.COMM_1:
            yield Compute("sum_ranges", leg.members * self.item_nbytes(leg, after, whole, step)[0] + nbytes)
        elif leg.task.kind is Kind.COMM_2:
            yield Compute("join_ranges", 2 * nbytes)
        elif leg.adds and leg.task.kind is not Kind.COMM_L:
            one = sum(self.item_nbytes(leg, after, whole, step))
            yield Compute("add_payloads", float((leg.members + 1) * one), calls=len(after.pieces))

    def _transfer(self, leg: Leg, group: tuple[int, ...], whole: FlatSpec, behind: int, step: int) -> Transfer:
        """Returns a task's transfer among ranks `group`, with stage ""; `behind`: number of flags (parameter used?)."""
        flags = behind if leg.carries_flags else 0
        before, after = [leg.before[rank] for rank in group], [leg.after[rank] for rank in group]

        def sizes(what: Sequence[Held | None]) -> tuple[float, ...]:
            return tuple(
                0.0 if held is None else float(room_nbytes(self.item_nbytes(leg, held, whole, step), flags))
                for held in what
            )

        match leg.task.kind:
            case Kind.COMM:
                (held,) = set(before)
                assert held is not None
                nbytes = float((held.numel + flags) * dtype_of(whole, leg.keep_fp32).itemsize)
                return Transfer("", Pattern.ALL_REDUCE, (nbytes,) * len(group))
            case Kind.COMM_L:
                held = before[0]
                assert held is not None and self.compressor is not None
                itemsize = self.compressor.number_dtype(whole).itemsize
                nbytes = float(sum(self.item_nbytes(leg, held, whole, step)) + flags * itemsize)
                return Transfer("", Pattern.ALL_REDUCE, (nbytes,) * len(group))
            case Kind.COMM_C:
                return Transfer("", Pattern.ALL_GATHER, sizes(before))
            case kind if kind.is_first:
                return Transfer("", Pattern.ALL_TO_ALL, sizes(after))
        if leg.task.rooted:
            return Transfer("", Pattern.BROADCAST, sizes(before))
        return Transfer("", Pattern.ALL_GATHER, sizes(before))


def routes(
    compressor: Compressor[Any],
    ranks_per_node: int = 1,
    *,
    devices: Sequence[str] = DEVICES,
    constraints: LeafConstraints | None = None,
) -> tuple[Route, ...]:
    """Returns all routes, with or without compression, whose collectives can send or sum what the compressor makes.

    A route is a sequence of compressions, decompressions and collectives that sums a flat bucket.

    Args:
        compressor: used by the routes that compress.
        ranks_per_node: if above 1, routes with collectives inside and across nodes are among them.
        devices: the devices on which routes may compress and decompress.
        constraints: limits on the routes; None: no limits.

    Raises:
        ValueError: if constraints exclude all routes, or name unknown collectives or devices.
    """
    leaves = WITH_SUMS.leaves(devices, constraints)
    legal = [leaf for leaf in leaves if is_flat(leaf) or ranks_per_node > 1]
    found = tuple(Route.of(leaf, compressor, ranks_per_node) for leaf in legal if _illegal(leaf, compressor) is None)
    if not found:
        raise ValueError(f"no route of {compressor.title} is left under {constraints}: loosen one of the constraints")
    return found


@lru_cache(maxsize=1024)
def _leaf_of(words: tuple[str, ...]) -> Leaf:
    return WITH_SUMS.parse(words)


def _work(task: RouteTask, compressor: Compressor[Any], kernel: str, calls: int, *, read: int, written: int) -> Compute:
    """Returns the computation of a task that reads and writes so many bytes; work on the host copies them too."""
    copied = (float(read), float(written)) if is_on_host(task, compressor) else (0.0, 0.0)
    return Compute(compressor.kernel(kernel), float(read + written), task.choice, calls, True, *copied)


def _stage(leg: Leg) -> str:
    scope = leg.task.scope
    return leg.task.word if scope in (None, Scope.ALL) else f"{scope} {leg.task.word}"


def _agree_stage(following: Leg) -> str:
    return "agree" if following.task.scope is Scope.ALL else f"{following.task.scope} agree"


def _at_once(stage: str, leg: Leg, each: Sequence[Transfer], size: int, groups: Sequence[tuple[int, ...]]) -> Transfer:
    """Merges the transfers of a collective, `each` in one of the process `groups`, into one among all `size` ranks."""
    if leg.task.scope is Scope.ALL:
        return replace(each[0], stage=stage)
    return Transfer.at_once(stage, size, groups, each)


def _illegal(leaf: Leaf, compressor: Compressor[Any]) -> str | None:
    """Returns an error message if a collective in `leaf` cannot send or sum the compressor's payloads, else None."""
    sums = [task.word for task in leaf if task.kind is Kind.COMM_L]
    if sums and not issubclass(compressor.traits.payload, Summand):
        return (
            f"Route.tasks: no {sums[0]} can sum the payloads of {compressor.title}: use all_gather, or all_to_all and "
            "all_gather"
        )
    for place, task in enumerate(leaf):
        kinds = [other.kind for other in leaf[place + 1 : place + 3]]
        if compressor.traits.agrees and task.kind is Kind.COMP and kinds != [Kind.COMM_L, Kind.DECOMP]:
            return (
                f"Route.compressor: {compressor.title} makes payloads for an all-reduce: after each compress there "
                "must come all_reduce and decompress"
            )
    return None
