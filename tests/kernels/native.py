"""The native modules that this machine runs, for tests that each of them must pass."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.kernels import cpu as plain_cpu

BASE = importlib.import_module("gradsync.kernels._kernels_base")
MODULES = [BASE, *([importlib.import_module("gradsync.kernels._kernels_avx2")] if BASE.has_avx2() else [])]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

native = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition("_")[2])


def special_values(dtype: torch.dtype) -> Tensor:
    """Returns zeros of both signs, NaN, infinities, the smallest subnormal and the largest number."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return torch.tensor(
        [0.0, -0.0, float("nan"), float("inf"), -float("inf"), tiny, torch.finfo(dtype).max], dtype=dtype
    )


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Asserts the same dtype, shape and bits; a NaN may have any bits."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.is_floating_point():
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = (
            got.nan_to_num(0, float("inf"), -float("inf")),
            expected.nan_to_num(0, float("inf"), -float("inf")),
        )
    got, expected = got.contiguous().flatten(), expected.contiguous().flatten()
    assert got.numel() == 0 or torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


class Native:
    """A stand-in for `gradsync.kernels.cpu` whose kernels also take `module` and `threads`."""

    def __getattr__(self, name: str) -> Any:
        return partial(run_as, getattr(plain_cpu, name))


class ReturnedNative:
    """A wrapper of a kernel object with two phases, which writes with the module and threads that made it."""

    def __init__(self, target: Any, options: dict[str, Any]) -> None:
        self._target, self._options = target, options

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        return partial(run_as, found, **self._options) if callable(found) else found


def run_as(
    function: Callable[..., Any],
    *arguments: Any,
    module: ModuleType | None = None,
    threads: int | None = None,
    **options: Any,
) -> Any:
    """Calls a function of `gradsync.kernels.cpu` with this native module and number of threads."""
    home = sys.modules[function.__module__]
    forced = {"load": module and (lambda: module), "threads_for": threads and (lambda elements: threads)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in forced.items():
            if value is not None and hasattr(home, name):
                patch.setattr(home, name, value)
        found = function(*arguments, **options)
    made_here = type(found).__module__.startswith("gradsync.kernels.cpu")
    return ReturnedNative(found, {"module": module, "threads": threads}) if made_here else found


cpu = Native()
