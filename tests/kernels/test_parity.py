"""The sum of row-sparse parts: the bits of its definition, for any size, dtype and number of threads."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import RowsPart, accumulation_dtype, reference
from tests.kernels.native import BASE, DTYPES, cpu, native, special_values
from tests.kernels.native import assert_same_bits as assert_same_tensor
from tests.kernels.on_device import every

SIZES = [0, 1, 63, 64, 65, 1000]
DIMS = [0, 1, 3, 16, 33]


def type_and_text(value: object) -> str:
    return f"{type(value).__name__} {getattr(value, 'layout', '')}"


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
    """Returns sum_rows's result as its docstring defines it: one addition after the other, in order."""
    dtype, dim = parts[0][1].dtype, parts[0][1].shape[1]
    total: dict[int, Tensor] = {}
    for indices, values in parts:
        for row, value in zip(indices.tolist(), values, strict=True):
            zero = torch.zeros(dim, dtype=accumulation_dtype(dtype))
            total[row] = total.get(row, zero) + value
    rows = sorted(total)
    sums = [(total[row] * scale).to(dtype) for row in rows]
    return torch.tensor(rows, dtype=torch.int64), torch.stack(sums) if sums else torch.empty(0, dim, dtype=dtype)


def assert_same_bits(got: RowsPart, expected: RowsPart) -> None:
    assert_same_tensor(got[0], expected[0])
    assert_same_tensor(got[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_reference_sum_rows_is_the_written_out_loop(dtype: torch.dtype, sort: bool) -> None:
    parts = make_parts(65, 3, dtype, sort=sort)
    assert_same_bits(reference.sum_rows(parts, 65, scale=0.3), loop_sum(parts, 0.3))


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", SIZES)
def test_native_sum_rows_equals_reference(num_rows: int, dtype: torch.dtype, module: ModuleType) -> None:
    for dim, sort in product(DIMS, (True, False)):
        parts = make_parts(num_rows, dim, dtype, sort=sort)
        expected = reference.sum_rows(parts, num_rows, scale=0.3)
        for threads in (1, 2):
            assert_same_bits(cpu.sum_rows(parts, num_rows, scale=0.3, threads=threads, module=module), expected)


@native
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dim", [1, 16, 33, 64])
def test_native_sum_rows_equals_reference_over_many_blocks(dim: int, sort: bool, module: ModuleType) -> None:
    parts = make_parts(20_011, dim, torch.float32, sort=sort)
    parts.append((torch.arange(500, 520), torch.ones(20, dim)))  # a part that ends before most blocks begin
    expected = reference.sum_rows(parts, 20_011)
    for threads in (1, 2, 3, 7):
        assert_same_bits(cpu.sum_rows(parts, 20_011, threads=threads, module=module), expected)


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


def stripes_of(dim: int, n: int) -> list[tuple[int, int]]:
    return [(owner * dim // n, (owner + 1) * dim // n) for owner in range(n)]


@native
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "n"), [(1, 1), (3, 4), (16, 4), (33, 7), (64, 8), (128, 1)])
def test_a_striped_sum_is_the_sum_cut_by_columns(
    dim: int, n: int, dtype: torch.dtype, sort: bool, module: ModuleType
) -> None:
    parts = make_parts(2000, dim, dtype, sort=sort)
    rows, expected = reference.sum_rows(parts, 2000, scale=0.3)
    stripes = stripes_of(dim, n)
    for threads in (1, 3):
        union = cpu.unite_rows([indices for indices, _ in parts], 2000, threads=threads, module=module)
        indices = torch.empty(union.count, dtype=torch.int32)
        # Every other column of stripes into its own buffer, the others into columns of a wider tensor.
        wide = torch.empty(union.count, dim + 2, dtype=dtype)
        outs = [
            wide[:, start:stop] if number % 2 else torch.empty(union.count, stop - start, dtype=dtype)
            for number, (start, stop) in enumerate(stripes)
        ]
        union.write_indices(indices)
        union.sum([values for _, values in parts], outs, stripes, scale=0.3)
        assert torch.equal(indices.long(), rows)
        for out, (start, stop) in zip(outs, stripes, strict=True):
            assert_same_tensor(out, expected[:, start:stop])


@native
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_stripes_larger_than_the_caches_are_the_sum_cut_by_columns(sort: bool, module: ModuleType) -> None:
    indices = torch.randint(400_000, (300_000,), generator=torch.Generator().manual_seed(0))
    indices = indices.sort().values if sort else indices
    values = torch.randn(len(indices), 48, generator=torch.Generator().manual_seed(1))
    rows, expected = reference.sum_rows([(indices, values)], 400_000)
    outs = [torch.empty(len(rows), 32), torch.empty(len(rows), 16), torch.empty(len(rows) * 3 + 1)[1:].view(-1, 3)]
    stripes = [(0, 32), (32, 48), (40, 43)]  # whole cache lines, and not
    cpu.unite_rows([indices], 400_000, module=module).sum([values], outs, stripes)
    for out, (start, stop) in zip(outs, stripes, strict=True):
        assert torch.equal(out, expected[:, start:stop])


@native
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
def test_values_may_be_columns_of_a_wider_tensor(sort: bool, module: ModuleType) -> None:
    parts = [(i, v[:, 2:7]) for i, v in make_parts(300, 9, torch.float32, sort=sort)]
    assert_same_bits(cpu.sum_rows(parts, 300, module=module), reference.sum_rows(parts, 300))


@native
def test_sums_go_into_views_of_one_message(module: ModuleType) -> None:
    parts = make_parts(100, 8, torch.float32, sort=False)
    rows, expected = reference.sum_rows(parts, 100)
    union = cpu.unite_rows([i for i, _ in parts], 100, module=module)
    message = torch.full((union.count * 4 + 2 * union.count * 16 + 8,), 0xAB, dtype=torch.uint8)
    views = message[:-8].split([union.count * 4, union.count * 16, union.count * 16])
    union.write_indices(views[0].view(torch.int32))
    outs = [view.view(torch.float32).view(union.count, 4) for view in views[1:]]
    union.sum([v for _, v in parts], outs, [(0, 4), (4, 8)])
    assert torch.equal(views[0].view(torch.int32).long(), rows)
    assert_same_tensor(torch.cat(outs, dim=1), expected)
    assert message[-8:].tolist() == [0xAB] * 8


@native
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_sum_rows_fills_buffers_of_the_caller(index_dtype: torch.dtype, module: ModuleType) -> None:
    parts = make_parts(100, 5, torch.bfloat16, sort=False)
    expected = reference.sum_rows(parts, 100)
    for sum_rows in (reference.sum_rows, lambda *a, **k: cpu.sum_rows(*a, module=module, **k)):
        out = torch.zeros(100, dtype=index_dtype), torch.zeros(100, 5, dtype=torch.bfloat16)
        rows, values = sum_rows(parts, 100, out=out)
        assert (rows.data_ptr(), values.data_ptr()) == (out[0].data_ptr(), out[1].data_ptr())
        assert_same_bits((rows.long(), values), expected)
        with pytest.raises(ValueError, match="room for"):
            sum_rows(parts, 100, out=(out[0][:3], out[1]))


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 11])
def test_special_values_are_summed_as_defined(width: int, dtype: torch.dtype, module: ModuleType) -> None:
    values = special_values(dtype)[:, None].expand(-1, width)
    pairs = torch.cat([values.repeat(7, 1), values.repeat_interleave(7, dim=0)])
    indices = torch.arange(49).repeat(2)
    for parts in ([(indices, pairs)], [(indices[:49], pairs[:49]), (indices[49:], pairs[49:])]):
        assert_same_bits(cpu.sum_rows(parts, 49, module=module), reference.sum_rows(parts, 49))


