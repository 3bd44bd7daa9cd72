"""Indices as offsets within blocks, in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import (
    check_ascending,
    check_index_out,
    check_indices,
    check_message,
    check_range,
    check_size,
    num_blocks,
)

_FULL = 256  # indices of a full block of 8-bit offsets: one more than its count byte can say


def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    """See `gradsync.kernels.encode_offsets`."""
    check_size("size", size)
    check_indices("indices", indices)
    check_message("out", out, len(indices), size, bits)
    check_range("encode_offsets", indices, size, "size")
    check_ascending("encode_offsets", "indices", indices, strictly=True)
    blocks, offsets = indices.long() >> bits, indices.long() & ((1 << bits) - 1)
    counts = torch.bincount(blocks, minlength=num_blocks(size, bits))
    if bits == 8:
        offsets = torch.where(counts[blocks] == _FULL, (offsets - 1) & 255, offsets)
        out.copy_(torch.cat([counts.clamp(max=255), offsets]))
        return
    out.copy_(torch.cat([counts.int().view(torch.uint8), offsets.to(torch.int16).view(torch.uint8)]))


def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    """See `gradsync.kernels.decode_offsets`."""
    check_size("size", size)
    check_index_out("out", out, len(out), size)
    check_message("message", message, len(out), size, bits)
    blocks = num_blocks(size, bits)
    if bits == 8:
        counts, offsets = message.long().split([blocks, len(out)])
        counts, offsets = _unmark_full(counts, offsets)
    else:
        aligned = message.clone()
        counts = aligned[: 4 * blocks].view(torch.int32).long()
        offsets = aligned[4 * blocks :].view(torch.int16).long() & 0xFFFF
    if (counts < 0).any() or counts.sum() != len(out):
        raise ValueError(f"decode_offsets: the message is malformed: its counts do not add up to {len(out)}")
    base = torch.arange(blocks, device=message.device) << bits
    indices = torch.repeat_interleave(base, counts) + offsets
    try:
        check_ascending("decode_offsets", "indices", indices, strictly=True)
        check_range("decode_offsets", indices, size, "size")
    except ValueError as error:
        raise ValueError(f"decode_offsets: the message is malformed: {error}") from None
    out.copy_(indices)


def _unmark_full(counts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Counts up to 256 and ascending offsets; full blocks are those of count 255 that begin with offset 255."""
    begin = 0
    sizes: list[int] = counts.tolist()
    firsts: list[int] = offsets.tolist()
    full = torch.zeros_like(offsets, dtype=torch.bool)
    for block, count in enumerate(sizes):
        if count == 255 and firsts[begin : begin + 1] == [255] and begin + _FULL <= len(firsts):
            full[begin : begin + _FULL] = True
            sizes[block] = _FULL
        begin += sizes[block]
    return counts.new_tensor(sizes), torch.where(full, (offsets + 1) & 255, offsets)
