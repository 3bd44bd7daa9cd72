"""The (max,+) model of group schedules meets figures of other code, and delays spread only through groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.comm.shuffle import GroupSchedule, Round, grid, together, with_ranks_absent
from gradsync.costs.cluster import Cluster, Link
from gradsync.planner.averaging.grouping import step_s
from gradsync_lab.papers import ds_sync
from gradsync_lab.papers.ds_sync import (
    COMPUTE_S,
    HOP_S,
    PUBLISHED_SPEED,
    SCENARIOS,
    SCHEDULES,
    SELDOM,
    SIZES,
    SLOW_LINK,
    STALLS,
    UNIFORM,
    Scenario,
    Wait,
    chosen_table,
    grid_spread,
    grids,
    iteration_s,
    iterations_table,
    loads_table,
    ring_seconds,
    sizes_table,
    spreads_table,
    without_slow_rank,
)


def ends_s(schedule: GroupSchedule, step: int, ready_s: np.ndarray, scenario: Scenario) -> list[float]:
    """Returns when each rank goes on, by a formula of its own."""
    found = []
    for rank in range(schedule.size):
        group = schedule.group_of(rank, step)
        m, slowdown = len(group), scenario.slowdown if 0 in group else 1.0
        ring_s = 2 * (m - 1) / m * 100e6 * slowdown / 1.25e9 + 2 * (m - 1) * 30e-6
        found.append(max(ready_s[other] for other in group) + ring_s)
    return found


def test_iterations_of_64_ranks_take_what_other_code_says() -> None:
    figures = iterations_table().figures
    assert len(figures) == len(SCENARIOS) * len(SCHEDULES)
    random = {scenario.name for scenario in SCENARIOS if scenario.is_random}
    for figure in figures:
        assert figure.value == pytest.approx(figure.published, rel=0.03 if figure.row in random else 0.01), figure


def test_spreads_are_those_of_other_code() -> None:
    table = spreads_table()
    for figure in table.figures:
        if figure.published is not None:
            assert figure.value == pytest.approx(figure.published, rel=5e-3, abs=1e-9), figure
        elif figure.row.startswith("momentum") or figure.row == "no momentum":
            assert figure.column == "BSP ring" and figure.value == pytest.approx(0.0, abs=1e-9)
        else:
            assert figure.value > table.figure("no momentum", figure.column).value, "who comes seldom drifts"


def test_uplinks_carry_what_other_code_says() -> None:
    figures = loads_table().figures
    assert len(figures) == 15
    for figure in figures:
        assert figure.value == pytest.approx(figure.published, rel=3e-3), figure


IRREGULAR = GroupSchedule((Round(((0, 3), (1, 4, 5), (2,))), Round(((1, 2), (0, 3, 4), (5,)))))


@given(
    st.sampled_from([grid((2, 3)), IRREGULAR, with_ranks_absent(grid((4, 2)), (0,), 3), together(5)]),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_groups_wait_for_their_last_member_and_their_slowest_link(
    schedule: GroupSchedule, step: int, seed: int
) -> None:
    ready_s = np.random.default_rng(seed).random((2, schedule.size))
    seen = Wait.of(schedule.round(step), SLOW_LINK).ends(ready_s)
    for world in range(2):
        assert seen[world] == pytest.approx(ends_s(schedule, step, ready_s[world], SLOW_LINK))


@pytest.mark.parametrize("members", [2, 3, 8, 63, 64])
def test_the_steps_of_the_scheme_are_the_ring_of_the_model(members: int) -> None:
    expected_s = 2 * (members - 1) / members * 0.08 + 2 * (members - 1) * HOP_S
    assert ring_seconds(members, 1.25e9) == pytest.approx(expected_s)
    assert ring_seconds(1, 1.25e9) == 0.0


def test_a_lasting_delay_sets_the_pace_of_all_and_a_passing_one_of_few() -> None:
    schedule = grid((4, 4))
    slow_s, uniform_s = iteration_s(schedule, SLOW_LINK), iteration_s(schedule, UNIFORM)
    assert slow_s == pytest.approx(COMPUTE_S + ring_seconds(4, 1.25e9 / 4))
    lost_s, of_all_s = (iteration_s(each, STALLS) - iteration_s(each, UNIFORM) for each in (schedule, together(16)))
    assert of_all_s == pytest.approx(0.5 * (1 - 0.99**16), rel=0.05)
    assert 0.01 * 0.5 < lost_s < of_all_s
    assert uniform_s == pytest.approx(COMPUTE_S + ring_seconds(4, 1.25e9))


def test_chance_follows_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    once_s = iteration_s(grid((4, 4)), STALLS)
    assert iteration_s(grid((4, 4)), STALLS) == once_s
    monkeypatch.setattr(ds_sync, "SEED", 9)
    other_s = iteration_s(grid((4, 4)), STALLS)
    assert other_s != once_s and other_s == pytest.approx(once_s, rel=0.03)


def test_the_slow_rank_sits_out_where_the_scenario_says_so() -> None:
    whole = grid((4, 4))
    assert without_slow_rank(whole, UNIFORM) is without_slow_rank(whole, SLOW_LINK) is whole
    assert without_slow_rank(whole, SELDOM) == with_ranks_absent(whole, (0,), 4)


def test_pairs_lose_less_than_a_joined_round_each_time_as_the_next_pair_has_not_heard_of_it() -> None:
    """In 4^3 a delay reaches the next group that the slow rank joins; in pairs the delay does not, which is their
    gain.
    """
    for name, absorbed in (("8x8", False), ("4^3", False), ("2^6", True)):
        schedule = SCHEDULES[name]
        apart_s, joined_s = iteration_s(schedule, UNIFORM), iteration_s(schedule, SLOW_LINK)
        in_turn_s = (3 * apart_s + joined_s) / 4
        seen_s = iteration_s(schedule, SELDOM)
        assert seen_s < 0.9 * in_turn_s if absorbed else seen_s == pytest.approx(in_turn_s)


@pytest.mark.parametrize("radices", [(2, 2), (16, 4), (4, 2, 2), (3, 4, 5), (2,) * 5, (7,)])
def test_the_spread_of_a_grid_needs_no_matrices(radices: tuple[int, ...]) -> None:
    assert grid_spread(radices) == pytest.approx(grid(radices).spread(), abs=1e-9)


def test_there_is_one_grid_for_each_number_of_rounds() -> None:
    assert list(grids(64)) == [(8, 8), (4, 4, 4), (4, 4, 2, 2), (4, 2, 2, 2, 2), (2,) * 6]
    assert list(grids(4)) == [(2, 2)]
    assert list(grids(32))[0] == (8, 4)
    assert all(math.prod(radices) == 4096 for radices in grids(4096)) and len(list(grids(4096))) == 11


def test_sizes_have_bsp_beside_grids_and_what_these_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_sync, "SIZES", SIZES[:2])
    monkeypatch.setattr(ds_sync, "MOST_FOR_SPREAD", 4)
    for scenario in SCENARIOS:
        table = sizes_table(scenario)
        for size in SIZES[:2]:
            row = f"{size} ranks"
            bsp, fastest, flat = (table.figure(row, column).value for column in ("BSP", "fastest", "two rounds"))
            assert fastest <= flat < bsp
            assert table.figure(row, "two rounds: groups").value == math.isqrt(size)
        known = [figure.row for figure in table.figures if figure.column == "two rounds: spread"]
        assert known == (["4 ranks"] if scenario is SELDOM else ["4 ranks", "16 ranks"])
    assert sizes_table(UNIFORM).figure("16 ranks", "fastest: spread").value == pytest.approx(11.0)


def test_what_is_chosen_where_a_node_is_slow_beats_what_is_published() -> None:
    speeds = {figure.row: figure.value for figure in chosen_table().figures if figure.column == "speed"}
    (slow,) = (speed for row, speed in speeds.items() if "one of them slow" in row)
    assert slow > PUBLISHED_SPEED and min(speeds.values()) > 1.3


@pytest.mark.parametrize("schedule", [together(16), grid((4, 4)), grid((2, 8))])
def test_the_planner_expects_the_same(schedule: GroupSchedule) -> None:
    cluster = Cluster(16, Link(1.25e9, HOP_S))
    assert iteration_s(schedule, UNIFORM) == pytest.approx(step_s(schedule, cluster, 100e6, COMPUTE_S))


def test_4096_ranks_are_simulated() -> None:
    """A ring of all ranks has 8190 hops; in pairs a stall reaches only few ranks."""
    assert iteration_s(together(4096), UNIFORM) == pytest.approx(0.1 + 2 * 4095 / 4096 * 0.08 + 8190 * 30e-6)
    assert iteration_s(grid((64, 64)), UNIFORM) == pytest.approx(iteration_s(together(64), UNIFORM))
    pairs_s = iteration_s(grid((2,) * 12), STALLS)
    assert iteration_s(grid((2,) * 6), STALLS) < pairs_s < 0.5 * iteration_s(together(4096), STALLS)
