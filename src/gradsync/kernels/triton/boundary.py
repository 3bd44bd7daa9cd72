"""Helpers that call Triton kernels with torch tensors: the launch, checks of memory, tables of addresses.

A kernel that works on any number of tensors gets a table of their addresses. Triton cannot check the memory behind an
address, so device and strides are checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import Stripes, describe

BLOCK = 1024  # entries that one program works on
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize
_POINTEES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def launch(kernel: Any, programs: int, device: torch.device, *arguments: object, **constants: object) -> None:
    """Launches a Triton kernel on `device` as `programs` programs, none if 0, without fused multiply-add."""
    if programs == 0:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # the CPU's is Triton's interpreter
        kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def blocks(entries: int, block: int = BLOCK) -> int:
    """Returns the number of programs, each of which handles `block` entries, that `entries` entries need."""
    return -(-entries // block)


def tile(width: int) -> dict[str, int]:
    """Returns the ROWS and COLUMNS that one program handles of a table of this width: powers of two, product 1024."""
    columns = min(128, 1 << max(width - 1, 0).bit_length())
    return {"ROWS": BLOCK // columns, "COLUMNS": columns}


def common_device(tensors: Sequence[Tensor]) -> torch.device:
    """Returns the device of the tensors, which have any shapes and dtypes.

    Raises:
        ValueError: if they are on different devices.
        TypeError: for a sparse tensor, or a lazily negated view.
    """
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"all tensors must be on {device}, got {describe(tensor)}")
        if tensor.layout is not torch.strided or tensor.is_neg():
            kind = "a negative view" if tensor.layout is torch.strided else str(tensor.layout)
            raise TypeError(f"the Triton kernels take dense tensors, got {kind}: use the reference implementation")
    return device


def device_of(**given: Tensor | Sequence[Tensor] | None) -> torch.device:
    """Returns the common device of all given tensors, of any shapes and dtypes; keywords name them in some errors.

    Raises:
        ValueError: if they are on different devices.
        TypeError: for a sparse tensor, a lazily negated view, or one that is not contiguous.
    """
    tensors = {name: [value] if isinstance(value, Tensor) else value or () for name, value in given.items()}
    device = common_device([tensor for several in tensors.values() for tensor in several])
    for name, several in tensors.items():
        check_contiguous(name, *several)
    return device


def check_contiguous(name: str, *tensors: Tensor) -> None:
    """Raises TypeError unless the tensors, of any shapes and dtypes, are contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise TypeError(f"{name} must be contiguous, got {describe(tensor)}, strides {tensor.stride()}")


def check_rows(name: str, *tensors: Tensor, written: bool = False) -> None:
    """Raises TypeError unless each row of the 2-D tensors has adjacent elements and, if `written`, its own memory."""
    for tensor in tensors:
        rows, columns = tensor.shape
        apart = columns > 1 and rows > 0 and tensor.stride(1) != 1
        if apart or (written and rows > 1 and columns > 0 and tensor.stride(0) < columns):
            raise TypeError(
                f"{name} must be rows of adjacent elements, one after the other, got {describe(tensor)}, strides "
                f"{tensor.stride()}"
            )


def bits_of(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor's memory, of any shape and dtype, as integers of the same size."""
    return tensor.detach().view(_BITS[tensor.element_size()])


def pointee(tensor: Tensor) -> tl.dtype:
    """Returns Triton's integer dtype with the element size of a tensor, of any shape, for pointers to its memory."""
    return _POINTEES[tensor.element_size()]


def on(device: torch.device, numbers: Sequence[int] | Tensor) -> Tensor:
    """Returns numbers on the device, without waiting for it: a tensor of any shape, or a list as (numbers,) int64."""
    table = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int64)
    return table.to(device, non_blocking=True)


def default_device() -> torch.device:
    """Returns the current CUDA device; without CUDA the CPU, where Triton's interpreter runs."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def column_table(tensors: Sequence[Tensor], stripes: Stripes) -> Tensor:
    """Returns a table of all columns of the tensors, (3, width) int64: number in the whole matrix, address, row stride.

    `tensors`: (rows, stop - start) each, the columns [start, stop) of its stripe.
    """
    parts = [torch.empty(3, 0, dtype=torch.int64)]
    for tensor, (start, stop) in zip(tensors, stripes, strict=True):
        columns = torch.arange(start, stop)
        begins = tensor.data_ptr() + (columns - start) * tensor.element_size()
        parts.append(torch.stack([columns, begins, torch.full_like(columns, tensor.stride(0))]))
    return torch.cat(parts, dim=1)
