"""Broadcasts of many tensors, packed into few messages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .group import Group

BROADCAST_BYTES = 25 << 20  # of a message of initial parameters: large enough for line rate, small beside the model

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def broadcast_tensors(group: Group, tensors: list[Tensor], timeout_s: float) -> None:
    """Overwrites `tensors` with those of the group's member 0, packed into few broadcasts.

    Args:
        group: the members, all of which call this.
        tensors: any tensors, whose shapes, dtypes and layouts are the same on all members; sparse ones also have the
            same number of stored elements. Elements that share memory (`expand`) are written once.
        timeout_s: seconds that each broadcast may take.

    Raises:
        GroupError: when a broadcast does not complete.
        ValueError: for a tensor layout that `dense_parts` does not know.
    """
    if group.size == 1:
        return
    piece: list[Tensor] = []
    filled_bytes = 0
    for tensor in [part for each in tensors for part in dense_parts(each)]:
        piece.append(tensor)
        filled_bytes += tensor.numel() * tensor.element_size()
        if filled_bytes >= BROADCAST_BYTES:
            _broadcast_piece(group, piece, timeout_s)
            piece, filled_bytes = [], 0
    if piece:
        _broadcast_piece(group, piece, timeout_s)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the dense tensors that share a tensor's memory: itself, or the indices and values of a sparse one.

    `tensor` has any shape and dtype. Dimensions that `expand` added are left out, as their elements share memory.

    Raises:
        ValueError: for a layout other than strided, COO, CSR, CSC, BSR and BSC.
    """
    if tensor.layout is torch.strided:
        if 0 in tensor.stride():
            one = tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())
            return [tensor.detach()[one] if tensor.numel() else tensor.new_empty(0)]
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        return [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
    raise ValueError(f"a tensor of layout {tensor.layout} cannot be broadcast")


def _broadcast_piece(group: Group, tensors: list[Tensor], timeout_s: float) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # Memory of conjugate and negative views has other values: torch computes theirs when they are read.
    views = any(tensor.is_neg() or tensor.is_conj() for tensor in tensors)
    with torch.no_grad():
        # Bytes, so that all element types share the message: wide ones first, as each must start at a multiple of its
        # size.
        kinds = sorted(by_dtype.items(), key=lambda kind: -kind[0].itemsize)
        computed = [[t.resolve_conj().resolve_neg() for t in alike] if views else alike for _, alike in kinds]
        message = torch.cat([_flatten_dense_tensors(alike).view(torch.uint8) for alike in computed])
        group.broadcast(message).wait(timeout_s)
        if group.rank == 0:
            return
        lengths = [dtype.itemsize * sum(tensor.numel() for tensor in alike) for dtype, alike in kinds]
        for (dtype, alike), part in zip(kinds, message.split(lengths), strict=True):
            values = _unflatten_dense_tensors(part.view(dtype), alike)
            if views:
                for tensor, value in zip(alike, values, strict=True):
                    tensor.copy_(value)
            else:
                torch._foreach_copy_(alike, values)
