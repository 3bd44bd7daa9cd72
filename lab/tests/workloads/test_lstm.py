"""The language model has the measured densities of two tables, draws negatives, and learns."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from gradsync_lab.workloads import LSTMWorkload, load
from lab.tests.workloads.training import assert_trains_alike, opened, opened_or_skip, train

SMALL: dict[str, Any] = {"data": "zipf", "vocabulary": 1000, "num_negatives": 64, "batch_size": 8, "dim": 16}


def small(**options: Any) -> LSTMWorkload:
    return opened(LSTMWorkload, **{**SMALL, **options})


@pytest.fixture(scope="module")
def gcide() -> LSTMWorkload:
    return opened_or_skip(LSTMWorkload)


def test_the_words_are_counted_and_ranked_by_frequency(gcide: LSTMWorkload) -> None:
    words = gcide._opened[0]
    counts = np.bincount(words)
    assert gcide.source == gcide.options["source"] == "gcide"
    assert len(words) == 6_294_698
    assert len(counts) == 216_493 + 1
    assert counts[0] == 0
    assert (np.diff(counts[1:]) <= 0).all()
    assert gcide.num_train == 308_439


def test_words_outside_the_vocabulary_are_word_0(gcide: LSTMWorkload) -> None:
    rows = np.arange(2000)
    read, coming = gcide.batch(rows)
    fewer = opened(LSTMWorkload, vocabulary=500)
    ours, _ = fewer.batch(rows)
    assert torch.equal(ours, torch.where(read < 500, read, 0))
    assert (read == 0).double().mean() == pytest.approx(0.019, abs=0.01)
    assert torch.equal(read[:, 1:], coming[:, :-1])
    assert torch.equal(read[1:, 0], coming[:-1, -1])  # windows follow each other in the text


@pytest.mark.parametrize(
    ("options", "world_size", "read", "scored"),
    [
        ({}, 1, 0.0029, 0.0138),
        ({}, 8, 0.0162, 0.0746),
        ({"batch_size": 64}, 1, 0.0052, 0.0156),
        ({"negatives": "shared"}, 8, 0.0166, 0.0255),
        ({"vocabulary": 50_000, "num_negatives": 1024}, 1, 0.0056, 0.0166),
    ],
)
def test_row_densities_are_those_of_the_design(
    gcide: LSTMWorkload, options: dict[str, Any], world_size: int, read: float, scored: float
) -> None:
    workload = opened(LSTMWorkload, **options)
    ranks = [workload.batches(rank, world_size, seed=0) for rank in range(world_size)]
    rows = np.zeros((12, 2))
    for step in rows:
        parts = [next(rank) for rank in ranks]
        step[0] = torch.cat([inputs.flatten() for inputs, _, _ in parts]).unique().numel()
        step[1] = torch.cat([ids.flatten() for _, *scoring in parts for ids in scoring]).unique().numel()
    assert rows.mean(axis=0) / workload.vocabulary == pytest.approx([read, scored], rel=0.05)


def test_tables_have_sparse_gradients_with_the_rows_of_the_batch() -> None:
    workload = small()
    model = workload.model(sparse=True)
    inputs, targets, negatives = batch = next(workload.batches(0, 1, seed=0))
    workload.loss(model, batch).backward()
    scored = torch.cat([targets.flatten(), negatives]).unique()
    for table, rows in ((model.words, inputs.unique()), (model.scores, scored), (model.bias, scored)):
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        assert torch.equal(table.weight.grad.coalesce().indices()[0], rows)
    assert all(p.grad is not None and not p.grad.is_sparse for p in model.lstm.parameters())


def test_own_negatives_differ_between_ranks_and_shared_ones_between_steps_only() -> None:
    def drawn(negatives: str, rank: int) -> list[torch.Tensor]:
        workload = small(negatives=negatives)
        return [batch[2] for batch in islice(workload.batches(rank, 2, seed=3), 3)]

    own, other_own = drawn("own", 0), drawn("own", 1)
    shared, other_shared = drawn("shared", 0), drawn("shared", 1)
    assert not any(torch.equal(a, b) for a, b in zip(own, other_own, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(shared, other_shared, strict=True))
    assert not torch.equal(shared[0], shared[1])
    assert not torch.equal(own[0], own[1])


def test_evaluation_is_the_full_softmax_and_leaves_the_model_as_it_was() -> None:
    workload = small()
    model = workload.model(sparse=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = workload.evaluate(model)
    inputs, targets = workload.batch(np.arange(workload.num_train, workload.num_train + 128))
    with torch.no_grad():
        states = model.lstm(model.words(inputs))[0]
        logits = states @ model.scores.weight.T + model.bias.weight.squeeze(1)
        expected = -logits.log_softmax(dim=-1).gather(2, targets[..., None]).mean()
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_sparse_and_dense_gradients_train_alike() -> None:
    workload = small()
    assert_trains_alike(workload, 20, losses_within=1e-4, weights_within=1e-3)


def test_the_model_learns_english(gcide: LSTMWorkload) -> None:
    workload = opened(LSTMWorkload, vocabulary=10_000, num_negatives=512)
    before = workload.evaluate(workload.model(sparse=True))["loss"]
    model, losses = train(workload, 80, sparse=True)
    assert before == pytest.approx(math.log(10_000), abs=0.05)
    assert max(losses) < before + 1  # no blow-up of the first steps
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 2
    assert workload.evaluate(model)["loss"] < 5.35  # the words' frequencies alone give 5.40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary": 1}, "vocabulary must be at least 2, got 1"),
        ({"unroll": 0}, "unroll must be at least 1, got 0"),
        ({"num_negatives": 0}, "num_negatives must be at least 1, got 0"),
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"dim": 256}, "hidden must be more than dim .* got 256, 256"),
        ({"negatives": "mine"}, "negatives must be own or shared, got 'mine'"),
        ({"data": "wikipedia"}, "data must be gcide, zipf or any, got 'wikipedia'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("lstm", **options)
