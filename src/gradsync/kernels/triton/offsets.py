"""Triton kernels that pack indices as offsets within blocks, and unpack them.

A message may begin at any address, so it is read and written in bytes. Binary searches find where a block begins among
the indices, and to which block an offset belongs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import check_index_out, check_indices, check_message, check_size, num_blocks
from gradsync.kernels.reference.offsets import is_unary, sizes_from_unary, unary_counts
from gradsync.kernels.triton.boundary import BLOCK, blocks, device_of, launch
from gradsync.kernels.triton.ordered import faults_of, place_after, refuse

_FULL = 256  # indices of a full block of 8-bit offsets: one more than its count byte can say


@triton.jit
def _write_counts(
    indices: tl.tensor, count: tl.tensor, num_blocks: tl.tensor, out: tl.tensor, BITS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """One program writes how many indices each block in one range has, in one byte (256 as 255) or in four bytes."""
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    begin = place_after(indices, count, (block << BITS) - 1)
    found = place_after(indices, count, ((block + 1) << BITS) - 1) - begin
    if BITS == 8:
        tl.store(out + block, tl.where(found == 256, 255, found), mask=block < num_blocks)
    else:
        for byte in tl.static_range(4):
            tl.store(out + 4 * block + byte, (found >> 8 * byte) & 255, mask=block < num_blocks)


@triton.jit
def _write_offsets(
    indices: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    BITS: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program writes the offset within its block, in one byte or two, of each index in one range of indices.

    If TURNED, the offsets in a full block (256 indices) are written as 255, 0, 1, ..., 254. An index is in a full block
    if the first and last index of the block lie at the right distance before and after.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    offset = index & ((1 << BITS) - 1)
    if TURNED:
        begin = at - offset
        whole = (begin >= 0) & (begin + 255 < count)
        first = tl.load(indices + begin, mask=whole, other=-1).to(tl.int64)
        last = tl.load(indices + begin + 255, mask=whole, other=-1).to(tl.int64)
        full = (first == index - offset) & (last == first + 255)
        offset = tl.where(full, (offset - 1) & 255, offset)
    if BITS == 8:
        tl.store(out + at, offset, mask=at < count)
    else:
        tl.store(out + 2 * at, offset & 255, mask=at < count)
        tl.store(out + 2 * at + 1, offset >> 8, mask=at < count)


@triton.jit
def _mark_full(
    candidates: tl.tensor,
    num_candidates: tl.tensor,
    begins: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    full: tl.tensor,
) -> None:
    """A single program marks in `full` which candidates, blocks with the count byte 255, are full (256 indices).

    It goes through them in order, as the begin of each one's offsets depends on the full blocks before it.
    """
    number = tl.program_id(0)
    before = number.to(tl.int64)  # 0: full blocks so far
    while number < num_candidates:
        block = tl.load(candidates + number)
        begin = tl.load(begins + block) + before
        fits = begin + 256 <= count
        is_full = (fits & (tl.load(offsets + begin, mask=fits, other=0).to(tl.int32) == 255)).to(tl.int64)
        tl.store(full + block, is_full)
        before += is_full
        number += 1


@triton.jit
def _read_offsets(
    ends: tl.tensor,
    num_blocks: tl.tensor,
    sizes: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    size: tl.tensor,
    out: tl.tensor,
    faults: tl.tensor,
    BITS: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program decodes one range of offsets to indices, and sets `faults` to 1 if these are out of order or range.

    Damaged counts do no harm; all programs that set a fault store the same 1.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    block = place_after(ends, num_blocks, at)
    known = (at < count) & (block < num_blocks)
    length = tl.load(sizes + block, mask=known, other=0)
    begin = tl.load(ends + block, mask=known, other=0) - length
    inner = known & (at > begin)
    if BITS == 8:
        turn = (TURNED & (length == 256)).to(tl.int64)
        offset = (tl.load(offsets + at, mask=known, other=0).to(tl.int64) + turn) & 255
        before = (tl.load(offsets + at - 1, mask=inner, other=0).to(tl.int64) + turn) & 255
    else:
        low = tl.load(offsets + 2 * at, mask=known, other=0).to(tl.int64)
        offset = (tl.load(offsets + 2 * at + 1, mask=known, other=0).to(tl.int64) << 8) + low
        low = tl.load(offsets + 2 * at - 2, mask=inner, other=0).to(tl.int64)
        before = (tl.load(offsets + 2 * at - 1, mask=inner, other=0).to(tl.int64) << 8) + low
    index = (block << BITS) + offset
    wrong = (known & (index >= size)) | (inner & (offset <= before))
    tl.store(faults, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0)
    tl.store(out + at, index, mask=known)


def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    check_size("size", size)
    check_indices("indices", indices)
    check_message("out", out, len(indices), size, bits)
    device = device_of(indices=indices, out=out)
    faults: list[int] = faults_of(indices, size).tolist()
    refuse(faults, "encode_offsets", indices, size, "size", ascending=True, strictly=True)
    num, count = num_blocks(size, bits), len(indices)
    unary = is_unary(count, size, bits)
    if unary:
        out[: len(out) - count].copy_(unary_counts(indices.long() >> bits, num))
    else:
        launch(_write_counts, blocks(num), device, indices, count, num, out, BITS=bits, BLOCK=BLOCK)
    offsets = out[len(out) - count * bits // 8 :]
    turned = bits == 8 and not unary
    launch(_write_offsets, blocks(count), device, indices, count, offsets, BITS=bits, TURNED=turned, BLOCK=BLOCK)


def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    check_size("size", size)
    check_index_out("out", out, len(out), size)
    check_message("message", message, len(out), size, bits)
    device = device_of(message=message, out=out)
    num, count = num_blocks(size, bits), len(out)
    head, offsets = message.split([len(message) - count * bits // 8, count * bits // 8])
    unary = is_unary(count, size, bits)
    if bits == 16:
        sizes = head.clone().view(torch.int32).long()
    else:
        sizes = sizes_from_unary(head, count, num) if unary else _with_full(head.long(), offsets)
    ends = sizes.cumsum(0)
    faults = ((sizes < 0).any() | (sizes.sum() != count)).int().view(1)
    arguments = ends, num, sizes, offsets, count, size, out, faults
    turned = bits == 8 and not unary
    launch(_read_offsets, blocks(count), device, *arguments, BITS=bits, TURNED=turned, BLOCK=BLOCK)
    if faults.item():
        raise ValueError(
            f"decode_offsets: the message is malformed: its counts do not add up to {count}, or its indices do not "
            f"ascend or are outside [0, size={size})"
        )


def _with_full(counts: Tensor, offsets: Tensor) -> Tensor:
    """Returns the number of indices in each block, (blocks,), from count bytes, in which 255 stands for 255 or 256.

    A block of 256 stores its first offset as 255, which a block of 255 cannot begin with. If all or none of the blocks
    with 255 are full, the number of `offsets` says so; for a mix of both, one program looks at their first offsets.
    """
    candidates = (counts == _FULL - 1).nonzero().flatten()
    missing = len(offsets) - int(counts.sum())
    if missing == 0:
        return counts
    if missing == len(candidates):
        return counts + (counts == _FULL - 1)
    full, begins = torch.zeros_like(counts), counts.cumsum(0) - counts
    launch(_mark_full, 1, counts.device, candidates, len(candidates), begins, offsets, len(offsets), full)
    return counts + full
