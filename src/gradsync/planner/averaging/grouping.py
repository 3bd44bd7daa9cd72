"""Schedules of node groups that average parameters, chosen by the rates of a cluster's links (after DS-Sync).

The paper does not say how it groups. Here candidates compete: all nodes together, grids and other exact schedules,
schedules in which only so many groups cross between racks at a time, schedules in which slow nodes sit out most rounds,
and schedules in which all nodes do. Where a schedule leaves open which node takes which place, nodes are moved about
until the busiest links carry least. The time of each schedule is computed round by round from the cluster's links;
nodes with nobody to wait for go on.

Members are nodes, not ranks: ranks of one node sum first, and each exchanges a part of that sum between nodes. But
distances are those of ranks: `of_ranks` in `comm/shuffle.py` says which ranks average while their nodes rest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...comm.shuffle import (
    EXACT,
    GroupSchedule,
    RankGroup,
    Round,
    crossing,
    exact,
    together,
    with_local_steps,
    with_ranks_absent,
)
from ...costs.cluster import SLOW, Cluster, Link, Placement
from ...costs.steps import transfers
from ...inputs.settings import FewInt, NonNegativeFinite, NonNegativeFloat, PositiveInt, SeveralInt, argument
from ...schemes import AllReduce
from ...tensors.bucket import TensorSpec

SITTING_OUT = (2, 4, 8)  # slow nodes take part in one of so many rounds
ROUNDS = 32  # least number of rounds to simulate, in whole cycles; the later half is timed
FEWEST_CYCLES = 4
MOVES = 1500  # swaps that simulated annealing tries
LARGE_BYTES = float(1 << 30)  # enough for the all-reduce to be a ring in any case
COOLEST = 1e-3  # last temperature of the annealing, as a share of the first cost


@dataclass(frozen=True)
class Grouping:
    """A schedule of averaging, judged on a cluster: its step time, and how far it lets ranks' parameters differ.

    Attributes:
        name: the schedule's name, for records.
        schedule: which nodes average their parameters in which round.
        step_s: mean seconds of a step in the long run, computation and exchange.
        spread: the ranks' mean squared distance to their mean, in variances of the noise of one rank's training step.
        left: the largest share of a difference between ranks that remains after all rounds of the schedule.
        crossing: the most groups that cross one rack's uplink in a round.
    """

    name: str
    schedule: GroupSchedule
    step_s: float
    spread: float
    left: float
    crossing: int


def groupings(
    cluster: Cluster,
    nbytes: float,
    compute_s: float,
    *,
    largest: int | None = None,
    budget: int | None = 1,
    most_spread: float = 1.5,
    most_left: float = 0.5,
    most_local_steps: int = 4,
    seed: int = 0,
) -> list[Grouping]:
    """Returns schedules of averaging (which nodes average in which round) within the limits, the quickest first.

    One of them always averages all nodes together. In some, slow nodes sit out: they join the averages only in one of
    several rounds.

    Args:
        cluster: the nodes, the ranks on each of them, and their links.
        nbytes: bytes that each node averages in a step.
        compute_s: seconds of a step without the exchange.
        largest: most nodes of a group, except a group of all; None: the square root of all, a whole rack, or all but
            the slow nodes.
        budget: most groups that may cross a rack's uplink in the same round; None: any number.
        most_spread: largest mean squared distance of ranks to their mean, in variances of one step's noise.
        most_left: largest share of the squared distances to the mean that may be left after one pass through all
            rounds.
        most_local_steps: most training steps per average, on all nodes; 1 averages after each step.
        seed: seed of the random search for the nodes' places in groups.

    Raises:
        ValueError: for a cluster of one node, or arguments out of their range.
    """
    _check(cluster, nbytes, compute_s)
    argument("seed", seed, int)
    argument("largest", largest, SeveralInt | None)
    argument("budget", budget, PositiveInt | None)
    argument("most_spread", most_spread, NonNegativeFloat)
    argument("most_left", most_left, NonNegativeFloat)
    argument("most_local_steps", most_local_steps, FewInt)
    found = dict[GroupSchedule, Grouping]()
    budget = budget or cluster.nodes
    usual = max(2, math.isqrt(cluster.nodes))
    for name, schedule in _candidates(cluster, largest or usual, budget, seed):
        if largest is not None and any(largest < len(group) < cluster.nodes for group in schedule.distinct):
            continue
        judged = judge(name, schedule, cluster, nbytes, compute_s)
        if judged.crossing > budget or judged.left > most_left + EXACT:  # exact ones but for rounding
            continue
        for every in range(1, most_local_steps + 1):
            if _rested_spread(judged.spread, every, cluster.world_size) <= most_spread + EXACT:
                rested = judged if every == 1 else _with_local_steps(judged, every, cluster, nbytes, compute_s)
                found.setdefault(rested.schedule, rested)
    return sorted(found.values(), key=lambda grouping: grouping.step_s)


def judge(name: str, schedule: GroupSchedule, cluster: Cluster, nbytes: float, compute_s: float) -> Grouping:
    """Returns a schedule of averaging with its expected seconds per step, and how far ranks' parameters stay apart.

    `Grouping.spread` is their mean squared distance to their mean, in variances of the noise of one rank's training
    step; `Grouping.left` is the largest share of such a distance that is left after one pass through all rounds.

    A rank is as far from the mean as its node's mean, of which noise is smaller by the number of ranks, and in addition
    as far from that mean as `_within_nodes` says.

    Args:
        name: a name for the result.
        schedule: says which nodes average in which round.
        cluster: the nodes, the ranks on each of them, and their links.
        nbytes: bytes that each node averages in a step.
        compute_s: seconds of a step without the exchange.
    """
    within_spread, within_left = _within_nodes(schedule, cluster.ranks_per_node)
    return Grouping(
        name,
        schedule,
        step_s=step_s(schedule, cluster, nbytes, compute_s),
        spread=schedule.spread() / cluster.world_size + within_spread,
        left=max(schedule.left, within_left),
        crossing=max(_most_crossing(each, cluster) for each in schedule.rounds),
    )


def _within_nodes(schedule: GroupSchedule, per_node: int) -> tuple[float, float]:
    """Returns how far ranks are from their node's mean, as (`Grouping.spread`, `Grouping.left`) of that part alone.

    In a round in which every node rests, ranks move by their step's noise, as all of them are alone. In other rounds
    they come to their node's mean, or go beyond it by what a relaxation does.

    Args:
        schedule: says which nodes average in which round.
        per_node: the number of ranks on each node.
    """
    if per_node == 1:
        return 0.0, 0.0
    shares = np.ones((len(schedule.rounds), schedule.size))  # of the way to their node's mean, by round and node
    for number, each in enumerate(schedule.rounds):
        for group, share in each.parts:
            shares[number, list(group)] = 0.0 if each.rests else share
    kept, noise = np.square(1 - shares), 1 - 1 / per_node
    after_a_cycle = np.zeros(schedule.size)
    for each in kept:
        after_a_cycle = each * (after_a_cycle + noise)
    left = kept.prod(axis=0)
    apart, found = after_a_cycle / (1 - left), []  # in steady state; below 1, as all meet others in some round
    for each in kept:
        apart = each * (apart + noise)
        found.append(apart.mean())
    return float(np.mean(found)), float(left.max())


def _with_local_steps(judged: Grouping, every: int, cluster: Cluster, nbytes: float, compute_s: float) -> Grouping:
    """Returns the grouping changed so that nodes average only after each `every`-th training step."""
    schedule = with_local_steps(judged.schedule, every)
    return replace(
        judged,
        name=f"{judged.name}, after {every} steps",
        schedule=schedule,
        step_s=step_s(schedule, cluster, nbytes, compute_s),
        spread=_rested_spread(judged.spread, every, cluster.world_size),
    )


def _rested_spread(spread: float, every: int, ranks: int) -> float:
    """Returns the mean squared distance of ranks to their mean if they average after each `every`-th step only.

    `spread`: the same if they average after each step, both in variances of one step's noise; `ranks`: their number. An
    average removes the noise of `every` steps, and each local step before it adds one step's noise.
    """
    return every * spread + (every - 1) / 2 * (1 - 1 / ranks)


def step_s(schedule: GroupSchedule, cluster: Cluster, nbytes: float, compute_s: float) -> float:
    """Simulates a schedule of averaging, and returns the mean seconds of a training step in the long run.

    In each round the schedule divides the nodes into groups, which average their parameters. A group's exchange begins
    when its last node has arrived, and its nodes go on when it ends. Nodes that nobody waits for come to later rounds
    early: a rack's uplink carries what crosses it in one round after what crosses it in the rounds before. Exchanges
    inside nodes take no time.

    Args:
        schedule: says which nodes average in which round; a round follows each training step.
        cluster: the nodes and their links.
        nbytes: bytes that each node averages in a step.
        compute_s: seconds of a step without the exchange.
    """
    ended_s, marks = [0.0] * cluster.nodes, []
    uplink_ended_s = [0.0] * len(_racks(cluster))
    rounds = [
        [(group, _racks_of(group, cluster), seconds) for group, seconds in round_s(each, cluster, nbytes).items()]
        for each in schedule.rounds
    ]
    cycles = max(FEWEST_CYCLES, -(-ROUNDS // len(rounds)))
    for cycle in range(cycles + 1):
        if cycle >= cycles // 2:
            marks.append(max(ended_s))
        for lasting in rounds:
            ended_before_s = uplink_ended_s.copy()
            for group, crossed, seconds in lasting:
                arrived_s = max(ended_s[node] for node in group) + compute_s
                end_s = max([arrived_s, *(ended_before_s[rack] for rack in crossed)]) + seconds
                for node in group:
                    ended_s[node] = end_s
                for rack in crossed:
                    uplink_ended_s[rack] = max(uplink_ended_s[rack], end_s)
    return (marks[-1] - marks[0]) / ((len(marks) - 1) * len(rounds))


class Ring(NamedTuple):
    """The cost of a node group's all-reduce: bytes over its busiest link, and rounds of messages (for latency)."""

    busiest_bytes: float
    rounds: int


