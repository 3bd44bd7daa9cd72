"""The Triton kernel for digests of tensors: one program hashes one block, and adds the hash to the tensor's sum.

All tensors of a dtype are hashed by one launch: a program finds its tensor in a table of their addresses and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.digests import INFINITY_AND_NAN, WORDS, check_digest, keys, write_digests
from gradsync.kernels.triton.boundary import addresses, blocks, check_contiguous, common_device, launch, on, pointee
from gradsync.kernels.triton.hashing import finalised
from gradsync.kernels.triton.ordered import place_after


@triton.jit
def _sum_blocks(
    table: tl.tensor,
    num_tensors: tl.tensor,
    keys: tl.tensor,
    totals: tl.tensor,
    INFINITY: tl.constexpr,
    NAN: tl.constexpr,
    POINTEE: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """One program adds the hash of one block of a tensor to the tensor's total.

    Args:
        table: rows of `num_tensors` numbers: the first program of each tensor, its address, its number of elements, and
            its place in `totals`.
        keys: two factors for each word of a block.
        INFINITY, NAN: the bits of these, 0 for integers.
        POINTEE: the integer type of the elements' bits; BITS is their number.
    """
    program = tl.zeros([1], tl.int64) + tl.program_id(0)
    row = table + place_after(table, num_tensors, program) - 1
    number = program - tl.load(row)
    x, count = tl.load(row + num_tensors).to(tl.pointer_type(POINTEE)), tl.load(row + 2 * num_tensors)
    lane = tl.arange(0, WORDS * 32 // BITS)
    at = number * (WORDS * 32 // BITS) + lane
    bits = tl.load(x + at, mask=at < count, other=0).to(tl.int64)
    if NAN != 0:
        magnitude = bits & ((1 << (BITS - 1)) - 1)
        bits = tl.where(magnitude > INFINITY, NAN, bits)
        bits = tl.where(magnitude == 0, 0, bits)
    if BITS == 64:
        low, high = bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF
        first = low * tl.load(keys + 2 * lane) + high * tl.load(keys + 2 * lane + 1)
        second = low * tl.load(keys + WORDS + 2 * lane) + high * tl.load(keys + WORDS + 2 * lane + 1)
    else:
        word = (bits & ((1 << BITS) - 1)) << ((lane * BITS) % 32)
        first = word * tl.load(keys + (lane * BITS) // 32)
        second = word * tl.load(keys + WORDS + (lane * BITS) // 32)
    mixed = finalised((number + 1).to(tl.uint64, bitcast=True))
    mixed = finalised(tl.sum(second, 0).to(tl.uint64, bitcast=True) ^ mixed)
    mixed = finalised(tl.sum(first, 0).to(tl.uint64, bitcast=True) ^ mixed)
    tl.atomic_add(totals + tl.load(row + 3 * num_tensors), mixed.to(tl.int64, bitcast=True))


def digest(xs: Sequence[Tensor], out: Tensor) -> None:
    check_digest(xs, out)
    device = common_device([out, *xs])
    check_contiguous("xs", *xs)
    totals, factors = torch.zeros_like(out), on(device, _keys())
    for dtype in dict.fromkeys(x.dtype for x in xs):
        places = [place for place, x in enumerate(xs) if x.dtype == dtype]
        alike = [xs[place] for place in places]
        *begins, programs = accumulate((blocks(x.numel(), WORDS * 4 // x.itemsize) for x in alike), initial=0)
        table = on(device, [*begins, *addresses(alike), *(x.numel() for x in alike), *places])
        infinity, nan = INFINITY_AND_NAN.get(dtype, (0, 0))
        kind = {"POINTEE": pointee(alike[0]), "BITS": 8 * dtype.itemsize}
        constants = {"INFINITY": infinity, "NAN": nan, **kind, "WORDS": WORDS}
        launch(_sum_blocks, programs, device, table, len(alike), factors, totals, **constants)
    write_digests(totals, [x.numel() for x in xs], out)


@cache
def _keys() -> Tensor:
    """Returns the factors of `reference.digests.keys` on the CPU: one copy is faster than their arithmetic on a GPU."""
    return keys(torch.device("cpu"))
