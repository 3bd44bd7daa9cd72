"""Text classification by a small BERT (Devlin et al., 2019): which part of speech does a dictionary entry explain?

Nine tenths of the model are the table of WordPieces, whose gradient has the rows of a batch's pieces; attention and the
rest are dense. The model has no head tied to the table, which would make that gradient dense, and is not pre-trained.
Without dropout, the loss depends on weights and batch alone, so that a step can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .base import Batch, adagrad_of_tables
from .classification import ClassificationWorkload
from .data import Array
from .entries import LABELS, MAX_PIECES, PADDING, VOCABULARY, open_entries
from .transformer import NUM_LAYERS, check_dim, num_parameters_of_layers, transformer_layers

HELD_OUT_RATIO = 0.02
EVALUATION_BATCH = 64
INITIAL_STD = 0.1
DENSE_RATE_RATIO = 0.1  # Adagrad's first steps are about as long as the rate, see `lstm.LSTM_RATE_RATIO`


class BertClassifier(nn.Module):
    """A BERT encoder that classifies a text by the state of its [CLS] piece.

    Layers normalize their inputs instead of their outputs (pre-norm).
    """

    def __init__(self, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.pieces = nn.Embedding(VOCABULARY, dim, padding_idx=PADDING, sparse=sparse)
        self.positions = nn.Parameter(torch.empty(MAX_PIECES, dim))
        self.embedded_norm = nn.LayerNorm(dim)
        self.layers = transformer_layers(dim)
        self.encoded_norm = nn.LayerNorm(dim)
        self.pooler = nn.Linear(dim, dim)
        self.classifier = nn.Linear(dim, len(LABELS))
        nn.init.normal_(self.pieces.weight, std=INITIAL_STD)
        nn.init.normal_(self.positions, std=INITIAL_STD)
        with torch.no_grad():
            self.pieces.weight[PADDING] = 0

    def forward(self, pieces: Tensor) -> Tensor:
        """Returns logits (batch, 4) float32 for `pieces` (batch, longest) int64."""
        absent = pieces == PADDING
        states = self.embedded_norm(self.pieces(pieces) + self.positions[: pieces.shape[1]])
        for layer in self.layers:
            states = layer(states, src_key_padding_mask=absent)
        pooled = torch.tanh(self.pooler(self.encoded_norm(states[:, 0])))
        logits: Tensor = self.classifier(pooled)
        return logits


@dataclass(frozen=True, kw_only=True)
class BertWorkload(ClassificationWorkload):
    """Classifies dictionary entries by part of speech: noun, adjective, verb or adverb.

    The model has 4.3 million parameters, 90 % of them in the table of WordPieces.
    """

    name: ClassVar[str] = "bert"
    real: ClassVar[str] = "gcide"
    held_out_ratio: ClassVar[float] = HELD_OUT_RATIO
    evaluation_samples: ClassVar[int | None] = None  # all held-out entries
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH

    batch_size: int = 32  # entries a rank and step
    learning_rate: float = 0.05  # of the table
    dim: int = 128  # row length of the table, and width of the transformer
    data: str = "gcide"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dim(self.dim)

    def open(self, cache: Path) -> tuple[Array, str]:
        return open_entries(self.data, cache)

    def batch(self, rows: Array) -> Batch:
        """Returns pieces (batch, longest) and labels (batch,), int64."""
        entries = self._opened[0][rows].astype(np.int64)
        longest = int((entries[:, 1:] != PADDING).sum(axis=1).max())
        table = torch.from_numpy(entries)
        return table[:, 1 : 1 + longest], table[:, 0]

    def model(self, *, sparse: bool, seed: int = 0) -> BertClassifier:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return BertClassifier(self.dim, sparse=sparse)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns Adagrad; the transformer learns at a tenth of the table's rate."""
        return adagrad_of_tables(model, self.learning_rate, dense_ratio=DENSE_RATE_RATIO)

    def describe(self) -> str:
        in_table = VOCABULARY * self.dim
        rest = self.dim**2 + (MAX_PIECES + 5 + len(LABELS)) * self.dim + len(LABELS)  # positions, two norms, the head
        num_parameters = in_table + num_parameters_of_layers(self.dim) + rest
        data = f"{self.num_samples:,} entries of a dictionary of English (GCIDE), label: part of speech"
        if self.source == "zipf":
            data = f"{self.num_samples:,} GENERATED entries (Zipf law; not real data)"
        return (
            f"BERT of width {self.dim}, {NUM_LAYERS} layers, {num_parameters / 1e6:.2f} M parameters ("
            f"{in_table / num_parameters:.1%} in a table of {VOCABULARY:,} WordPieces), batch {self.batch_size} "
            f"entries of up to {MAX_PIECES} pieces a rank; {data}"
        )
