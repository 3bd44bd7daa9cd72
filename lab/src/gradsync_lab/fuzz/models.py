"""Small models made of a case's parts; each part adds its own term to the loss."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Part

BATCH, IDS = 3, 5
SPATIAL = 5  # height and width of images


class FuzzModel(nn.Module):
    """A model whose forward returns the loss of one micro-batch, (), for a step, a rank and a micro-batch."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.case = case
        self.parts = nn.ModuleDict({part.key: _module_of(part) for part in case.parts})
        for part in case.parts:
            _freeze(self.parts[part.key], part)
            for parameter in self.parts[part.key].parameters():
                if parameter.requires_grad and part.hook != "none":
                    parameter.register_hook(_doubled if part.hook == "new" else _doubled_in_place)

    def forward(self, step: int, rank: int, micro: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part in self.case.parts:
            if part.takes_part(step, rank, micro):
                seed = Random(f"{self.case.seed} {part.key} {step} {rank} {micro}").getrandbits(48)
                output = self.parts[part.key](torch.Generator().manual_seed(seed))
                total = total + output.double().square().mean()
        spoilt = self.case.spoilt
        if spoilt is not None and (spoilt.step, spoilt.rank) == (step, rank):
            total = total * torch.nan
        return total * self.case.magnitude

    def is_announced(self, name: str) -> bool:
        """Whether the module of a parameter says that its gradients are sparse, so that all ranks know that."""
        module = self.get_submodule(name.rpartition(".")[0])
        return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse

    def freeze(self, step: int) -> None:
        """Freezes the parts that are due before a step."""
        for part in self.case.parts:
            if part.frozen_from == step:
                self.parts[part.key].requires_grad_(False)


class _Perceptron(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        count = 1 if part.shared else part.depth
        self.width, self.depth, self.dtype = part.width, part.depth, _dtype(part)
        self.layers = nn.ModuleList(nn.Linear(part.width, part.width, dtype=self.dtype) for _ in range(count))
        if part.memory == "strided":
            for layer in self.layers:
                assert isinstance(layer, nn.Linear)
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(BATCH, self.width, generator=generator).to(self.dtype)
        for number in range(self.depth):
            x = torch.tanh(self.layers[number % len(self.layers)](x))
        return x


class _Table(nn.Module):
    """An embedding, a bag of them, or one whose matrix is the output layer, too."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.rows, self.kind = part.rows, part.kind
        of_rows: Any = partial(nn.EmbeddingBag, mode="sum") if part.kind == "bag" else nn.Embedding
        self.table = of_rows(part.rows, part.width, sparse=part.sparse, dtype=_dtype(part))

    def forward(self, generator: torch.Generator) -> Tensor:
        fewest = 1 if self.kind == "bag" else 0  # bags of one shape cannot be empty
        count = int(torch.randint(fewest, IDS + 1, (), generator=generator))
        ids = torch.randint(self.rows, (BATCH, count), generator=generator)
        found: Tensor = self.table(ids)
        if self.kind == "tied":
            found = F.linear(found, self.table.weight)
        weights = torch.randn(found.shape, generator=generator).to(found.dtype)
        return torch.tanh((found * weights).sum() / (BATCH * IDS)).reshape(1)  # 0 without ids, no NaN


class _Convolution(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.width, self.dtype = part.width, _dtype(part)
        self.format = torch.channels_last if part.memory == "strided" else torch.contiguous_format
        self.first = nn.Conv2d(2, part.width, 3, dtype=self.dtype)
        self.norm = nn.BatchNorm2d(part.width, dtype=self.dtype)
        self.to(memory_format=self.format)  # type: ignore[call-overload]  # it knows layouts of tensors only

    def forward(self, generator: torch.Generator) -> Tensor:
        x = torch.randn(BATCH, 2, SPATIAL, SPATIAL, generator=generator).to(self.dtype)
        return torch.sigmoid(self.norm(self.first(x.contiguous(memory_format=self.format))))


class _Single(nn.Module):
    """A scalar, or a parameter without elements."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        shape = (0, part.width) if part.kind == "empty" else ()
        self.value = nn.Parameter(torch.randn(shape, dtype=_dtype(part)))

    def forward(self, generator: torch.Generator) -> Tensor:
        return self.value.sum() + torch.randn((), generator=generator)


def _module_of(part: Part) -> nn.Module:
    match part.kind:
        case "mlp":
            return _Perceptron(part)
        case "conv":
            return _Convolution(part)
        case "scalar" | "empty":
            return _Single(part)
    return _Table(part)


def _dtype(part: Part) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


def _freeze(module: nn.Module, part: Part) -> None:
    first = part.frozen == "first" and next(iter(module.parameters()))
    for parameter in module.parameters():
        if part.frozen == "all" or parameter is first:
            parameter.requires_grad_(False)


def _doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


def _doubled_in_place(gradient: Tensor) -> Tensor:
    return gradient.mul_(2)
