"""A mark of a tensor that changes when the tensor is written to, also through `.data`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import digest


class Stamp(NamedTuple):
    """A mark of a tensor by which writes to it are detected: its version and address and, if asked for, a digest.

    Writes through `.data`, or by way of NumPy, do not change the version: only the digest of the elements shows them.
    """

    version: int
    address: int
    has_values: bool
    values: int  # the digest; 0 without one

    @classmethod
    def of(cls, tensor: Tensor, has_values: bool = True) -> Stamp:
        """Returns the stamp of a tensor of any shape and layout; `has_values` reads the whole tensor for a digest."""
        held = tensor._values() if tensor.layout is torch.sparse_coo else tensor
        return cls(tensor._version, held.data_ptr(), has_values, _digest(held) if has_values else 0)


def _digest(tensor: Tensor) -> int:
    """Returns a 64-bit hash of all elements in the order in which they lie in memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor).copy_(tensor)
    out = torch.empty(1, dtype=torch.int64, device=tensor.device)
    digest([dense.as_strided((dense.numel(),), (1,))], out)
    return int(out)
