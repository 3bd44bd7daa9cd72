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
    """Returns all schemes that default plans may contain, so that the kernels of each can be measured.

    Where `placement` has several ranks on each node, these include the schemes that sum inside nodes.
    """
    return (*PLANNED, *INSIDE_NODES) if placement.is_hierarchy else PLANNED


@dataclass(frozen=True)
class Network:
    """The network that planners plan for: costs of kernels and links, and the node of each rank.

    Attributes:
        cost: the costs of kernels and links.
        placement: the node of each rank.
    """

    cost: CostModel
    placement: Placement

    @classmethod
    def of(cls, profile: Profile) -> Network:
        """Returns the network of a measured job: costs of kernels and links, and the node of each rank."""
        return cls(profile.cost_model(), profile.placement)
