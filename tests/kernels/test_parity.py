"""Every implementation of a kernel gives the bits of its definition, for any size, dtype and number of threads."""

from __future__ import annotations

import importlib
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync.kernels import RowsPart, cpu, reference

BASE = importlib.import_module("gradsync.kernels._kernels_base")
MODULES = [BASE, *([importlib.import_module("gradsync.kernels._kernels_avx2")] if BASE.has_avx2() else [])]
SIZES = [0, 1, 63, 64, 65, 1000]
DIMS = [0, 1, 3, 16, 33]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]

native = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition("_")[2])


def make_parts(num_rows: int, dim: int, dtype: torch.dtype, *, sort: bool, seed: int = 0) -> list[RowsPart]:
    """Parts of different lengths and index dtypes: with duplicates, with the first and last row, and an empty one."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number, length in enumerate([num_rows // 2, 0, 2 * num_rows, min(num_rows, 3)]):
        indices = torch.randint(num_rows, (length,), generator=generator) if length else torch.empty(0).long()
        indices[:2] = torch.tensor([num_rows - 1, 0])[:length]
        indices = indices.sort().values if sort else indices
        values = torch.randn(length, dim, generator=generator, dtype=torch.float64).to(dtype)
        parts.append((indices.to(torch.int32 if number % 2 else torch.int64), values))
    return parts


def loop_sum(parts: list[RowsPart], scale: float) -> RowsPart:
    """The promise of sum_rows word for word: one addition after the other, in the order of parts and occurrence."""
    dtype, dim = parts[0][1].dtype, parts[0][1].shape[1]
    total: dict[int, Tensor] = {}
    for indices, values in parts:
        for row, value in zip(indices.tolist(), values, strict=True):
            zero = torch.zeros(dim, dtype=reference.accumulation_dtype(dtype))
            total[row] = total.get(row, zero) + value
    rows = sorted(total)
    sums = [(total[row] * scale).to(dtype) for row in rows]
    return torch.tensor(rows, dtype=torch.int64), torch.stack(sums) if sums else torch.empty(0, dim, dtype=dtype)


def assert_same_bits(got: RowsPart, expected: RowsPart) -> None:
    assert torch.equal(got[0], expected[0])
    assert (got[0].dtype, got[1].dtype, got[1].shape) == (torch.int64, expected[1].dtype, expected[1].shape)
    assert torch.equal(got[1].view(torch.uint8), expected[1].view(torch.uint8)) or got[1].numel() == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_reference_sum_rows_is_the_written_out_loop(dtype: torch.dtype, sort: bool) -> None:
    parts = make_parts(65, 3, dtype, sort=sort)
    assert_same_bits(reference.sum_rows(parts, 65, scale=0.3), loop_sum(parts, 0.3))


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("num_rows", SIZES)
def test_native_sum_rows_equals_reference(
    num_rows: int, dim: int, dtype: torch.dtype, sort: bool, threads: int, module: ModuleType
) -> None:
    parts = make_parts(num_rows, dim, dtype, sort=sort)
    got = cpu.sum_rows(parts, num_rows, scale=0.3, threads=threads, module=module)
    assert_same_bits(got, reference.sum_rows(parts, num_rows, scale=0.3))


@native
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("dim", [1, 16, 64])
def test_native_sum_rows_equals_reference_over_many_blocks(dim: int, threads: int, module: ModuleType) -> None:
    parts = make_parts(20_011, dim, torch.float32, sort=True)
    parts.append((torch.arange(500, 520), torch.ones(20, dim)))  # a part that ends before most blocks begin
    got = cpu.sum_rows(parts, 20_011, threads=threads, module=module)
    assert_same_bits(got, reference.sum_rows(parts, 20_011))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[RowsPart], int]:
    num_rows = draw(st.sampled_from([1, 2, 63, 64, 65, 128, 300]))
    dim = draw(st.sampled_from([1, 2, 17]))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        indices = torch.tensor(draw(st.lists(st.integers(0, num_rows - 1), max_size=40)), dtype=torch.int64)
        indices = indices.sort().values if draw(st.booleans()) else indices
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
        parts.append((indices, torch.randn(len(indices), dim, generator=generator)))
    return parts, num_rows


@native
@settings(max_examples=60, deadline=None)
@given(case=cases(), threads=st.integers(1, 3), scale=st.sampled_from([1.0, 0.5, 1 / 3]))
def test_native_sum_rows_equals_reference_on_random_parts(
    module: ModuleType, case: tuple[list[RowsPart], int], threads: int, scale: float
) -> None:
    parts, num_rows = case
    got = cpu.sum_rows(parts, num_rows, scale=scale, threads=threads, module=module)
    assert_same_bits(got, reference.sum_rows(parts, num_rows, scale=scale))


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_travel(dtype: torch.dtype, module: ModuleType) -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([[nan, inf, 1.0], [1.0, 1.0, -inf], [2.0, -inf, 2.0]], dtype=dtype)
    parts = [(torch.tensor([5, 5, 5]), values)]
    _, got = cpu.sum_rows(parts, 6, module=module)
    assert torch.equal(got.isnan(), torch.tensor([[True, True, False]]))
    assert got[0, 2] == -inf


@native
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", [-1, 5, 70])
def test_an_index_out_of_range_is_named(bad: int, index_dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    parts = [
        (torch.tensor([4, 0]), torch.ones(2, 3)),
        (torch.tensor([1, bad, 99, -7], dtype=index_dtype), torch.ones(4, 3)),
    ]
    message = f"sum_rows: index {bad} of part 1 is outside \\[0, num_rows=5\\)"
    with pytest.raises(ValueError, match=message):
        cpu.sum_rows(parts, 5, threads=threads, module=module)
    with pytest.raises(ValueError, match=message):
        reference.sum_rows(parts, 5)


@native
def test_tensors_that_are_not_contiguous_give_the_same_sum(module: ModuleType) -> None:
    indices, values = (
        torch.tensor([3, 9, 1, 9, 3])[::2],
        torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).T,
    )
    parts = [(indices, values)]
    assert not indices.is_contiguous() and not values.is_contiguous()
    assert_same_bits(cpu.sum_rows(parts, 4, module=module), reference.sum_rows(parts, 4))


@native
def test_the_native_boundary_refuses_what_it_would_have_to_convert(module: ModuleType) -> None:
    union = module.unite([torch.tensor([1, 0])], 2, 1)
    ones = torch.ones(2, 4)
    with pytest.raises(TypeError):
        module.unite([torch.tensor([0, 1, 2])[::2]], 3, 1)
    with pytest.raises(TypeError):
        module.unite([torch.tensor([0.0])], 3, 1)
    with pytest.raises(TypeError):
        union.sum([ones], 1.0, torch.empty(4, 2).T, 1)
    with pytest.raises(TypeError):
        union.sum([ones], 1.0, torch.empty(2, 4, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="rows of the union"):
        union.sum([ones], 1.0, torch.empty(3, 4), 1)
    with pytest.raises(ValueError, match="its number of indices"):
        union.sum([ones[:1]], 1.0, torch.empty(2, 4), 1)
    with pytest.raises(ValueError, match="one entry per row"):
        union.write_indices(torch.empty(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="threads"):
        module.unite([torch.tensor([1])], 2, 0)


@pytest.mark.parametrize("sum_rows", [cpu.sum_rows, reference.sum_rows], ids=["native", "reference"])
@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "at least one part"),
        ([(torch.zeros(2), torch.ones(2, 1))], TypeError, "int64 or int32, got torch.float32"),
        ([(torch.zeros(2).long(), torch.ones(2, 1).int())], TypeError, "floating"),
        ([(torch.zeros(2).long(), torch.ones(3, 1))], ValueError, "part 0 must be indices"),
        ([(torch.zeros(2).long(), torch.ones(2))], ValueError, "part 0 must be indices"),
        (
            [(torch.zeros(1).long(), torch.ones(1, 1)), (torch.zeros(1).long(), torch.ones(1, 2))],
            ValueError,
            "part 1 must be indices",
        ),
        (
            [(torch.zeros(1).long(), torch.ones(1, 1)), (torch.zeros(1).long(), torch.ones(1, 1).double())],
            TypeError,
            "values of part 1 must be torch.float32",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(sum_rows, parts, error, message) -> None:
    with pytest.raises(error, match=message):
        sum_rows(parts, 3)