@native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_every_16_bit_number_is_widened_and_rounded_as_torch_does(
    offset: int, dtype: torch.dtype, module: ModuleType
) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[offset:].view(-1, 1)
    values = torch.cat([values, values.flip(0)], dim=1)  # rows of two: the scalar path beside the vectors
    for scale in (1.0, 1 / 3, 2.0**-12, 2.0**9):
        for parts in ([(torch.arange(len(values)), values)], [(torch.zeros(1).long(), values.view(1, -1))]):
            expected = reference.sum_rows(parts, len(values), scale=scale)
            assert_same_bits(cpu.sum_rows(parts, len(values), scale=scale, module=module), expected)


@native
def test_sums_larger_than_the_caches_are_the_same(module: ModuleType) -> None:
    indices = torch.randperm(300_000, generator=torch.Generator().manual_seed(0))
    values = torch.randn(300_000, 32, generator=torch.Generator().manual_seed(1))
    union = cpu.unite_rows([indices, indices[:5]], 300_000, module=module)
    message = torch.empty(300_000 * 32 + 3)[3:]  # not at a multiple of a vector
    outs = [part.view(300_000, -1) for part in message.split([300_000 * 20, 300_000 * 12])]
    union.sum([values, values[:5]], outs, [(0, 20), (20, 32)], scale=0.5)
    _, expected = reference.sum_rows([(indices, values), (indices[:5], values[:5])], 300_000, scale=0.5)
    assert_same_tensor(torch.cat(outs, dim=1), expected)


