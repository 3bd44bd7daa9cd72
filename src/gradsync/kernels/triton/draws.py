"""Counter-based random numbers in Triton: see `gradsync.kernels.reference.draws`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mixed(h: tl.tensor, added: tl.tensor) -> tl.tensor:
    """Returns a keyed bijection of uint32, see `reference.draws`."""
    h = (h ^ (h >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    h = ((h ^ (h >> 15)) + added) * tl.full([1], 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def draws(lower: tl.tensor, upper: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """See `gradsync.kernels.reference.draws`; of uint32 halves of the places, and an int64 seed."""
    key = (seed >> 32).to(tl.uint32)
    return mixed(mixed(lower ^ seed.to(tl.uint32), 0) + key + upper * tl.full([1], 0x9E3779B9, tl.uint32), 0)
