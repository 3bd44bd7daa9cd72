"""Broadcasts of many tensors in few messages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from .group import Group

BROADCAST_BYTES = 25 << 20  # a message of initial parameters: large enough for line rate, small beside the model


def broadcast_tensors(group: Group, tensors: list[Tensor], timeout_s: float) -> None:
    """Overwrites the tensors with member 0's, in few messages; same shapes everywhere."""
    if group.size == 1:
        return
    piece: list[Tensor] = []
    filled_bytes = 0
    for tensor in tensors:
        piece.append(tensor)
        filled_bytes += tensor.numel() * tensor.element_size()
        if filled_bytes >= BROADCAST_BYTES:
            _broadcast_piece(group, piece, timeout_s)
            piece, filled_bytes = [], 0
    if piece:
        _broadcast_piece(group, piece, timeout_s)


def _broadcast_piece(group: Group, tensors: list[Tensor], timeout_s: float) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        # Bytes, so that all element types share the message: wide ones first, as each must start at a multiple of its
        # size.
        kinds = sorted(by_dtype.items(), key=lambda kind: -kind[0].itemsize)
        message = torch.cat([_flatten_dense_tensors(alike).view(torch.uint8) for _, alike in kinds])
        group.broadcast(message).wait(timeout_s)
        if group.rank == 0:
            return
        lengths = [dtype.itemsize * sum(tensor.numel() for tensor in alike) for dtype, alike in kinds]
        for (dtype, alike), part in zip(kinds, message.split(lengths), strict=True):
            torch._foreach_copy_(alike, _unflatten_dense_tensors(part.view(dtype), alike))
