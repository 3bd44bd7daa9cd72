"""Groupings keep to what is asked for, are as quick as the specification says, and dodge slow nodes and uplinks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.cluster import Cluster, Link
from gradsync.comm.shuffle import Round, crossing, grid, hypercube, together
from gradsync.planner.grouping import groupings, round_s, seated, step_s, uplink_loads

LINK = Link(1.25e9, 30e-6)  # 10 Gbit/s
SLOW = Link(1.25e9 / 4, 30e-6)
NBYTES, COMPUTE_S = 100e6, 0.1
UNIFORM = Cluster(64, LINK)
ONE_SLOW = Cluster(64, LINK, slow={9: SLOW})


def racks(number: int, per_rack: int, share: float = 1.0) -> Cluster:
    """Whose uplinks have so large a share of a node's bandwidth."""
    trunk = Link(share * LINK.bandwidth_bytes_per_s, LINK.latency_s)
    return Cluster(number * per_rack, LINK, rack_size=per_rack, trunk=trunk)


@pytest.mark.parametrize(
    ("cluster", "expected_ms"),
    [(UNIFORM, [261, 240, 220, 180]), (ONE_SLOW, [734, 660, 580, 420])],
    ids=["uniform", "one slow"],
)
def test_steps_are_those_of_the_specification(cluster: Cluster, expected_ms: list[float]) -> None:
    schedules = [together(64), grid((8, 8)), grid((4, 4, 4)), hypercube(64)]
    found = [1e3 * step_s(schedule, cluster, NBYTES, COMPUTE_S) for schedule in schedules]
    assert found == pytest.approx(expected_ms, rel=0.01)


@pytest.mark.parametrize("per_rack", [8])
@pytest.mark.parametrize(("number", "together_loads", "columns"), [(2, 1.875, 8), (4, 1.94, 12), (8, 1.97, 14)])
def test_uplinks_carry_what_the_specification_says(
    number: int, per_rack: int, together_loads: float, columns: float
) -> None:
    cluster = racks(number, per_rack)
    in_racks, across = grid((number, per_rack)).rounds[::-1]
    one_at_a_time = crossing([range(r * per_rack, (r + 1) * per_rack) for r in range(number)], 1).rounds[1]
    expected = {together(cluster.nodes).rounds[0]: together_loads, in_racks: 0, across: columns}
    expected[one_at_a_time] = 2 * (number - 1) / number
    for each, load in expected.items():
        assert uplink_loads(each.groups, cluster) == pytest.approx([load] * number, rel=2e-3)


def test_groups_that_cross_share_the_uplink() -> None:
    cluster = racks(2, 4, share=0.5)
    alone, both = Round(((0, 4), (1, 2, 3), (5, 6, 7))), Round(((0, 4), (1, 5), (2, 3), (6, 7)))
    transfer_s = NBYTES / cluster.trunk.bandwidth_bytes_per_s if cluster.trunk else 0.0
    assert round_s(alone, cluster, NBYTES)[0, 4] == pytest.approx(transfer_s, rel=1e-3)
    assert round_s(both, cluster, NBYTES)[0, 4] == pytest.approx(2 * transfer_s, rel=1e-3)
    assert round_s(both, cluster, NBYTES)[2, 3] == pytest.approx(transfer_s / 2, rel=1e-3)


@settings(max_examples=25)
@given(
    st.integers(2, 20),
    st.integers(1, 7),
    st.floats(0.1, 4.0),
    st.sets(st.integers(0, 19), max_size=3),
    st.integers(1, 3),
)
def test_no_more_groups_cross_an_uplink_than_the_budget_lets(
    nodes: int, rack_size: int, share: float, slow: set[int], budget: int
) -> None:
    trunk = Link(share * LINK.bandwidth_bytes_per_s)
    slow_links = {node: SLOW for node in slow if node < nodes}
    cluster = Cluster(nodes, LINK, slow=slow_links, rack_size=rack_size, trunk=trunk)
    found = groupings(cluster, NBYTES, COMPUTE_S, budget=budget)
    assert "together" in [grouping.name for grouping in found]
    assert [grouping.step_s for grouping in found] == sorted(grouping.step_s for grouping in found)
    for grouping in found:
        assert grouping.schedule.size == nodes and grouping.spread <= 1.0 and grouping.left <= 0.5
        for each in grouping.schedule.rounds:
            over: dict[int, int] = {}
            for group in each.groups:
                touched = {node // rack_size for node in group}
                for rack in touched if len(touched) > 1 else ():
                    over[rack] = over.get(rack, 0) + 1
            assert max(over.values(), default=0) <= min(budget, grouping.crossing)


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
    assert groupings(UNIFORM, NBYTES, COMPUTE_S, largest=4)[0].name == "exact, groups of up to 2"


def test_nodes_are_seated_where_uplinks_have_less_to_carry() -> None:
    """Of a hypercube over four racks, two digits must cross; counted against the order of racks they all could."""
    cluster = racks(4, 4, share=0.5)
    scattered = hypercube(16).with_ranks([4 * (rank % 4) + rank // 4 for rank in range(16)])
    shuffled = scattered.with_ranks([5, 12, 0, 9, 3, 14, 7, 10, 1, 8, 15, 6, 2, 11, 4, 13])
    moved = seated(shuffled, cluster)
    assert moved.is_exact and moved == seated(shuffled, cluster)
    before, after = (
        sum(max(uplink_loads(each.groups, cluster)) for each in schedule.rounds) for schedule in (shuffled, moved)
    )
    best = sum(max(uplink_loads(each.groups, cluster)) for each in scattered.rounds)
    assert best <= after < before and after <= 1.3 * best


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cluster": Cluster(1, LINK)}, "two nodes or more"),
        ({"nbytes": -1.0}, "must not be negative"),
        ({"compute_s": -1.0}, "must not be negative"),
        ({"budget": 0}, "the budget at least 1"),
    ],
)
def test_what_is_no_task_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        groupings(**{"cluster": UNIFORM, "nbytes": NBYTES, "compute_s": COMPUTE_S, **settings})  # type: ignore[arg-type]
