"""A mark of a tensor that changes when the tensor is written to, also through `.data`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import digest


class Stamp(NamedTuple):
    """The version and the address of a tensor and, if asked for, a digest of its elements.

    Writes through `.data`, or by way of NumPy, leave the version as it is: only the digest tells them.
    """

    version: int
    address: int
    has_values: bool
    values: int  # the digest; 0 without one

    @classmethod
    def of(cls, tensor: Tensor, has_values: bool = True) -> Stamp:
        """Returns the mark of a tensor of any shape and layout; `has_values` reads the whole tensor for a digest."""
        held = tensor._values() if tensor.layout is torch.sparse_coo else tensor
        return cls(tensor._version, held.data_ptr(), has_values, _digest(held) if has_values else 0)


def _digest(tensor: Tensor) -> int:
    """Returns 64 bits that depend on all elements as they lie in memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor).copy_(tensor)
    out = torch.empty(1, dtype=torch.int64, device=tensor.device)
    digest([dense.as_strided((dense.numel(),), (1,))], out)
    return int(out)
