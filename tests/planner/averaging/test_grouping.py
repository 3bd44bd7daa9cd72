"""Groupings meet their constraints, are as quick as the specification says, and avoid slow nodes and uplinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.comm.shuffle import RankGroup, Round, crossing, grid, of_ranks, together, with_local_steps
from gradsync.costs.cluster import Cluster, Link
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.grouping import groupings, judge, placed_by_annealing, round_s, step_s

LINK = Link(1.25e9, 30e-6)  # 10 Gbit/s
SLOW = Link(1.25e9 / 4, 30e-6)
NBYTES, COMPUTE_S = 100e6, 0.1
UNIFORM = Cluster(64, LINK)
ONE_SLOW = Cluster(64, LINK, slow={9: SLOW})


def racks(number: int, per_rack: int, share: float = 1.0) -> Cluster:
    """Returns racks whose uplinks have this share of a node's bandwidth."""
    trunk = Link(share * LINK.bandwidth_bytes_per_s, LINK.latency_s)
    return Cluster(number * per_rack, LINK, rack_size=per_rack, trunk=trunk)


@pytest.mark.parametrize(
    ("cluster", "expected_ms"),
    [(UNIFORM, [261, 240, 220, 180]), (ONE_SLOW, [734, 660, 580, 420])],
    ids=["uniform", "one slow"],
)
def test_steps_are_those_of_the_specification(cluster: Cluster, expected_ms: list[float]) -> None:
    schedules = [together(64), grid((8, 8)), grid((4, 4, 4)), grid((2,) * 6)]
    found = [1e3 * step_s(schedule, cluster, NBYTES, COMPUTE_S) for schedule in schedules]
    assert found == pytest.approx(expected_ms, rel=0.01)


def test_groups_that_cross_share_the_uplink() -> None:
    cluster = racks(2, 4, share=0.5)
    alone, both = Round(((0, 4), (1, 2, 3), (5, 6, 7))), Round(((0, 4), (1, 5), (2, 3), (6, 7)))
    transfer_s = NBYTES / cluster.trunk.bandwidth_bytes_per_s if cluster.trunk else 0.0
    assert round_s(alone, cluster, NBYTES)[0, 4] == pytest.approx(transfer_s, rel=1e-3)
    assert round_s(both, cluster, NBYTES)[0, 4] == pytest.approx(2 * transfer_s, rel=1e-3)
    assert round_s(both, cluster, NBYTES)[2, 3] == pytest.approx(transfer_s / 2, rel=1e-3)


def test_an_uplink_carries_one_round_after_another() -> None:
    """Nodes that stay inside their rack come to the next round early, and wait there for the uplink."""
    cluster = racks(2, 2, share=0.5)
    transfer_s = NBYTES / LINK.bandwidth_bytes_per_s
    for every in (1, 2):
        schedule = with_local_steps(crossing([range(2), range(2, 4)], 1), every)
        cycle_s = len(schedule.rounds) * step_s(schedule, cluster, NBYTES, 0.0)
        assert cycle_s == pytest.approx((1 + 2 + 2) * transfer_s, rel=0.01)


@st.composite
def topologies(draw: st.DrawFn) -> Cluster:
    """Draws racks of any size and rate, the last one perhaps smaller, and up to three nodes with other links.

    Nodes have one to three ranks.
    """
    nodes = draw(st.one_of(st.integers(2, 12), st.sampled_from([13, 17])))
    trunk = Link(draw(st.floats(0.1, 4.0)) * LINK.bandwidth_bytes_per_s, draw(st.sampled_from([0.0, 30e-6, 1e-3])))
    shares = draw(st.dictionaries(st.integers(0, nodes - 1), st.floats(0.05, 2.0), max_size=3))
    links = {node: Link(share * LINK.bandwidth_bytes_per_s) for node, share in shares.items()}
    ranks_per_node = draw(st.integers(1, 3))
    return Cluster(nodes, LINK, ranks_per_node, slow=links, rack_size=draw(st.integers(1, 8)), trunk=trunk)


