"""Averages within groups that change from round to round (DS-Sync, Wang et al., 2020 and 2022)."""

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
from .combine import at_once, in_turns
from .compressed import CompressedAllGather
from .dense import AllReduce
from .precision import HalfPrecision

ROUND = "round"  # the compress point of a state that only counts


@register
@dataclass(frozen=True)
class Shuffled(Scheme[Tensor]):
    """The mean over this rank's group in this round, by `scheme`; in the next round it is with others.

    For parameters after the optimiser's step: averages of gradients would let the replicas go apart for ever. With W
    the round's mixing (`GroupSchedule`), the result is `scale` times the number of all ranks times W x: with a scale of
    1 / ranks, x moves towards the mean of its group. Not exact: not the mean of all. The same bits within a group, if
    the round has no relaxation.

    `rounds` are repeated: of each, its groups, which have every rank once. `relaxations`: of each round, one for each
    group in ascending order; none: all go to the mean. `scheme` is for flat buckets, keeps no residuals, and is exact,
    rounds to 16 bits, or gathers payloads. What a rank's values lose by that it keeps: its result has it in place of
    the others', so results of a group differ by as much, and the mean of all loses nothing, but for what sums of 16
    bits are rounded by on their way.
    Flags arrive within the group.
    Wire: that of `scheme` within the groups of the round; a rank alone sends nothing.
    """

    rounds: tuple[tuple[RankGroup, ...], ...]
    relaxations: tuple[tuple[float, ...], ...] = ()
    scheme: Scheme[Any] = AllReduce()

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.scheme.inner if isinstance(self.scheme, HalfPrecision) else self.scheme
        is_exact = inner.traits.layout is Layout.FLAT and inner.traits.exact
        if not is_exact and not isinstance(self.scheme, CompressedAllGather):
            raise ValueError(
                f"{type(self).__name__}.scheme must be for flat buckets and exact, HalfPrecision of such a one, or "
                f"CompressedAllGather, got {self.scheme!r}"
            )
        shares = self.relaxations or ((),) * len(self.rounds)
        if len(shares) != len(self.rounds):
            raise ValueError(f"there are {len(self.rounds)} rounds, and relaxations of {len(shares)}")
        schedule = GroupSchedule(tuple(Round(*each) for each in zip(self.rounds, shares, strict=True)))
        relaxed = any(share != 1 for each in schedule.rounds for share in each.relaxations)
        object.__setattr__(self, "rounds", tuple(each.groups for each in schedule.rounds))
        object.__setattr__(self, "relaxations", tuple(each.relaxations for each in schedule.rounds) if relaxed else ())

    @classmethod
    def by(cls, schedule: GroupSchedule, scheme: Scheme[Any] | None = None) -> Shuffled:
        rounds, relaxations = zip(*((each.groups, each.relaxations) for each in schedule.rounds), strict=True)
        return cls(rounds, relaxations, scheme or AllReduce())

    @cached_property
    def schedule(self) -> GroupSchedule:
        shares = self.relaxations or [()] * len(self.rounds)
        return GroupSchedule(tuple(Round(*each) for each in zip(self.rounds, shares, strict=True)))

    @property
    def title(self) -> str:
        return f"{self.name} {self.scheme.title}"

    @cached_property
    def traits(self) -> Traits:
        return Traits(Layout.FLAT, lossy=self.scheme.traits.lossy, mixes=True, carries_flags=True)

    def stages(self, size: int) -> tuple[str, ...]:
        """Those of the largest group; smaller ones that need fewer have empty turns. One rank has them too."""
        groups = self.schedule.distinct or ((0,),)
        return max((self.scheme.stages(len(group)) for group in groups), key=len)

    def init(self, bucket: Bucket, group: Group) -> State:
        """Makes the groups, each once, in the same order on all ranks.

        Raises:
            ValueError: for a schedule of another number of ranks, or a `scheme` that keeps state.
        """
        if self.schedule.size != group.size:
            raise ValueError(f"the schedule is for {self.schedule.size} ranks, there are {group.size}")
        state = self.scheme.init(bucket, group)
        if any(isinstance(kept, Tensor) or any(part.elements for part in kept) for kept in state.values()):
            raise ValueError(
                f"{self.name} cannot average by {self.scheme.title}, which keeps residuals: here a rank keeps what it "
                "does not send in its values"
            )
        for members in self.schedule.distinct:
            if group.rank in members:
                group.subgroup(members)
        return {**state, ROUND: (CompressorState(bucket.flat_spec, group.rank),)}

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        inner = {point: kept for point, kept in state.items() if point != ROUND}
        (counted,) = state[ROUND]
        assert isinstance(counted, CompressorState)
        numel, turns = counted.spec.numel, len(self.stages(group.size))
        members, share = self._part(group.rank, counted.step)
        own = x[:numel].mul(scale * group.size * (1 - share)) if share != 1 else None
        rest = None
        if len(members) > 1:
            within = group.subgroup(members)
            share_of_one = scale * group.size / within.size
            if isinstance(self.scheme, HalfPrecision | CompressedAllGather):
                sent = self.scheme.own_part(x[:numel], inner, share_of_one)
                if sent is not None:
                    rest = x[:numel].mul(scale * group.size).sub_(sent, alpha=within.size)
            # Exchange: the mean of the group.
            x, _ = await in_turns(self.scheme.synchronize(x, inner, within, share_of_one), turns)
        else:
            if turns:
                await in_turns(_nothing(), turns)
            x[:numel] *= scale * group.size
        if rest is not None:
            x[:numel].add_(rest)
        if own is not None:
            x[:numel].mul_(share).add_(own)
        following = {point: tuple(part.next() for part in kept) for point, kept in inner.items()}
        return x, {**following, ROUND: (counted.next(),)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        now = self.schedule.round(round)
        groups = [group for group in now.groups if len(group) > 1]
        within = [self.scheme.steps(specs, profiles, placement.of(group), round) for group in groups]
        exchange = tuple(at_once("group", placement.size, groups, within))
        (spec,) = specs
        if groups and self.traits.lossy:
            exchange = (Compute("keep_rest", 5.0 * spec.nbytes), *exchange, Compute("add_rest", 3.0 * spec.nbytes))
        if any(share != 1 for share in now.relaxations):
            exchange = (Compute("relax", 2.0 * spec.nbytes), *exchange, Compute("relax", 3.0 * spec.nbytes))
        return exchange

    def unchanged_since(self, round: int) -> int:
        """The round of the cycle that it is."""
        return round % len(self.rounds)

    def _part(self, rank: int, step: int) -> tuple[RankGroup, float]:
        return next((group, share) for group, share in self.schedule.round(step).parts if rank in group)


async def _nothing() -> None:
    """A rank alone exchanges nothing."""
