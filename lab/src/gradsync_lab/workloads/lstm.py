"""Word-level language model with sampled softmax (Jozefowicz et al., 2016) on dictionary prose.

Nearly all of the model are two tables with one row a word: one embeds the words read, the other scores the next word. A
step touches the rows of the words it reads in the first table, of its targets and of the sampled negatives in the
second: two sparse gradients with different rows.

Every window starts from a zero state: the loss depends on weights and batch alone, so that a step can be repeated,
resumed, or taken in between to measure, without disturbing the training.
"""

from __future__ import annotations

import warnings
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
from .gcide import open_words
from .language import SampledSoftmaxWorkload
from .softmax import sampled_softmax_loss

HELD_OUT_RATIO = 0.02
EVALUATION_WINDOWS = 128  # a full softmax over 100,000 words costs about 0.5 ms a word
EVALUATION_BATCH = 8
INITIAL_STD = 0.1
# Adagrad's first steps are about as long as the rate: at the tables' rate the projection alone would shift a state by
# 256 times that. With one rate of 0.1 for all, the loss is 40 over the first ten steps, with this 10.8.
LSTM_RATE_RATIO = 0.1


class LSTMLanguageModel(nn.Module):
    """An embedding of words, an LSTM with projection (Sak et al., 2014) and a table that scores the next word."""

    def __init__(self, vocabulary: int, dim: int, hidden: int, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim, sparse=sparse)
        self.lstm = nn.LSTM(dim, hidden, proj_size=dim, batch_first=True)
        self.scores = nn.Embedding(vocabulary, dim, sparse=sparse)
        self.bias = nn.Embedding(vocabulary, 1, sparse=sparse)
        nn.init.normal_(self.words.weight, std=INITIAL_STD)
        nn.init.normal_(self.scores.weight, std=INITIAL_STD)
        nn.init.zeros_(self.bias.weight)
        with warnings.catch_warnings():
            # Once a process, torch warns that oneDNN has no LSTM with projection; its own is faster than oneDNN's
            # without (4.7 against 5.6 ms forward), so there is nothing to act upon.
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN", UserWarning)
            self.lstm(torch.zeros(1, 1, dim))

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor | None = None) -> Tensor:
        """Returns the mean loss of `targets` after `inputs`, both (batch, unroll) int64: a scalar.

        With `negatives` (n,) int64 the loss is by sampled softmax, for training; without, over the whole vocabulary.
        """
        states = self.lstm(self.words(inputs))[0].flatten(0, 1)
        targets = targets.flatten()
        if negatives is None:
            logits = torch.addmm(self.bias.weight.squeeze(1), states, self.scores.weight.T)
            return functional.cross_entropy(logits, targets)
        ids = torch.cat([targets, negatives])  # one look-up of each table: one sparse gradient
        return sampled_softmax_loss(
            states, self.scores(ids), self.bias(ids).squeeze(1), targets, negatives, self.words.num_embeddings
        )


@dataclass(frozen=True, kw_only=True)
class LSTMWorkload(SampledSoftmaxWorkload):
    """Predicts the next word; 13 million parameters, 99 % of them in tables of words."""

    name: ClassVar[str] = "lstm"
    real: ClassVar[str] = "gcide"
    held_out_ratio: ClassVar[float] = HELD_OUT_RATIO
    evaluation_samples: ClassVar[int] = EVALUATION_WINDOWS
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH

    batch_size: int = 32  # windows a rank and step
    learning_rate: float = 0.1  # of the tables
    unroll: int = 20  # words a window
    vocabulary: int = 100_000  # the most frequent words; all others are word 0
    dim: int = 64  # row length of the tables, and width of the LSTM's projection
    hidden: int = 256  # cells of the LSTM
    num_negatives: int = 2048
    data: str = "gcide"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, least in {"unroll": 1, "vocabulary": 2, "dim": 1}.items():
            if (value := getattr(self, option)) < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")
        if self.hidden <= self.dim:
            raise ValueError(
                f"hidden must be more than dim (it is projected down to it), got {self.hidden}, {self.dim}"
            )

    def open(self, cache: Path) -> tuple[Array, str]:
        return open_words(self.data, cache)

    @property
    def num_samples(self) -> int:
        return (len(self._opened[0]) - 1) // self.unroll  # 1: the last window's last target

    def batch(self, rows: Array) -> Batch:
        """Returns words read and next words, both (windows, unroll) int64, of the windows `rows`, without negatives."""
        positions = rows[:, None] * self.unroll + np.arange(self.unroll + 1)
        words = self._opened[0][positions].astype(np.int64)
        words[words >= self.vocabulary] = 0
        window = torch.from_numpy(words)
        return window[:, :-1], window[:, 1:]

    @property
    def scored(self) -> range:
        """Returns the ids of all words, from which negatives are drawn."""
        return range(self.vocabulary)

    def model(self, *, sparse: bool, seed: int = 0) -> LSTMLanguageModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LSTMLanguageModel(self.vocabulary, self.dim, self.hidden, sparse=sparse)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns Adagrad; the LSTM learns at a tenth of the tables' rate."""
        return adagrad_of_tables(model, self.learning_rate, dense_ratio=LSTM_RATE_RATIO)

    def describe(self) -> str:
        in_tables = self.vocabulary * (2 * self.dim + 1)
        num_parameters = in_tables + self.hidden * (9 * self.dim + 8)  # the LSTM's matrices and two biases
        data = f"{len(self._opened[0]):,} words of a dictionary of English (GCIDE), in random order of entries"
        if self.source == "zipf":
            data = f"{len(self._opened[0]):,} GENERATED words (Zipf law; not real data)"
        return (
            f"LSTM {self.dim} -> {self.hidden} -> {self.dim}, {num_parameters / 1e6:.2f} M parameters ("
            f"{in_tables / num_parameters:.1%} in tables of {self.vocabulary:,} words), {self.num_negatives} "
            f"{self.negatives} negatives, batch {self.batch_size} windows of {self.unroll} words a rank; {data}"
        )
