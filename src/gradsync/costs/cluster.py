"""The network as numbers: links, clusters, and the node of each rank.

Read from TOML or built in code; nothing here needs torch. Rates and times are parsed from the spelling people use
("1gbit", "25Gbps", "10ms") at the edge and kept in bytes per second and seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..inputs.files import MOST_TOML_BYTES, from_toml, naming, read_text
from ..inputs.settings import NonNegativeFinite, PositiveFloat, PositiveInt, check, shown

MOST_RANKS = 1 << 17  # of a job; to plan for so many takes half a minute
RATES_BITS_PER_S = (1.0, 8e15)  # the least and the highest of a link
MOST_DURATION_S = 1000.0  # of a latency
SLOW = 0.8  # share of the usual rate below which a node's link is slow
_BITS_PER_UNIT = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_rate_bytes_per_s(text: str) -> float:
    """Returns a link rate such as `200mbit`, `1gbit`, `25Gbps` or `2.5 Gbit/s` in bytes per second (decimal prefixes).

    Raises:
        ValueError: when `text` is not a number of bits with such a unit, or below the least or above the highest rate
            in `RATES_BITS_PER_S`; bytes (`GB/s`, `GBps`) are refused.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgtKMGT]?)(?:[bB]it(?:/s)?|bps)\s*", text)
    bits_per_s = 0.0 if match is None else float(match[1]) * _BITS_PER_UNIT[match[2].lower()]
    least, most = RATES_BITS_PER_S
    if not least <= bits_per_s <= most:
        raise ValueError(
            f"a link rate must look like 200mbit, 1gbit or 25Gbps and be positive, {format_rate(least / 8)} to "
            f"{format_rate(most / 8)}, got {shown(text)}"
        )
    return bits_per_s / 8


def parse_duration_s(text: str) -> float:
    """Returns a duration such as `10ms`, `50us` or `1.5s` in seconds.

    Raises:
        ValueError: when `text` is not a number with such a unit, or more than `MOST_DURATION_S`.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(s|ms|us|ns)\s*", text)
    seconds = math.inf if match is None else float(match[1]) * _SECONDS_PER_UNIT[match[2]]
    if seconds > MOST_DURATION_S:
        raise ValueError(
            f"a duration must look like 10ms, 50us or 1.5s, at most {MOST_DURATION_S:g}s, got {shown(text)}"
        )
    return seconds


def format_rate(bytes_per_s: float) -> str:
    """Returns the rate as text for people, which `parse_rate_bytes_per_s` reads: 125e6 bytes per second -> `1gbit`."""
    bits = bytes_per_s * 8
    for prefix in "tgmk":
        if bits >= _BITS_PER_UNIT[prefix]:
            return f"{bits / _BITS_PER_UNIT[prefix]:.4g}{prefix}bit"
    return f"{bits:.4g}bit"


@dataclass(frozen=True)
class Link:
    """A full-duplex network link.

    Attributes:
        bandwidth_bytes_per_s: the rate in each direction, in bytes a second.
        latency_s: seconds of a message.
    """

    bandwidth_bytes_per_s: PositiveFloat
    latency_s: NonNegativeFinite = 0.0

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def parse(cls, text: str, latency: str = "0s") -> Link:
        """Returns a link with this rate and latency: `Link.parse("1gbit", "50us")`.

        Raises:
            ValueError: for other spellings, see `parse_rate_bytes_per_s` and `parse_duration_s`.
        """
        return cls(parse_rate_bytes_per_s(text), parse_duration_s(latency))


@dataclass(frozen=True)
class Placement:
    """The node on which each rank of a process group runs.

    Attributes:
        nodes: the node of each member: `nodes[i]` is that of the group's i-th member.
    """

    nodes: tuple[int, ...]

    @classmethod
    def one_per_node(cls, size: int) -> Placement:
        """Returns the placement of `size` ranks, each on a node of its own."""
        return cls(tuple(range(size)))

    @classmethod
    def regular(cls, nodes: int, ranks_per_node: int) -> Placement:
        """Returns the placement of equally many ranks on each node, numbered node by node as by torchrun."""
        return cls(tuple(rank // ranks_per_node for rank in range(nodes * ranks_per_node)))

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.nodes)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that have members."""
        return len(self._members)

    @property
    def ranks_per_node(self) -> int | None:
        """The number of members on each node; None where nodes have different numbers."""
        counts = set(map(len, self._members.values()))
        return counts.pop() if len(counts) == 1 else None

    @property
    def is_hierarchy(self) -> bool:
        """Whether there are several nodes, each with the same number of members, and more than one on each."""
        return self.num_nodes > 1 and (self.ranks_per_node or 0) > 1

    def within(self, member: int) -> tuple[int, ...]:
        """Returns the members on the same node as `member`, itself included, in order."""
        return self._members[self.nodes[member]]

    def across(self, member: int) -> tuple[int, ...]:
        """Returns one member of each node: the one with the same index within its node as `member` has in its own.

        Raises:
            ValueError: where nodes have different numbers of members.
        """
        if self.ranks_per_node is None:
            counts = ", ".join(str(len(members)) for members in self._members.values())
            raise ValueError(f"the nodes have {counts} ranks; a group across nodes needs as many ranks on each of them")
        place = self.within(member).index(member)
        return tuple(sorted(members[place] for members in self._members.values()))

    def of(self, members: Sequence[int]) -> Placement:
        """Returns the placement of a subgroup: of these members alone, in this order, numbered from 0."""
        return Placement(tuple(self.nodes[member] for member in members))

    @cached_property
    def _members(self) -> dict[int, tuple[int, ...]]:
        """The members on each node, keyed by node, in the order of the nodes' first members."""
        found: dict[int, list[int]] = {}
        for member, node in enumerate(self.nodes):
            found.setdefault(node, []).append(member)
        return {node: tuple(members) for node, members in found.items()}


