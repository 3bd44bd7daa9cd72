"""Values in another type and their sums: rounded as torch rounds, the same bits everywhere."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradsync.kernels import reference
from tests.kernels.native import DTYPES, assert_same_bits, cpu, native, special_values
from tests.kernels.on_device import TRITON, every


def numbers(dtype: torch.dtype, size: int) -> Tensor:
    """Returns numbers of all magnitudes, and special values."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-45, 38, (size,), generator=generator).double()
    values = (torch.randn(size, generator=generator, dtype=torch.float64) * 10**exponents).to(dtype)
    return torch.cat([special_values(dtype), values])


def narrowed(kernels, x: Tensor, dtype: torch.dtype, scale: float, **options) -> Tensor:
    whole = torch.full((len(x) + 9,), 77, dtype=dtype)
    kernels.narrow(x, whole[:-9], scale=scale, **options)
    assert (whole[-9:] == 77).all()
    return whole[:-9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_rounding_is_torchs_but_finite_values_stay_finite(wide: torch.dtype, dtype: torch.dtype) -> None:
    x, most = numbers(wide, 1000), torch.finfo(dtype).max
    got = narrowed(reference, x, dtype, 1.0)
    plain = x.to(dtype)
    beyond = x.isfinite() & (x.abs() > most)
    assert beyond.any()
    assert torch.equal(got[beyond].double(), most * x[beyond].double().sign())
    assert_same_bits(got[~beyond], plain[~beyond])


@native
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_native_narrow_equals_the_definition(dtype: torch.dtype, threads: int, module: ModuleType) -> None:
    for wide in (torch.float32, torch.float64):
        for size in (0, 1, 15, 1030, 5000):
            x = numbers(wide, size)[len(special_values(wide)) if size < 2 else 0 :]
            for scale in (1.0, 1 / 3):
                expected = narrowed(reference, x, dtype, scale)
                assert_same_bits(narrowed(cpu, x, dtype, scale, threads=threads, module=module), expected)


@native
def test_large_outputs_past_the_caches_are_the_same(module: ModuleType) -> None:
    x = torch.randn((32 << 20) // 2 + 77, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        for threads in (1, 3):
            got = narrowed(cpu, x[1:], dtype, 0.3, threads=threads, module=module)
            assert_same_bits(got, narrowed(reference, x[1:], dtype, 0.3))


@pytest.mark.interpreted
def test_narrow_on_the_device_equals_the_definition() -> None:
    for wide, dtype in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float16),
    ):
        x = numbers(wide, 1030)
        assert_same_bits(narrowed(TRITON, x, dtype, 1 / 3), narrowed(reference, x, dtype, 1 / 3))


@every
def test_what_is_not_to_be_narrowed_is_refused(kernels) -> None:
    x, out = torch.ones(3), torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="x must be float"):
        kernels.narrow(out, out)
    with pytest.raises(TypeError, match="out must be bfloat16 or float16, got"):
        kernels.narrow(x, x)
    with pytest.raises(ValueError, match=r"out must be of shape \(3,\)"):
        kernels.narrow(x, out[:2])


def summands(dtype: torch.dtype, count: int, size: int) -> list[Tensor]:
    """Returns tensors whose magnitudes and special values meet in the sum, unaligned to vectors."""
    x = numbers(dtype, size + count)
    return [x.roll(n * n)[n : n + size] for n in range(count)]


