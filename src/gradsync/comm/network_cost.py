"""Makes the cost model of a group's network links from the latency and rate that its ranks measured."""

from __future__ import annotations

from ..costs.cluster import Link
from ..costs.cost_model import CostModel
from .group import Group


def network_cost(group: Group) -> CostModel | None:
    """Returns the cost model of the group's links, the same on every rank; None if the links were not measured.

    Ranks measure rates in an all-to-all. Of n ranks, g on each node, each sends n - 1 parts; a node's link carries
    g (n - g) parts in that time. So the link's rate is the rank's times g (n - g) / (n - 1).
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
