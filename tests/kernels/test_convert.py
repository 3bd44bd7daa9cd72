"""Values in a narrower type: rounded as torch rounds, finite ones stay finite; the same bits everywhere."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradsync.kernels import cpu, reference
from tests.kernels.native import assert_same_bits, native, special_values
from tests.kernels.on_device import TRITON, every, needs_triton


def numbers(dtype: torch.dtype, size: int) -> Tensor:
    """Of all magnitudes, and some that are special."""
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


@needs_triton
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