@native
def test_the_native_boundary_refuses_what_it_would_have_to_convert(module: ModuleType) -> None:
    ones = torch.ones(2, 4)
    union = module.RowUnion([torch.tensor([1, 0])], 2, 1)
    one = [(0, 4)]
    with pytest.raises(TypeError, match=r"contiguous, got int64 of shape \(2\), strides \(2\)"):
        module.RowUnion([torch.tensor([0, 1, 2])[::2]], 3, 1)
    with pytest.raises(ValueError, match=r"1-D, got int64 of shape \(1, 2\)"):
        module.RowUnion([torch.tensor([[0, 1]])], 3, 1)
    with pytest.raises(TypeError, match="int64 or int32, got float32"):
        module.RowUnion([torch.tensor([0.0])], 3, 1)
    with pytest.raises(TypeError, match="rows of adjacent elements"):
        union.sum([ones], [torch.empty(4, 2).T], one, 1.0, 1)
    with pytest.raises(TypeError, match="outs must be float32, got float64"):
        union.sum([ones], [torch.empty(2, 4, dtype=torch.float64)], one, 1.0, 1)
    with pytest.raises(TypeError, match="values must be float32, float64, bfloat16 or float16, got int64"):
        union.sum([ones.long()], [ones.long()], one, 1.0, 1)
    with pytest.raises(ValueError, match=r"outs must be of shape \(2, 4\)"):
        union.sum([ones], [torch.empty(3, 4)], one, 1.0, 1)
    with pytest.raises(ValueError, match=r"values must be of shape \(2, 4\)"):
        union.sum([ones[:1]], [torch.empty(2, 4)], one, 1.0, 1)
    with pytest.raises(ValueError, match="one values array per part"):
        union.sum([ones, ones], [torch.empty(2, 4)], one, 1.0, 1)
    with pytest.raises(ValueError, match=r"stripe \[2, 6\) is not within the 4 columns"):
        union.sum([ones], [torch.empty(2, 4)], [(2, 6)], 1.0, 1)
    with pytest.raises(ValueError, match="2 stripes and 1 arrays"):
        union.sum([ones], [torch.empty(2, 4)], [(0, 2), (2, 4)], 1.0, 1)
    with pytest.raises(ValueError, match=r"of shape \(2,\)"):
        union.write_indices(torch.empty(3, dtype=torch.int64), 1)
    odd = torch.zeros(33, dtype=torch.uint8).numpy()[1:]
    with pytest.raises(TypeError, match="multiple of the item size"):
        union.sum([odd.view("f4").reshape(2, 4)], [ones], one, 1.0, 1)
    with pytest.raises(TypeError, match="multiple of the item size"):
        module.count_bits(odd.view("i8"), 1)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        module.RowUnion([torch.tensor([1])], 2, 0)


