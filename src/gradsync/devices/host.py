"""Copies between an accelerator and the host: of numbers that the host knows, and for computations offloaded to it.

On the CPU there is nothing to copy: each function returns the tensor that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import streams


def is_apart(device: torch.device) -> bool:
    """Whether tensors on the device must be copied before the host's kernels can read them."""
    return device.type != "cpu"


def numbers(values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies numbers of the host to the device, and returns them, (values,); the host does not wait for the device.

    Submitted to this thread's current stream. `dtype`: None for that of `torch.tensor`.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)  # pageable: staged before this returns


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors, contiguous ones of any shapes and dtypes on one device, on the host.

    Copies run behind what this thread's current stream was given so far, and the thread waits for them.
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
    """Returns memory of the host with the shape and dtype of `out`, for a result that `send` copies to `out`."""
    return _pinned(out) if is_apart(out.device) else out


def send(result: Tensor, out: Tensor) -> None:
    """Copies a tensor of the host to `out`, of the same shape and dtype, on this thread's current stream.

    The thread does not wait where the result is in memory of `room_for`.
    """
    if result is not out:
        out.copy_(result, non_blocking=True)


def sent(made: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the host, 1-D, on the device, by way of memory that the thread need not wait for."""
    if not is_apart(device):
        return made
    staged, out = _pinned(made), torch.empty(made.shape, dtype=made.dtype, device=device)
    staged.copy_(made)
    send(staged, out)
    return out


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
