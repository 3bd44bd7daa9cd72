"""DS-Sync's simulated rounds: the figures that were worked out apart, and what must hold of any of them."""

from __future__ import annotations

import pytest

from gradsync.comm.shuffle import GroupSchedule, Round, crossing, grid, together
from gradsync.planner.grouping import step_s
from gradsync.simulator import ds_sync
from gradsync.simulator.ds_sync import (
    COMPUTE_S,
    CONDITIONS,
    EXPECTED_MS,
    LINK,
    NBYTES,
    PUBLISHED,
    chosen_table,
    conditions_table,
    grid_spread,
    grids_of,
    iteration_s,
    sizes_table,
    uplinks_table,
)


def test_64_nodes_take_what_was_worked_out() -> None:
    table = conditions_table()
    for condition in CONDITIONS:
        for column in ("together", *ds_sync.RADICES):
            figure = table.figure(condition.name, column)
            assert figure.value == pytest.approx(figure.published, rel=0.03 if condition.random else 0.01)


def test_uplinks_carry_what_was_worked_out() -> None:
    for figure in uplinks_table().figures:
        assert figure.value == pytest.approx(figure.published, abs=0.01)


@pytest.mark.parametrize("radices", [(4, 4), (8, 8), (2, 2, 2, 2), (4, 4, 4), (7,), (2, 4, 3)])
def test_spreads_without_matrices_are_the_same(radices: tuple[int, ...]) -> None:
    assert grid_spread(radices) == pytest.approx(grid(radices).spread(), abs=1e-9)


def test_grids_of_a_size_have_equal_radices() -> None:
    assert grids_of(64) == [(2,) * 6, (4, 4, 4), (8, 8)]
    assert grids_of(4) == [(2, 2)]


def test_who_waits_for_nobody_goes_on() -> None:
    """Two pairs and a third of one slow node never wait for each other until they meet."""
    apart = GroupSchedule((*([Round(((0, 1), (2, 3)))] * 9), Round(((0, 1, 2, 3),))))
    slow = ds_sync.Condition("slow", slow=True)
    pair_s = COMPUTE_S + NBYTES / (ds_sync.SLOW_SHARE * LINK.bandwidth_bytes_per_s) + 2 * LINK.latency_s
    all_s = COMPUTE_S + 1.5 * NBYTES / (ds_sync.SLOW_SHARE * LINK.bandwidth_bytes_per_s) + 6 * LINK.latency_s
    assert iteration_s(apart, slow) == pytest.approx((9 * pair_s + all_s) / 10, rel=1e-3)


@pytest.mark.parametrize("schedule", [together(16), grid((4, 4)), crossing([range(8), range(8, 16)], 1)])
def test_the_planner_expects_the_same(schedule: GroupSchedule) -> None:
    cluster = ds_sync.Cluster(16, LINK)
    assert iteration_s(schedule, CONDITIONS[0]) == pytest.approx(step_s(schedule, cluster, NBYTES, COMPUTE_S))


def test_groups_pay_on_every_size_and_more_where_something_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_sync, "SIZES", (4, 64, 1024))
    monkeypatch.setattr(ds_sync, "ROUNDS", 480)
    table = sizes_table()
    for size in (4, 64, 1024):
        speeds = [table.figure(f"{size} nodes", condition.name).value for condition in CONDITIONS]
        assert min(speeds) > 1.1 and max(speeds) > speeds[0]
        assert 0 < table.figure(f"{size} nodes", "spread").value < 1


def test_what_is_chosen_where_a_node_is_slow_beats_what_is_published() -> None:
    chosen = {
        figure.row.partition(":")[0]: figure.value for figure in chosen_table().figures if figure.column == "speed"
    }
    assert chosen["one slow node"] > PUBLISHED
    assert min(chosen.values()) > 1.3


def test_all_conditions_have_figures_beside_them() -> None:
    assert list(EXPECTED_MS) == [condition.name for condition in CONDITIONS]
