"""Sampled softmax (Bengio & Senecal, 2008; Jean et al., 2015): scores a target against a few words drawn by Zipf's law.

The full softmax touches every row of the table of scores in every step; sampled softmax touches only the rows of
targets and drawn words, so that the table's gradient is row-sparse.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .data import Array

NEGATIVES = ("own", "shared")  # each rank draws its own words, or in a step all ranks draw the same


def sampled_softmax_loss(
    states: Tensor, rows: Tensor, biases: Tensor, targets: Tensor, negatives: Tensor, vocabulary: int
) -> Tensor:
    """Returns the mean cross entropy, a scalar, of each target among itself and the negatives.

    Each negative's score is lowered by the log of the number of times its word is expected among the draws. So the
    negatives' sum of exponentials estimates, without bias, the sum over all words except the target (Bengio & Senecal,
    2008). The target is there exactly once, so its score stays as it is, and draws of the target itself do not count.

    Args:
        states: (n, dim).
        rows: (n + k, dim), the table's rows of the targets, then of the negatives.
        biases: (n + k,), in the same order.
        targets: (n,) int64.
        negatives: (k,) int64, drawn by `log_uniform`, with repetitions.
        vocabulary: words that can be drawn.
    """
    split = len(targets)
    true = (states * rows[:split]).sum(dim=1) + biases[:split]
    expected = len(negatives) * log_uniform_probability(negatives, vocabulary)
    drawn = torch.addmm(biases[split:] - torch.log(expected), states, rows[split:].T)
    drawn = drawn.masked_fill(targets[:, None] == negatives, -math.inf)
    logits = torch.cat([true[:, None], drawn], dim=1)
    return functional.cross_entropy(logits, torch.zeros_like(targets))


def log_uniform_probability(ids: Tensor, vocabulary: int) -> Tensor:
    """Returns the probability that `log_uniform` draws each of `ids` (int64): log((id + 2) / (id + 1)) / log(vocabulary
    + 1).
    """
    return torch.log1p(1 / (ids + 1)) / math.log(vocabulary + 1)


def log_uniform(rng: np.random.Generator, size: int, vocabulary: int) -> Array:
    """Draws `size` ids below `vocabulary`, int64, with repetitions, about as frequent as words are by Zipf's law."""
    ids = np.exp(rng.random(size) * math.log(vocabulary + 1)).astype(np.int64) - 1
    return np.asarray(np.minimum(ids, vocabulary - 1))  # rounding may reach the end of the last word's share


def rng_of_negatives(kind: str, *, seed: int, step: int, rank: int) -> np.random.Generator:
    """Returns the generator of a step's draws: for `kind` "own" another for each `rank`, for "shared" one for all."""
    stream = 1 if kind == "shared" else 2 + rank  # 0 would be the seed of an epoch's order
    return np.random.default_rng([seed, step, stream])
