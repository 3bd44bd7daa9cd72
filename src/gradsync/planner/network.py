"""A network as planners see it, and the schemes that default plans are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..costs.cluster import Placement
from ..costs.cost_model import CostModel
from ..plans.profile import Profile
from ..schemes import (
    DOUBLING_OF_ROWS,
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    ReduceScatter,
    Scheme,
    SparseReduceScatter,
)

PLANNED: tuple[Scheme[Any], ...] = (
    BalancedParallelism(),
    AGSparse(),
    DOUBLING_OF_ROWS,
    BalancedElements(),
    AllReduce(),
)  # what default plans are made of


INSIDE_NODES: tuple[Scheme[Any], ...] = (ReduceScatter(), SparseReduceScatter())  # and, where several ranks are there


@dataclass(frozen=True)
class Network:
    """What things cost, and where the ranks are."""

    cost: CostModel
    placement: Placement

    @classmethod
    def of(cls, profile: Profile) -> Network:
        """As it was measured before."""
        return cls(profile.cost_model(), profile.placement)
