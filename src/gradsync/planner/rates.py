"""Which links are slow, and which nodes are near each other: rates between nodes, measured in pairs.

Every node exchanges with every other one once, in rounds in which all are busy: what several pairs have to share, as an
uplink of racks, shows in them as it would in training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..cluster import Cluster, Link
from ..comm import LENGTH_BYTES, Group

SIZES = (1 << 20, 8 << 20)  # bytes each way; the larger one where the smaller takes no time
TOO_SHORT_S = 5e-3
REPEATS = 2  # of each round, of which the quickest counts: others may disturb, but nobody helps
SLOW = 0.8  # share of the usual rate below which a node's link is slow
NEAR = 0.75  # share of what their links could do that nodes of a rack reach at least

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


def _exchange_s(group: Group, peer: int | None, nbytes: int, timeout_s: float) -> float:
    """Both ways; all ranks begin at once."""
    group.all_reduce(torch.zeros(1)).wait(timeout_s)
    bound = nbytes + LENGTH_BYTES
    messages = {} if peer is None else {peer: torch.zeros(bound, dtype=torch.uint8)}
    began_s = time.perf_counter()
    group.swap(messages, list(messages), bound, torch.device("cpu"), in_pairs=True).wait(timeout_s)
    return time.perf_counter() - began_s


def cluster_of(rates: Rates, ranks_per_node: int = 1) -> Cluster:
    """What the rates say of links and racks; racks only where they are all as large, of nodes that follow each other.

    Raises:
        ValueError: for rates of fewer than two nodes.
    """
    nodes = len(rates)
    if nodes < 2:
        raise ValueError(f"rates between nodes need two of them, got {nodes}")
    links = rates.max(axis=1)
    usual = float(np.median(links))
    slow = {node: Link(float(rate)) for node, rate in enumerate(links) if rate < SLOW * usual}
    size = _rack_size(rates >= NEAR * np.minimum.outer(links, links))
    if size is None:
        return Cluster(nodes, Link(usual), ranks_per_node, slow=slow)
    uplinks = [
        sum(rates[a, b] for a, b in pairs if (a // size == rack) != (b // size == rack))
        for pairs in tournament(nodes)
        for rack in range(nodes // size)
    ]
    return Cluster(nodes, Link(usual), ranks_per_node, slow=slow, rack_size=size, trunk=Link(float(max(uplinks))))


def _rack_size(near: NDArray[np.bool_]) -> int | None:
    """None where all are near each other, or where who is near whom makes no racks."""
    racks: list[list[int]] = []
    for node in range(len(near)):
        if racks and near[node, racks[-1]].all():
            racks[-1].append(node)
        else:
            racks.append([node])
    sizes = set(map(len, racks))
    return sizes.pop() if 1 < len(racks) < len(near) and len(sizes) == 1 and _are_apart(near, racks) else None


def _are_apart(near: NDArray[np.bool_], racks: Sequence[Sequence[int]]) -> bool:
    """Whether most pairs of two racks are not near each other."""
    rack_of = np.array([number for number, rack in enumerate(racks) for _ in rack])
    across = rack_of[:, None] != rack_of[None, :]
    return bool(near[across].mean() < 0.5)
