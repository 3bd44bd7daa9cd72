"""Triton kernels that find non-zero elements, and that convert indices to bitmaps and back.

Bitmaps are int64 words to the caller and int32 words here, the same bits in the little-endian memory that all CUDA
machines have. Selected elements are written in two passes: the first counts them in each block, and the running sum of
the counts says where each block writes; the second writes them. Each block writes to a range of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import (
    WORD_BITS,
    check_flat,
    check_floating,
    check_index_out,
    check_indices,
    check_shape,
    check_size,
)
from gradsync.kernels.reference.elements import check_words
from gradsync.kernels.triton.boundary import BLOCK, bits_of, blocks, check_contiguous, common_device, device_of, launch
from gradsync.kernels.triton.ordered import faults_of, refuse

_DECODED_BITS = 4096  # of a bitmap, that one program works on


@triton.jit
def _set_bits(indices: tl.tensor, count: tl.tensor, words: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program sets the bits of one block of indices by atomic OR, as lanes and programs may share a word."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    bit = tl.full([BLOCK], 1, tl.int32) << (index % 32).to(tl.int32)
    tl.atomic_or(words + index // 32, bit, mask=at < count, sem="relaxed")


@triton.jit
def ones_in(words: tl.tensor) -> tl.tensor:
    """Returns the number of set bits of each int32 word, as int32: sums over pairs of bits, then fours, then bytes."""
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _count_set(words: tl.tensor, num_words: tl.tensor, counts: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program stores the number of set bits in one block of words."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < num_words, other=0)
    tl.store(counts + tl.program_id(0), tl.sum(ones_in(word), 0))


@triton.jit
def _positions_of_set(
    words: tl.tensor, num_words: tl.tensor, ends: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program writes the positions of the set bits among BLOCK bits to its range of `out`, up to its `ends`."""
    program = tl.program_id(0).to(tl.int64)
    bit = program * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + bit // 32, mask=bit // 32 < num_words, other=0)
    kept = (word >> (bit % 32).to(tl.int32)) & 1
    begin = tl.load(ends + program) - tl.sum(kept, 0)
    tl.store(out + begin + tl.cumsum(kept, 0) - 1, bit, mask=kept != 0)


@triton.jit
def _count_nonzero(x: tl.tensor, count: tl.tensor, counts: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program stores the number of non-zero elements in one block: elements with a set bit besides the sign."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + at, mask=at < count, other=0)
    tl.store(counts + tl.program_id(0), tl.sum(((bits << 1) != 0).to(tl.int32), 0))


@triton.jit
def _take_nonzero(
    x: tl.tensor, count: tl.tensor, ends: tl.tensor, indices: tl.tensor, values: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program writes the non-zero elements in one block to its range of the outputs, which ends at its `ends`."""
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(x + at, mask=at < count, other=0)
    kept = ((bits << 1) != 0).to(tl.int32)
    place = tl.load(ends + program) - tl.sum(kept, 0) + tl.cumsum(kept, 0) - 1
    tl.store(indices + place, at, mask=kept != 0)
    tl.store(values + place, bits, mask=kept != 0)


def _ends(kernel: Any, entries: Tensor, block: int) -> Tensor:
    """Returns the running sum of the counts that `kernel` stores for each block of entries, (blocks,) int64."""
    counts = torch.empty(blocks(len(entries), block), dtype=torch.int32, device=entries.device)
    launch(kernel, len(counts), entries.device, entries, len(entries), counts, BLOCK=block)
    return counts.cumsum(0)


def _last(ends: Tensor) -> int:
    """Returns the last of the running sums `ends`, the total count, on the host; waits for the device."""
    return int(ends[-1]) if len(ends) else 0


def set_bits(indices: Tensor, words: Tensor) -> None:
    """Sets the bits of `words`, (n,) int32, at `indices`, (nnz,) int64 or int32, and clears all others."""
    arguments = indices, len(indices), words.zero_()
    launch(_set_bits, blocks(len(indices)), words.device, *arguments, BLOCK=BLOCK)


def write_set(words: Tensor, ends: Tensor, block: int, out: Tensor) -> None:
    """Writes the positions of the set bits of `words`, (n,) int32, to `out`, (count,) int64 or int32.

    `ends`: how many there are up to the end of each block of `block` bits, (blocks,) int64.
    """
    launch(_positions_of_set, len(ends), words.device, words, len(words), ends, out, BLOCK=block)


def encode_bitmap(indices: Tensor, size: int, out: Tensor) -> None:
    check_size("size", size)
    check_indices("indices", indices)
    check_words("out", out)
    check_shape("out", out, -(-size // WORD_BITS))
    device_of(indices=indices, out=out)
    faults: list[int] = faults_of(indices, size).tolist()
    refuse(faults, "encode_bitmap", indices, size, "size", ascending=False, strictly=False)
    set_bits(indices, out.view(torch.int32))


def decode_bitmap(words: Tensor, out: Tensor) -> None:
    check_words("words", words)
    common_device([words, out])
    check_contiguous("words", words)
    halves = words.view(torch.int32)
    ends = _ends(_count_set, halves, _DECODED_BITS // 32)
    check_index_out("out", out, _last(ends), len(words) * WORD_BITS)
    check_contiguous("out", out)
    write_set(halves, ends, _DECODED_BITS, out)


def count_bits(words: Tensor) -> int:
    check_words("words", words)
    device_of(words=words)
    return _last(_ends(_count_set, words.view(torch.int32), BLOCK))


class NonzeroElements:
    def __init__(self, x: Tensor) -> None:
        check_floating("x", x)
        check_flat("x", x)
        device_of(x=x)
        self._x = x
        self._ends = _ends(_count_nonzero, bits_of(x), BLOCK)
        self.count = _last(self._ends)

    def write(self, indices: Tensor, values: Tensor) -> None:
        check_index_out("indices", indices, self.count, len(self._x))
        check_floating("values", values, self._x.dtype)
        check_shape("values", values, self.count)
        device = device_of(x=self._x, indices=indices, values=values)
        arguments = bits_of(self._x), len(self._x), self._ends, indices, bits_of(values)
        launch(_take_nonzero, len(self._ends), device, *arguments, BLOCK=BLOCK)


nonzero_elements = NonzeroElements
