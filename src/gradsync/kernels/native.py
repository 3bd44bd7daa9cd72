"""Loads the C++ module with the native kernels at its first use.

The module is built twice from one source (csrc/), for any CPU and for AVX2; `load` chooses by this machine's CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

import torch  # before the native module, so that both use torch's OpenMP runtime
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


@functools.cache
def load() -> ModuleType:
    """Imports and returns the fastest build of the C++ kernels that this machine's CPU can run.

    Raises:
        ImportError: if gradsync was installed where it could not be compiled; the message says what to do.
    """
    try:
        base = importlib.import_module("gradsync.kernels._kernels_base")
        return importlib.import_module("gradsync.kernels._kernels_avx2") if base.has_avx2() else base
    except ImportError as error:
        raise missing(error) from error


def is_installed() -> bool:
    """Whether gradsync was installed with native kernels, which this function does not load."""
    return importlib.util.find_spec("gradsync.kernels._kernels_base") is not None


def missing(why: object) -> ImportError:
    """Returns the error for native kernels that cannot be loaded, which says what to do."""
    return ImportError(
        f"the native kernels are not built ({why}): install a C++17 compiler and the Python headers, then build "
        "gradsync here, in its folder: pip install --no-cache-dir --force-reinstall --no-deps ."
    )


def supports(tensors: Iterable[Tensor], entries: int = 0) -> bool:
    """Whether the C++ kernels take tensors of these dtypes, devices and layouts, in any shapes, and `entries` rows."""
    for tensor in tensors:  # not all(...): the generator would cost as much as what it does, at every call
        if tensor.dtype not in DTYPES or not is_plain(tensor):
            return False
    most: int = load().MAX_BITS
    return entries <= most


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor of any shape and dtype is on the CPU, dense, and not a lazily negated view (`Tensor.is_neg`)."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()
