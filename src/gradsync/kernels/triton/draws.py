"""Counter-based random numbers in Triton: the bits for an element depend only on a seed and the element's place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(h: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Returns a bijective hash of the uint32 numbers `h`; `added` is added between its two multiplications."""
    h = (h ^ (h >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    h = ((h ^ (h >> 15)) + added) * tl.full([1], 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def draws(lower: tl.tensor, upper: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Returns 32 random bits for each place (lower and upper uint32 half) by an int64 seed, as `reference.draws`."""
    key = (seed >> 32).to(tl.uint32)
    return mixed(mixed(lower ^ seed.to(tl.uint32), 0) + key + upper * tl.full([1], 0x9E3779B9, tl.uint32), 0)
