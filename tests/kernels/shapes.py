"""Patterns of non-zero elements that an owner map must balance."""

from __future__ import annotations

import torch
from torch import Tensor


def random_indices(size: int, density: float, seed: int = 0) -> Tensor:
    chosen = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density
    return chosen.nonzero().flatten()


def zipf_rows(size: int, dim: int, hits: int) -> Tensor:
    """Returns the indices of all elements in the rows that `hits` draws from a Zipf law touch."""
    rows = size // dim
    weights = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
    drawn = torch.multinomial(weights, hits, replacement=True, generator=torch.Generator().manual_seed(3)).unique()
    return (drawn[:, None] * dim + torch.arange(dim)).flatten()


def columns_of_2048(size: int, columns: Tensor) -> Tensor:
    return (torch.arange(size // 2048)[:, None] * 2048 + columns).flatten()
