"""Averaging in changing groups of ranks (after DS-Sync, INFOCOM 2022), simulated, compared with one ring of all (BSP).

The model of rounds is (max,+) linear. In each round every rank computes, then a group starts when its last member is
ready, and its members go on when the group's ring is done. So a delay spreads only through groups, and where the paths
are long it meets the next delay too late to add to it. The paper's own tables are not known to us: figures in brackets
are by other code, computed separately from this code. Nothing is fitted. Kernels are left out, as that code has none,
and so is overlap with computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from gradsync.comm.shuffle import GroupSchedule, Round, crossing, grid, together, with_ranks_absent
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.costs.cost_model import CostModel
from gradsync.costs.steps import Step, Transfer, busiest, transfers
from gradsync.costs.transport import DEFAULT_TRANSPORT
from gradsync.planner.averaging.grouping import groupings
from gradsync.schemes import AllReduce, Hierarchical, ReduceScatter
from gradsync.tensors.bucket import TensorSpec

from .tables import Rows, Table

BUCKET = TensorSpec((25_000_000,), torch.float32)  # 100 MB
LINK_BYTES_PER_S = 1.25e9  # 10 Gbit/s
HOP_S = 30e-6
COMPUTE_S = 0.1

SLOW = 0  # the rank with the slow link
SEED = 8
RANKS_DRAWN = 1 << 12  # ranks times worlds; worlds are independent draws that are simulated together
ROUNDS, SETTLING = 240, 96  # least number of rounds that a mean is over, and before the mean begins
SIZES = (4, 16, 64, 256, 1024, 4096)
MOST_FOR_SPREAD = 64  # with more ranks, the matrices of a schedule with a slow rank take long
PUBLISHED_SPEED = 1.94  # published: largest speed-up of training
RACKS = ((2, 8), (4, 8), (8, 8))  # (racks, ranks in each)


@dataclass(frozen=True)
class Scenario:
    """A simulated disturbance of ranks or links: jitter, stalls, or a slow link."""

    name: str
    jitter: float = 0.0  # standard deviation of a rank's computation, over its mean
    stall_chance: float = 0.0  # per rank and round
    stall_s: float = 0.0
    slowdown: float = 1.0  # factor by which one rank's link is slower
    joins_every: int = 1  # the slow rank takes part in one of so many rounds, and is alone in the others

    @property
    def is_random(self) -> bool:
        return self.jitter > 0 or self.stall_chance > 0

    def computed_s(self, draw: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
        """Draws ranks' computation seconds in a round, float64 of `shape` (worlds, ranks); worlds are simulations."""
        seconds = np.full(shape, COMPUTE_S)
        if self.jitter:
            seconds += draw.normal(0.0, self.jitter * COMPUTE_S, shape)
        if self.stall_chance:
            seconds += self.stall_s * (draw.random(shape) < self.stall_chance)
        return seconds


UNIFORM = Scenario("uniform")
JITTER = Scenario("10 % compute jitter", jitter=0.1)
STALLS = Scenario("1 % chance of a 0.5 s stall", stall_chance=0.01, stall_s=0.5)
SLOW_LINK = Scenario("one link 4x slower", slowdown=4.0)
SELDOM = Scenario("4x slower, in every 4th round", slowdown=4.0, joins_every=4)
SCENARIOS = (UNIFORM, JITTER, STALLS, SLOW_LINK, SELDOM)

SCHEDULES = {"BSP ring": together(64), "8x8": grid((8, 8)), "4^3": grid((4, 4, 4)), "2^6": grid((2,) * 6)}
STATED_MS = {  # worked out by other code, in the order of SCHEDULES
    UNIFORM: (261, 240, 220, 180),
    JITTER: (285, 258, 235, 190),
    STALLS: (500, 415, 362, 276),
    SLOW_LINK: (734, 660, 580, 420),
    SELDOM: (379, 345, 310, 210),
}


