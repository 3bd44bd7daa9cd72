"""Changed links are found by the times of rounds, noise is ignored, and groups change only for clearly better ones."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torch import nn
from torch.optim import SGD

from gradsync.comm.shuffle import (
    GroupSchedule,
    Round,
    crossing,
    exact,
    grid,
    together,
    with_local_steps,
    with_ranks_absent,
)
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.grouping import Grouping, judge, round_s
from gradsync.planner.averaging.plan import schedule_of
from gradsync.planner.averaging.regroup import (
    FIGURES,
    LEAST_ROUNDS,
    Rounds,
    is_better,
    links_changed,
    share_removed,
    spread_for,
)

NODES, NBYTES = 4, 1e6
PAIRS = grid((2, 2))
LINK = Link(1e8)
UNIFORM = Cluster(NODES, LINK)
WATCHED = FIGURES * LEAST_ROUNDS


def slow(node: int, share: float) -> Cluster:
    return Cluster(NODES, LINK, slow={node: Link(share * LINK.bandwidth_bytes_per_s)})


def of(cluster: Cluster, schedule: GroupSchedule) -> Grouping:
    return judge("", schedule, cluster, NBYTES, 0.0)


def planned(cluster: Cluster, most_local_steps: int = 1) -> GroupSchedule:
    return AveragingPlanner(most_local_steps=most_local_steps).grouping(cluster, NBYTES).schedule


def watched(seconds: list[float], cycle: int = 1) -> Rounds:
    rounds = Rounds(cycle)
    for each in seconds:
        rounds.add(each)
    return rounds


def test_a_young_plan_says_nothing_yet() -> None:
    assert watched([0.1] * (WATCHED - 1)).young_s is None
    rounds = watched([0.1] * WATCHED)
    assert rounds.young_s == rounds.now_s == pytest.approx(0.1)


def test_figures_are_of_whole_cycles() -> None:
    """Rounds of a cycle differ, but the figures do not depend on where in the cycle they are read."""
    cycle = [0.4, *[0.1] * 11]
    rounds = watched(cycle * FIGURES, len(cycle))
    assert rounds.young_s == pytest.approx(sum(cycle) / len(cycle))
    for each in cycle[:7]:
        rounds.add(each)
    assert rounds.now_s == rounds.young_s


def test_a_stall_is_no_change() -> None:
    rounds = watched([0.1] * WATCHED + [20.0] + [0.1] * (LEAST_ROUNDS - 1))
    assert rounds.young_s is not None and rounds.now_s is not None
    assert not links_changed([rounds.young_s], [rounds.now_s])


def test_what_stays_is_what_counts_from_then_on() -> None:
    rounds = watched([0.1] * WATCHED + [0.2] * WATCHED)
    assert rounds.young_s == pytest.approx(0.1) and rounds.now_s == pytest.approx(0.2)
    rounds.keep_plan()
    assert rounds.young_s == rounds.now_s


@pytest.mark.parametrize("now_s", [0.14, 0.07])
def test_one_rank_is_enough_to_say_that_links_have_changed(now_s: float) -> None:
    assert links_changed([0.1, 0.1, 0.1], [0.1, now_s, 0.1])
    assert not links_changed([0.1, 0.1, 0.1], [0.11, 0.09, 0.1])


def test_changes_that_take_no_time_are_none() -> None:
    assert not links_changed([1e-4], [9e-4])


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_noise_leaves_groups_as_they_are(seed: int, most: int) -> None:
    """Rounds have noise of a tenth, as do the rates of a planner that measures nevertheless."""
    draw = random.Random(seed)
    noisy = watched([0.05 * draw.uniform(0.9, 1.1) for _ in range(4 * WATCHED)])
    assert noisy.young_s is not None and noisy.now_s is not None
    assert not links_changed([noisy.young_s], [noisy.now_s])
    shares = {node: Link(LINK.bandwidth_bytes_per_s * draw.uniform(0.9, 1.0)) for node in range(NODES)}
    usual = Cluster(NODES, LINK, slow=shares)
    with_slow = Cluster(NODES, LINK, slow={**shares, 3: Link(draw.uniform(0.45, 0.55) * 1e8)})
    for present, measured in ((planned(UNIFORM, most), usual), (planned(slow(3, 0.5), most), with_slow)):
        found = planned(measured, most)
        assert found == present or not is_better(of(measured, found), of(measured, present), 1)


def test_a_rate_near_the_bound_does_not_flip_groups_back_and_forth() -> None:
    """A node that is slightly too slow is allowed to sit out, and stays so when it becomes slightly less slow."""
    too_slow, not_quite = slow(3, 0.79), slow(3, 0.82)
    sits_out, joins = planned(too_slow), planned(not_quite)
    assert sits_out != joins == PAIRS
    assert is_better(of(too_slow, sits_out), of(too_slow, joins), 1)
    assert not is_better(of(not_quite, joins), of(not_quite, sits_out), 1)


class Job:
    """Ranks whose rounds take the time that the present links give them in the simulation."""

    def __init__(self, links: Cluster) -> None:
        self.schedule, self.measured = planned(links), 0
        self._begin()

    def _begin(self) -> None:
        self.rounds = [Rounds(len(self.schedule.rounds)) for _ in range(NODES)]

    def train(self, links: Cluster, steps: int, draw: random.Random) -> None:
        for step in range(steps):
            taken_s = round_s(self.schedule.round(step), links, NBYTES)
            for rank, rounds in enumerate(self.rounds):
                rounds.add(taken_s[self.schedule.group_of(rank, step)] * draw.uniform(0.95, 1.05))

    def consensus(self, links: Cluster) -> None:
        young_s, now_s = ([getattr(rounds, name) for rounds in self.rounds] for name in ("young_s", "now_s"))
        if not links_changed(young_s, now_s):
            return
        self.measured += 1
        found = planned(links)
        if found != self.schedule and is_better(of(links, found), of(links, self.schedule), 1):
            self.schedule = found
            self._begin()
        else:
            for rounds in self.rounds:
                rounds.keep_plan()


def test_contention_that_moves_is_followed_and_forgotten() -> None:
    """First one node becomes slow, then another one, then none; each epoch is long and ends with a consensus."""
    draw, job = random.Random(0), Job(UNIFORM)
    assert job.schedule == PAIRS
    moved = []
    for links in (UNIFORM, UNIFORM, slow(3, 0.1), slow(3, 0.1), slow(1, 0.1), slow(1, 0.1), UNIFORM, UNIFORM):
        job.train(links, 200, draw)
        job.consensus(links)
        moved.append(job.schedule)
        if len(moved) == 2:
            assert job.measured == 0, "nothing has changed"
    assert moved[1] == PAIRS
    assert moved[2] == moved[3] == planned(slow(3, 0.1)) != PAIRS
    assert moved[4] == moved[5] == planned(slow(1, 0.1)) != moved[3]
    assert moved[6] == moved[7] == PAIRS, "nobody sits out for what is over"
    assert job.measured == 3


def test_links_that_all_slow_down_alike_change_no_groups() -> None:
    job, slower = Job(UNIFORM), Cluster(NODES, Link(LINK.bandwidth_bytes_per_s / 5))
    for links in (UNIFORM, slower, slower, slower):
        job.train(links, 100, random.Random(0))
        job.consensus(links)
    assert job.schedule == PAIRS
    assert job.measured == 1, "they were measured once, and are as usual from then on"


def test_only_what_is_clearly_better_is_taken() -> None:
    present = Grouping("", PAIRS, step_s=1.0, spread=0.5, left=0.0, crossing=1)

    def better(step_s: float, spread: float, budget: int | None = 1, **of_present: int) -> bool:
        found = Grouping("", together(4), step_s=step_s, spread=spread, left=0.0, crossing=1)
        held = Grouping("", PAIRS, 1.0, 0.5, 0.0, of_present.get("crossing", present.crossing))
        return is_better(found, held, budget)

    assert better(0.85, 0.9) and not better(0.95, 0.5)
    assert better(1.05, 0.3) and not better(1.2, 0.3), "closer together, in about the same time"
    assert better(2.0, 0.9, crossing=2), "an uplink is crowded"
    assert not better(2.0, 0.9, None, crossing=2)


def test_a_planner_goes_over_to_groups_for_the_links_of_now() -> None:
    model = nn.Linear(1000, 250)
    optimizer = SGD(model.parameters(), lr=0.1)
    planner, placement = AveragingPlanner(most_local_steps=1), Placement.one_per_node(NODES)
    assert planner.regrouped(PAIRS, model, optimizer, placement, UNIFORM) is None
    plan = planner.regrouped(PAIRS, model, optimizer, placement, slow(3, 0.1))
    assert plan is not None
    assert plan.digest == planner.plan(model, optimizer, placement, slow(3, 0.1)).digest
    assert schedule_of(plan) == with_ranks_absent(together(NODES), (3,), 8)
    racks = Cluster(NODES, LINK, rack_size=2, trunk=Link(1e7))
    over = planner.regrouped(PAIRS, model, optimizer, placement, racks)
    assert over is not None and schedule_of(over) == crossing([range(2), range(2, 4)], 1)


def test_links_are_watched_only_where_they_were_measured() -> None:
    nodes, one = Placement.one_per_node(NODES), Placement((0, 0))
    assert AveragingPlanner().remaps(nodes)
    assert not AveragingPlanner().remaps(one), "there are none"
    assert not AveragingPlanner(remap=False).remaps(nodes)
    assert not AveragingPlanner(cluster=UNIFORM).remaps(nodes)
    assert not AveragingPlanner(schedule=PAIRS).remaps(nodes)


def test_times_of_a_checkpoint_are_gone_on_with() -> None:
    rounds = Rounds(1, young_s=0.1)
    assert rounds.young_s == 0.1 and rounds.now_s is None
    for _ in range(WATCHED):
        rounds.add(0.3)
    assert rounds.now_s is not None and links_changed([rounds.young_s], [rounds.now_s])


SCHEDULES = [
    together(16),
    grid((4, 4)),
    grid((2,) * 4),
    crossing([range(8), range(8, 16)], 1),
    with_ranks_absent(grid((4, 4)), (5,), 4),
    exact(11, 3),  # with relaxations
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_rounds_remove_says_how_far_apart_ranks_are(schedule: GroupSchedule) -> None:
    """Values get independent noise in each step; only distances to averages are observed."""
    draw, n, elements, norm = np.random.default_rng(0), schedule.size, 100, 50.0
    cycles = -(-200 // len(schedule.rounds))
    values = np.zeros((n, elements))
    removed, apart = [], []
    for step in range((cycles + 10) * len(schedule.rounds)):
        values += draw.normal(size=values.shape)
        mixed = schedule.round(step).mixing @ values
        shares = [share for rank in range(n) for group, share in schedule.round(step).parts if rank in group]
        distances = np.square(mixed - values).sum(axis=1)
        values = mixed
        if step >= 10 * len(schedule.rounds):
            removed += [share_removed(d, norm, share) for d, share in zip(distances, shares, strict=True)]
            apart.append(np.square(values - values.mean(axis=0)).sum() / n / norm)
    spread = spread_for(np.sqrt(np.mean(apart)), float(np.mean(removed)), n)
    assert spread == pytest.approx(schedule.spread() / n, rel=0.1, abs=1e-9)


@pytest.mark.parametrize("share", [0.5, 1.0, 1.6])
def test_rounds_that_go_short_of_the_mean_or_beyond_remove_less_than_they_change(share: float) -> None:
    values = np.random.default_rng(0).normal(size=(4, 30))
    mixed = Round(((0, 1, 2, 3),), (share,)).mixing @ values

    def apart(v: np.ndarray) -> float:
        return float(np.square(v - v.mean(axis=0)).sum())

    removed = sum(share_removed(float(np.square(m - v).sum()), 1.0, share) for m, v in zip(mixed, values, strict=True))
    assert removed == pytest.approx(apart(values) - apart(mixed))


@pytest.mark.parametrize("every", [1, 3])
def test_ranks_of_a_node_are_ranks(every: int) -> None:
    """3 nodes of 2 ranks: each rank's noise is 1, and a round removes all that `every` steps have added."""
    judged = judge("", with_local_steps(together(3), every), Cluster(3, LINK, 2), NBYTES, 0.0)
    assert judged.spread == pytest.approx((every - 1) / 2 * (1 - 1 / 6))
    assert spread_for(1.0, 1 - 1 / 6, 6) == pytest.approx(1.0)


