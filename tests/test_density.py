"""Density in Zen's terms: measured exactly, and what is believed between the measurements."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.density import DensityProfile, profile_rows

NUM_ROWS = 30


@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=20), min_size=1, max_size=9))
@settings(deadline=None)
def test_profiles_count_what_sets_count(lists: list[list[int]]) -> None:
    profile = profile_rows([torch.tensor(rows, dtype=torch.int64) for rows in lists], NUM_ROWS)
    mean = sum(len(set(rows)) for rows in lists) / len(lists)
    assert profile.rows == pytest.approx(mean)
    assert profile.density == pytest.approx(mean / NUM_ROWS)
    assert profile.union_rows(1) == profile.rows
    for k in {2, 4, 8, len(lists)}:
        if 1 < k <= len(lists):
            assert profile.union_rows(k) == pytest.approx(len(set().union(*lists[:k])))


def test_a_table_without_rows_and_ranks_without_tables_have_density_zero() -> None:
    assert profile_rows([torch.empty(0).long()], 0).density == 0.0
    assert profile_rows([], 10).rows == 0.0
    assert profile_rows([torch.empty(0).long()] * 4, 10).union_rows(4) == 0.0


def test_unmeasured_unions_are_those_of_independent_uniform_ranks() -> None:
    profile = DensityProfile(100, 10.0)
    assert profile.union_rows(2) == pytest.approx(100 * (1 - 0.9**2))
    assert profile.union_rows(1000) == pytest.approx(100)


def test_unions_between_measurements_follow_a_power_of_the_ranks() -> None:
    profile = DensityProfile(1000, 100.0, {4: 2.0})  # 2 = 4 ** 0.5
    assert profile.union_rows(4) == 200
    assert profile.union_rows(2) == pytest.approx(100 * 2**0.5)
    assert profile.union_rows(9) == pytest.approx(300)


def test_the_nearest_measurement_counts_and_the_table_bounds_the_union() -> None:
    profile = DensityProfile(350, 100.0, {2: 1.5, 16: 4.0})
    assert profile.union_rows(7) == pytest.approx(100 * 7**0.5)  # as at 16, nearer than 2 by the factor
    assert profile.union_rows(3) == pytest.approx(100 * 3 ** (torch.tensor(1.5).log2().item()))
    assert profile.union_rows(64) == 350


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_equal_and_disjoint_rows_are_the_limits(ratio: float) -> None:
    profile = DensityProfile(10_000, 100.0, {2: ratio})
    assert profile.union_rows(8) == pytest.approx(100 * ratio**3)


@pytest.mark.parametrize(
    ("rows", "pattern", "expected"),
    [(5.0, "a", True), (5.0, "", True), (5.0, "b", False), (6.0, "a", False), (6.0, "", False)],
)
def test_tables_may_have_the_same_rows_unless_something_known_speaks_against_it(
    rows: float, pattern: str, expected: bool
) -> None:
    known, other = DensityProfile(10, 5.0, pattern="a"), DensityProfile(10, rows, pattern=pattern)
    assert known.may_have_rows_of(other) is other.may_have_rows_of(known) is expected


def test_tables_without_rows_have_the_same_rows_whatever_their_patterns() -> None:
    assert DensityProfile(10, 0.0, pattern="a").may_have_rows_of(DensityProfile(10, 0.0, pattern="b"))