@native
@pytest.mark.parametrize(
    "values", [None, [1.0], 1.0, "text", torch.eye(2).to_sparse(), torch.empty(2, 4, device="meta")], ids=type_and_text
)
def test_what_is_no_array_is_a_type_error_of_the_native_boundary(values: object, module: ModuleType) -> None:
    with pytest.raises(TypeError):
        module.scatter_rows(torch.tensor([0, 1]), values, torch.zeros(2, 4), True, 1)
    with pytest.raises(TypeError):
        module.NonzeroRows(values, 1)


@native
def test_memory_that_may_only_be_read_is_never_written(module: ModuleType) -> None:
    constant = torch.zeros(2, 4).numpy()
    constant.flags.writeable = False
    with pytest.raises(TypeError):
        module.scatter_rows(torch.tensor([0, 1]), torch.ones(2, 4), constant, True, 1)
    assert not constant.any()
    assert module.NonzeroRows(constant, 1).count == 0, "as an input it is fine"


@native
def test_tables_beyond_the_limits_are_refused_or_summed(module: ModuleType) -> None:
    row = torch.tensor([2**33])
    with pytest.raises(ValueError, match="more than the native kernels take"):
        cpu.unite_rows([row], 2**34 + 1, module=module)
    rows, values = kernels.sum_rows([(row, torch.ones(1, 2))], 2**34 + 1)  # auto falls back
    assert (rows.tolist(), values.tolist()) == ([2**33], [[1.0, 1.0]])
    many = torch.zeros(2**20, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"more than 2\^32 - 1 rows"):
        cpu.unite_rows([many] * 2**12, 5, module=module)


