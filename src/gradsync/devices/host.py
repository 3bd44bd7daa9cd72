"""Copies between an accelerator and the host: of numbers that the host knows, and for computations offloaded to it.

On the CPU there is nothing to copy: each function returns the tensor that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import streams


def is_apart(device: torch.device) -> bool:
    """Whether tensors on this device must be copied to the host before kernels for the CPU can read them."""
    return device.type != "cpu"


def numbers(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies numbers of the host to the device and returns them, shape (len(values),); the host does not wait.

    The copy is submitted to this thread's current stream. `dtype`: None for that of `torch.tensor`.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)  # pageable: staged before this returns


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns copies on the host of tensors on one device, contiguous ones of any shapes and dtypes.

    They are copied after what this thread's current stream was given so far, and the thread waits for them. Tensors on
    the CPU are returned as they are.
    """
    if not tensors or not is_apart(tensors[0].device):
        return list(tensors)
    found = []
    for tensor in tensors:
        arriving = _pinned(tensor)
        arriving.copy_(tensor, non_blocking=True)
        found.append(arriving)
    streams.settle(tensors[0].device)
    return found


def room_for(out: Tensor) -> Tensor:
    """Returns memory of the host with the shape and dtype of `out`, for a result that `send` then copies to `out`.

    It is pinned; where `out` is on the CPU, it is `out` itself.
    """
    return _pinned(out) if is_apart(out.device) else out


def send(result: Tensor, out: Tensor) -> None:
    """Copies a tensor of the host to `out`, of the same shape and dtype, on this thread's current stream.

    The host does not wait if `result` is memory that `room_for` returned.
    """
    if result is not out:
        out.copy_(result, non_blocking=True)


def sent(made: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on the device of a 1-D tensor of the host, without waiting for the device.

    It is copied to pinned memory first; a tensor for the CPU is returned as it is.
    """
    if not is_apart(device):
        return made
    staged, out = _pinned(made), torch.empty(made.shape, dtype=made.dtype, device=device)
    staged.copy_(made)
    send(staged, out)
    return out


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