@settings(max_examples=12)
@given(
    topologies(),
    st.one_of(st.none(), st.integers(1, 3)),
    st.one_of(st.none(), st.integers(2, 9)),
    st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_whatever_the_racks_all_that_is_returned_keeps_to_what_is_asked_for(
    cluster: Cluster, budget: int | None, largest: int | None, most_spread: float, most_left: float
) -> None:
    assert cluster.rack_size is not None
    found = groupings(
        cluster, NBYTES, COMPUTE_S, budget=budget, largest=largest, most_spread=most_spread, most_left=most_left
    )
    assert "together" in [grouping.name for grouping in found]
    assert [grouping.step_s for grouping in found] == sorted(grouping.step_s for grouping in found)
    for grouping in found:
        schedule = grouping.schedule
        assert schedule.size == cluster.nodes
        ranks = of_ranks(schedule, cluster.placement())
        assert ranks.spread() / ranks.size == pytest.approx(grouping.spread) and grouping.spread < most_spread + 1e-6
        assert ranks.left == pytest.approx(grouping.left) and grouping.left < most_left + 1e-6
        if largest is not None:
            assert all(len(group) in (*range(largest + 1), cluster.nodes) for group in schedule.distinct)
        for each in schedule.rounds:
            over = Counter[int]()  # groups with members beyond the rack, by rack
            for group in each.groups:
                touched = {node // cluster.rack_size for node in group}
                over.update(touched if len(touched) > 1 else ())
            assert max(over.values(), default=0) <= min(budget or cluster.nodes, grouping.crossing)


@pytest.mark.parametrize("nodes", [2, 3, 7, 12, 49])
def test_everybody_together_is_always_possible(nodes: int) -> None:
    """Exact schedules are possible, too, if no difference may be left, though rounding leaves some of both."""
    names = [each.name for each in groupings(Cluster(nodes, LINK), NBYTES, COMPUTE_S, most_spread=0.0, most_left=0.0)]
    assert names == ["together"]
    assert nodes == 2 or len(groupings(Cluster(nodes, LINK), NBYTES, COMPUTE_S, most_spread=2.0, most_left=0.0)) > 1


def test_groups_inside_racks_are_no_larger_than_asked_for() -> None:
    cluster = racks(2, 8, share=0.5)
    assert "crossing, 1 at a time" in [each.name for each in groupings(cluster, NBYTES, COMPUTE_S)]
    found = groupings(cluster, NBYTES, COMPUTE_S, largest=4, most_local_steps=1)
    assert [each.name for each in found] == ["together"]


def test_slow_nodes_sit_out() -> None:
    quickest = groupings(ONE_SLOW, NBYTES, COMPUTE_S)[0]
    assert "slow nodes in one round of" in quickest.name
    assert quickest.step_s < 0.3 * step_s(together(64), ONE_SLOW, NBYTES, COMPUTE_S)
    alone = [quickest.schedule.group_of(9, step) == (9,) for step in range(len(quickest.schedule.rounds))]
    assert sum(alone) > len(alone) / 2


def test_what_may_be_apart_is_bounded() -> None:
    tight = groupings(UNIFORM, NBYTES, COMPUTE_S, most_spread=0.2)
    assert [grouping.name for grouping in tight] == ["exact, groups of up to 8", "together"]
    assert [each.name for each in groupings(UNIFORM, NBYTES, COMPUTE_S, most_spread=0.0, most_left=0.0)] == ["together"]
    quickest = groupings(UNIFORM, NBYTES, COMPUTE_S, largest=4, most_local_steps=1)[0]
    assert quickest.name == "exact, groups of up to 2"


@pytest.mark.parametrize("cluster", [UNIFORM, ONE_SLOW, racks(4, 4, share=0.5)])
def test_local_steps_are_judged_as_what_they_are(cluster: Cluster) -> None:
    found = groupings(cluster, NBYTES, COMPUTE_S, most_spread=1.5)
    rested = [each for each in found if each.name.endswith(" steps")]
    assert {each.name[-7:] for each in rested} >= {"2 steps", "3 steps"}
    for each in rested:
        judged = judge(each.name, each.schedule, cluster, NBYTES, COMPUTE_S)
        assert (each.left, each.crossing, each.step_s) == (judged.left, judged.crossing, judged.step_s)
        assert each.spread == pytest.approx(judged.spread, abs=1e-9)
    assert found[0] in rested, "links rest"
    free = groupings(cluster, 0.0, COMPUTE_S)
    assert free[0].step_s == pytest.approx(COMPUTE_S, rel=0.01)


def test_of_what_is_about_as_quick_the_one_that_keeps_nodes_closer_is_taken() -> None:
    """Local steps gain nothing where the exchange is negligible beside a step."""
    cluster = Cluster(4, LINK)
    hardly = AveragingPlanner(compute_s=COMPUTE_S).grouping(cluster, 1e-3 * COMPUTE_S * LINK.bandwidth_bytes_per_s)
    assert hardly.name == "together"
    assert AveragingPlanner().grouping(cluster, NBYTES).name == "exact, groups of up to 2, after 3 steps"
    names = [AveragingPlanner(most_local_steps=most).grouping(cluster, NBYTES).name for most in (2, 1)]
    assert names == ["exact, groups of up to 2, after 2 steps", "exact, groups of up to 2"]


def test_ranks_of_a_node_that_are_apart_between_averages_count() -> None:
    """Pairs of nodes with 8 ranks stay close, as means of 8 ranks have little noise, but their ranks do not."""
    pairs = grid((2,) * 3)
    for every, allowed in ((1, 0.5), (2, 1.0), (3, 2.0)):
        (one, eight) = (
            [
                each.spread
                for each in groupings(Cluster(8, LINK, per_node), NBYTES, COMPUTE_S, most_spread=9.0)
                if each.schedule == with_local_steps(pairs, every)
            ]
            for per_node in (1, 8)
        )
        assert eight[0] < one[0] and (every - 1) / 2 * (1 - 1 / 8) <= eight[0] < allowed


def uplink_loads(groups: Iterable[RankGroup], cluster: Cluster) -> list[float]:
    """Returns the load of each rack's uplink in each direction: a ring moves 2 (n - 1) / n of a member's data."""
    assert cluster.rack_size is not None
    loads = [0.0] * -(-cluster.nodes // cluster.rack_size)
    for group in groups:
        racks = {rank // cluster.rack_size for rank in group}
        for rack in racks if len(racks) > 1 else ():
            loads[rack] += 2 * (len(group) - 1) / len(group)
    return loads


def test_nodes_are_seated_where_uplinks_have_less_to_carry() -> None:
    """Two digits of a hypercube over four racks must cross racks; in the original seating all digits could."""
    cluster = racks(4, 4, share=0.5)
    scattered = grid((2,) * 4).with_ranks([4 * (rank % 4) + rank // 4 for rank in range(16)])
    shuffled = scattered.with_ranks([5, 12, 0, 9, 3, 14, 7, 10, 1, 8, 15, 6, 2, 11, 4, 13])
    moved = placed_by_annealing(shuffled, cluster)
    assert moved.is_exact and moved == placed_by_annealing(shuffled, cluster)
    before, after = (
        sum(max(uplink_loads(each.groups, cluster)) for each in schedule.rounds) for schedule in (shuffled, moved)
    )
    best = sum(max(uplink_loads(each.groups, cluster)) for each in scattered.rounds)
    assert best <= after < before and after <= 1.3 * best


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cluster": Cluster(1, LINK)}, "two nodes or more"),
        ({"nbytes": -1.0}, r"nbytes must be in \[0, inf\), got -1.0"),
        ({"compute_s": float("inf")}, r"compute_s must be in \[0, inf\), got inf"),
        ({"compute_s": "1"}, "compute_s must be a number, got '1'"),
        ({"budget": 0}, "budget must be at least 1 or None, got 0"),
        ({"budget": True}, "budget must be a whole number or None, got True"),
        ({"largest": 1}, "largest must be at least 2 or None, got 1"),
        ({"most_local_steps": 0}, r"most_local_steps must be in \[1, 1000\], got 0"),
        ({"most_local_steps": 10**30}, r"most_local_steps must be in \[1, 1000\], got 10"),
        ({"most_spread": -0.1}, "most_spread must be at least 0, got -0.1"),
        ({"most_left": float("nan")}, "most_left must be at least 0, got nan"),
    ],
)
def test_what_is_no_task_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        groupings(**{"cluster": UNIFORM, "nbytes": NBYTES, "compute_s": COMPUTE_S, **settings})
