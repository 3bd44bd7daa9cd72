"""Counter-based random numbers: an element's random bits depend only on a seed and on its index in its tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (1 << 32) - 1  # all 32 bits


def draws(seed: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Returns 32 random bits for each of `count` element indices from `start` on, by a 64-bit seed.

    The result is (count,) int64 in [0, 2^32); equal seeds and indices give equal bits.
    """
    return draws_at(torch.arange(start, start + count, device=device), seed)


def draws_at(places: Tensor, seed: int) -> Tensor:
    """Returns the 32 random bits of `draws` for any element indices, int64 of any shape, as int64 in [0, 2^32)."""
    lower, upper = places & _LOW, places >> 32
    added = (seed >> 32 & _LOW) + upper * 0x9E3779B9
    return _mix(_mix(lower ^ (seed & _LOW)) + added)


def noise(seed: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Returns random bits for stochastic rounding: shape and range as `draws`, with half as much arithmetic for each.

    All indices with the same upper 32 bits share two keys, the draws of the first two of these indices: one is xored
    with the index, and one is added between the steps of the mixing.
    """
    places = torch.arange(start, start + count, device=device)
    key, added = (draws_at(places >> 32 << 32 | which, seed) for which in (0, 1))
    return _mix(places & _LOW ^ key, added)


def _mix(h: Tensor, added: Tensor | int = 0) -> Tensor:
    """Hashes each element by a bijection of 32 bits that mixes all bits; adds `added` between its multiplications."""
    h = h & _LOW
    h = h ^ h >> 16
    h = (h * 0x7FEB352D) & _LOW
    h = (h ^ h >> 15) + added
    h = ((h & _LOW) * 0x846CA68B) & _LOW
    return h ^ h >> 16
