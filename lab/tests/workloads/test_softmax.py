"""Sampled softmax equals its formula, its draws follow their law, and it has the optimum of the full softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gradsync_lab.workloads.softmax import log_uniform, log_uniform_probability, sampled_softmax_loss


def test_words_are_drawn_as_often_as_the_correction_expects() -> None:
    vocabulary, draws = 50, 200_000
    counts = np.bincount(log_uniform(np.random.default_rng(0), draws, vocabulary), minlength=vocabulary)
    expected = draws * log_uniform_probability(torch.arange(vocabulary), vocabulary).double().numpy()
    assert len(counts) == vocabulary
    assert expected.sum() == pytest.approx(draws, rel=1e-6)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_sampled_softmax_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary, targets, negatives = 10, torch.tensor([3, 0]), torch.tensor([0, 7, 3, 7])
    states, table, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 4), (10, 4), (10,)))
    ids = torch.cat([targets, negatives])

    def corrected(position: int, word: int) -> float:
        probability = (math.log(word + 2) - math.log(word + 1)) / math.log(vocabulary + 1)
        expected_count = 1 if word == targets[position] else len(negatives) * probability
        return float(states[position] @ table[word] + bias[word]) - math.log(expected_count)

    expected = 0.0
    for position, target in enumerate(targets.tolist()):
        among = [target] + [word for word in negatives.tolist() if word != target]
        expected += math.log(sum(math.exp(corrected(position, word)) for word in among)) - corrected(position, target)
    loss = sampled_softmax_loss(states, table[ids], bias[ids], targets, negatives, vocabulary)
    assert float(loss) == pytest.approx(expected / 2, rel=1e-5)


def test_sampled_softmax_has_the_optimum_of_the_full_one() -> None:
    """Biases trained on draws from a known law end at its logarithm; without the correction they would not."""
    law = torch.tensor([0.05, 0.15, 0.3, 0.5], dtype=torch.float64)  # against the sampler's order
    bias = torch.zeros(4, requires_grad=True)
    rng, states, rows = np.random.default_rng(0), torch.zeros(512, 1), torch.zeros(544, 1)
    optimizer = torch.optim.Adam([bias], lr=0.02)
    path = []
    for _ in range(500):
        targets = torch.from_numpy(rng.choice(4, size=512, p=law.numpy()))
        negatives = torch.from_numpy(log_uniform(rng, 32, 4))
        optimizer.zero_grad()
        sampled_softmax_loss(states, rows, bias[torch.cat([targets, negatives])], targets, negatives, 4).backward()
        optimizer.step()
        path.append(bias.detach().double().softmax(dim=0))
    torch.testing.assert_close(torch.stack(path[250:]).mean(dim=0), law, rtol=0, atol=0.02)