@dataclass(frozen=True)
class Cluster:
    """A cluster of nodes, with equally many ranks on each, and the links between them.

    Attributes:
        nodes: the number of nodes.
        link: the link of each node to the others.
        ranks_per_node: the number of ranks on each node.
        intra: the link between ranks of one node.
        slow: the links of single nodes, by node, that differ from `link`.
        rack_size: number of consecutive nodes that share a rack, in the last one perhaps fewer; None: no racks.
        trunk: the link of each rack to the others.

    Raises:
        ValueError: for numbers below 1, more than `MOST_RANKS` ranks, nodes that do not exist, and `rack_size` without
            `trunk` or the reverse.
    """

    nodes: PositiveInt
    link: Link
    ranks_per_node: PositiveInt = 1
    intra: Link = field(default_factory=lambda: Link(bandwidth_bytes_per_s=10e9, latency_s=5e-6))
    slow: dict[int, Link] = field(default_factory=dict)
    rack_size: PositiveInt | None = None
    trunk: Link | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.world_size > MOST_RANKS:
            raise ValueError(
                f"Cluster.nodes times Cluster.ranks_per_node must be at most {MOST_RANKS} ranks, got "
                f"{shown(self.nodes)} times {shown(self.ranks_per_node)}"
            )
        for node in self.slow:
            if not 0 <= node < self.nodes:
                raise ValueError(f"Cluster.slow names node {node}, but the nodes are 0..{self.nodes - 1}")
        if (self.rack_size is None) != (self.trunk is None):
            raise ValueError("Cluster.rack_size and Cluster.trunk go together: give both or neither")

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    def placement(self) -> Placement:
        """Returns the node of each rank of the cluster: ranks are numbered node by node, as torchrun numbers them."""
        return Placement.regular(self.nodes, self.ranks_per_node)

    def link_of(self, node: int) -> Link:
        """Returns the link that joins `node` to the network: `self.link`, unless `slow` has another one for it."""
        return self.slow.get(node, self.link)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Reads a cluster from TOML.

        Raises:
            TypeError: if `path` is no path.
            ValueError: naming the file, the key and what was expected, for unknown keys, missing keys or illegal
                values, and for a file that cannot be read, is no TOML, or larger than `inputs.files.MOST_TOML_BYTES`.

        Example:
            nodes = 4
            ranks_per_node = 2
            link = { rate = "10gbit", latency = "30us" }
            intra = { rate = "200gbit" }
            slow = { 3 = { rate = "1gbit" } }
        """
        text = read_text(path, "cluster", MOST_TOML_BYTES)
        with naming(path):
            return cls._of_table(from_toml(text, "cluster"))

    @classmethod
    def _of_table(cls, raw: dict[str, Any]) -> Cluster:
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(raw) - known):
            raise ValueError(f"unknown key {shown(unknown[0])}; a cluster has {', '.join(sorted(known))}")
        for name in ("nodes", "link"):
            if name not in raw:
                raise ValueError(f"the key {name!r} is missing")
        for name in ("link", "intra", "trunk"):
            if name in raw:
                raw[name] = _link_from_table(raw[name], name)
        slow = raw.get("slow", {})
        if not isinstance(slow, dict) or not all(re.fullmatch("0|[1-9][0-9]{0,8}", node) for node in slow):
            raise ValueError(f'slow must look like {{ 3 = {{ rate = "1gbit" }} }}, got {shown(slow)}')
        raw["slow"] = {int(node): _link_from_table(table, f"slow.{node}") for node, table in slow.items()}
        return cls(**raw)


def _link_from_table(table: Any, where: str) -> Link:
    table = {"rate": table} if isinstance(table, str) else table
    legal = isinstance(table, dict) and "rate" in table and not set(table) - {"rate", "latency"}
    if not legal or not all(isinstance(text, str) for text in table.values()):
        raise ValueError(f'{where} must look like {{ rate = "1gbit", latency = "50us" }}, got {shown(table)}')
    try:
        return Link.parse(table["rate"], table.get("latency", "0s"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
