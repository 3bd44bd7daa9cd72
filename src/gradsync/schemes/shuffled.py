"""A scheme that averages parameters in groups which change from round to round (DS-Sync, Wang et al., 2020, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..comm import Group
from ..comm.shuffle import GroupSchedule, RankGroup, Round
from ..compressors import CompressorState
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Compute, Step
from ..tensors.bucket import Bucket, Layout, TensorSpec
from ..tensors.density import DensityProfile
from .base import Scheme, State, Traits
from .combine import Hierarchical, at_once, in_turns
from .compressed import CompressedAllGather
from .dense import AllReduce
from .precision import HalfPrecision

ROUND = "round"  # the key of a state that only counts rounds


@register
@dataclass(frozen=True)
class Shuffled(Scheme[Tensor]):
    """A scheme that averages parameters within groups of ranks, by `scheme`; the groups change from round to round.

    It takes parameters after the optimiser's step: if gradients were averaged so, replicas would drift apart for ever.
    A round is one call of `synchronize`. With W its mixing matrix (`Round.mixing`), the result is `scale` times the
    number of all ranks times W x: with a scale of 1 / ranks, x moves towards the mean of its group. Not exact: not the
    mean of all ranks. Within a group all ranks get the same bits, if `scheme` is exact and the round has no relaxation.
    The flags behind a bucket's elements (did a rank use a parameter?) are summed within the group.

    If `scheme` is lossy, each rank adds to its own result the part of its values that was not sent (`Scheme.mix`). So
    results in a group differ by that much, and the mean over all ranks loses nothing but the rounding of 16-bit sums.
    Where nodes have several ranks, `scheme` is `Hierarchical`, and a group has all ranks of its nodes.
    Wire: that of `scheme` within the group of a rank; a rank alone sends nothing.

    Attributes:
        rounds: for each round the groups of ranks, with every rank once; repeated in order.
        relaxations: for each round and group the share of the way to the group's mean that ranks move; (): 1 for all.
        scheme: sums within a group; for flat buckets, without residuals; exact, `HalfPrecision`, or
            `CompressedAllGather` with a compressor for which the ranks need not agree on numbers; or `Hierarchical`
            with one of these between nodes.
    """

    rounds: tuple[tuple[RankGroup, ...], ...]
    relaxations: tuple[tuple[float, ...], ...] = ()
    scheme: Scheme[Any] = AllReduce()

    def __post_init__(self) -> None:
        super().__post_init__()
        sent = self.scheme
        if isinstance(sent, Hierarchical) and sent.intra.traits.exact:
            sent = sent.inter
        inner = sent.inner if isinstance(sent, HalfPrecision) else sent
        is_exact = inner.traits.layout is Layout.FLAT and inner.traits.exact
        if not is_exact and not isinstance(sent, CompressedAllGather):
            raise ValueError(
                f"{type(self).__name__}.scheme must be for flat buckets and exact, HalfPrecision of such a scheme, or "
                f"CompressedAllGather, or Hierarchical with one of these between nodes, got {self.scheme!r}"
            )
        if isinstance(sent, CompressedAllGather) and sent.compressor.traits.agrees:
            raise ValueError(
                f"{type(self).__name__}.scheme must have a compressor for which ranks agree on no numbers, as a rank "
                f"must know beforehand what it sends, got {self.scheme.title}"
            )
        shares = self.relaxations or ((),) * len(self.rounds)
        if len(shares) != len(self.rounds):
            raise ValueError(
                f"{type(self).__name__}.relaxations must be for {len(self.rounds)} rounds or none, got {len(shares)}"
            )
        schedule = GroupSchedule(tuple(Round(*each) for each in zip(self.rounds, shares, strict=True)))
        relaxed = any(share != 1 for each in schedule.rounds for share in each.relaxations)
        object.__setattr__(self, "rounds", tuple(each.groups for each in schedule.rounds))
        object.__setattr__(self, "relaxations", tuple(each.relaxations for each in schedule.rounds) if relaxed else ())

    @classmethod
    def by(cls, schedule: GroupSchedule, scheme: Scheme[Any] | None = None) -> Shuffled:
        """Returns the scheme that averages by a schedule's groups, each with `scheme` (default: all-reduce)."""
        rounds, relaxations = zip(*((each.groups, each.relaxations) for each in schedule.rounds), strict=True)
        return cls(rounds, relaxations, scheme or AllReduce())

    @cached_property
    def schedule(self) -> GroupSchedule:
        """The groups of all rounds, and how far each rank goes towards its group's mean."""
        shares = self.relaxations or [()] * len(self.rounds)
        return GroupSchedule(tuple(Round(*each) for each in zip(self.rounds, shares, strict=True)))

    @property
    def title(self) -> str:
        return f"{self.name} {self.scheme.title}"

    @cached_property
    def traits(self) -> Traits:
        of = self.scheme.traits
        return Traits(Layout.FLAT, lossy=of.lossy, mixes=True, carries_flags=True, waits_for_device=of.waits_for_device)

    def stages(self, size: int) -> tuple[str, ...]:
        """Returns the names of the exchanges of one round: those of `scheme` in the group of ranks that needs the most.

        Other groups idle in those that they lack.
        """
        groups = self.schedule.distinct or ((0,),)
        return max((self.scheme.stages(len(group)) for group in groups), key=len)

    def init(self, bucket: Bucket, group: Group) -> State:
        """Returns the state before the first round: that of `scheme`, and a counter of rounds.

        Process groups are made for the groups of ranks, and for those that `scheme` needs within them, in the same
        order on all ranks.

        Raises:
            ValueError: if `rounds` are for another number of ranks, `scheme` keeps residuals (what compression left
                out), or cannot sum within some group, also within one that this rank is not in.
        """
        if self.schedule.size != group.size:
            raise ValueError(f"the schedule is for {self.schedule.size} ranks, there are {group.size}: make a new plan")
        state = self.scheme.init(bucket, group)
        if any(isinstance(kept, Tensor) or any(part.elements for part in kept) for kept in state.values()):
            raise ValueError(
                f"{self.name} cannot average by {self.scheme.title}, which keeps residuals: use the compressor without "
                "error feedback, as a rank's parameters keep what was not sent"
            )
        for members in self.schedule.distinct:
            self._require_steps(bucket, members, group)
        for members in self.schedule.distinct:
            if group.rank in members:
                self.scheme.init(bucket, group.subgroup(members))
        return {**state, ROUND: (CompressorState(bucket.flat_spec, group.rank),)}

    def _require_steps(self, bucket: Bucket, members: RankGroup, group: Group) -> None:
        """Raises ValueError, the same on all ranks, if `scheme` is not for these members and the nodes they are on."""
        if len(members) == 1:
            return
        try:
            self.scheme.steps(bucket.specs, (), group.placement.of(members))
        except ValueError as error:
            raise ValueError(f"{self.name} cannot average within the ranks {list(members)}: {error}") from None

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        inner = {point: kept for point, kept in state.items() if point != ROUND}
        (counted,) = state[ROUND]
        assert isinstance(counted, CompressorState)
        numel, turns = counted.spec.numel, len(self.stages(group.size))
        members, share = self._part(group.rank, counted.step)
        own = x[:numel].mul(scale * group.size * (1 - share)) if share != 1 else None
        if len(members) > 1:
            within = group.subgroup(members)
            # Exchange: the mean of the group.
            x, _ = await in_turns(self.scheme.mix(x, numel, inner, within, scale * group.size / within.size), turns)
        else:
            if turns:
                await in_turns(_nothing(), turns)
            if scale * group.size != 1:
                x[:numel] *= scale * group.size
        if own is not None:
            x[:numel].mul_(share).add_(own)
        following = {point: tuple(part.next() for part in kept) for point, kept in inner.items()}
        return x, {**following, ROUND: (counted.next(),)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        now = self.schedule.round(step)
        groups = [group for group in now.groups if len(group) > 1]
        within = [self.scheme.steps(specs, profiles, placement.of(group), step) for group in groups]
        exchange = tuple(at_once("group", placement.size, groups, within))
        (spec,) = specs
        if groups and self.traits.lossy:
            part_bytes = spec.nbytes / (self.scheme.together if isinstance(self.scheme, Hierarchical) else 1)
            exchange = (Compute("keep_rest", 5.0 * part_bytes), *exchange, Compute("add_rest", 3.0 * part_bytes))
        if any(share != 1 for share in now.relaxations):
            exchange = (Compute("relax", 2.0 * spec.nbytes), *exchange, Compute("relax", 3.0 * spec.nbytes))
        return exchange

    def unchanged_since(self, step: int) -> int:
        """Returns the earliest training step whose groups of ranks and messages are those of `step`."""
        first = self.scheme.unchanged_since(step)
        return first + (step - first) % len(self.rounds)

    def rests(self, rank: int, step: int) -> bool:
        return len(self.schedule.group_of(rank, step)) == 1

    def _part(self, rank: int, step: int) -> tuple[RankGroup, float]:
        return next((group, share) for group, share in self.schedule.round(step).parts if rank in group)


async def _nothing() -> None:
    """Does nothing, without awaits; a rank that is alone in its group runs this in place of `scheme`."""
