"""Density as Zen defines it: measured exactly, and estimated between measurements."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import (
    DensityProfile,
    ParameterProfile,
    ZeroSample,
    denser,
    joined,
    profile_rows,
    profile_sample,
)

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


def test_values_that_cancelled_out_over_all_ranks_need_not_do_so_over_fewer() -> None:
    profile = DensityProfile(1000, 100.0, {5: 0.0})
    assert profile.union_rows(5) == 0.0
    assert profile.union_rows(2) == profile.union_rows(3) == 100.0


def test_the_nearest_measurement_counts_and_the_table_bounds_the_union() -> None:
    profile = DensityProfile(350, 100.0, {2: 1.5, 16: 4.0})
    assert profile.union_rows(7) == pytest.approx(100 * 7**0.5)  # as at 16, nearer than 2 by the factor
    assert profile.union_rows(3) == pytest.approx(100 * 3 ** (torch.tensor(1.5).log2().item()))
    assert profile.union_rows(64) == 350


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_equal_and_disjoint_rows_are_the_limits(ratio: float) -> None:
    profile = DensityProfile(10_000, 100.0, {2: ratio})
    assert profile.union_rows(8) == pytest.approx(100 * ratio**3)


def test_a_joined_profile_counts_all_tensors() -> None:
    whole = joined([DensityProfile(100, 10.0, {2: 1.5}), DensityProfile(300, 30.0, {2: 1.1, 4: 1.2})])
    assert (whole.num_rows, whole.rows) == (400, 40.0)
    assert whole.union_rows(2) == pytest.approx(15 + 33)
    assert whole.union_rows(4) == pytest.approx(10 * 1.5**2 + 36)


def seen(gradients: list[torch.Tensor]) -> tuple[DensityProfile | None, DensityProfile | None]:
    samples = [ZeroSample.of(gradient) for gradient in gradients]
    rows, elements = torch.stack([s.rows for s in samples]), torch.stack([s.elements for s in samples])
    counts = torch.tensor([[s.num_rows, s.num_elements] for s in samples])
    spec = TensorSpec.of(gradients[0])
    return profile_sample(rows, counts[:, 0], spec.num_rows), profile_sample(elements, counts[:, 1], spec.numel)


def test_rows_that_no_sample_meets_are_counted() -> None:
    gradients = [torch.zeros(1_000_000, 2) for _ in range(2)]
    for rank, gradient in enumerate(gradients):
        gradient[torch.arange(7) * 100 + rank + 1] = 1.0
    gradients[1][999_999] = 1.0
    rows, elements = seen(gradients)
    assert rows is not None and elements is not None
    assert (rows.rows, rows.most_rows, elements.rows) == (7.5, 8, 15)
    assert rows.union_rows(2) == pytest.approx(15, rel=0.01)  # nothing is known of the overlap: it is taken as chance


def test_a_sample_tells_how_many_rows_and_elements_are_not_zero_and_how_they_overlap() -> None:
    gradients = [torch.zeros(200_000, 4) for _ in range(2)]
    gradients[0][: 200_000 // 20] = 1.0
    gradients[1][200_000 // 40 : 200_000 // 40 * 3, :2] = 1.0  # as many rows, half of them the same, half as dense
    rows, elements = seen(gradients)
    assert rows is not None and elements is not None
    assert rows.density == pytest.approx(0.05, rel=0.15)
    assert rows.union_rows(2) / rows.rows == pytest.approx(1.5, rel=0.1)
    assert elements.density == pytest.approx(0.0375, rel=0.2)


def test_a_small_tensor_is_sampled_whole() -> None:
    gradient = torch.zeros(300, 7)
    gradient[5], gradient[7, 3], gradient[9, 0] = 1.0, float("nan"), -0.0
    rows, elements = seen([gradient, gradient])
    assert rows is not None and elements is not None
    assert (rows.rows, rows.union_rows(2), elements.rows) == (2, 2, 8)


def test_full_strided_and_zero_gradients_are_not_found_to_be_sparse() -> None:
    spec = TensorSpec((300, 7), torch.float32)
    for gradient in (torch.ones(300, 7), torch.zeros(7, 300).t()):
        rows, elements = seen([gradient])
        assert rows is not None and elements is not None
        assert not ParameterProfile("p", spec, sparse=False, density=rows, elements=elements).found
    assert seen([torch.zeros(300, 7)]) == (None, None)


def test_of_two_looks_the_denser_one_counts() -> None:
    thin, full = DensityProfile(100, 1.0), DensityProfile(100, 100.0)
    assert denser(thin, full) is full
    assert denser(full, thin) is full
    assert denser(None, thin) is thin
    assert denser(thin, None) is thin
    assert denser(None, None) is None


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
