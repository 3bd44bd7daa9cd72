"""Codes of few bits: their values, and native bits that equal the definition's for any number of threads."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.kernels import FloatGrid, Grid, Sections, accumulation_dtype, codes_nbytes, num_scales, reference
from gradsync.kernels.reference.draws import noise
from tests.compressors.family import gradient
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native
from tests.kernels.on_device import every

SECTIONS = Sections((0, 1, 700, 33, 0, 2, 20_000), (0, 5, 2**32 - 300, 0, 0, 7, 3), (1, 2, 2**63 + 3, 4, 5, 6, 7))
GRIDS = [
    Grid(127, 8, 256),
    Grid(127, 8, 256, stochastic=True),
    Grid(100, 8, 0, "norm"),
    Grid(100, 8, 700, "norm", stochastic=True),
    Grid(7, 4, 101),
    Grid(1, 2, 0, stochastic=True),
    Grid(3, 4, 0, "given"),
    FloatGrid("e4m3", 256),
    FloatGrid("e5m2"),
    FloatGrid("exponent"),
]


def encoded(kernels: Any, x: Tensor, sections: Sections, grid: Any, residual: Tensor | None = None, **options: Any):
    """Returns codes and scales, the residual, scales alone, and a sum of three; memory behind the codes stays."""
    codes = torch.full((codes_nbytes(sections, grid) + 9,), 77, dtype=torch.uint8)
    scales, left = torch.full((num_scales(sections, grid),), 2.0), torch.zeros_like(reference_sum(x))
    kernels.quantize(x, sections, grid, codes[:-9], scales, residual=residual, next_residual=left, **options)
    assert (codes[-9:] == 77).all()
    alone, codes = scales.clone(), codes[:-9]
    if grid.scale in ("max", "norm"):
        kernels.block_scales(x, sections, grid, alone.zero_(), residual=residual, **options)
    out = torch.full((len(x) + 9,), 77, dtype=x.dtype)
    parts = [(codes, scales), (codes.flip(0), scales), (codes, scales)]
    kernels.dequantize(parts, sections, grid, out[:-9], scale=0.3, **options)
    assert (out[-9:] == 77).all()
    return codes, scales, left, alone, out


def reference_sum(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


@native
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_native_codes_and_sums_have_the_bits_of_the_definition(grid: Any, module: ModuleType) -> None:
    for number, dtype in enumerate(DTYPES):
        x = gradient(sum(SECTIONS.lengths), torch.float64, number).pow_(3).to(dtype)
        x[5000:5700], x[300:330] = 0.0, 1e-40
        if number in (0, 3):  # which leaves sections that are one block without codes
            x[100], x[-1000] = float("nan"), float("inf")
        residual = None if number % 2 else reference_sum(gradient(len(x), dtype, 9))
        expected = encoded(reference, x, SECTIONS, grid, residual)
        got = encoded(cpu, x, SECTIONS, grid, residual, module=module, threads=1 + number)
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bits(mine, theirs)


@native
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("given", [2.0, 0.0, math.inf])
def test_codes_of_floats_of_which_nothing_is_kept_have_the_bits_of_the_definition(
    grid: Any, given: float, module: ModuleType
) -> None:
    """Values without a residual are read in place: zeros of both signs, NaN and infinity; also with given scales."""
    x = gradient(sum(SECTIONS.lengths), torch.float64, 4).pow_(3).float()
    x[5000:5700], x[6000:6100:7], x[6001:6100:7] = 0.0, -0.0, 1e-40
    x[7000], x[7040], x[7081] = float("nan"), float("inf"), float("-inf")
    made = []
    for kernels, options in ((reference, {}), (cpu, {"module": module, "threads": 1})):
        codes = torch.zeros(codes_nbytes(SECTIONS, grid), dtype=torch.uint8)
        scales = torch.full((num_scales(SECTIONS, grid),), given)
        kernels.quantize(x, SECTIONS, grid, codes, scales, **options)
        made.append((codes, scales))
    for mine, theirs in zip(*made, strict=True):
        assert_same_bits(mine, theirs)


@native
@pytest.mark.parametrize("scale", ["max", "norm"])
def test_scales_of_blocks_that_no_cache_holds_are_the_same_on_many_threads(scale: str, module: ModuleType) -> None:
    x, sections = gradient(100_003, torch.float32), Sections((40_000, 60_003))
    for grid in (Grid(127, 8, 0, scale), Grid(127, 8, 33_000, scale), Grid(7, 4, 0, scale)):
        expected = encoded(reference, x, sections, grid)
        for threads in (1, 3):
            for mine, theirs in zip(
                encoded(cpu, x, sections, grid, module=module, threads=threads), expected, strict=True
            ):
                assert_same_bits(mine, theirs)


@native
@pytest.mark.parametrize("grid", [Grid(127, 8, 256), Grid(7, 4, 0)], ids=str)
def test_large_outputs_past_the_caches_are_the_same(grid: Any, module: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, numel in ((torch.float32, 32 << 18), (torch.bfloat16, 32 << 19)):
        sections = Sections((3, numel))
        codes = torch.randint(256, (codes_nbytes(sections, grid),), generator=generator).byte()
        part = codes, torch.rand(num_scales(sections, grid), generator=generator)
        outs = [torch.zeros(numel + 3, dtype=dtype) for _ in range(2)]
        reference.dequantize([part], sections, grid, outs[0], scale=0.3)
        cpu.dequantize([part], sections, grid, outs[1], scale=0.3, module=module, threads=2)
        assert_same_bits(outs[1], outs[0])


def test_the_layout_is_as_it_says() -> None:
    x, sections = torch.tensor([1.0, -1.0, 0.5, 0.0, 1.0, 4.0]), Sections((5, 1))
    for grid, expected in (
        (Grid(2, 8), [2, 254, 1, 0, 2, 2]),
        (Grid(2, 4), [2 + 2 | 2 << 4, -2 + 2 | 4 << 4, 1 + 2, 4]),  # h = 3: elements 0 and 3, 1 and 4, 2
        (Grid(1, 2), [2 | 1 << 2 | 2 << 4, 0 | 1 << 2, 2]),  # h = 2: elements 0, 2 and 4, 1 and 3; 0.5 is a tie
    ):
        codes = torch.zeros(codes_nbytes(sections, grid), dtype=torch.uint8)
        scales = torch.zeros(num_scales(sections, grid))
        reference.quantize(x, sections, grid, codes, scales)
        assert (codes.tolist(), scales.tolist()) == (expected, [1.0, 4.0])


def test_small_floats_and_powers_of_two_are_those_of_their_codes() -> None:
    every_code, one = torch.arange(256).to(torch.uint8), Sections((256,), (), (1,))
    for grid, dtype in ((FloatGrid("e4m3"), torch.float8_e4m3fn), (FloatGrid("e5m2"), torch.float8_e5m2)):
        out = torch.zeros(256)
        cpu.dequantize([(every_code, torch.tensor([grid.top]))], one, grid, out)
        assert_same_bits(out, 0.0 + every_code.view(dtype).float())
        codes = torch.zeros(256, dtype=torch.uint8)
        cpu.quantize(out.nan_to_num(0, 0, 0), one, grid, codes, torch.zeros(1))
        sent = out.isfinite() & (out != 0)
        assert torch.equal(codes[sent], every_code[sent])


@every
def test_what_does_not_fit_is_refused(kernels: Any) -> None:
    x, sections, grid = torch.ones(5), Sections((3, 2)), Grid(7, 4, stochastic=True)
    codes, scales, seeded = torch.zeros(3).byte(), torch.zeros(2), Sections((3, 2), (), (1, 2))
    with pytest.raises(ValueError, match="must have one for each section"):
        kernels.quantize(x, sections, grid, codes, scales)
    with pytest.raises(ValueError, match="codes must be of shape"):
        kernels.quantize(x, seeded, grid, codes[:2], scales)
    with pytest.raises(ValueError, match="scales must be of shape"):
        kernels.quantize(x, seeded, grid, codes, scales[:1])
    with pytest.raises(ValueError, match="x must be of shape"):
        kernels.quantize(x[:4], seeded, grid, codes, scales)
    with pytest.raises(TypeError, match="residual must be"):
        kernels.quantize(x, seeded, grid, codes, scales, residual=x.double())
    with pytest.raises(ValueError, match="block_scales needs a grid with scales of its own"):
        kernels.block_scales(x, seeded, Grid(7, scale="given"), scales)
    with pytest.raises(TypeError, match="codes must be"):
        kernels.dequantize([(codes.int(), scales)], sections, grid, x)
    with pytest.raises(ValueError, match="out must be of shape"):
        kernels.dequantize([(codes, scales)], sections, grid, x[:4])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(8, 4), r"Grid.levels must be in \[1, 7\] for 4 bits, got 8"),
        (lambda: Grid(1, 3), "Grid.bits must be 8, 4 or 2, got 3"),
        (lambda: Grid(1, block=-1), r"Grid.block must be in \[0, 2\^62\), got -1"),
        (lambda: Grid(1, scale="mean"), "Grid.scale must be one of max, norm, given, got 'mean'"),
        (lambda: FloatGrid("e3m4"), "FloatGrid.format must be one of e4m3, e5m2, exponent, got 'e3m4'"),
    ],
)
def test_grids_that_are_none_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@every
def test_powers_of_two_of_what_float32_does_not_hold_are_finite(kernels: Any) -> None:
    x = torch.tensor([1e300, -1e39, 1e-300, float("inf"), float("nan")], dtype=torch.float64)
    sections, grid = Sections((len(x),), seeds=(1,)), FloatGrid("exponent")
    codes, none, out = torch.zeros(len(x), dtype=torch.uint8), torch.zeros(0), torch.zeros_like(x)
    kernels.quantize(x, sections, grid, codes, none)
    kernels.dequantize([(codes, none)], sections, grid, out)
    assert out[:3].tolist() == [2.0**16, -(2.0**16), 0.0] and out[3:].isnan().all()


def test_noise_is_uniform_and_that_of_no_other_place_or_seed() -> None:
    count, start = 1 << 16, 2**32 - (1 << 15)
    drawn = [noise(seed, start, count) for seed in (1, 2, 1 + 2**32)]
    assert torch.equal(drawn[0][1 << 15 :], noise(1, 2**32, 1 << 15))
    upper = [(noise >> 8).double() * 2**-24 for noise in drawn]
    upper += [upper[0].roll(shift) for shift in (1, 2, 1 << 15)]  # the last: places whose lower halves are alike
    bound = 5 / math.sqrt(12 * count)
    for number, uniform in enumerate(upper):
        assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < bound
        for other in upper[number + 1 :]:
            correlation = ((uniform - 0.5) * (other - 0.5)).mean() * 12
            assert abs(correlation) < 5 / math.sqrt(count)
            apart = (uniform - other) % 1  # of keys that were only added, a constant
            assert abs(apart.mean() - 0.5) < bound
            counts = torch.histc(apart, 64, 0, 1)
            assert (counts - count / 64).square().sum() / (count / 64) < 63 + 5 * math.sqrt(2 * 63)
