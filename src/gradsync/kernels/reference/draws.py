"""Random numbers by counting: what an element draws depends on its section's seed and on its place in the tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (1 << 32) - 1  # all 32 bits


def draws(seed: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """(count,) int64 in [0, 2^32): those of places `start` and on of a tensor with this seed of 64 bits."""
    places = torch.arange(start, start + count, device=device)
    lower, upper = places & _LOW, places >> 32
    added = (seed >> 32 & _LOW) + upper * 0x9E3779B9
    return _mix(_mix(lower ^ (seed & _LOW)) + added)


def uniform(seed: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """(count,) float32 in [0, 1), in steps of 2^-24: as `draws`."""
    return (draws(seed, start, count, device) >> 8).float() * 2**-24


def _mix(h: Tensor) -> Tensor:
    """A bijection of 32 bits in which each bit of the input changes each of the output half of the time."""
    h = h & _LOW
    h = h ^ h >> 16
    h = (h * 0x7FEB352D) & _LOW
    h = h ^ h >> 15
    h = (h * 0x846CA68B) & _LOW
    return h ^ h >> 16
