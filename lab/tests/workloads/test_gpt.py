"""The language model has dense gradients of a tied table, does not look ahead, and learns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from gradsync_lab.workloads import GPTWorkload, load
from gradsync_lab.workloads.tokens import COUNTS, SEPARATOR, VOCABULARY
from lab.tests.workloads.training import opened, opened_or_skip, train

SMALL: dict[str, Any] = {"data": "zipf", "batch_size": 2, "dim": 64, "context": 16}


def small(**options: Any) -> GPTWorkload:
    return opened(GPTWorkload, **{**SMALL, **options})


@pytest.fixture(scope="module")
def gcide() -> GPTWorkload:
    return opened_or_skip(GPTWorkload)


def test_the_tokens_are_counted_and_use_the_whole_vocabulary(gcide: GPTWorkload) -> None:
    tokens = np.asarray(gcide._opened[0])
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert gcide.source == gcide.options["source"] == "gcide"
    assert (len(tokens), counts[SEPARATOR]) == (COUNTS["tokens"], COUNTS["entries"])
    assert len(counts) == VOCABULARY
    assert (counts > 0).mean() > 0.97  # bytes that do not occur in the text are tokens too
    assert gcide.num_train == 133_087


def test_all_gradients_are_dense_and_the_tied_table_has_one_in_every_row() -> None:
    workload = small()
    model = workload.model(sparse=True)
    workload.loss(model, next(workload.batches(0, 1, seed=0))).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert len(gradients) == 1 + 1 + 2 * 12 + 2
    assert all(g is not None and g.layout is torch.strided and g.abs().sum() > 0 for g in gradients.values())
    table = gradients["tokens.weight"]
    assert table is not None
    assert (table != 0).any(dim=1).all()


def test_a_position_sees_no_token_behind_it() -> None:
    workload = small()
    model = workload.model(sparse=True)
    inputs, targets = next(workload.batches(0, 1, seed=0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])

    def gradient_of_first_losses(inputs: torch.Tensor) -> torch.Tensor:
        masked = torch.where(torch.arange(16) < 5, targets, -100)  # cross_entropy leaves -100 out
        return torch.cat([g.flatten() for g in torch.autograd.grad(model(inputs, masked), list(model.parameters()))])

    changed = inputs.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
    assert torch.equal(gradient_of_first_losses(inputs), gradient_of_first_losses(changed))
    changed[:, 4] = (changed[:, 4] + 1) % VOCABULARY
    assert not torch.equal(gradient_of_first_losses(inputs), gradient_of_first_losses(changed))


def test_evaluation_is_of_the_held_out_windows_and_leaves_the_model_as_it_was() -> None:
    workload = small()
    model = workload.model(sparse=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = workload.evaluate(model)
    batch = workload.batch(np.arange(workload.num_train, workload.num_train + 64))
    with torch.no_grad():
        assert result["loss"] == pytest.approx(float(workload.loss(model, batch)), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_the_model_learns_more_than_the_frequencies_of_tokens(gcide: GPTWorkload) -> None:
    """Windows are a quarter as long, to save time."""
    workload = opened(GPTWorkload, context=16)
    assert workload.evaluate(workload.model(sparse=True))["loss"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    model, losses = train(workload, 60, sparse=True)
    counts = torch.from_numpy(np.bincount(gcide._opened[0], minlength=VOCABULARY) + 1.0)
    targets = workload.batch(np.arange(workload.num_train, workload.num_train + 64))[1]
    of_frequencies = functional.nll_loss((counts / counts.sum()).log().expand(64 * 16, -1), targets.flatten())
    assert max(losses) < 9.5  # no blow-up of the first steps
    assert workload.evaluate(model)["loss"] < float(of_frequencies) - 0.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 100}, "dim must be a positive multiple of 64 .a head of attention., got 100"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"data": "wikipedia"}, "data must be gcide, zipf or any, got 'wikipedia'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("gpt", **options)
