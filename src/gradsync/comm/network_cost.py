"""The cost model of a group's links, from its ranks' measurements."""

from __future__ import annotations

from ..costs.cluster import Link
from ..costs.cost_model import CostModel
from .group import Group


def network_cost(group: Group) -> CostModel | None:
    """Returns the cost model of the group's measured links, the same on every rank; None where none were measured.

    A rank measures its share of its node's link in an all-to-all: of n ranks, g on each node, each sends (n - 1) / n of
    its bytes, and g (n - g) / n of them cross that link.
    """
    if group.alpha_s is None or group.bytes_per_s is None:
        return None
    placement = group.placement
    if not placement.is_hierarchy:
        return CostModel(group.alpha_s, group.bytes_per_s, stage_s=group.stage_s, transport=group.transport)
    node, across, n = group.within_node(), group.across_nodes(), group.size
    assert node.alpha_s is not None and node.bytes_per_s is not None and across.alpha_s is not None
    node_bytes_per_s = group.bytes_per_s * node.size * (n - node.size) / (n - 1)
    intra = Link(node.bytes_per_s, node.alpha_s)
    return CostModel(across.alpha_s, node_bytes_per_s, intra=intra, stage_s=across.stage_s, transport=group.transport)
