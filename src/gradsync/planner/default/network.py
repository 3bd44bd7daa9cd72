"""The network as planners see it, and the schemes that default plans are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...costs.cluster import Placement
from ...costs.cost_model import CostModel
from ...plans.profile import Profile
from ...schemes import (
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
)  # schemes that default plans choose from
INSIDE_NODES: tuple[Scheme[Any], ...] = (ReduceScatter(), SparseReduceScatter())  # first stages inside nodes


def planned_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Returns the schemes that default plans use, and if nodes have several ranks, also those that sum inside nodes."""
    return (*PLANNED, *INSIDE_NODES) if placement.is_hierarchy else PLANNED


@dataclass(frozen=True)
class Network:
    """A cost model of kernels and links, and the placement of ranks on nodes."""

    cost: CostModel
    placement: Placement

    @classmethod
    def of(cls, profile: Profile) -> Network:
        """Returns the cost model and the placement of ranks that a profile has measured."""
        return cls(profile.cost_model(), profile.placement)
