"""The layers that `bert` and `gpt` share: self-attention and feed-forward, with normalized inputs (pre-norm).

Without dropout, the loss depends on weights and batch alone, so that a step can be repeated.
"""

from __future__ import annotations

from torch import nn

NUM_LAYERS = 2
HEAD_DIM = 64  # BERT's and GPT-2's
FEED_FORWARD_RATIO = 4


def transformer_layers(dim: int) -> nn.ModuleList:
    """Returns `NUM_LAYERS` encoder layers for states of (batch, length, dim)."""
    return nn.ModuleList(
        nn.TransformerEncoderLayer(
            dim,
            dim // HEAD_DIM,
            FEED_FORWARD_RATIO * dim,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        for _ in range(NUM_LAYERS)
    )


def num_parameters_of_layers(dim: int) -> int:
    """Returns the number of parameters of all layers: 4 attention matrices, feed-forward, biases and norms in each."""
    return NUM_LAYERS * ((4 + 2 * FEED_FORWARD_RATIO) * dim**2 + (9 + FEED_FORWARD_RATIO) * dim)


def check_dim(dim: int) -> None:
    """Raises ValueError unless the width is a positive multiple of `HEAD_DIM`."""
    if dim < 1 or dim % HEAD_DIM:
        raise ValueError(f"dim must be a positive multiple of {HEAD_DIM} (a head of attention), got {dim}")
