"""Clusters with a bottleneck, by name: what a link's rate makes of the lab's other settings (DS-Sync's occasions)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.costs.cluster import format_rate

from ..cluster.scenario import rate_bytes_per_s

Settings = dict[str, Any]  # of `Scenario`


def _uniform(nodes: int, rate: float) -> Settings:
    return {}


def _slow_node(share: float) -> Callable[[int, float], Settings]:
    """The last node's link."""
    return lambda nodes, rate: {"slow": {nodes - 1: format_rate(rate * share)}}


def _racks(nodes: int, rate: float) -> Settings:
    """Two, with uplinks of a quarter of what the nodes of the larger one could send."""
    rack_size = -(-nodes // 2)
    return {"rack_size": rack_size, "trunk": format_rate(rate * rack_size / 4)}


def _contention(nodes: int, rate: float) -> Settings:
    """Somebody else's flow on one pair of nodes, which moves on every few seconds."""
    return {"moving_background": (format_rate(rate * 0.75), 4.0)}


def _stalls(nodes: int, rate: float) -> Settings:
    """Some rank stops for half a second, every four seconds on average."""
    return {"stalls": (0.5, 4.0)}


SCENARIOS: dict[str, Callable[[int, float], Settings]] = {
    "uniform": _uniform,
    "slow-node": _slow_node(1 / 4),
    "slower-node": _slow_node(1 / 10),
    "racks": _racks,
    "contention": _contention,
    "stalls": _stalls,
}


def settings_of(name: str, nodes: int, link: str) -> Settings:
    """The lab's settings beside nodes and link.

    Raises:
        ValueError: for an unknown name, links that are not shaped, or too few nodes for it.
    """
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; there are {', '.join(SCENARIOS)}")
    rate = rate_bytes_per_s(link)
    if rate is None:
        raise ValueError(f"scenarios are of shaped links, got {link}")
    if nodes < 4:
        raise ValueError(f"scenarios are of 4 nodes or more, got {nodes}")
    return SCENARIOS[name](nodes, rate)
