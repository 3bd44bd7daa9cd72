"""Kernels that pack indices as offsets within blocks, in plain torch operations."""

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
    counts_nbytes,
    num_blocks,
    unary_nbytes,
)
from gradsync.kernels.choice import dispatched

_FULL = 256  # indices of a full block of 8-bit offsets: one more than its count byte can say


@dispatched("indices", "out")
def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    """Encodes ascending indices as offsets within blocks of 2^bits, for densities between those of list and bitmap.

    Layout: the count of each of ceil(size / 2^bits) blocks, then the offsets, index mod 2^bits, block by block. With 16
    bits, counts are int32 and offsets uint16, in the byte order of the machine. With 8 bits, an offset is one byte, and
    counts are what is shorter:
    - a byte each: 255 counts 255 indices or, where the first offset is 255, a full block of 256, whose offsets are 255,
      0, 1, ..., 254; no 255 ascending offsets begin so;
    - a one for each index and a zero behind each block, from the lowest bit of a byte on (the upper bits of Elias and
      Fano's code; about one bit more than the entropy of the indices where a block has one or two).
    The size of a message thus follows from the number of indices alone.

    Args:
        indices: (nnz,) int64 or int32, ascending, without duplicates.
        size: all indices are in [0, size).
        bits: 8 or 16.
        out: (offsets_nbytes(nnz, size, bits),) uint8.

    Raises:
        ValueError: an index out of range or order, or a duplicate, before anything is written; other bits or sizes.
        TypeError: other dtypes.
    """
    check_size("size", size)
    check_indices("indices", indices)
    check_message("out", out, len(indices), size, bits)
    check_range("encode_offsets", indices, size, "size")
    check_ascending("encode_offsets", "indices", indices, strictly=True)
    blocks, offsets = indices.long() >> bits, indices.long() & ((1 << bits) - 1)
    counts = torch.bincount(blocks, minlength=num_blocks(size, bits))
    if bits == 16:
        out.copy_(torch.cat([counts.int().view(torch.uint8), offsets.to(torch.int16).view(torch.uint8)]))
    elif is_unary(len(indices), size, bits):
        out.copy_(torch.cat([unary_counts(blocks, len(counts)), offsets]))
    else:
        offsets = torch.where(counts[blocks] == _FULL, (offsets - 1) & 255, offsets)
        out.copy_(torch.cat([counts.clamp(max=255), offsets]))


def is_unary(count: int, size: int, bits: int) -> bool:
    """Whether `encode_offsets` writes unary counts: with 8 bits, if they are shorter than one byte for each block."""
    blocks = num_blocks(size, bits)
    return bits == 8 and counts_nbytes(count, blocks, bits) < blocks


def unary_counts(blocks: Tensor, num: int) -> Tensor:
    """Returns the blocks' counts in unary, (nbytes,) uint8: a one bit for each index, a zero bit after each block.

    Args:
        blocks: the block of each index, ascending, (nnz,) int64.
        num: the number of blocks.
    """
    bits = blocks.new_zeros(8 * unary_nbytes(len(blocks), num))
    bits[blocks + torch.arange(len(blocks), device=blocks.device)] = 1
    return (bits.view(-1, 8) << torch.arange(8, device=blocks.device)).sum(1).to(torch.uint8)


def sizes_from_unary(message: Tensor, count: int, num: int) -> Tensor:
    """Decodes unary counts, (nbytes,) uint8, to the number of indices in each of `num` blocks, (num,) int64.

    For a malformed message the results do not add up to `count`, the number of all indices.
    """
    bits = (message.long().unsqueeze(1) >> torch.arange(8, device=message.device) & 1).flatten()
    zeros = (bits[: count + num] == 0).nonzero().flatten()
    if len(zeros) != num or int(zeros[-1]) != count + num - 1 or bool(bits[count + num :].any()):
        return message.new_full((num,), count + 1, dtype=torch.int64)
    return zeros.diff(prepend=zeros.new_full((1,), -1)) - 1


@dispatched("message", "out")
def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    """Decodes a message of `encode_offsets`, which may be damaged, and writes its indices to `out`.

    Args:
        message: (offsets_nbytes(nnz, size, bits),) uint8.
        out: (nnz,) int64, or int32 for sizes up to 2^31. Overwritten.

    Raises:
        ValueError: a message of another size, or one that does not encode nnz ascending indices in [0, size); `out` may
            then have been written to.
        TypeError: other dtypes.
    """
    check_size("size", size)
    check_index_out("out", out, len(out), size)
    check_message("message", message, len(out), size, bits)
    blocks = num_blocks(size, bits)
    aligned = message.clone()
    head, body = aligned.split([len(message) - len(out) * bits // 8, len(out) * bits // 8])
    offsets = body.long() if bits == 8 else body.view(torch.int16).long() & 0xFFFF
    if bits == 16:
        counts = head.view(torch.int32).long()
    elif is_unary(len(out), size, bits):
        counts = sizes_from_unary(head, len(out), blocks)
    else:
        counts, offsets = _unmark_full(head.long(), offsets)
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
    """Returns the counts and ascending offsets of blocks, (blocks,) and (nnz,), without the mark of full blocks.

    A full block of 256 indices is marked by the count 255 and the first offset 255.
    """
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
