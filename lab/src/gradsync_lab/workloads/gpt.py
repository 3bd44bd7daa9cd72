"""Language model by a small GPT-2 (Radford et al., 2019): the next token of a dictionary's prose.

The table of tokens is read, and scores the next token too: a tied head, whose softmax gives every row a gradient. So
all gradients are dense, and only a compressor makes them sparse: the element-sparse case. Without dropout, the loss
depends on weights and batch alone, so that a step can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .base import Batch, adagrad_of_tables
from .data import Array
from .language import LanguageWorkload
from .tokens import VOCABULARY, open_tokens
from .transformer import NUM_LAYERS, check_dim, num_parameters_of_layers, transformer_layers

HELD_OUT_RATIO = 0.02
EVALUATION_WINDOWS = 64
EVALUATION_BATCH = 16
INITIAL_STD = 0.02  # GPT-2's: with a tied head, scores must begin near 0
DENSE_RATE_RATIO = 0.05  # Adagrad's first steps are about as long as the rate, see `lstm.LSTM_RATE_RATIO`


class GPTLanguageModel(nn.Module):
    """A transformer that returns the loss of the next token; each position sees itself and earlier ones."""

    def __init__(self, dim: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Parameter(torch.empty(context, dim))
        self.layers = transformer_layers(dim)
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.tokens.weight, std=INITIAL_STD)
        nn.init.normal_(self.positions, std=INITIAL_STD)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of `targets` after `inputs`, both (batch, length) int64: a scalar."""
        length = inputs.shape[1]
        states = self.tokens(inputs) + self.positions[:length]
        later = torch.ones(length, length, dtype=torch.bool, device=inputs.device).triu(1)
        for layer in self.layers:
            states = layer(states, src_mask=later, is_causal=True)
        logits = functional.linear(self.norm(states), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, kw_only=True)
class GPTWorkload(LanguageWorkload):
    """Predicts the next token; 1.5 million parameters, 72 % of them in a table that embeds tokens and scores them."""

    name: ClassVar[str] = "gpt"
    real: ClassVar[str] = "gcide"
    held_out_ratio: ClassVar[float] = HELD_OUT_RATIO
    evaluation_samples: ClassVar[int] = EVALUATION_WINDOWS
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH

    batch_size: int = 8  # windows a rank and step
    learning_rate: float = 0.03  # of the table
    context: int = 64  # tokens a window
    dim: int = 128  # row length of the table, and width of the transformer
    data: str = "gcide"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dim(self.dim)
        if self.context < 1:
            raise ValueError(f"context must be at least 1, got {self.context}")

    def open(self, cache: Path) -> tuple[Array, str]:
        return open_tokens(self.data, cache)

    @property
    def num_samples(self) -> int:
        return (len(self._opened[0]) - 1) // self.context  # 1: the last window's last target

    def batch(self, rows: Array) -> Batch:
        """Returns tokens read and next tokens, both (windows, context) int64, of the windows numbered `rows`."""
        positions = rows[:, None] * self.context + np.arange(self.context + 1)
        window = torch.from_numpy(self._opened[0][positions].astype(np.int64))
        return window[:, :-1], window[:, 1:]

    def model(self, *, sparse: bool, seed: int = 0) -> GPTLanguageModel:
        """Returns a fresh model; `sparse` changes nothing, as a tied head has a dense gradient."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return GPTLanguageModel(self.dim, self.context)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns Adagrad; the transformer learns at `DENSE_RATE_RATIO` times the table's rate."""
        return adagrad_of_tables(model, self.learning_rate, dense_ratio=DENSE_RATE_RATIO)

    def describe(self) -> str:
        in_table = VOCABULARY * self.dim
        num_parameters = in_table + num_parameters_of_layers(self.dim) + (self.context + 2) * self.dim
        data = f"{len(self._opened[0]):,} tokens of a dictionary of English (GCIDE), in random order of entries"
        if self.source == "zipf":
            data = f"{len(self._opened[0]):,} GENERATED tokens (Zipf law; not real data)"
        return (
            f"GPT-2 of width {self.dim}, {NUM_LAYERS} layers, {num_parameters / 1e6:.2f} M parameters ("
            f"{in_table / num_parameters:.1%} in a tied table of {VOCABULARY:,} tokens), batch {self.batch_size} "
            f"windows of {self.context} tokens a rank; {data}"
        )