@cache
def ring_of(members: int, nbytes: float) -> Ring:
    """Returns the cost of an all-reduce of `nbytes` among nodes: bytes on the busiest link, rounds of messages."""
    bucket = TensorSpec((math.ceil(nbytes / 4),), torch.float32)
    (found,) = transfers(AllReduce().steps((bucket,), (), Placement.one_per_node(members)))
    return Ring(found.busiest_bytes, found.rounds)


def round_s(each: Round, cluster: Cluster, nbytes: float) -> dict[RankGroup, float]:
    """Returns the seconds that each group of nodes takes in one round to average `nbytes` by a ring all-reduce.

    `each`: the round, which divides the nodes into groups. All groups exchange at once; groups that cross the same
    rack's uplink share its rate.
    """
    loads: dict[object, float] = {}
    over: dict[RankGroup, list[tuple[object, Link]]] = {}
    for group in each.groups:
        over[group] = list(_links(group, cluster)) if len(group) > 1 else []
        for key, _ in over[group]:
            loads[key] = loads.get(key, 0.0) + ring_of(len(group), nbytes).busiest_bytes
    return {
        group: max(loads[key] / link.bandwidth_bytes_per_s for key, link in links)
        + ring_of(len(group), nbytes).rounds * max(link.latency_s for _, link in links)
        if links
        else 0.0
        for group, links in over.items()
    }


