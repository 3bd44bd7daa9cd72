"""The layers that `bert` and `gpt` share: self-attention and feed-forward, normalized before, not after.

There is no dropout: the loss depends on weights and batch alone, so that a step can be repeated.
"""

from __future__ import annotations

from torch import nn

NUM_LAYERS = 2
HEAD_DIM = 64  # BERT's and GPT-2's
FEED_FORWARD_RATIO = 4


def transformer_layers(dim: int) -> nn.ModuleList:
    """For states of (batch, length, dim)."""
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
    """Attention of 4 squares, feed-forward, biases, norms; of all layers."""
    return NUM_LAYERS * ((4 + 2 * FEED_FORWARD_RATIO) * dim**2 + (9 + FEED_FORWARD_RATIO) * dim)


def check_dim(dim: int) -> None:
    """Refuses widths that are not of whole heads."""
    if dim < 1 or dim % HEAD_DIM:
        raise ValueError(f"dim must be a positive multiple of {HEAD_DIM} (a head of attention), got {dim}")