@dataclass(frozen=True)
class Wait:
    """One averaging round as arrays: which ranks wait for each other, and how long their ring then takes."""

    order: NDArray[np.intp]  # (n,) ranks, group by group
    starts: NDArray[np.intp]  # (groups,) where in that order a group begins
    group_of: NDArray[np.intp]  # (n,)
    ring_s: NDArray[np.float64]  # (groups,)

    @classmethod
    def of(cls, each: Round, scenario: Scenario) -> Wait:
        sizes = np.array([len(group) for group in each.groups])
        order = np.fromiter(chain.from_iterable(each.groups), np.intp, each.size)
        group_of = np.empty(each.size, np.intp)
        group_of[order] = np.repeat(np.arange(len(sizes)), sizes)
        slowed = [scenario.slowdown if SLOW in group else 1.0 for group in each.groups]
        ring_s = [
            ring_seconds(len(group), LINK_BYTES_PER_S / by) for group, by in zip(each.groups, slowed, strict=True)
        ]
        return cls(order, np.cumsum(sizes) - sizes, group_of, np.array(ring_s))

    def ends(self, ready_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns when n ranks go on, from when they were ready, both (worlds, n) seconds; worlds are simulations."""
        begins_s = np.maximum.reduceat(ready_s[:, self.order], self.starts, axis=1)
        return (begins_s + self.ring_s)[:, self.group_of]


@cache
def ring_seconds(members: int, slowest_bytes_per_s: float) -> float:
    """Returns the seconds of a ring all-reduce of 100 MB (`BUCKET`); the slowest link limits the whole ring."""
    return CostModel(HOP_S, slowest_bytes_per_s).seconds(ring_of(members)) if members > 1 else 0.0


def ring_of(members: int) -> Transfer:
    (transfer,) = transfers(AllReduce().steps((BUCKET,), (), Placement.one_per_node(members)))
    return transfer


def iteration_s(schedule: GroupSchedule, scenario: Scenario) -> float:
    """Returns the seconds of an iteration (computation, then one averaging round) in the long run.

    The result is the mean over ranks, rounds and, where there is chance, worlds (independent draws).
    """
    waits = [Wait.of(each, scenario) for each in without_slow_rank(schedule, scenario).rounds]
    worlds = max(RANKS_DRAWN // schedule.size, 1) if scenario.is_random else 1
    settling, rounds = (len(waits) * -(-least // len(waits)) for least in (SETTLING, ROUNDS))
    draw, ready_s, begun_s = np.random.default_rng(SEED), np.zeros((worlds, schedule.size)), 0.0
    for step in range(settling + rounds):
        if step == settling:
            begun_s = float(ready_s.mean())
        ready_s = waits[step % len(waits)].ends(ready_s + scenario.computed_s(draw, ready_s.shape))
    return (float(ready_s.mean()) - begun_s) / rounds


def without_slow_rank(schedule: GroupSchedule, scenario: Scenario) -> GroupSchedule:
    """Returns the schedule of groups without the slow rank in the rounds that it skips."""
    every = scenario.joins_every
    return schedule if every == 1 else with_ranks_absent(schedule, (SLOW,), every)


def grids(size: int) -> Iterator[tuple[int, ...]]:
    """Yields the radices (group sizes by round) of grids of `size` ranks, a power of two.

    For each number of rounds from two on, these are the most equal ones, largest first.
    """
    exponent = size.bit_length() - 1
    for rounds in range(2, exponent + 1):
        share, more = divmod(exponent, rounds)
        yield (2 << share,) * more + (1 << share,) * (rounds - more)


def grid_spread(radices: Sequence[int]) -> float:
    """Returns the sum of ranks' squared distances to their mean in a grid, if each adds noise of variance 1 a round.

    `radices` are the group sizes by round. The result is `grid(radices).spread()` without matrices, for any size: noise
    from k rounds ago is the same on as many ranks as k group sizes multiply to.
    """
    size, cyclic = math.prod(radices), (*radices, *radices)
    ages = [(first, age) for first in range(len(radices)) for age in range(1, len(radices))]
    return sum(size / math.prod(cyclic[first : first + age]) - 1 for first, age in ages) / len(radices)


def ds_sync_tables() -> list[Table]:
    """Tabulates times of iterations, how far ranks' parameters drift apart, uplink loads, and the planner's groups."""
    return [iterations_table(), spreads_table(), *map(sizes_table, SCENARIOS), loads_table(), chosen_table()]


def iterations_table() -> Table:
    rows = Rows("64 ranks", "ms")
    gains = []
    for scenario, stated in STATED_MS.items():
        found_s = [iteration_s(schedule, scenario) for schedule in SCHEDULES.values()]
        gains.append(found_s[0] / min(found_s))
        rows.add(scenario.name, zip(SCHEDULES, (1e3 * seconds for seconds in found_s), stated, strict=True))
    bytes_ratio = ring_of(64).sent_bytes(0) / ring_of(2).sent_bytes(0)
    return rows.done(
        "Milliseconds of an iteration of 64 ranks (in brackets: worked out by other code)",
        f"{BUCKET.nbytes / 1e6:.0f} MB at {8 * LINK_BYTES_PER_S / 1e9:.0f} Gbit/s, {1e6 * HOP_S:.0f} us a hop, "
        f"{1e3 * COMPUTE_S:.0f} ms of computation, nothing of it overlapped; rings by the steps of all_reduce.",
        f"Pairs send 1/{bytes_ratio:.2f} of a ring's bytes; an iteration is {min(gains):.2f} to {max(gains):.2f} times "
        "as fast.",
        f"Chance: {RANKS_DRAWN // 64} worlds side by side, {ROUNDS} rounds from the {SETTLING}th on, one seed.",
    )


STATED_SPREADS = {  # (momentum, whether it is averaged) -> spread of each grid, in the order of SCHEDULES
    (0.0, False): (7.0, 18.0, 57.0),
    (0.9, False): (36.8, 123.0, 678.0),
    (0.9, True): (7.0, 25.8, 189.0),
}


def spreads_table() -> Table:
    """Tabulates the price of faster iterations: how far ranks' parameters drift apart."""
    rows = Rows("spread", "variances")
    for (momentum, averaged), stated in STATED_SPREADS.items():
        values = (each.spread(momentum, averaged=averaged) for each in SCHEDULES.values())
        name = f"momentum {momentum}, {'averaged' if averaged else 'local'}" if momentum else "no momentum"
        rows.add(name, zip(SCHEDULES, values, (None, *stated), strict=True))
    seldom = [without_slow_rank(each, SELDOM) for each in SCHEDULES.values()]
    rows.add(
        "no momentum, one rank in every 4th",
        ((n, each.spread(), None) for n, each in zip(SCHEDULES, seldom, strict=True)),
    )
    inexact = [name for name, each in zip(SCHEDULES, seldom, strict=True) if not each.is_exact]
    return rows.done(
        "How far noise keeps 64 ranks apart: squared distances to their mean, in the variance that each gets a round "
        "(in brackets: worked out by other code)",
        f"Where one rank joins every 4th round only, no consensus is exact after a cycle of {', '.join(inexact)}.",
        decimals=1,
    )


def sizes_table(scenario: Scenario) -> Table:
    """Tabulates an iteration's milliseconds by number of ranks: one ring (BSP), the fastest grid, a grid of two rounds.

    A grid of k rounds has ranks in k dimensions: each round averages groups of ranks along one of them.
    """
    rows = Rows(f"sizes, {scenario.name}", "ms")
    for size in SIZES:
        found_s = {radices: iteration_s(grid(radices), scenario) for radices in grids(size)}
        fastest, flattest = min(found_s, key=lambda radices: found_s[radices]), next(grids(size))
        row = f"{size} ranks"
        rows.add(row, [("BSP", 1e3 * iteration_s(together(size), scenario), None)])
        for name, radices in (("fastest", fastest), ("two rounds", flattest)):
            rows.add(row, [(name, 1e3 * found_s[radices], None)])
            rows.add(row, [(f"{name}: groups", max(radices), None)], unit="ranks")
            spread = _spread(radices, scenario)
            if spread is not None:
                rows.add(row, [(f"{name}: spread", spread, None)], unit="variances")
    return rows.done(
        f"Milliseconds of an iteration, {scenario.name}: BSP, the fastest grid, the fastest of two rounds",
        "For each number of rounds, one grid with radices as equal as possible. spread: as above, without momentum, "
        "over all ranks.",
        decimals=1,
    )


def _spread(radices: Sequence[int], scenario: Scenario) -> float | None:
    """Returns the sum of ranks' squared distances to their mean, in variances of a round's noise; None if too slow.

    `radices` are the group sizes by round. Ranks step without momentum.
    """
    if scenario.joins_every == 1:
        return grid_spread(radices)
    if math.prod(radices) > MOST_FOR_SPREAD:
        return None
    return without_slow_rank(grid(radices), scenario).spread()


LOADS = {  # worked out by other code, by RACKS
    "rack-ordered flat ring": (1.875, 1.94, 1.97),
    "hierarchical": (1.0, 1.5, 1.75),
    "grid, in-rack round": (0.0, 0.0, 0.0),
    "grid, column round": (8.0, 12.0, 14.0),
    "one crossing group": (1.0, 1.5, 1.75),
}


def loads_table() -> Table:
    rows = Rows("uplink", "of the bytes")
    for name, stated in LOADS.items():
        for (racks, per_rack), figure in zip(RACKS, stated, strict=True):
            rows.add(name, [(f"{racks}x{per_rack}", uplink_load(name, racks, per_rack), figure)])
    return rows.done(
        "The most that a rack's uplink carries in one direction in a round, of the bytes averaged, by racks x ranks "
        "(in brackets: worked out by other code)",
        "Counted: bytes that rings send from rack to rack, by their steps. one crossing group: the largest of the "
        "cycle's rounds in which one group crosses.",
    )


def uplink_load(name: str, racks: int, per_rack: int) -> float:
    """Returns the bytes that the busiest rack sends or receives in a round, over the bucket's bytes.

    `name` is the way of averaging, a key of `LOADS`, such as "hierarchical".
    """
    placement = Placement.regular(racks, per_rack)
    columns, rows = grid((racks, per_rack)).rounds
    match name:
        case "rack-ordered flat ring":
            rounds = [_rings(together(placement.size).round(0))]
        case "hierarchical":
            scheme = Hierarchical(ReduceScatter(), AllReduce(), ranks_per_node=per_rack)
            rounds = [scheme.steps((BUCKET,), (), placement)]
        case "grid, in-rack round":
            rounds = [_rings(rows)]
        case "grid, column round":
            rounds = [_rings(columns)]
        case "one crossing group":
            members = [placement.within(rack * per_rack) for rack in range(racks)]
            rounds = [_rings(each) for each in crossing(members, budget=1).rounds[1:]]
        case _:
            raise ValueError(f"unknown way {name!r}")
    return max(_uplink_bytes(each, placement) for each in rounds) / BUCKET.nbytes


def _uplink_bytes(steps: Sequence[Step], placement: Placement) -> float:
    """Returns the most bytes that leave one rack, or reach one."""
    racks = placement.nodes
    messages = (message for each in transfers(steps) for message in each.carried_by(DEFAULT_TRANSPORT).messages())
    between = ((racks[source], racks[to], nbytes) for source, to, nbytes in messages)
    return busiest(message for message in between if message[0] != message[1])


def _rings(each: Round) -> tuple[Step, ...]:
    """Returns the transfers of a ring all-reduce in each group of the round, all at the same time."""
    return (Transfer.at_once("all_reduce", each.size, each.groups, [ring_of(len(group)) for group in each.groups]),)


def chosen_table() -> Table:
    """Tabulates the groups that the planner chooses on networks with and without a bottleneck, and their speed-up."""
    link = Link(LINK_BYTES_PER_S, HOP_S)
    slow, narrow = Link(LINK_BYTES_PER_S / SLOW_LINK.slowdown, HOP_S), Link(LINK_BYTES_PER_S / 2, HOP_S)
    clusters = {
        "16 nodes": Cluster(16, link),
        "16 nodes, one of them slow": Cluster(16, link, slow={SLOW: slow}),
        "2 racks of 8, a narrow trunk": Cluster(16, link, rack_size=8, trunk=narrow),
        "4 racks of 8, a narrow trunk": Cluster(32, link, rack_size=8, trunk=narrow),
    }
    rows = Rows("chosen", "times")
    for name, cluster in clusters.items():
        found = groupings(cluster, BUCKET.nbytes, COMPUTE_S)
        whole = next(grouping for grouping in found if grouping.name == "together")
        rows.add(f"{name}: {found[0].name}", [("speed", whole.step_s / found[0].step_s, None)])
        rows.add(f"{name}: {found[0].name}", [("spread of a node", found[0].spread, None)], "variances")
    return rows.done(
        f"Groups that the planner chooses, against one group (published: up to {PUBLISHED_SPEED} times the speed)",
        "One group at a time may cross a rack's uplink; nodes may be 1.5 variances apart. slow: a quarter of the rate.",
    )
