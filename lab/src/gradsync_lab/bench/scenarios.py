"""Emulated clusters with a bottleneck, by name, as in DS-Sync's paper; settings scale with the links' rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync.costs.cluster import format_rate

from ..cluster.scenario import rate_bytes_per_s

Settings = dict[str, Any]  # of `Scenario`


def _uniform(nodes: int, rate: float) -> Settings:
    return {}


def _slow_node(share: float) -> Callable[[int, float], Settings]:
    """Returns a function that makes settings in which the last node's link has `share` of the others' rate."""
    return lambda nodes, rate: {"slow": {nodes - 1: format_rate(rate * share)}}


def _racks(nodes: int, rate: float) -> Settings:
    """Returns settings of two racks, whose uplinks have a quarter of the rate that the larger rack's nodes can send."""
    rack_size = -(-nodes // 2)
    return {"rack_size": rack_size, "trunk": format_rate(rate * rack_size / 4)}


def _contention(nodes: int, rate: float) -> Settings:
    """Returns settings with foreign traffic between two nodes, which moves to another pair every few seconds."""
    return {"moving_background": (format_rate(rate * 0.75), 4.0)}


def _stalls(nodes: int, rate: float) -> Settings:
    """Returns settings in which a random rank pauses for half a second, every four seconds on average."""
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
    """Returns the scenario's settings other than nodes and link.

    Raises:
        ValueError: the name is unknown, the link has no rate, or there are too few nodes.
    """
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; there are {', '.join(SCENARIOS)}")
    rate = rate_bytes_per_s(link)
    if rate is None:
        raise ValueError(f"scenarios need a link with a rate, such as 1gbit, got {link}")
    if nodes < 4:
        raise ValueError(f"scenarios need at least 4 nodes, got {nodes}")
    return SCENARIOS[name](nodes, rate)