def _share(members: int) -> float:
    """Returns the bytes that a ring all-reduce among `members` sends over each link, per byte to be averaged."""
    return ring_of(members, LARGE_BYTES).busiest_bytes / LARGE_BYTES if members > 1 else 0.0


def _check(cluster: Cluster, nbytes: float, compute_s: float) -> None:
    if cluster.nodes < 2:
        raise ValueError("there is nobody to average with: a grouping needs two nodes or more, got one")
    argument("nbytes", nbytes, NonNegativeFinite)
    argument("compute_s", compute_s, NonNegativeFinite)


def _candidates(cluster: Cluster, largest: int, budget: int, seed: int) -> Iterator[tuple[str, GroupSchedule]]:
    """Yields schedules to compare, as (name, schedule), each then with slow nodes in one of 2, 4 or 8 rounds only.

    `largest`: most nodes of a group; `budget`: most groups that cross a rack's uplink in a round.
    """
    slow = [node for node, link in cluster.slow.items() if _is_slow(link, cluster)]
    for name, schedule in _of_all(cluster, largest, budget, seed):
        yield name, schedule
        if slow and len(slow) < cluster.nodes:
            for every in SITTING_OUT:
                yield f"{name}, slow nodes in one round of {every}", with_ranks_absent(schedule, slow, every)


def _of_all(cluster: Cluster, largest: int, budget: int, seed: int) -> Iterator[tuple[str, GroupSchedule]]:
    n, racks = cluster.nodes, _racks(cluster)
    yield "together", together(n)
    known: dict[GroupSchedule, str] = {}
    for most in range(2, min(largest, n) + 1):
        schedule = exact(n, most)
        known.setdefault(schedule, f"exact, groups of up to {max(map(len, schedule.distinct))}")
    for schedule, name in known.items():
        yield name, placed_by_annealing(schedule, cluster, seed) if len(racks) > 1 else schedule
    if len(racks) > 1:
        for groups in range(1, min(budget, max(map(len, racks))) + 1):
            yield f"crossing, {groups} at a time", crossing(racks, groups)
            if len(set(map(len, racks))) == 1 and len(racks[0]) % groups == 0:
                yield f"crossing, {groups} at a time, kept apart", crossing(racks, groups, keep_apart=True)