def few_parts(num_rows: int, dim: int, dtype: torch.dtype, *, sort: bool) -> list[RowsPart]:
    """Returns parts of 61 rows, near the table's ends, in clusters, repeated within and across parts; one is empty."""
    generator = torch.Generator().manual_seed(0)
    near = torch.tensor([0, 1, 63, 64, num_rows // 2, num_rows - 2, num_rows - 1])
    parts = []
    for number, length in enumerate([20, 0, 30, 11]):
        anywhere = torch.randint(num_rows, (length // 2,), generator=generator)
        indices = torch.cat([anywhere, near[torch.randint(len(near), (length - length // 2,), generator=generator)]])
        indices = indices[torch.randperm(length, generator=generator)]
        indices = indices.sort().values if sort else indices
        values = torch.randn(length, dim, generator=generator, dtype=torch.float64).to(dtype)
        narrow = number % 2 and num_rows <= 2**31
        parts.append((indices.to(torch.int32 if narrow else torch.int64), values))
    return parts


_LARGEST_BITMAP_WORDS = BASE.MIN_SORTED_WORDS + 61 * BASE.SORTED_WORDS_PER_ITEM  # beyond, items are sorted


@native
@pytest.mark.parametrize("sort", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize(("dim", "dtype"), list(zip([1, 16, 33, 16], DTYPES, strict=True)), ids=str)
@pytest.mark.parametrize(
    "num_rows", [64 * _LARGEST_BITMAP_WORDS, 64 * _LARGEST_BITMAP_WORDS + 1, 2**22, 2**22 + 1, 2**31, 2**33, 2**34]
)
def test_few_rows_of_a_large_table_are_summed_as_defined(
    num_rows: int, dim: int, dtype: torch.dtype, sort: bool, module: ModuleType
) -> None:
    parts = few_parts(num_rows, dim, dtype, sort=sort)
    rows, expected = reference.sum_rows(parts, num_rows, scale=0.3)
    stripes = stripes_of(dim, 2)
    for threads in (1, 3):
        union = cpu.unite_rows([indices for indices, _ in parts], num_rows, threads=threads, module=module)
        outs = [torch.empty(len(rows), stop - start, dtype=dtype) for start, stop in stripes]
        union.sum([values for _, values in parts], outs, stripes, scale=0.3)
        assert_same_tensor(torch.cat(outs, dim=1), expected)
        for index_dtype in [torch.int64, *([torch.int32] if num_rows <= 2**31 else [])]:
            out = torch.empty(union.count, dtype=index_dtype)
            union.write_indices(out)
            assert torch.equal(out.long(), rows)


@native
@pytest.mark.parametrize("words", [0, 1], ids=["bitmap", "sorting"])
@pytest.mark.parametrize("length", [1, 5000])
def test_both_ways_to_unite_rows_meet_at_their_threshold(length: int, words: int, module: ModuleType) -> None:
    num_rows = 64 * (module.MIN_SORTED_WORDS + length * module.SORTED_WORDS_PER_ITEM + words)
    indices = torch.randint(num_rows, (length,), generator=torch.Generator().manual_seed(0))
    indices[-1] = num_rows - 1
    parts = [(indices, torch.randn(length, 8, generator=torch.Generator().manual_seed(1)))]
    assert_same_bits(cpu.sum_rows(parts, num_rows, module=module), reference.sum_rows(parts, num_rows))
    with pytest.raises(ValueError, match=rf"index {num_rows} of part 0 is outside"):
        cpu.unite_rows([indices + 1], num_rows, module=module)


@pytest.mark.parametrize("unite", [kernels.unite_rows, cpu.unite_rows, reference.unite_rows])
def test_a_union_of_no_part_is_refused(unite) -> None:
    with pytest.raises(ValueError, match="unite_rows needs at least one part"):
        unite([], 4)
    assert unite([torch.zeros(0).long()], 4).count == 0


@native
def test_indices_up_to_2_31_fit_int32_and_no_further(module: ModuleType) -> None:
    for unite in (reference.unite_rows, lambda *a: cpu.unite_rows(*a, module=module)):
        out = torch.zeros(1, dtype=torch.int32)
        unite([torch.tensor([2**31 - 1], dtype=torch.int32)], 2**31).write_indices(out)
        assert out.tolist() == [2**31 - 1]
        with pytest.raises(ValueError, match="use int64"):
            unite([torch.tensor([0])], 2**31 + 1).write_indices(out)


@every
def test_a_sum_that_does_not_fit_the_union_is_refused(kernels) -> None:
    union = kernels.unite_rows([torch.tensor([1, 0, 1])], 2)
    ones, out = torch.ones(3, 4), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="one values array"):
        union.sum([ones, ones], [out])
    with pytest.raises(ValueError, match="values must be"):
        union.sum([ones[:2]], [out])
    with pytest.raises(ValueError, match="outs must be"):
        union.sum([ones], [ones])
    with pytest.raises(ValueError, match="not within the 4 columns"):
        union.sum([ones], [out], [(1, 5)])
    with pytest.raises(TypeError, match="outs must be"):
        union.sum([ones], [out.double()])
    with pytest.raises(TypeError, match="int64 or int32"):
        union.write_indices(torch.zeros(2))
    assert not out.any()


def test_native_says_where_tensors_of_other_devices_go() -> None:
    with pytest.raises(TypeError, match=r"on meta: use the reference"):
        cpu.unite_rows([torch.empty(3, dtype=torch.int64, device="meta")], 5)
    assert BASE.MAX_BITS == 2**34


@every
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
def test_arguments_that_do_not_fit_are_refused(kernels, parts, error, message) -> None:
    with pytest.raises(error, match=message):
        kernels.sum_rows(parts, 3)
