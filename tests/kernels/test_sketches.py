"""Count sketches: their promises, and that every implementation gives the definition's bits."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync import kernels
from gradsync.kernels import Sections, accumulation_dtype, reference
from gradsync.kernels.draws import sketch_keys
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import every

LENGTHS = (0, 1, 700, 33, 0, 2, 11_011, 5000)  # tensors that share a bucket
PLACES = (0, 5, 2**32 - 90, 7, 0, 2**40, 31, 0)  # of their first elements: across a 32-bit word too
SEEDS = (1, 2, 2**63 + 5, 2**64 - 1, 0, 6, 7, 8)
COLUMNS = (0, 1, 64, 7, 3, 2, 272, 1024)  # of 1 to 32 lanes
SECTIONS = Sections(LENGTHS, PLACES, SEEDS)


def sketched(
    kernels: Any, x: Tensor, sections: Sections, columns: tuple[int, ...], rows: int, **options: Any
) -> Tensor:
    """Returns the counters, made in memory filled with 77; nothing is written behind them."""
    count = rows * sum(columns)
    counters = torch.full((count + 9,), 77, dtype=accumulation_dtype(x.dtype))
    kernels.count_sketch(x, sections, columns, counters[:count], rows=rows, **options)
    assert (counters[count:] == 77).all()
    return counters[:count]


def estimated(
    kernels: Any,
    counters: Tensor,
    sections: Sections,
    columns: tuple[int, ...],
    rows: int,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    numel = sum(sections.lengths)
    out = torch.full((numel + 9,), 77, dtype=dtype or counters.dtype)
    kernels.sketch_estimates(counters, sections, columns, out[:numel], rows=rows, **options)
    assert (out[numel:] == 77).all()
    return out[:numel]


def numbers(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)


def seeded(number: int, length: int) -> Sections:
    return Sections((length,), (0,), (number * 0xD1342543DE82EF95 % 2**64,))


@pytest.mark.parametrize(("columns", "lanes"), [(7, 1), (24, 4), (32, 4), (64, 8), (1024, 32)])
def test_any_two_elements_share_a_counter_as_often_and_with_independent_signs(columns: int, lanes: int) -> None:
    """Neighbours, and elements one or more groups apart, collide within 5 standard deviations over 4000 seeds."""
    seeds, length = 4000, 200
    hits, signs = torch.zeros(length), torch.zeros(length)
    spike = torch.zeros(length)
    spike[37] = 1.0
    for number in range(seeds):
        counters = sketched(cpu, spike, seeded(number, length), (columns,), 1)
        found = estimated(cpu, counters, seeded(number, length), (columns,), 1)
        hits += found.abs()
        signs += found
    near = torch.arange(length) // lanes == 37 // lanes
    assert hits[37] == signs[37] == seeds
    near[37] = False
    assert (hits[near] == 0).all()
    near[37] = True
    expected = seeds / columns
    assert float((hits[~near] - expected).abs().max()) < 5 * math.sqrt(expected)
    assert float(signs[~near].abs().max()) < 5 * math.sqrt(expected)


def test_rows_are_independent() -> None:
    """Elements that share a counter in one row share one in another as often as any."""
    length, columns, seeds, both = 64, 8, 4000, 0.0
    spike = torch.zeros(length)
    spike[3] = 1.0
    for number in range(seeds):
        sections = seeded(number, length)
        rows = sketched(cpu, spike, sections, (columns,), 2).split(columns)
        first, second = (
            estimated(cpu, row, Sections((length,), (0,), (sketch_keys(sections.seeds[0], r)[0],)), (columns,), 1)
            for r, row in enumerate(rows)
        )
        both += float((first * second)[columns:].abs().sum())
    expected = seeds * (length - columns) / columns**2
    assert abs(both - expected) < 5 * math.sqrt(expected)


def test_counters_are_linear() -> None:
    x, y = numbers(sum(LENGTHS), torch.float64), numbers(sum(LENGTHS) + 1, torch.float64)[1:]
    of_sum = sketched(reference, x + y, SECTIONS, COLUMNS, 3)
    sum_of = sketched(reference, x, SECTIONS, COLUMNS, 3) + sketched(reference, y, SECTIONS, COLUMNS, 3)
    torch.testing.assert_close(of_sum, sum_of, rtol=0, atol=1e-11)


def test_what_is_large_is_found_among_much_that_is_small() -> None:
    x = 0.01 * numbers(50_000)
    large = torch.randperm(50_000, generator=torch.Generator().manual_seed(1))[:50]
    x[large] = 10.0
    estimates = estimated(
        reference, sketched(reference, x, seeded(1, 50_000), (1024,), 7), seeded(1, 50_000), (1024,), 7
    )
    torch.testing.assert_close(estimates[large], x[large], rtol=0.05, atol=0)


def test_a_nan_reaches_what_shares_a_counter_with_it() -> None:
    x = torch.zeros(4096)
    x[7] = float("nan")
    found = estimated(reference, sketched(reference, x, seeded(2, 4096), (512,), 3), seeded(2, 4096), (512,), 3)
    assert found[7].isnan()
    assert 0 < int(found.isnan().sum()) < 100
    assert (found[~found.isnan()] == 0).all()


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 3, 6, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_sketches_equal_the_definition(dtype: torch.dtype, rows: int, threads: int, module: ModuleType) -> None:
    x = numbers(sum(LENGTHS), dtype)
    x[-9:-2] = special_values(dtype)
    counters = sketched(cpu, x, SECTIONS, COLUMNS, rows, threads=threads, module=module)
    assert_same_bits(counters, sketched(reference, x, SECTIONS, COLUMNS, rows))
    if rows % 2 == 1:
        got = estimated(cpu, counters, SECTIONS, COLUMNS, rows, dtype, threads=threads, module=module)
        assert_same_bits(got, estimated(reference, counters, SECTIONS, COLUMNS, rows, dtype))


@every
def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    two, x, counters = Sections((2, 3), (), (1, 2)), torch.zeros(5), torch.zeros(9)
    columns = (1, 2)
    for call in (
        lambda *given, rows: kernels.count_sketch(x, *given, counters, rows=rows),
        lambda *given, rows: kernels.sketch_estimates(counters, *given, x, rows=rows),
    ):
        with pytest.raises(ValueError, match="rows must be positive, got 0"):
            call(two, columns, rows=0)
        with pytest.raises(ValueError, match="needs a seed for each of 2 sections, got none"):
            call(Sections((2, 3)), columns, rows=3)
        with pytest.raises(ValueError, match="columns must be one for each of 2 sections, got 1"):
            call(two, (3,), rows=3)
        with pytest.raises(ValueError, match=r"columns must be in \[1, 2\^31\) for 3 elements, got 0"):
            call(two, (3, 0), rows=3)
        with pytest.raises(ValueError, match="counters must be of shape"):
            call(two, columns, rows=5)
    with pytest.raises(ValueError, match="rows must be odd, for a median, got 2"):
        kernels.sketch_estimates(counters[:6], two, columns, x, rows=2)
    with pytest.raises(ValueError, match="x must be"):
        kernels.count_sketch(x[:4], two, columns, counters, rows=3)
    with pytest.raises(ValueError, match="out must be"):
        kernels.sketch_estimates(counters, two, columns, x[:4], rows=3)
    with pytest.raises(TypeError, match="counters must be"):
        kernels.count_sketch(x.double(), two, columns, counters, rows=3)
    with pytest.raises(TypeError, match="x must be"):
        kernels.count_sketch(x.int(), two, columns, counters, rows=3)
    with pytest.raises(TypeError, match="counters must be"):
        kernels.sketch_estimates(counters.half(), two, columns, x.half(), rows=3)


def test_every_implementation_can_be_chosen() -> None:
    sections, x, found = Sections((50,), (), (1,)), numbers(50), []
    for implementation in ("reference", "native", "auto"):
        with kernels.use(implementation):
            counters, out = torch.zeros(24), torch.zeros(50)
            kernels.count_sketch(x, sections, (8,), counters, rows=3)
            kernels.sketch_estimates(counters, sections, (8,), out, rows=3)
            found.append((counters.tolist(), out.tolist()))
    assert found[0] == found[1] == found[2]
