"""Loads the Triton kernels for CUDA at their first use. PyTorch for CUDA brings Triton."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gradsync.devices.inventory import accelerators
from gradsync.kernels.native import DTYPES


@functools.cache
def load() -> ModuleType:
    """Imports and returns the package of Triton kernels.

    Raises:
        ImportError: if there is no Triton; the message says what to do.
    """
    try:
        return importlib.import_module("gradsync.kernels.triton")
    except ImportError as error:
        raise ImportError(
            f"the kernels for CUDA cannot be loaded ({error}): install torch for CUDA, which brings Triton"
        ) from error


@functools.cache
def is_present() -> bool:
    """Whether this machine has an accelerator; else Triton's kernels run in its interpreter, on the CPU."""
    return bool(accelerators())


def supports(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors, in any shapes, are on CUDA in dtypes and layouts of the Triton kernels; False for none."""
    for t in tensors:
        if not (t.is_cuda and t.dtype in DTYPES and t.layout is torch.strided and not t.is_neg()):
            return False
    return len(tensors) > 0