def summed(kernels, parts: list[Tensor], like: Tensor, dtype: torch.dtype, scale: float, **options) -> Tensor:
    whole = torch.full((len(like) + 9,), 77, dtype=dtype)
    kernels.sum_parts(parts, whole[1:-8], scale=scale, **options)
    assert (whole[:1] == 77).all() and (whole[-8:] == 77).all()
    return whole[1:-8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_a_sum_is_torchs_one_part_after_the_other(given: torch.dtype, dtype: torch.dtype) -> None:
    wide = torch.float64 if torch.float64 in (given, dtype) else torch.float32
    for count in (1, 2, 9):
        parts = summands(given, count, 1000)
        for scale in (1.0, 1 / 3):
            total = parts[0].to(wide)
            for part in parts[1:]:
                total = total + part.to(wide)
            got = summed(reference, parts, parts[0], dtype, scale)
            assert_same_bits(got, (total * scale).to(dtype))
            assert count == 1 or (got.isnan().any() and got.isinf().any())


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_part_comes_back_as_it_was_and_no_part_is_zero(dtype: torch.dtype, kernels) -> None:
    x = numbers(dtype, 30)
    assert_same_bits(summed(kernels, [x], x, dtype, 1.0), x)
    wide = summed(kernels, [x], x, torch.float64, 1.0)
    assert_same_bits(wide, x.double())
    assert_same_bits(summed(kernels, [wide], x, dtype, 1.0), x)
    assert_same_bits(summed(kernels, [], x, dtype, -1.0), torch.zeros(len(x), dtype=dtype))


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_may_overwrite_one_of_its_parts(dtype: torch.dtype, kernels) -> None:
    for place in range(3):
        parts = summands(dtype, 3, 1100)
        expected = summed(reference, parts, parts[0], dtype, 0.3)
        kernels.sum_parts(parts, parts[place], scale=0.3)
        assert_same_bits(parts[place], expected)


@native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", DTYPES, ids=str)
def test_native_sums_equal_the_definition(given: torch.dtype, dtype: torch.dtype, module: ModuleType) -> None:
    for count, size in ((0, 5), (1, 0), (1, 1), (2, 15), (3, 1030), (8, 5000), (17, 2100)):
        parts = summands(given, count, size)
        like = parts[0] if parts else torch.zeros(size)
        for scale in (1.0, 1 / 3):
            expected = summed(reference, parts, like, dtype, scale)
            for threads in (1, 3):
                got = summed(cpu, parts, like, dtype, scale, threads=threads, module=module)
                assert_same_bits(got, expected)


@native
def test_large_sums_past_the_caches_are_the_same(module: ModuleType) -> None:
    x = torch.randn((32 << 20) // 2 + 77, generator=torch.Generator().manual_seed(0))
    for given, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float32, torch.half)):
        parts = [x.to(given)[1:], x.to(given).flip(0)[:-1]]
        expected = summed(reference, parts, parts[0], dtype, 0.3)
        for threads in (1, 3):
            assert_same_bits(summed(cpu, parts, parts[0], dtype, 0.3, threads=threads, module=module), expected)
    cpu.sum_parts(parts, parts[0], scale=0.3, threads=2, module=module)
    assert_same_bits(parts[0].half(), expected)


@pytest.mark.interpreted
def test_many_parts_on_the_device_equal_the_definition() -> None:
    parts = summands(torch.bfloat16, 9, 1030)
    assert_same_bits(*(summed(version, parts, parts[0], torch.float32, 1 / 9) for version in (TRITON, reference)))


@every
def test_what_is_not_to_be_summed_is_refused(kernels) -> None:
    x, half, out = torch.ones(3), torch.ones(3, dtype=torch.float16), torch.zeros(3)
    with pytest.raises(TypeError, match="out must be float"):
        kernels.sum_parts([x], out.int())
    with pytest.raises(TypeError, match="parts must be float"):
        kernels.sum_parts([x.int()], out)
    with pytest.raises(TypeError, match=r"parts must be (torch\.)?float32, got (torch\.)?float16"):
        kernels.sum_parts([x, half], out)
    with pytest.raises(ValueError, match=r"parts must be of shape \(3,\), got .*\(2,?\)"):
        kernels.sum_parts([x, x[:2]], out)
    with pytest.raises(ValueError, match="out must be 1-D"):
        kernels.sum_parts([x], out[None])
    assert not out.any()
