"""Kernels on whole rows: joined, scattered, and found in a dense table; native gives the bits of the definition."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync import kernels as automatic
from gradsync.kernels import reference
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every


def random_rows(rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def stripes_of(dim: int, n: int) -> list[tuple[int, int]]:
    return [(owner * dim // n, (owner + 1) * dim // n) for owner in range(n)]


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_joined_columns_are_the_rows_that_were_cut(dtype: torch.dtype, module: ModuleType) -> None:
    for rows in (0, 1, 700):
        for dim, n in ((0, 2), (1, 3), (16, 1), (16, 4), (33, 7), (64, 8), (300, 2)):
            assert_joined_columns_are_the_rows_that_were_cut(rows, dim, n, dtype, module)


def assert_joined_columns_are_the_rows_that_were_cut(
    rows: int, dim: int, n: int, dtype: torch.dtype, module: ModuleType
) -> None:
    whole = random_rows(rows, dim, dtype)
    stripes = stripes_of(dim, n)
    parts = [whole[:, a:b] if number % 2 else whole[:, a:b].contiguous() for number, (a, b) in enumerate(stripes)]
    for threads in (1, 3):
        out = torch.empty_like(whole)
        cpu.join_columns(parts, stripes, out, threads=threads, module=module)
        assert_same_bits(out, whole)
    out = torch.empty_like(whole)
    reference.join_columns(parts, stripes, out)
    assert_same_bits(out, whole)


@native
@pytest.mark.parametrize(("dim", "n"), [(30, 4), (32, 2)])
def test_rows_larger_than_the_caches_are_joined_at_any_address(dim: int, n: int, module: ModuleType) -> None:
    whole = random_rows(300_000, dim)
    stripes = stripes_of(dim, n)
    for offset, threads in ((0, 1), (3, 2), (3, 1), (0, 2)):
        out = torch.empty(300_000 * dim + offset)[offset:].view(300_000, dim)
        cpu.join_columns([whole[:, a:b] for a, b in stripes], stripes, out, threads=threads, module=module)
        assert torch.equal(out, whole)


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_rows_are_scattered_into_a_table_larger_than_the_caches(
    sort: bool, offset: int, threads: int, module: ModuleType
) -> None:
    indices = torch.randint(600_000, (50_000,), generator=torch.Generator().manual_seed(0))
    indices = indices.sort().values if sort else indices  # some occur twice
    values = random_rows(50_000, 16)
    got, expected = (torch.zeros(600_000 * 16 + offset)[offset:].view(-1, 16) for _ in range(2))
    cpu.scatter_rows(indices, values, got, accumulate=False, threads=threads, module=module)
    reference.scatter_rows(indices, values, expected, accumulate=False)
    assert torch.equal(got, expected)


@native
def test_columns_of_no_stripe_stay(module: ModuleType) -> None:
    for join in (reference.join_columns, lambda *a: cpu.join_columns(*a, module=module)):
        out = torch.zeros(3, 8)
        join([torch.ones(3, 2)], [(5, 7)], out[:, :7])
        assert out.tolist() == [[0, 0, 0, 0, 0, 1, 1, 0]] * 3


@native
@pytest.mark.parametrize(
    "stripes", [[(0, 8), (0, 8)], [(8, 16), (0, 8)], [(0, 12), (6, 10)], [(0, 16), (4, 4)]], ids=str
)
def test_stripes_of_rows_larger_than_the_caches_may_overlap_or_come_in_any_order(
    stripes: list[tuple[int, int]], module: ModuleType
) -> None:
    rows = 2**19 + 5  # of 64 bytes
    parts = [random_rows(rows, stop - start, seed=start + stop) for start, stop in stripes]
    expected, got = torch.full((rows, 16), 7.0), torch.full((rows, 16), 7.0)
    reference.join_columns(parts, stripes, expected)
    cpu.join_columns(parts, stripes, got, module=module)
    assert torch.equal(got, expected)


@every
def test_columns_that_do_not_fit_are_refused(kernels) -> None:
    out = torch.zeros(3, 4)
    for parts, stripes, error, message in [
        ([torch.ones(3, 2)], [(3, 5)], ValueError, "not within the 4 columns"),
        ([torch.ones(2, 2)], [(0, 2)], ValueError, "parts must be"),
        ([torch.ones(3, 2)], [], ValueError, "0 stripes and 1 arrays"),
        ([torch.ones(3, 2).double()], [(0, 2)], TypeError, "parts must be"),
    ]:
        with pytest.raises(error, match=message):
            kernels.join_columns(parts, stripes, out)
    with pytest.raises(TypeError, match="out must be float"):
        kernels.join_columns([out.int()], [(0, 4)], out.int())
    assert not out.any()


@native
@settings(max_examples=60, deadline=None)
@given(data=st.data(), threads=st.integers(1, 4), accumulate=st.booleans(), sort=st.booleans())
def test_scattered_rows_equal_one_assignment_after_the_other(
    module: ModuleType, data: st.DataObject, threads: int, accumulate: bool, sort: bool
) -> None:
    dim, dtype = data.draw(st.sampled_from([1, 3, 16, 33])), data.draw(st.sampled_from(DTYPES))
    listed = data.draw(st.lists(st.integers(0, 19), max_size=60))
    indices = torch.tensor(
        sorted(listed) if sort else listed, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))
    )
    values = random_rows(len(indices), 2 * dim, dtype)[:, :dim]
    dense = random_rows(20, dim, dtype, seed=1)
    expected, defined, got = dense.clone(), dense.clone(), torch.cat([dense, dense], dim=1)
    for row, value in zip(indices.tolist(), values, strict=True):
        expected[row] = expected[row] + value if accumulate else value
    reference.scatter_rows(indices, values, defined, accumulate=accumulate)
    cpu.scatter_rows(indices, values, got[:, :dim], accumulate=accumulate, threads=threads, module=module)
    assert_same_bits(defined, expected)
    assert_same_bits(got[:, :dim], expected)
    assert_same_bits(got[:, dim:], dense)


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_scattered_as_defined(dtype: torch.dtype, module: ModuleType) -> None:
    values = special_values(dtype)[:, None].expand(-1, 9).contiguous()
    for accumulate in (False, True):
        for special in special_values(dtype):
            expected, got = (torch.full((7, 9), special.item(), dtype=dtype) for _ in range(2))
            reference.scatter_rows(torch.arange(7), values, expected, accumulate=accumulate)
            cpu.scatter_rows(torch.arange(7), values, got, accumulate=accumulate, module=module)
            assert_same_bits(got, expected)


@every
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1])
def test_a_bad_row_is_named_before_anything_is_written(bad: int, accumulate: bool, kernels) -> None:
    dense = torch.zeros(5, 2)
    indices = torch.tensor([0, bad], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"scatter_rows: index {bad} of part 0 is outside \[0, num_rows=5\)"):
        kernels.scatter_rows(indices, torch.ones(2, 2), dense, accumulate=accumulate)
    assert not dense.any()


@every
def test_rows_that_do_not_fit_the_table_are_refused(kernels) -> None:
    dense, indices = torch.zeros(5, 2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="values must be"):
        kernels.scatter_rows(indices, torch.ones(2, 3), dense, accumulate=True)
    with pytest.raises(TypeError, match="values must be"):
        kernels.scatter_rows(indices, torch.ones(2, 2).half(), dense, accumulate=False)
    with pytest.raises(TypeError, match="int64 or int32"):
        kernels.scatter_rows(indices.float(), torch.ones(2, 2), dense, accumulate=False)
    assert not dense.any()


@native
@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_are_scattered_beyond_element_2_31(accumulate: bool, module: ModuleType, tmp_path: Path) -> None:
    """Only the written rows of the table, which lies in a file with holes, take memory."""
    num_rows, dim = 2**29 + 5, 4
    dense = torch.from_file(str(tmp_path / "table"), shared=True, size=num_rows * dim).view(num_rows, dim)
    indices = torch.tensor([num_rows - 1, 0, 2**29, num_rows - 1])
    values = random_rows(4, dim)
    cpu.scatter_rows(indices, values, dense, accumulate=accumulate, module=module)
    last = values[0] + values[3] if accumulate else values[3]
    assert torch.equal(dense[indices], torch.stack([last, values[1], values[2], last]))
    with pytest.raises(ValueError, match=rf"index {num_rows} of part 0 is outside"):
        cpu.scatter_rows(indices + 1, values, dense, accumulate=accumulate, module=module)


def sparse_table(rows: int, dim: int, dtype: torch.dtype, every: int) -> Tensor:
    """Returns a table whose every `every`-th row has one special value; other rows are zeros of both signs."""
    table = torch.zeros(rows, dim, dtype=dtype)
    table[:, ::2] = -0.0
    if dim:
        specials = special_values(dtype)
        for number, row in enumerate(range(0, rows, every)):
            table[row, number % dim] = specials[number % len(specials)]
    return table


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nonzero_rows_equal_the_definition(dtype: torch.dtype, module: ModuleType) -> None:
    for rows, apart in ((0, 1), (1, 1), (63, 1), (64, 2), (65, 64), (1000, 3)):
        for dim in (0, 1, 7, 32, 33, 100):
            assert_nonzero_rows_equal_the_definition(rows, apart, dim, dtype, module)


def assert_nonzero_rows_equal_the_definition(
    rows: int, every: int, dim: int, dtype: torch.dtype, module: ModuleType
) -> None:
    wide = torch.cat([sparse_table(rows, dim, dtype, every), torch.ones(rows, 3, dtype=dtype)], dim=1)
    expected = [row for row, values in enumerate(wide[:, :dim].tolist()) if any(x != 0 for x in values)]  # NaN != 0
    for dense in (wide[:, :dim], wide[:, :dim].contiguous()):
        defined = reference.nonzero_rows(dense)
        one, three = (cpu.nonzero_rows(dense, threads=threads, module=module) for threads in (1, 3))
        stripes = stripes_of(dim, 3)
        for rows_found, index_dtype in ((defined, torch.int64), (one, torch.int32), (three, torch.int64)):
            assert rows_found.count == len(expected)
            indices = torch.empty(len(expected), dtype=index_dtype)
            whole = torch.empty(len(expected), dim, dtype=dtype)
            parts = [torch.empty(len(expected), stop - start, dtype=dtype) for start, stop in stripes]
            rows_found.write_indices(indices)
            rows_found.gather([whole])
            rows_found.gather(parts, stripes)
            assert indices.tolist() == expected
            assert_same_bits(whole, dense[expected])
            assert_same_bits(torch.cat(parts, dim=1), dense[expected])


@every
def test_what_is_no_table_has_no_nonzero_rows(kernels) -> None:
    with pytest.raises(ValueError, match="2-D"):
        kernels.nonzero_rows(torch.ones(3))
    with pytest.raises(TypeError, match="must be float"):
        kernels.nonzero_rows(torch.ones(3, 2).long())
    found = kernels.nonzero_rows(torch.ones(3, 2))
    with pytest.raises(ValueError, match="outs must be"):
        found.gather([torch.ones(2, 2)])
    with pytest.raises(TypeError, match="outs must be"):
        found.gather([torch.ones(3, 2).double()])
    with pytest.raises(ValueError, match="out must be"):
        found.write_indices(torch.zeros(2).long())


@native
def test_rows_with_gaps_between_elements_are_refused_not_copied(module: ModuleType) -> None:
    apart, fine = torch.zeros(4, 6)[:, ::2], torch.zeros(4, 3)
    for call in (
        lambda: cpu.nonzero_rows(apart, module=module),
        lambda: cpu.join_columns([apart], [(0, 3)], fine, module=module),
        lambda: cpu.join_columns([fine], [(0, 3)], apart, module=module),
        lambda: cpu.scatter_rows(torch.arange(4), apart, fine, accumulate=False, module=module),
        lambda: cpu.scatter_rows(torch.arange(4), fine, apart, accumulate=True, module=module),
        lambda: cpu.unite_rows([torch.arange(4)], 4, module=module).sum([apart], [fine]),
        lambda: cpu.unite_rows([torch.arange(4)], 4, module=module).sum([fine], [apart]),
        lambda: cpu.nonzero_rows(fine + 1, module=module).gather([apart]),
        lambda: cpu.nonzero_rows(torch.zeros(3, 4).T, module=module),
    ):
        with pytest.raises(TypeError, match=r"rows of adjacent elements.*, got float32 of shape \(4, 3\), strides"):
            call()
    assert not apart.any() and not fine.any()


@native
def test_rows_that_share_memory_are_read_but_not_written(module: ModuleType) -> None:
    same, fine = torch.zeros(1, 3).expand(4, 3), torch.zeros(4, 3)
    cpu.scatter_rows(torch.arange(4), torch.ones(1, 3).expand(4, 3), fine, accumulate=True, module=module)
    assert (fine == 1).all()
    for call in (
        lambda: cpu.scatter_rows(torch.arange(4), fine, same, accumulate=True, module=module),
        lambda: cpu.join_columns([fine], [(0, 3)], same, module=module),
        lambda: cpu.nonzero_rows(fine, module=module).gather([same]),
        lambda: cpu.unite_rows([torch.arange(4)], 4, module=module).sum([fine], [same]),
        lambda: cpu.join_columns([fine], [(0, 3)], torch.zeros(6).as_strided((4, 3), (1, 1)), module=module),
    ):
        with pytest.raises(TypeError, match="rows of adjacent elements, one after the other"):
            call()
    assert not same.any()


@native
def test_what_is_negative_by_a_mark_only_is_refused_and_left_to_the_reference(module: ModuleType) -> None:
    marked, dense = torch.view_as_complex(torch.ones(3, 1, 2)).conj().imag, torch.zeros(3, 1)
    assert marked.is_neg() and marked.tolist() == [[-1.0]] * 3
    with pytest.raises(TypeError, match="a negative view: use the reference"):
        cpu.scatter_rows(torch.arange(3), marked, dense, accumulate=True, module=module)
    automatic.scatter_rows(torch.arange(3), marked, dense, accumulate=True)
    assert dense.tolist() == [[-1.0]] * 3
