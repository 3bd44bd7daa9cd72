"""DS-Sync's rounds (arXiv 2007.03298) on nodes that jitter, stall, and have slow links, from 4 to 4096 of them.

Modelled: each node computes, and averages as soon as all of its group have; then it goes on. A group takes what a ring
of its members takes on the slowest of their links. The paper's own tables are not known to us; published is that
training takes up to 94 % less time at equal accuracy, read as 1.94 times the speed. The values beside ours are what the
same model was worked out to give, apart from this code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster, Link
from ..comm.shuffle import GroupSchedule, Round, crossing, grid, sitting_out, together
from ..planner.grouping import groupings, uplink_loads
from .tables import Rows, Table

NBYTES = 100e6
LINK = Link(1.25e9, 30e-6)  # 10 Gbit/s
COMPUTE_S = 0.1
ROUNDS = 2400  # that are timed, after as many cycles as it takes for what is slow to be felt everywhere
WARM_UP = 48
SLOW_SHARE = 0.25  # of its bandwidth that a slow node has left
SLOW_NODE = 3
JOINS_EVERY = 4  # rounds, if it sits out the others
SIZES = (4, 16, 64, 256, 1024, 4096)
MANY = 256  # nodes, from which on fewer rounds are as telling
PUBLISHED = 1.94  # times the speed


@dataclass(frozen=True)
class Condition:
    """What is wrong with the nodes."""

    name: str
    jitter: float = 0.0  # standard deviation of the time to compute, as a share of it
    stalls: float = 0.0  # chance that a node stalls in a round
    stall_s: float = 0.5
    slow: bool = False  # one node's link has `SLOW_SHARE` of its bandwidth
    sits_out: bool = False  # that one joins one round of `JOINS_EVERY`

    @property
    def random(self) -> bool:
        return self.jitter > 0 or self.stalls > 0


CONDITIONS = (
    Condition("uniform"),
    Condition("10 % jitter", jitter=0.1),
    Condition("stalls", stalls=0.01),
    Condition("a slow link", slow=True),
    Condition("it sits out", slow=True, sits_out=True),
)
RADICES = {"8x8": (8, 8), "4x4x4": (4, 4, 4), "pairs": (2,) * 6}
EXPECTED_MS = {  # of 64 nodes; random ones within 2 %
    "uniform": (261, 240, 220, 180),
    "10 % jitter": (285, 258, 235, 190),
    "stalls": (500, 415, 362, 276),
    "a slow link": (734, 660, 580, 420),
    "it sits out": (379, 345, 310, 210),
}


def iteration_s(schedule: GroupSchedule, condition: Condition, *, seed: int = 0) -> float:
    """What an iteration takes in the long run."""
    if condition.sits_out:
        schedule = sitting_out(schedule, (SLOW_NODE,), JOINS_EVERY)
    draw, n = np.random.default_rng(seed), schedule.size
    bandwidths = np.full(n, LINK.bandwidth_bytes_per_s)
    if condition.slow:
        bandwidths[SLOW_NODE] *= SLOW_SHARE
    rounds = [_Exchange(each, bandwidths) for each in schedule.rounds]
    ended_s, began_s = np.zeros(n), 0.0
    cycles = math.ceil((ROUNDS if n <= MANY else ROUNDS // 8) / len(rounds))
    before = math.ceil(WARM_UP / len(rounds))
    for cycle in range(before + cycles):
        if cycle == before:
            began_s = float(ended_s.max())
        for exchange in rounds:
            computed_s = np.full(n, COMPUTE_S)
            if condition.jitter:
                computed_s *= np.maximum(1 + condition.jitter * draw.standard_normal(n), 0.0)
            if condition.stalls:
                computed_s += condition.stall_s * (draw.random(n) < condition.stalls)
            ended_s = exchange.ended_s(ended_s + computed_s)
    return (float(ended_s.max()) - began_s) / (cycles * len(rounds))


class _Exchange:
    """A round: what each of its groups takes."""

    def __init__(self, each: Round, bandwidths: NDArray[np.float64]) -> None:
        sizes = np.array([len(group) for group in each.groups])
        self._members = np.array([node for group in each.groups for node in group])
        self._starts, self._of_group = np.cumsum([0, *sizes[:-1]]), np.repeat(np.arange(len(sizes)), sizes)
        slowest = np.minimum.reduceat(bandwidths[self._members], self._starts)
        self._lasts_s = 2 * (sizes - 1) / sizes * NBYTES / slowest + 2 * (sizes - 1) * LINK.latency_s

    def ended_s(self, ready_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """When each node is done, if it was ready then."""
        ends_s = np.maximum.reduceat(ready_s[self._members], self._starts) + self._lasts_s
        ended_s = np.empty_like(ready_s)
        ended_s[self._members] = ends_s[self._of_group]
        return ended_s


def grid_spread(radices: Sequence[int]) -> float:
    """`grid(radices).spread()`, without its matrices: noise of k rounds ago is averaged over k radices."""
    n, d = math.prod(radices), len(radices)
    left = [
        n / math.prod(radices[(first + k) % d] for k in range(rounds)) - 1
        for rounds in range(1, d)
        for first in range(d)
    ]
    return sum(left) / d


def grids_of(size: int) -> list[tuple[int, ...]]:
    """Of equal radices, of a power of two."""
    power = size.bit_length() - 1
    return [(2**digits,) * (power // digits) for digits in range(1, power) if power % digits == 0]


def ds_sync_tables() -> list[Table]:
    return [conditions_table(), sizes_table(), uplinks_table(), chosen_table()]


def conditions_table() -> Table:
    rows = Rows("64 nodes", "ms")
    for condition in CONDITIONS:
        schedules = {"together": together(64), **{name: grid(radices) for name, radices in RADICES.items()}}
        rows.add(
            condition.name,
            [
                (name, 1e3 * iteration_s(schedule, condition), expected)
                for (name, schedule), expected in zip(schedules.items(), EXPECTED_MS[condition.name], strict=True)
            ],
        )
    return rows.done(
        "An iteration of 64 nodes, 100 MB over 10 Gbit/s, 100 ms of computation",
        "stalls: of half a second, of one node in a hundred in each round; a slow link: a quarter of one node's",
        f"it sits out: the node with the slow link is alone but for one round of {JOINS_EVERY}",
        "beside: the same model, worked out apart",
        decimals=0,
    )


def sizes_table() -> Table:
    """How much faster the best grid is than everybody together, and how far apart it keeps the nodes."""
    rows = Rows("sizes", "times")
    for size in SIZES:
        speeds, best = [], set()
        for condition in CONDITIONS:
            seconds = {radices: iteration_s(grid(radices), condition) for radices in grids_of(size)}
            best.add(min(seconds, key=lambda radices: seconds[radices]))
            speeds.append((condition.name, iteration_s(together(size), condition) / min(seconds.values()), None))
        rows.add(f"{size} nodes", speeds)
        spread = max(grid_spread(radices) for radices in best) / size
        rows.add(f"{size} nodes", [("spread", spread, None)], "a node, noise of a step")
    return rows.done(
        f"Speed of the best grid over all together (published: up to {PUBLISHED})",
        "all together: one ring, whose hops are felt from a thousand nodes on",
        "spread: expected squared distance of a node to the mean; noise: of one local step",
    )


def uplinks_table() -> Table:
    """What a rack's uplink carries in each direction, in units of what a node averages, counted message by message."""
    rows = Rows("uplinks", "S")
    expected = {
        "a ring of all": (1.875, 1.94, 1.97),
        "by racks first": (1.0, 1.5, 1.75),
        "a grid's round in racks": (0.0, 0.0, 0.0),
        "a grid's round across": (8.0, 12.0, 14.0),
        "one group crosses": (1.0, 1.5, 1.75),
    }
    loads: dict[str, list[float]] = {name: [] for name in expected}
    shapes = [(2, 8), (4, 8), (8, 8)]
    for racks, per_rack in shapes:
        cluster = Cluster(racks * per_rack, LINK, rack_size=per_rack, trunk=LINK)
        across, inside = grid((racks, per_rack)).rounds
        one = crossing([range(rack * per_rack, (rack + 1) * per_rack) for rack in range(racks)], 1).rounds[1]
        groups = {
            "a ring of all": together(cluster.nodes).rounds[0],
            "by racks first": across,  # each of its groups has one part of so many as a rack has nodes
            "a grid's round in racks": inside,
            "a grid's round across": across,
            "one group crosses": one,
        }
        for name, each in groups.items():
            part = per_rack if name == "by racks first" else 1
            loads[name].append(max(uplink_loads(each.groups, cluster)) / part)
    for name, values in loads.items():
        columns = [f"{racks} x {per_rack}" for racks, per_rack in shapes]
        rows.add(name, zip(columns, values, expected[name], strict=True))
    return rows.done("What a rack's uplink carries in a round, racks x nodes in each")


def chosen_table() -> Table:
    """What the planner chooses on networks with a bottleneck, and what that saves."""
    slow = Link(SLOW_SHARE * LINK.bandwidth_bytes_per_s, LINK.latency_s)
    narrow = Link(LINK.bandwidth_bytes_per_s / 2, LINK.latency_s)
    clusters = {
        "uniform": Cluster(16, LINK),
        "one slow node": Cluster(16, LINK, slow={SLOW_NODE: slow}),
        "two racks, a narrow trunk": Cluster(16, LINK, rack_size=8, trunk=narrow),
        "four racks, a narrow trunk": Cluster(32, LINK, rack_size=8, trunk=narrow),
    }
    rows = Rows("chosen", "times")
    for name, cluster in clusters.items():
        found = groupings(cluster, NBYTES, COMPUTE_S)
        whole = next(grouping for grouping in found if grouping.name == "together")
        rows.add(f"{name}: {found[0].name}", [("speed", whole.step_s / found[0].step_s, None)])
        rows.add(f"{name}: {found[0].name}", [("spread a node", found[0].spread, None)], "noise of a step")
    return rows.done(f"Groups chosen by the links, beside all together (published: up to {PUBLISHED} times the speed)")
