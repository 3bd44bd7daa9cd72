"""Dense schemes: every element of a flat bucket travels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..bucket import Layout, TensorSpec
from ..cluster import Placement
from ..comm import Group
from ..density import DensityProfile
from ..steps import Compute, Pattern, Step, Transfer
from .base import Scheme, State, register


@register
@dataclass(frozen=True)
class AllReduce(Scheme[Tensor]):
    """The transport's own all-reduce, as DDP does it. Exact.

    Wire: 2(n-1)/n of the bucket, sent and received by each rank (ring; the transport may choose another way).
    """

    layout = Layout.FLAT

    def stages(self, size: int) -> tuple[str, ...]:
        return ("all_reduce",)

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        # Scaling before the sum keeps a half-precision sum inside its range.
        x.mul_(scale)
        return await group.all_reduce(x), state

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        round: int = 0,
    ) -> tuple[Step, ...]:
        (flat,) = specs
        return (
            Compute("scale", 2 * flat.nbytes),
            Transfer("all_reduce", Pattern.ALL_REDUCE, (float(flat.nbytes),) * placement.size),
        )
