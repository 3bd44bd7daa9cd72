"""Helpers for calls of the native C++ kernels: tensors as DLPack capsules, and the number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import dlpack

from gradsync.kernels.native import DTYPES, is_plain

_MIN_PARALLEL_ELEMENTS = 1 << 16  # starting threads costs more than they save below


def threads_for(elements: int) -> int:
    """Returns the number of threads for a kernel on so many elements: torch's number, or 1 for fewer than 65536."""
    return 1 if elements < _MIN_PARALLEL_ELEMENTS else torch.get_num_threads()


def plain(name: str, tensor: Tensor) -> object:
    """Returns a tensor of any shape as a DLPack capsule for one native call; C++ checks dtype, shape and strides.

    Otherwise nanobind (the C++ binding) would ask the tensor for a capsule in Python: 2 of the 2.5 us that an array
    costs.

    Raises:
        TypeError: for a tensor that is not dense on the CPU, or has a dtype that the native kernels do not know.
    """
    if not is_plain(tensor):
        negated = ", a negative view" if tensor.is_neg() else ""
        raise TypeError(
            f"the native kernels take dense tensors on the CPU, got {name} {tensor.dtype} {tensor.layout} on "
            f"{tensor.device}{negated}: use the reference implementation"
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(f"the native kernels do not know the dtype of {name}, got {tensor.dtype}: use the reference")
    known = tensor.detach() if tensor.requires_grad else tensor  # a capsule refuses what autograd follows
    return dlpack.to_dlpack(known)  # type: ignore[attr-defined]  # documented, but not in its __all__


def plain_or_none(name: str, tensor: Tensor | None) -> object:
    return None if tensor is None else plain(name, tensor)


def plains(name: str, tensors: Sequence[Tensor]) -> list[object]:
    return [plain(name, tensor) for tensor in tensors]


class OwnerPartition:
    """Sorted indices split by owner (the rank that sums them): a native `RotatedPartition` or `HashedPartition`."""

    def __init__(self, dealt: Any, places: str) -> None:
        self._dealt, self._places = dealt, places  # what errors call the places of the items
        self.counts: list[int] = dealt.counts

    def write(self, values: Tensor, places: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        self._dealt.write(plain("values", values), plains(self._places, places), plains("outs", outs))
