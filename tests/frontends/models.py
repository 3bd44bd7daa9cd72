"""Small models, one for each difficulty."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Perceptron(nn.Module):
    """Three layers, a scalar, and a parameter without elements."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale + self.nothing.sum()


class MixedPrecision(nn.Module):
    """Layers of three element types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x.double()).float())
        return self.third(hidden.bfloat16()).float()


class Branches(nn.Module):
    """Three branches; a forward takes the ones that it is told to take, and the last one is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.shared = nn.Linear(3, 3)

    def forward(self, x: Tensor, taken: tuple[int, ...]) -> Tensor:
        total = x[:, :3]
        for number in taken:
            total = total + self.branches[number](x)
        return self.shared(total) if 0 in taken or 1 in taken else total


class Tables(nn.Module):
    """Embeddings with sparse gradients beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 5, sparse=True)
        self.bags = nn.EmbeddingBag(20, 5, mode="sum", sparse=True)
        self.out = nn.Linear(5, 3)
        self.use_words = True

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids).sum(1) if self.use_words else 0
        return self.out(words + self.bags(ids.flatten() % 20, self._offsets(ids)))

    def _offsets(self, ids: Tensor) -> Tensor:
        return torch.arange(ids.shape[0]) * ids.shape[1]


class TiedTable(nn.Module):
    """One matrix is the embedding and the output layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4, sparse=sparse)
        self.head = nn.Linear(4, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


class HiddenTable(nn.Module):
    """A table with sparse gradients that is no `nn.Embedding`: no module announces them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(25, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(F.embedding(ids, self.table, sparse=True).sum(1))


class Convolutions(nn.Module):
    """Channels-last convolutions with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x.to(memory_format=torch.channels_last)))))


class Checkpointed(nn.Module):
    """Two blocks under activation checkpointing."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.out = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class Recursive(nn.Module):
    """Calls itself, so often as it is told, which may differ between the ranks; batch normalisation in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        x = self.norm(self.layer(x))
        out: Tensor = self(x, depth - 1) if depth > 1 else self.out(x)
        return out
