"""Scenarios of an emulated cluster: link rates, racks, slow nodes, background traffic, stalls."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from gradsync.costs.cluster import format_rate, parse_duration_s, parse_rate_bytes_per_s

UNSHAPED = "unshaped"
MOST_NODES = 200  # addresses in one /24
SHAPEABLE_BYTES_PER_S = (1e3, 2**32 - 1)  # the kernel's token bucket is told its rate as a 32-bit number


@dataclass(frozen=True)
class Scenario:
    """An emulated cluster's nodes and links, and the disturbances while a job runs.

    Rates are text such as `1gbit`, `200mbit` or `unshaped` (no limit).

    - `slow`: node -> the rate of its link.
    - `rack_size`, `trunk`: every `rack_size` nodes form a rack, which the trunk's rate joins to the others.
    - `background`: (from node, to node, rate) of traffic that runs all the time.
    - `moving_background`: (rate, seconds) of one flow that moves to another pair of nodes after so many seconds.
    - `stalls`: (seconds, mean seconds in between): a random rank stops for so long, as a swapped-out process does.
    - `seed`: draws moving traffic and stalls.

    Raises:
        ValueError: on construction, for fields that do not fit together.
    """

    nodes: int
    link: str = "1gbit"
    ranks_per_node: int = 1
    rack_size: int | None = None
    trunk: str | None = None
    slow: dict[int, str] = field(default_factory=dict)
    background: tuple[tuple[int, int, str], ...] = ()
    moving_background: tuple[str, float] | None = None
    stalls: tuple[float, float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"a lab has 1 to {MOST_NODES} nodes, got {self.nodes}")
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {self.ranks_per_node}")
        if (self.rack_size is None) != (self.trunk is None):
            raise ValueError("rack_size and trunk go together: give both or neither")
        if self.rack_size is not None and self.rack_size < 1:
            raise ValueError(f"rack_size must be at least 1, got {self.rack_size}")
        named = [*self.slow, *(node for source, target, _ in self.background for node in (source, target))]
        for node in named:
            if not 0 <= node < self.nodes:
                raise ValueError(f"there is no node {node}: the nodes are 0..{self.nodes - 1}")
        for source, target, _ in self.background:
            if source == target:
                raise ValueError(f"background traffic needs two nodes, got {source}->{target}")
        for rate in (self.link, self.trunk or UNSHAPED, *self.slow.values()):
            rate_bytes_per_s(rate)
        flows = [rate for _, _, rate in self.background]
        for rate in flows if self.moving_background is None else [*flows, self.moving_background[0]]:
            parse_rate_bytes_per_s(rate)  # raises for `unshaped`
            rate_bytes_per_s(rate)
        if len({flow[:2] for flow in self.background}) < len(self.background):
            raise ValueError(f"background traffic may run once from a node to another, got {list(self.background)}")
        if self.moving_background is not None:
            _, stays_s = self.moving_background
            if not self.pairs_without_background or not 0 < stays_s < math.inf:
                raise ValueError(
                    "moving traffic needs two nodes without other background traffic and a time above 0 s, got "
                    f"{self.nodes} nodes and {stays_s}"
                )
        if self.stalls is not None and not all(0 < seconds < math.inf for seconds in self.stalls):
            raise ValueError(f"stalls need two times above 0 s, got {self.stalls}")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def rate_of(self, node: int) -> float | None:
        """Returns the rate of the node's link in each direction in bytes per second; None when it has no limit."""
        return rate_bytes_per_s(self.slow.get(node, self.link))

    def rack_of(self, node: int) -> int:
        return node // self.rack_size if self.rack_size else 0

    @property
    def racks(self) -> int:
        return self.rack_of(self.nodes - 1) + 1

    @property
    def pairs_without_background(self) -> list[tuple[int, int]]:
        """Returns the ordered pairs of nodes, from one to another, between which no `background` runs."""
        taken = {(source, target) for source, target, _ in self.background}
        return [pair for pair in permutations(range(self.nodes), 2) if pair not in taken]


def rate_bytes_per_s(text: str) -> float | None:
    """Parses a rate such as `1gbit` and returns bytes per second; None for `unshaped`.

    Raises:
        ValueError: `text` is no rate, or not one that the kernel can limit a link to.
    """
    if text == UNSHAPED:
        return None
    rate, (least, most) = parse_rate_bytes_per_s(text), SHAPEABLE_BYTES_PER_S
    if not least <= rate <= most:
        raise ValueError(
            f"the lab can shape links to {format_rate(least)} .. {format_rate(most)}, got {text}; "
            f"`{UNSHAPED}` sets no limit"
        )
    return rate


def parse_slow(texts: Sequence[str]) -> dict[int, str]:
    """Parses slow nodes: `["3=100mbit"]` -> {3: "100mbit"}. Raises ValueError for text of another form."""
    slow = {}
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,9})=(\S+)", text)
        if match is None:
            raise ValueError(f"a slow node is written NODE=RATE, like 3=100mbit; got {text!r}")
        slow[int(match[1])] = match[2]
    return slow


def parse_background(texts: Sequence[str]) -> tuple[tuple[int, int, str], ...]:
    """Parses background traffic: `["0->2=300mbit"]` -> ((0, 2, "300mbit"),).

    Raises:
        ValueError: a text has another form.
    """
    flows = []
    for text in texts:
        match = re.fullmatch(r"([0-9]{1,9})->([0-9]{1,9})=(\S+)", text)
        if match is None:
            raise ValueError(f"background traffic is written FROM->TO=RATE, like 0->2=300mbit; got {text!r}")
        flows.append((int(match[1]), int(match[2]), match[3]))
    return tuple(flows)


def parse_moving_background(text: str) -> tuple[str, float]:
    """Parses traffic that moves every 4 s: `"100mbit@4s"` -> ("100mbit", 4.0). Raises ValueError for another form."""
    rate, at, seconds = text.partition("@")
    if not at:
        raise ValueError(f"moving traffic is written RATE@TIME, like 100mbit@4s; got {text!r}")
    return rate, parse_duration_s(seconds)


def parse_stalls(text: str) -> tuple[float, float]:
    """Parses stalls: `"500ms@4s"` -> (0.5, 4.0), 0.5 s long, on average 4 s apart. Raises ValueError for other text."""
    stall, at, every = text.partition("@")
    if not at:
        raise ValueError(f"stalls are written TIME@TIME between them, like 500ms@4s; got {text!r}")
    return parse_duration_s(stall), parse_duration_s(every)
