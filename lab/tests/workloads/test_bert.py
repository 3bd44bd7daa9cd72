"""The classifier has the measured table densities, ignores padding, and updates alike from both kinds of gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gradsync_lab.workloads import BertWorkload, load
from gradsync_lab.workloads.entries import CLASS, PADDING, UNKNOWN, VOCABULARY
from lab.tests.workloads.training import assert_trains_alike, opened, opened_or_skip, train

SMALL: dict[str, Any] = {"data": "zipf", "batch_size": 8, "dim": 64}


def small(**options: Any) -> BertWorkload:
    return opened(BertWorkload, **{**SMALL, **options})


@pytest.fixture(scope="module")
def gcide() -> BertWorkload:
    return opened_or_skip(BertWorkload)


def test_the_entries_are_counted_and_cut_into_known_pieces(gcide: BertWorkload) -> None:
    entries = np.asarray(gcide._opened[0])
    labels, pieces = entries[:, 0], entries[:, 1:]
    assert gcide.source == gcide.options["source"] == "gcide"
    assert np.bincount(labels).tolist() == [55_761, 24_505, 15_493, 2_814]
    assert gcide.num_train == 96_602
    assert (pieces[:, 0] == CLASS).all()
    assert (pieces != UNKNOWN).all()
    assert pieces.max() == VOCABULARY - 1
    assert len(np.unique(pieces)) > 0.95 * VOCABULARY
    lengths = (pieces != PADDING).sum(axis=1)
    assert (lengths.min(), lengths.max()) == (6, 64)
    assert (np.diff((pieces != PADDING).astype(int), axis=1) <= 0).all()  # padding only at the end


@pytest.mark.parametrize(("world_size", "density"), [(1, 0.0157), (2, 0.0282), (4, 0.0477), (8, 0.0783)])
def test_row_densities_are_those_of_the_design(gcide: BertWorkload, world_size: int, density: float) -> None:
    """Densities are within a tenth, as the design's figures are for BERT's own vocabulary, not one trained on the
    text.
    """
    ranks = [gcide.batches(rank, world_size, seed=0) for rank in range(world_size)]
    rows = [torch.cat([next(rank)[0].flatten() for rank in ranks]) for _ in range(12)]
    touched = [pieces[pieces != PADDING].unique().numel() for pieces in rows]
    assert np.mean(touched) / VOCABULARY == pytest.approx(density, rel=0.1)


def test_the_table_has_a_sparse_gradient_with_the_rows_of_the_batch_and_never_padding() -> None:
    workload = small()
    model = workload.model(sparse=True)
    pieces, labels = batch = next(workload.batches(0, 1, seed=0))
    assert (pieces == PADDING).any()
    assert labels.shape == (8,)
    workload.loss(model, batch).backward()
    gradient = model.pieces.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert torch.equal(gradient.coalesce().indices()[0], pieces[pieces != PADDING].unique())
    rest = [parameter for name, parameter in model.named_parameters() if name != "pieces.weight"]
    assert len(rest) == 1 + 2 * 12 + 2 * 2 + 2 * 2
    assert all(p.grad is not None and not p.grad.is_sparse and p.grad.abs().sum() > 0 for p in rest)


def test_a_batch_is_as_wide_as_its_longest_entry_and_padding_changes_no_logit() -> None:
    workload = small()
    model = workload.model(sparse=True)
    rows = np.arange(8)
    pieces, labels = workload.batch(rows)
    lengths = (pieces != PADDING).sum(dim=1)
    assert pieces.shape[1] == lengths.max() > lengths.min()
    assert labels.tolist() == workload._opened[0][rows, 0].tolist()
    with torch.no_grad():
        alone = torch.cat([model(workload.batch(rows[row : row + 1])[0]) for row in rows])
        torch.testing.assert_close(model(pieces), alone, rtol=0, atol=1e-5)


def test_evaluation_covers_the_held_out_entries_and_leaves_the_model_as_it_was() -> None:
    workload = small()
    model = workload.model(sparse=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = workload.evaluate(model)
    batch = workload.batch(np.arange(workload.num_train, len(workload._opened[0])))
    with torch.no_grad():
        expected = workload.loss(model, batch)
        right = (model(batch[0]).argmax(dim=1) == batch[1]).double().mean()
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float(right))
    assert model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_sparse_and_dense_gradients_train_alike() -> None:
    workload = small()
    assert_trains_alike(workload, 10, losses_within=1e-4, weights_within=1e-3)


def test_the_model_learns_the_part_of_speech(gcide: BertWorkload) -> None:
    workload = opened(BertWorkload, batch_size=32, dim=64)
    assert workload.evaluate(workload.model(sparse=True))["loss"] == pytest.approx(math.log(4), abs=0.2)
    model, losses = train(workload, 60, sparse=True)
    result = workload.evaluate(model)
    assert max(losses) < 2.5  # no blow-up of the first steps
    assert result["accuracy"] > 0.7  # always "noun" is right for 0.560
    assert result["loss"] < 0.75  # the classes' frequencies alone give 1.08


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 100}, "dim must be a positive multiple of 64 .a head of attention., got 100"),
        ({"dim": 0}, "dim must be a positive multiple of 64 .* got 0"),
        ({"data": "wikipedia"}, "data must be gcide, zipf or any, got 'wikipedia'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("bert", **options)
