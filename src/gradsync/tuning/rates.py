"""Which links are slow, and which nodes are near each other: rates between nodes, measured in pairs.

Every node exchanges with every other one once, in rounds in which all are busy: what several pairs have to share, as an
uplink of racks, shows in them as it would in training.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from ..comm import LENGTH_BYTES, Group
from ..costs.cluster import SLOW, Cluster, Link

SIZES = (1 << 20, 8 << 20)  # bytes each way; the larger one where the smaller takes no time
TOO_SHORT_S = 5e-3
REPEATS = 2  # of each round, of which the quickest counts: others may disturb, but nobody helps
NEAR = 0.75  # share of what their links could do that nodes of a rack reach at least
MOST_NEAR = 0.8  # of the pairs of all racks: some other job may have been in the way of one

Rates = NDArray[np.float64]  # bytes per second between two nodes, (nodes, nodes), the same in both directions


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs, in which each two meet once; of an odd number one has a pause in each round."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measured_cluster(group: Group, timeout_s: float) -> Cluster:
    """The nodes of the group, and what rates between them say of their links. Collective.

    Raises:
        GroupError: when another rank died or stopped answering.
    """
    rates = measured_rates(group, timeout_s)
    return cluster_of(rates, group.placement.ranks_per_node or 1, latency_of(group))


def measured_rates(group: Group, timeout_s: float) -> Rates:
    """Between the first ranks of all nodes; the same figures on all ranks. Collective.

    Raises:
        GroupError: when another rank died or stopped answering.
    """
    placement = group.placement
    first = [placement.nodes.index(node) for node in dict.fromkeys(placement.nodes)]
    rates = np.zeros((len(first), len(first)))
    for nbytes in SIZES:
        for pairs in tournament(len(first)):
            peers = {first[a]: first[b] for a, b in pairs} | {first[b]: first[a] for a, b in pairs}
            taken_s = [_exchange_s(group, peers.get(group.rank), nbytes, timeout_s) for _ in range(REPEATS)]
            mine = torch.tensor([min(taken_s)], dtype=torch.float64)
            everyone = [float(part) for part in group.all_gather(mine).wait(timeout_s)]
            for a, b in pairs:
                rates[a, b] = rates[b, a] = nbytes / max(everyone[first[a]], everyone[first[b]])
        if not len(first) > 1 or nbytes / np.median(rates[rates > 0]) > TOO_SHORT_S:
            break
    return rates


def latency_of(group: Group) -> float:
    """Seconds of a message, the same on all ranks, where the group measured it; else nothing."""
    return group.alpha_s or 0.0


def _exchange_s(group: Group, peer: int | None, nbytes: int, timeout_s: float) -> float:
    """Both ways; all ranks begin at once."""
    group.all_reduce(torch.zeros(1)).wait(timeout_s)
    bound = nbytes + LENGTH_BYTES
    messages = {} if peer is None else {peer: torch.zeros(bound, dtype=torch.uint8)}
    began_s = time.perf_counter()
    group.swap(messages, list(messages), bound, torch.device("cpu"), in_pairs=True).wait(timeout_s)
    return time.perf_counter() - began_s


def cluster_of(rates: Rates, ranks_per_node: int = 1, latency_s: float = 0.0) -> Cluster:
    """What the rates say of links and racks; racks only where they are all as large, of nodes that follow each other.

    A node's link is as fast as the best of its exchanges: in racks of two, a slow node's neighbour looks as slow as it.

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
    """Of the largest racks whose nodes are near each other, and that hold up what goes between them when most does."""
    nodes, shares = len(rates), rates / np.minimum.outer(links, links)
    for size in range(nodes // 2, 1, -1):
        rack_of = np.arange(nodes) // size
        inside = np.equal.outer(rack_of, rack_of) & ~np.eye(nodes, dtype=bool)
        is_rack = nodes % size == 0 and (shares[inside] >= NEAR).mean() >= MOST_NEAR
        if is_rack and _share_across(shares, rack_of) < NEAR:
            return size
    return None


def _share_across(shares: NDArray[np.float64], rack_of: NDArray[np.int64]) -> float:
    """What pairs of two racks reach of what their links could do, where most of them exchange at once."""
    rounds = [[pair for pair in pairs if len({*rack_of[list(pair)]}) > 1] for pairs in tournament(len(shares))]
    most = max(map(len, rounds))
    return float(np.mean([shares[pair] for pairs in rounds if len(pairs) == most for pair in pairs]))
