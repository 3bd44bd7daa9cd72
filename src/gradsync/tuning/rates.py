"""Measures the rate between each two nodes, and infers slow links and racks of nodes that are close together.

Every node exchanges once with every other node, in rounds in which all nodes are busy. So a link that several pairs
share, such as a rack's uplink, lowers their rates as it would in training.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..comm import Group
from ..comm.links import Exchange
from ..costs.cluster import SLOW, Cluster, Link

SIZES = (1 << 20, 8 << 20)  # bytes each way; the larger size where the smaller takes no time
TOO_SHORT_S = 5e-3
REPEATS = 2  # of each round; the quickest counts
NEAR = 0.75  # share of the rate of their links that nodes of a rack reach at least
MOST_NEAR = 0.8  # share of the pairs within racks that must be near: another job may have disturbed one

Rates = NDArray[np.float64]  # bytes per second between two nodes, (nodes, nodes), the same in both directions


def measured_cluster(group: Group, timeout_s: float) -> Cluster:
    """Measures the rates between the group's nodes, and returns the links and racks inferred from them. Collective.

    `timeout_s`: seconds to wait for the other ranks.

    Raises:
        ValueError: for a single node.
        GroupError: when another rank died or stopped answering.
    """
    rates = measured_rates(group, timeout_s)
    return cluster_of(rates, group.placement.ranks_per_node or 1, latency_of(group))


def measured_rates(group: Group, timeout_s: float) -> Rates:
    """Measures the rate between each two nodes, in bytes per second, by exchanges of their first ranks. Collective.

    Returns them as (nodes, nodes) float64, the same on all ranks. `timeout_s`: seconds to wait for the other ranks.

    Raises:
        GroupError: when another rank died or stopped answering.
    """
    placement = group.placement
    first = [placement.nodes.index(node) for node in dict.fromkeys(placement.nodes)]
    rates = np.zeros((len(first), len(first)))
    for nbytes in SIZES:
        for pairs in tournament(len(first)):
            peers = {first[a]: [first[b]] for a, b in pairs} | {first[b]: [first[a]] for a, b in pairs}
            exchange = Exchange.of_messages(group, peers, nbytes)
            quickest_s = min(exchange.seconds(group, timeout_s) for _ in range(REPEATS))
            mine = torch.tensor([quickest_s], dtype=torch.float64, device=group.device)
            parts = group.all_gather(mine).wait(timeout_s)
            for a, b in pairs:
                rates[a, b] = rates[b, a] = nbytes / max(float(parts[first[a]]), float(parts[first[b]]))
        if not len(first) > 1 or nbytes / np.median(rates[rates > 0]) > TOO_SHORT_S:
            break
    return rates


def latency_of(group: Group) -> float:
    """Returns the latency in seconds that the group measured when it opened, the same on all ranks; 0 if it did not."""
    return group.alpha_s or 0.0


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Returns a round robin of the numbers below `size`: rounds of pairs in which each two numbers meet once.

    All numbers are in each round, except that one pauses where `size` is odd.
    """
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def cluster_of(rates: Rates, ranks_per_node: int = 1, latency_s: float = 0.0) -> Cluster:
    """Infers a cluster's links and racks from rates between nodes; racks are equally large, of consecutive nodes.

    A node's link is as fast as its best exchange: in racks of two, the neighbour of a slow node looks as slow.

    Args:
        rates: bytes per second between each two nodes, (nodes, nodes) float64.
        ranks_per_node: the number of ranks on each node.
        latency_s: the latency of all links, in seconds.

    Raises:
        ValueError: for rates of fewer than two nodes.
    """
    nodes = len(rates)
    if nodes < 2:
        raise ValueError(f"rates between nodes need two of them, got {nodes}")
    links = rates.max(axis=1)
    usual = float(np.median(links))
    slow = {node: Link(float(rate), latency_s) for node, rate in enumerate(links) if rate < SLOW * usual}
    size = _rack_size(rates, links)
    if size is None:
        return Cluster(nodes, Link(usual, latency_s), ranks_per_node, slow=slow)
    uplinks = [
        sum(rates[a, b] for a, b in pairs if (a // size == rack) != (b // size == rack))
        for pairs in tournament(nodes)
        for rack in range(nodes // size)
    ]
    trunk = Link(float(max(uplinks)), latency_s)
    return Cluster(nodes, Link(usual, latency_s), ranks_per_node, slow=slow, rack_size=size, trunk=trunk)


def _rack_size(rates: Rates, links: NDArray[np.float64]) -> int | None:
    """Returns the largest rack size with near line rate inside racks but not across them; None if there is none."""
    nodes, shares = len(rates), rates / np.minimum.outer(links, links)
    for size in range(nodes // 2, 1, -1):
        rack_of = np.arange(nodes) // size
        inside = np.equal.outer(rack_of, rack_of) & ~np.eye(nodes, dtype=bool)
        is_rack = nodes % size == 0 and (shares[inside] >= NEAR).mean() >= MOST_NEAR
        if is_rack and _share_across(shares, rack_of) < NEAR:
            return size
    return None


def _share_across(shares: NDArray[np.float64], rack_of: NDArray[np.int64]) -> float:
    """Returns the mean share of link rate that pairs of nodes in different racks reach when most such pairs exchange.

    Only those rounds of `tournament` (pairs that exchange at the same time) count that have the most such pairs.
    """
    rounds = [[pair for pair in pairs if len({*rack_of[list(pair)]}) > 1] for pairs in tournament(len(shares))]
    most = max(map(len, rounds))
    return float(np.mean([shares[pair] for pairs in rounds if len(pairs) == most for pair in pairs]))
