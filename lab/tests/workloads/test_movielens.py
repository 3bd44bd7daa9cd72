"""NeuMF on MovieLens 100k has the counted ratings, trains alike from both gradients, and learns; digits do too."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gradsync_lab.workloads import DataUnavailableError, DigitsWorkload, MovieLensWorkload, load, movielens
from lab.tests.workloads.training import assert_trains_alike, opened, opened_or_skip, train


@pytest.fixture(scope="module")
def ratings() -> MovieLensWorkload:
    return opened_or_skip(MovieLensWorkload)


def test_the_ratings_are_the_known_ones(ratings: MovieLensWorkload) -> None:
    samples = ratings._opened[0]
    assert ratings.source == "ml-100k" and samples.shape == (100_000, 3)
    assert np.bincount(samples[:, 2]).tolist() == [0, 6_110, 11_370, 27_145, 34_174, 21_201]
    assert (len(np.unique(samples[:, 0])), len(np.unique(samples[:, 1]))) == (943, 1_682)
    assert len(np.unique(samples[:, :2], axis=0)) == 100_000, "nobody rates a film twice"
    assert hashlib.sha256(samples.tobytes()).hexdigest()[:16] == "dbb1874ec9f705ed"
    assert ratings.num_train == 90_000 and "real" not in ratings.describe()


def test_held_out_likings_are_predicted(ratings: MovieLensWorkload) -> None:
    model, _ = train(ratings, 350, sparse=True)
    found = ratings.evaluate(model)
    assert found["auc"] > 0.74 and found["loss"] < 0.62


def test_both_gradients_train_alike_and_sparse_ones_have_the_rows_of_the_batch() -> None:
    generated = opened(MovieLensWorkload, data="zipf", batch_size=64)
    assert_trains_alike(generated, 20, losses_within=1e-5, weights_within=1e-4)
    model = generated.model(sparse=True)
    pairs, liked = batch = next(generated.batches(0, 1, seed=0))
    assert (pairs.shape, pairs.dtype, liked.shape, liked.dtype) == ((64, 2), torch.int64, (64,), torch.float32)
    assert model(pairs).shape == (64,)
    generated.loss(model, batch).backward()
    for column, tables in enumerate(((model.users, model.users_deep), (model.films, model.films_deep))):
        for table in tables:
            assert torch.equal(table.weight.grad.coalesce().indices()[0], pairs[:, column].unique())
    dense = [p for p in model.parameters() if not p.grad.is_sparse]
    assert len(dense) == 6 and sum(p.numel() for p in model.parameters()) == 174_305
    assert "0.17 M" in generated.describe() and "not real data" in generated.describe()


def archive(folder: Path, text: str) -> Path:
    content = text.encode()
    path = folder / "recbole.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo(movielens.RATINGS_FILE)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return path


def test_users_and_films_count_from_0_and_wrong_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n2\t3\t5\t881250949\n1\t1\t4\t881250950\n"
    monkeypatch.setattr(movielens, "fetch", lambda *arguments: archive(tmp_path, text))
    with pytest.raises(RuntimeError, match=r"got \(2, 2, 3\) ratings, users and films, expected \(100000, 943, 1682\)"):
        movielens.load_ratings(tmp_path)
    for name, number in (("NUM_RATINGS", 2), ("NUM_USERS", 2), ("NUM_FILMS", 3)):
        monkeypatch.setattr(movielens, name, number)
    assert sorted(movielens.load_ratings(tmp_path).tolist()) == [[0, 0, 4], [1, 2, 5]]


def test_without_index_and_cache_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataUnavailableError, match="put recbole-1.2.1.tar.gz .SHA-256 f00a94be.* there"):
        load("movielens", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        load("movielens", data="zipf", dim=0)


def test_digits_are_told_apart() -> None:
    digits = opened(DigitsWorkload)
    assert digits.source == "digits" and digits.num_train == 1_540
    images, labels = next(digits.batches(0, 1, seed=0))
    assert (images.shape, labels.shape, labels.dtype) == ((32, 1, 8, 8), (32,), torch.int64)
    model, losses = train(digits, 100, sparse=False)
    assert len(list(model.parameters())) == 18 and sum(p.numel() for p in model.parameters()) == 830_474
    assert digits.evaluate(model)["accuracy"] > 0.93 and losses[-1] < losses[0] / 2
    assert "0.830 M parameters (18 dense tensors" in digits.describe()
