"""Translation by a transformer (Vaswani et al., 2017) with sampled softmax, German to English.

Nearly all of the model are three tables with one row a word: German words read, English words read, English words
scored. Each has its own rows in a step, so a rank has three sparse gradients of different density; attention and the
rest are dense. Without dropout, the loss depends on weights and batch alone, so that a step can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .base import Batch, adagrad_of_tables
from .data import Array
from .language import SampledSoftmaxWorkload
from .phrases import MAX_WORDS, open_pairs
from .softmax import sampled_softmax_loss

PADDING, UNKNOWN, BORDER = 0, 1, 2  # ids below the words' ids; the border opens and closes an English sentence
HELD_OUT_RATIO = 0.02
EVALUATION_PAIRS = 256
EVALUATION_BATCH = 64
NUM_HEADS = 4
FEED_FORWARD_RATIO = 4
INITIAL_STD = 0.1
DENSE_RATE_RATIO = 0.1  # Adagrad's first steps are about as long as the rate, see `lstm.LSTM_RATE_RATIO`


class TranslationModel(nn.Module):
    """A transformer that returns the loss of the next English word, given a German sentence; one layer on each side."""

    def __init__(self, german_words: int, english_words: int, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.german = nn.Embedding(german_words, dim, padding_idx=PADDING, sparse=sparse)
        self.english = nn.Embedding(english_words, dim, padding_idx=PADDING, sparse=sparse)
        self.scores = nn.Embedding(english_words, dim, sparse=sparse)
        self.bias = nn.Embedding(english_words, 1, sparse=sparse)
        self.positions = nn.Parameter(torch.empty(MAX_WORDS + 1, dim))  # 1: the border
        layer: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoderLayer(dim, NUM_HEADS, FEED_FORWARD_RATIO * dim, **layer)
        self.decoder = nn.TransformerDecoderLayer(dim, NUM_HEADS, FEED_FORWARD_RATIO * dim, **layer)
        self.encoded_norm = nn.LayerNorm(dim)
        self.decoded_norm = nn.LayerNorm(dim)
        for weight in (self.german.weight, self.english.weight, self.scores.weight, self.positions):
            nn.init.normal_(weight, std=INITIAL_STD)
        nn.init.zeros_(self.bias.weight)
        with torch.no_grad():
            self.german.weight[PADDING] = 0
            self.english.weight[PADDING] = 0

    def forward(self, german: Tensor, english: Tensor, negatives: Tensor | None = None) -> Tensor:
        """Returns the mean loss, a scalar, of the words of `english` after the first, padding excluded.

        With `negatives` the loss is by sampled softmax, for training; without, over the whole vocabulary.

        Args:
            german: (batch, longest) int64.
            english: (batch, longest + 2) int64, each sentence between two ids `BORDER`.
            negatives: (n,) int64, sampled words' ids above `PADDING`, with repetitions.
        """
        coming = english[:, 1:]
        wanted = coming != PADDING
        states, targets = self._decoded(german, english[:, :-1])[wanted], coming[wanted]
        # Padding is not scored: counted from the first id above padding, ids are in the order of frequency.
        vocabulary, first = self.scores.num_embeddings - 1, PADDING + 1
        if negatives is None:
            logits = torch.addmm(self.bias.weight[first:].squeeze(1), states, self.scores.weight[first:].T)
            return functional.cross_entropy(logits, targets - first)
        ids = torch.cat([targets, negatives])  # one look-up of each table: one sparse gradient
        return sampled_softmax_loss(
            states, self.scores(ids), self.bias(ids).squeeze(1), targets - first, negatives - first, vocabulary
        )

    def _decoded(self, german: Tensor, english: Tensor) -> Tensor:
        """Returns states, (batch, longest, dim), that depend on all of `german` and on `english` up to their own
        word.
        """
        absent = german == PADDING
        read = self.german(german) + self.positions[: german.shape[1]]
        encoded = self.encoded_norm(self.encoder(read, src_key_padding_mask=absent))
        length = english.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=english.device).triu(1)
        # Padding follows the words, so that the causal mask alone hides it from them.
        said = self.english(english) + self.positions[:length]
        decoded = self.decoder(said, encoded, tgt_mask=later, memory_key_padding_mask=absent)
        states: Tensor = self.decoded_norm(decoded)
        return states


@dataclass(frozen=True, kw_only=True)
class NMTWorkload(SampledSoftmaxWorkload):
    """Translates German to English; 3.7 million parameters, 97 % of them in tables of words."""

    name: ClassVar[str] = "nmt"
    real: ClassVar[str] = "ding"
    held_out_ratio: ClassVar[float] = HELD_OUT_RATIO
    evaluation_samples: ClassVar[int] = EVALUATION_PAIRS
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH

    batch_size: int = 64  # pairs of sentences a rank and step
    learning_rate: float = 0.1  # of the tables
    german_words: int = 24_000  # rows: the most frequent words, and PADDING, UNKNOWN (all other words) and BORDER
    english_words: int = 16_000  # rows of both English tables
    dim: int = 64  # row length of the tables, and width of the transformer
    num_negatives: int = 1024
    data: str = "ding"

    def __post_init__(self) -> None:
        super().__post_init__()
        least_words = BORDER + 2
        for option, least in {"german_words": least_words, "english_words": least_words}.items():
            if (value := getattr(self, option)) < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")
        if self.dim < 1 or self.dim % NUM_HEADS:
            raise ValueError(f"dim must be a positive multiple of {NUM_HEADS} (heads of attention), got {self.dim}")

    def open(self, cache: Path) -> tuple[Array, str]:
        return open_pairs(self.data, cache)

    def batch(self, rows: Array) -> Batch:
        """Returns word ids, int64: German (batch, longest), English with a start and an end id (batch, longest + 2)."""
        pairs = self._opened[0][rows]
        german, english = _ids(pairs[:, 0], self.german_words), _ids(pairs[:, 1], self.english_words)
        between = np.pad(english, ((0, 0), (1, 1)), constant_values=PADDING)
        between[:, 0] = BORDER
        between[np.arange(len(rows)), 1 + (english != PADDING).sum(axis=1)] = BORDER
        return torch.from_numpy(german), torch.from_numpy(between)

    @property
    def scored(self) -> range:
        """Returns the ids of all English words, from which negatives are drawn, without padding."""
        return range(PADDING + 1, self.english_words)

    def model(self, *, sparse: bool, seed: int = 0) -> TranslationModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TranslationModel(self.german_words, self.english_words, self.dim, sparse=sparse)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns Adagrad; the transformer learns at a tenth of the tables' rate."""
        return adagrad_of_tables(model, self.learning_rate, dense_ratio=DENSE_RATE_RATIO)

    def num_tokens(self, batch: Batch) -> int:
        """Returns the number of English words that have a loss, with the closing border and without padding."""
        return int((batch[1][:, 1:] != PADDING).sum())

    def describe(self) -> str:
        in_tables = self.german_words * self.dim + self.english_words * (2 * self.dim + 1)
        square = self.dim * self.dim
        # Encoder and decoder: one and two attentions of 4 squares, feed-forward; their biases and all the norms.
        dense = (12 + 4 * FEED_FORWARD_RATIO) * square + (32 + 2 * FEED_FORWARD_RATIO) * self.dim
        num_parameters = in_tables + dense + (MAX_WORDS + 1) * self.dim
        data = f"{self.num_samples:,} pairs of a dictionary (Ding) and of LibreOffice's help, German to English"
        if self.source == "zipf":
            data = f"{self.num_samples:,} GENERATED pairs (Zipf law; not real data)"
        return (
            f"transformer of width {self.dim}, 1 + 1 layers, {num_parameters / 1e6:.2f} M parameters ("
            f"{in_tables / num_parameters:.1%} in tables of {self.german_words:,} and {self.english_words:,} words), "
            f"{self.num_negatives} {self.negatives} negatives, batch {self.batch_size} pairs a rank; {data}"
        )


def _ids(ranks: Array, num_words: int) -> Array:
    """Maps word ranks (batch, 60), 0: no word, to ids (batch, longest row) int64; ids >= `num_words` are UNKNOWN."""
    words = ranks[:, : (ranks != 0).sum(axis=1).max()].astype(np.int64)
    ids = np.where(words == 0, PADDING, words + BORDER)
    return np.where(ids < num_words, ids, UNKNOWN)
