"""A scheme whose result is the sign that most ranks vote for, in place of a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..comm import Group
from ..compressors import Sign
from ..compressors.expressions import register
from ..costs.cluster import Placement
from ..costs.steps import Step
from ..tensors.bucket import Bucket, TensorSpec
from ..tensors.density import DensityProfile
from .base import State
from .compressed import Compressed, CompressedAllGather, CompressedTwoWay


@register
@dataclass(frozen=True)
class MajorityVote(Compressed):
    """A scheme whose result is each element's majority sign over ranks (Bernstein et al., 2018).

    SignSGD with majority vote and, with `Signum`, SIGNUM. A tie gives 0 with "all_gather", +1 with "two_way". The
    result is a vote, neither a sum nor a mean: `scale` is not applied, and the optimiser's step is the learning rate
    times the vote. A zero votes for +1, so that weights without any gradient move: keep seldom-used tensors out of such
    buckets. Training does not converge for all gradients, as signs lose magnitudes; error feedback does not help a
    vote.
    Wire: 1 bit an element from each other rank with "all_gather", 2(n-1)/n bits an element with "two_way".

    Attributes:
        compressor: `Sign` or `Signum`.
        via: "all_gather": each rank counts all votes. "two_way": each rank counts the votes for an equal range of the
            bucket, and hands out one bit an element.
    """

    compressor: Sign = Sign()
    via: Literal["all_gather", "two_way"] = "all_gather"

    @property
    def _counted(self) -> Compressed:
        """The scheme that sums the ranks' signs; with "two_way" the owner of a range sends only the sums' signs."""
        return (
            CompressedAllGather(self.compressor)
            if self.via == "all_gather"
            else CompressedTwoWay(self.compressor, sums=Sign())
        )

    def stages(self, size: int) -> tuple[str, ...]:
        return self._counted.stages(size)

    def init(self, bucket: Bucket, group: Group) -> State:
        return self._counted.init(bucket, group)

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        votes, next_state = await self._counted.synchronize(x, state, group, 1.0)
        return votes.sign_(), next_state  # flags, which lie behind, are 0 or 1

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        return self._counted.steps(specs, profiles, placement, step)
