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
)  # the schemes of default plans
INSIDE_NODES: tuple[Scheme[Any], ...] = (ReduceScatter(), SparseReduceScatter())  # and among several ranks of a node


def planned_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Returns the schemes that default plans for ranks in these places are made of."""
    return (*PLANNED, *INSIDE_NODES) if placement.is_hierarchy else PLANNED


@dataclass(frozen=True)
class Network:
    """The costs of links and kernels, and the nodes that the ranks sit on."""

    cost: CostModel
    placement: Placement

    @classmethod
    def of(cls, profile: Profile) -> Network:
        """Returns the network of a measured job."""
        return cls(profile.cost_model(), profile.placement)
