"""The native modules that this machine runs, for tests that each of them must pass."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

BASE = importlib.import_module("gradsync.kernels._kernels_base")
MODULES = [BASE, *([importlib.import_module("gradsync.kernels._kernels_avx2")] if BASE.has_avx2() else [])]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

native = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition("_")[2])


def special_values(dtype: torch.dtype) -> Tensor:
    """Zeros of both signs, then NaN, infinities, the smallest subnormal and the largest number."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.tensor(
        [0.0, -0.0, float("nan"), float("inf"), -float("inf"), tiny, torch.finfo(dtype).max], dtype=dtype
    )


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal in dtype, shape and every bit; of a NaN, only that it is one."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.is_floating_point():
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = (
            got.nan_to_num(0, float("inf"), -float("inf")),
            expected.nan_to_num(0, float("inf"), -float("inf")),
        )
    got, expected = got.contiguous().flatten(), expected.contiguous().flatten()
    assert got.numel() == 0 or torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
