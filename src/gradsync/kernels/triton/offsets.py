"""Triton kernels that pack indices as offsets within blocks, and unpack them, by way of a rank bitmap."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.checks import PackedPositions, check_index_out, check_indices, check_message, check_size
from gradsync.kernels.reference import offsets as reference
from gradsync.kernels.triton.boundary import BLOCK, blocks, device_of, launch, on
from gradsync.kernels.triton.elements import set_bits, write_set
from gradsync.kernels.triton.ordered import faults_of, refuse
from gradsync.kernels.triton.positions import (
    empty_words,
    message_table,
    ranked,
    read_positions,
    store_position,
    write_heads,
)


@triton.jit
def _write_items(
    indices: tl.tensor, count: tl.tensor, begins: tl.tensor, table: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program writes the offsets of one range of indices to a message; `begins`: of the indices' rank bitmap."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + at, mask=at < count, other=0).to(tl.int64)
    block = begins + index // 256
    full = tl.load(block + 1, mask=at < count, other=0) - tl.load(block, mask=at < count, other=0) == 256
    store_position(table, 1, tl.zeros([], tl.int64), at, index, full, at < count)


def encode_offsets(indices: Tensor, size: int, bits: int, out: Tensor) -> None:
    check_size("size", size)
    check_indices("indices", indices)
    check_message("out", out, len(indices), size, bits)
    device = device_of(indices=indices, out=out)
    faults: list[int] = faults_of(indices, size).tolist()
    refuse(faults, "encode_offsets", indices, size, "size", ascending=True, strictly=True)
    words = empty_words(1, size, device)
    set_bits(indices, words)
    bitmap = ranked(words, 1, size)
    table = message_table([PackedPositions(out, len(indices), bits)], size)
    there = on(device, table)
    write_heads(bitmap, table, there)
    arguments = indices, len(indices), bitmap.begins, there
    launch(_write_items, blocks(len(indices)), device, *arguments, BLOCK=BLOCK)


def decode_offsets(message: Tensor, size: int, bits: int, out: Tensor) -> None:
    check_size("size", size)
    check_index_out("out", out, len(out), size)
    check_message("message", message, len(out), size, bits)
    device = device_of(message=message, out=out)
    bitmap, faults = read_positions(message_table([PackedPositions(message, len(out), bits)], size), size, device)
    if faults.item():
        reference.decode_offsets.reference(message, size, bits, out)  # says what is wrong
    else:
        write_set(bitmap.words, bitmap.begins[1:], 256, out)
