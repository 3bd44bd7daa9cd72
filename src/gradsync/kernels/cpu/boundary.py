"""What passes from Python to the native module and how: tensors as plain memory, and a number of threads."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch  # before the native module, so that both use torch's OpenMP runtime
from torch import Tensor
from torch.utils import dlpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_MIN_PARALLEL_ELEMENTS = 1 << 16  # starting threads costs more than they save below


@functools.cache
def load() -> ModuleType:
    """The fastest native module that this machine runs.

    Raises:
        ImportError: gradsync was installed where it could not be compiled; the message says what to do.
    """
    try:
        base = importlib.import_module("gradsync.kernels._kernels_base")
        return importlib.import_module("gradsync.kernels._kernels_avx2") if base.has_avx2() else base
    except ImportError as error:
        raise ImportError(
            f"the native kernels are not built ({error}): install a C++17 compiler and the Python headers, "
            "then install gradsync again"
        ) from error


def supports(tensors: Iterable[Tensor], entries: int = 0) -> bool:
    """Whether the native module knows the dtypes and device, and takes tables of so many rows or elements."""
    return all(t.dtype in DTYPES and _is_plain(t) for t in tensors) and entries <= load().MAX_BITS


def _is_plain(tensor: Tensor) -> bool:
    """Whether memory holds its elements as they are: not on a device, not sparse, not negated by a mere mark."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_neg()


def threads_for(requested: int | None, elements: int) -> int:
    """What the caller asked for, else what the work is worth."""
    if requested is not None:
        return requested
    return 1 if elements < _MIN_PARALLEL_ELEMENTS else torch.get_num_threads()


def plain(name: str, tensor: Tensor) -> object:
    """The tensor's memory, without autograd, for one call; the C++ side checks dtype, shape and strides.

    As a DLPack capsule, which nanobind would else ask the tensor for in Python: 2 of the 2.5 us that an array costs.
    """
    if not _is_plain(tensor):
        negated = ", a negative view" if tensor.is_neg() else ""
        raise TypeError(
            f"the native kernels take dense tensors on the CPU, got {name} {tensor.dtype} {tensor.layout} on "
            f"{tensor.device}{negated}: use the reference implementation"
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(f"the native kernels do not know the dtype of {name}, got {tensor.dtype}: use the reference")
    return dlpack.to_dlpack(tensor.detach())  # type: ignore[attr-defined]  # documented, but not in its __all__


def plains(name: str, tensors: Sequence[Tensor]) -> list[object]:
    return [plain(name, tensor) for tensor in tensors]


class OwnerPartition:
    """Items dealt to owners, however: see `gradsync.kernels.RotatedPartition` and `HashedPartition`."""

    def __init__(self, dealt: Any, places: str) -> None:
        self._dealt, self._places = dealt, places  # what errors call the places of the items
        self.counts: list[int] = dealt.counts

    def write(self, values: Tensor, places: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self._dealt.write(plain("values", values), plains(self._places, places), plains("outs", outs))