def placed_by_annealing(schedule: GroupSchedule, cluster: Cluster, seed: int = 0) -> GroupSchedule:
    """Returns the schedule with nodes exchanged between its groups so that the busiest links carry least.

    A schedule says which nodes average in which round. Simulated annealing, whose random numbers follow from `seed`,
    finds the permutation of the nodes.
    """
    draw, rounds = random.Random(seed), [_RoundLoads(each, cluster) for each in schedule.rounds]
    nodes = np.arange(cluster.nodes)
    present_s = best_s = first_s = sum(each.busiest_s(nodes) for each in rounds)
    best = nodes.copy()
    for move in range(MOVES):
        pair = draw.sample(range(len(nodes)), 2)
        nodes[pair] = nodes[pair[::-1]]
        moved_s = sum(each.busiest_s(nodes) for each in rounds)
        warmth_s = first_s * COOLEST ** (move / MOVES)
        if moved_s <= present_s or draw.random() < math.exp((present_s - moved_s) / warmth_s):
            present_s = moved_s
            if moved_s < best_s:
                best_s, best = moved_s, nodes.copy()
        else:
            nodes[pair] = nodes[pair[::-1]]
    return schedule.with_ranks(best.tolist())


class _RoundLoads:
    """Computes how long a round's busiest link sends, for any assignment of nodes to places in the round's groups."""

    def __init__(self, each: Round, cluster: Cluster) -> None:
        groups = [group for group in each.groups if len(group) > 1]
        sizes = np.array([len(group) for group in groups])
        self._members = np.array([rank for group in groups for rank in group], dtype=np.int64)
        self._of_group, self._starts = np.repeat(np.arange(len(groups)), sizes), np.cumsum([0, *sizes[:-1]])
        self._sent = np.array([_share(size) for size in sizes.tolist()])
        self._bandwidths = np.array([cluster.link_of(node).bandwidth_bytes_per_s for node in range(cluster.nodes)])
        self._rack_of = np.array([rack for rack, nodes in enumerate(_racks(cluster)) for _ in nodes])
        self._trunk_bytes_per_s = cluster.trunk.bandwidth_bytes_per_s if cluster.trunk else math.inf

    def busiest_s(self, nodes: NDArray[np.int64]) -> float:
        """Returns the seconds that the busiest link takes in this round if each node averages one byte.

        Args:
            nodes: (n,) int64: nodes[i] is the cluster's node that takes place i in the groups of the round.
        """
        seated = nodes[self._members]
        slowest = np.minimum.reduceat(self._bandwidths[seated], self._starts)
        is_in = np.zeros((len(self._sent), self._rack_of[-1] + 1), dtype=bool)
        is_in[self._of_group, self._rack_of[seated]] = True
        is_in[is_in.sum(axis=1) < 2] = False
        return max(float((self._sent / slowest).max()), float((self._sent @ is_in).max()) / self._trunk_bytes_per_s)


def _is_slow(link: Link, cluster: Cluster) -> bool:
    return link.bandwidth_bytes_per_s < SLOW * cluster.link.bandwidth_bytes_per_s


def _racks(cluster: Cluster) -> list[list[int]]:
    size = cluster.rack_size or cluster.nodes
    return [list(range(first, min(first + size, cluster.nodes))) for first in range(0, cluster.nodes, size)]


def _racks_of(group: RankGroup, cluster: Cluster) -> list[int]:
    """Returns the racks whose uplinks a node group's ring crosses: all racks of the group, if there are several."""
    racks = sorted({node // (cluster.rack_size or cluster.nodes) for node in group})
    return racks if len(racks) > 1 else []


def _links(group: RankGroup, cluster: Cluster) -> Iterator[tuple[object, Link]]:
    for node in group:
        yield node, cluster.link_of(node)
    for rack in _racks_of(group, cluster):
        assert cluster.trunk is not None
        yield f"rack {rack}", cluster.trunk


def _most_crossing(each: Round, cluster: Cluster) -> int:
    """Returns the largest number of groups in the round that cross the same rack's uplink."""
    racks = [rack for group in each.groups for rack in _racks_of(group, cluster)]
    return max(map(racks.count, racks), default=0)
