"""The Triton kernel for digests of tensors: one program hashes one block, and adds the hash to the tensor's sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsync.kernels.reference.digests import INFINITY_AND_NAN, WORDS, check_digest, keys, write_digests
from gradsync.kernels.triton.boundary import bits_of, blocks, check_contiguous, common_device, launch
from gradsync.kernels.triton.hashing import finalised


@triton.jit
def _sum_blocks(
    x: tl.tensor,
    count: tl.tensor,
    keys: tl.tensor,
    total: tl.tensor,
    INFINITY: tl.constexpr,
    NAN: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """One program adds the hash of one block to `total`; INFINITY and NAN are the bits of these, 0 for integers."""
    number = tl.program_id(0).to(tl.int64)
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
    tl.atomic_add(total, mixed.to(tl.int64, bitcast=True))


def digest(xs: Sequence[Tensor], out: Tensor) -> None:
    check_digest(xs, out)
    device = common_device([out, *xs])
    check_contiguous("xs", *xs)
    totals, factors = torch.zeros_like(out), keys(device)
    for place, x in enumerate(xs):
        infinity, nan = INFINITY_AND_NAN.get(x.dtype, (0, 0))
        constants = {"INFINITY": infinity, "NAN": nan, "BITS": 8 * x.element_size(), "WORDS": WORDS}
        programs = blocks(x.numel(), WORDS * 4 // x.element_size())
        launch(_sum_blocks, programs, device, bits_of(x), x.numel(), factors, totals[place:], **constants)
    write_digests(totals, [x.numel() for x in xs], out)
