"""Random draws that need no state, in plain torch operations: each is a hash of a seed and of a place."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.kernels.checks import Sections
from gradsync.kernels.draws import GOLDEN, MULTIPLIERS

_WORD = 2**32 - 1


def _mixed(h: Tensor) -> Tensor:
    h = (h ^ h >> 16) * MULTIPLIERS[0] & _WORD
    h = (h ^ h >> 15) * MULTIPLIERS[1] & _WORD
    return h ^ h >> 16


def draws(places: Tensor, seed: int) -> Tensor:
    """32 bits, as int64, for each place, int64, of a tensor whose draws have this 64-bit seed."""
    first = _mixed(places & _WORD ^ seed & _WORD)
    return _mixed(first + (seed >> 32) + (places >> 32) * GOLDEN & _WORD)


def uniform(sections: Sections, device: torch.device | None = None) -> Tensor:
    """A number in [0, 1) for each element of the sections, (numel,) float32: the upper 24 bits of its draw."""
    parts = [torch.empty(0, dtype=torch.int64, device=device)]
    starts = sections.starts or (0,) * len(sections.lengths)
    for length, start, seed in zip(sections.lengths, starts, sections.seeds, strict=True):
        parts.append(draws(torch.arange(start, start + length, device=device), seed))
    return (torch.cat(parts) >> 8).to(torch.float32) * 2.0**-24
