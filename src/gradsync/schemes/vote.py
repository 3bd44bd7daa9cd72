"""Signs in place of sums: what most ranks vote for."""

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
    """Every rank gets the sign that most ranks have: +1, -1 and, where votes are equal, 0. (Bernstein et al., 2018)

    SignSGD with majority vote and, of `Signum`, SIGNUM. A result is a vote, neither a sum nor a mean: it is not
    multiplied by the engine's scale, and the optimiser's step is its learning rate times the vote. A rank's zero is a
    vote for +1, so that a weight without any gradient moves: keep tensors that are seldom used out of such a bucket.
    It does not converge for all gradients, as signs lose what is large; error feedback does not help a vote.
    `via` "all_gather": all ranks count the votes of all. "two_way": each counts those for an equal range of the bucket,
    and hands out one bit, so that there a tie is +1.
    Wire: 1 bit an element of each other rank, or 2(n-1)/n bits an element.
    """

    compressor: Sign = Sign()
    via: Literal["all_gather", "two_way"] = "all_gather"

    @property
    def _counted(self) -> Compressed:
        """The scheme that sums the votes; two-way, what comes back are votes again."""
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
        round: int = 0,
    ) -> tuple[Step, ...]:
        return self._counted.steps(specs, profiles, placement, round)
