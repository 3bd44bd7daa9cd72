"""Loading of the Triton kernels for CUDA at first use. Torch for CUDA brings Triton."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from gradsync.kernels.native import DTYPES


@functools.cache
def load() -> ModuleType:
    """Returns the package of Triton kernels.

    Raises:
        ImportError: if there is no Triton; the message says what to do.
    """
    try:
        return importlib.import_module("gradsync.kernels.triton")
    except ImportError as error:
        raise ImportError(
            f"the kernels for CUDA cannot be loaded ({error}): install torch for CUDA, which brings Triton"
        ) from error


def supports(tensors: Sequence[Tensor]) -> bool:
    """Whether there are tensors, in any shapes, all on CUDA, in dtypes and layouts that the Triton kernels take."""
    for t in tensors:
        if not (t.is_cuda and t.dtype in DTYPES and t.layout is torch.strided and not t.is_neg()):
            return False
    return len(tensors) > 0