def regrouped_spread(planner: AveragingPlanner, present: GroupSchedule, removed: float) -> GroupSchedule | None:
    model = nn.Linear(1000, 250)
    optimizer = SGD(model.parameters(), lr=0.1)
    placement, cluster = Placement.one_per_node(16), Cluster(16, LINK)
    plan = planner.regrouped(present, model, optimizer, placement, cluster, removed=removed)
    return None if plan is None else schedule_of(plan)


def test_groups_grow_where_ranks_are_apart_and_shrink_where_there_is_room() -> None:
    """16 nodes; `removed` is the spread at which pairs, groups of 4, or only all together keep ranks near enough."""
    planner = AveragingPlanner(most_apart=1.0, most_local_steps=1)
    pairs, fours, all_together = grid((2,) * 4), grid((4, 4)), together(16)
    spreads = [schedule.spread() / 16 for schedule in (pairs, fours)]
    calm, restless, wild = (spread_for(1.0, spread, 16) for spread in (2 * spreads[0], 2 * spreads[1], 0.01))
    assert exact(16, 2) == pairs and exact(16, 4) == fours
    for present in (fours, all_together):
        assert regrouped_spread(planner, present, calm) == pairs
    for present in (pairs, all_together):
        assert regrouped_spread(planner, present, restless) == fours
    for present in (pairs, fours):
        assert regrouped_spread(planner, present, wild) == all_together
    for present, removed in ((pairs, calm), (fours, restless), (all_together, wild)):
        assert regrouped_spread(planner, present, removed) is None
    assert regrouped_spread(AveragingPlanner(most_local_steps=1), pairs, wild) is None, "nobody asked"


def test_distances_near_the_bound_leave_groups_as_they_are() -> None:
    planner, spread = AveragingPlanner(most_apart=1.0, most_local_steps=1), grid((2,) * 4).spread() / 16
    for nearly in (1.05 * spread, 0.95 * spread):
        removed = spread_for(1.0, nearly, 16)
        assert regrouped_spread(planner, grid((2,) * 4), removed) is None
        assert regrouped_spread(planner, grid((4, 4)), removed) is None


def test_wrong_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="most_apart must be greater than 0 or None, got 0"):
        AveragingPlanner(most_apart=0.0)
    for wrong in ({"momentum_every": True}, {"most_local_steps": 2.0}, {"largest": 1}, {"budget": 0}, {"budget": "1"}):
        with pytest.raises(ValueError, match=f"AveragingPlanner.{next(iter(wrong))} must be"):
            AveragingPlanner(**wrong)
    with pytest.raises(ValueError, match="give one of the two"):
        AveragingPlanner(most_apart=0.1, schedule=PAIRS)
    assert AveragingPlanner(most_apart=0.1, cluster=UNIFORM).regroups(Placement.one_per_node(NODES))
