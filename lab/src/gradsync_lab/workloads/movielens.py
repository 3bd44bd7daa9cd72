"""NeuMF (He et al., 2017) on MovieLens 100k: a recommender with small tables, of which a step touches many rows.

The ratings (Harper & Konstan, 2015, by GroupLens) are the example data in the source distribution of RecBole 1.2.1 on
PyPI. GroupLens allows research with them, not commercial use, and asks that they are not passed on: they are fetched by
who uses this workload, and no file of this project contains them.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .base import Batch, DataWorkload, adagrad_of_tables, evaluating, roc_auc
from .data import Array, SourceArchive, cached_array, fetch, real_or_zipf, zipf_ranks

ARCHIVE = SourceArchive(
    package="recbole",
    version="1.2.1",
    sha256="f00a94be7bf1c62d7cb5ac52bdd7c6355a499b1eb7e05d652f110fffa9a9d0a8",
)
RATINGS_FILE = "recbole-1.2.1/recbole/dataset_example/ml-100k/ml-100k.inter"
NUM_RATINGS, NUM_USERS, NUM_FILMS = 100_000, 943, 1_682
LIKED = 4  # a rating from here on, of 1 to 5, is the positive class
HELD_OUT_RATIO = 0.1
SPLIT_SEED = 0
ZIPF_EXPONENT = 0.9  # of generated films' and users' frequencies
HIDDEN = (64, 32)
INITIAL_STD = 0.01  # of tables, as in the paper


class NeuMF(nn.Module):
    """A network for the logit that a user likes a film: products of factors, and a perceptron of other factors."""

    def __init__(self, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.users, self.films = (
            nn.Embedding(NUM_USERS, dim, sparse=sparse),
            nn.Embedding(NUM_FILMS, dim, sparse=sparse),
        )
        self.users_deep = nn.Embedding(NUM_USERS, dim, sparse=sparse)
        self.films_deep = nn.Embedding(NUM_FILMS, dim, sparse=sparse)
        wide, narrow = HIDDEN
        self.perceptron = nn.Sequential(nn.Linear(2 * dim, wide), nn.ReLU(), nn.Linear(wide, narrow), nn.ReLU())
        self.head = nn.Linear(dim + narrow, 1)
        for table in (self.users, self.films, self.users_deep, self.films_deep):
            nn.init.normal_(table.weight, std=INITIAL_STD)

    def forward(self, pairs: Tensor) -> Tensor:
        """Returns logits (batch,) float32 for `pairs` (batch, 2) int64 of a user and a film."""
        user, film = pairs.unbind(dim=1)
        product = self.users(user) * self.films(film)
        deep = self.perceptron(torch.cat([self.users_deep(user), self.films_deep(film)], dim=1))
        logits: Tensor = self.head(torch.cat([product, deep], dim=1)).squeeze(1)
        return logits


@dataclass(frozen=True, kw_only=True)
class MovieLensWorkload(DataWorkload):
    """Predicts whether a user gives a film 4 stars or more; 0.17 million parameters, 96 % of them in four tables."""

    name: ClassVar[str] = "movielens"
    real: ClassVar[str] = "ml-100k"
    held_out_ratio: ClassVar[float] = HELD_OUT_RATIO

    batch_size: int = 256
    learning_rate: float = 0.05
    dim: int = 32  # row length of the tables
    data: str = "ml-100k"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim < 1:
            raise ValueError(f"dim must be at least 1, got {self.dim}")

    def open(self, cache: Path) -> tuple[Array, str]:
        return real_or_zipf(
            self.data, self.real, lambda: load_ratings(cache), zipf_ratings, what="ratings", known=NUM_RATINGS
        )

    def batch(self, rows: Array) -> Batch:
        """Returns pairs of user and film, (n, 2) int64, and 1 where the user liked the film, (n,) float32."""
        ratings = torch.from_numpy(self._opened[0][rows].astype(np.int64))
        return ratings[:, :2], (ratings[:, 2] >= LIKED).float()

    def model(self, *, sparse: bool, seed: int = 0) -> NeuMF:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return NeuMF(self.dim, sparse=sparse)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pairs, liked = batch
        return functional.binary_cross_entropy_with_logits(model(pairs), liked)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return adagrad_of_tables(model, self.learning_rate, dense_ratio=1.0)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns loss and AUC over the held-out tenth."""
        pairs, liked = self.batch(np.arange(self.num_train, self.num_samples))
        with evaluating(model) as device:
            logits = model(pairs.to(device)).cpu()
        loss = functional.binary_cross_entropy_with_logits(logits, liked)
        return {"loss": float(loss), "auc": roc_auc(logits, liked > 0)}

    def describe(self) -> str:
        num_parameters = sum(parameter.numel() for parameter in self.model(sparse=False).parameters())
        data = "100,000 ratings of films (MovieLens 100k), label: 4 stars or more"
        if self.source == "zipf":
            data = f"{self.num_samples:,} GENERATED ratings (Zipf law; not real data)"
        return (
            f"NeuMF, {num_parameters / 1e6:.2f} M parameters ({NUM_USERS} users and {NUM_FILMS:,} films in four tables "
            f"of rows of {self.dim}), batch {self.batch_size} a rank; {data}"
        )


def load_ratings(cache: Path) -> Array:
    """Returns the ratings, (100000, 3) int32, in a fixed random order: user, film, both from 0 on, and 1 to 5 stars.

    Raises:
        DataUnavailableError: neither the cache nor the package index has the ratings.
        RuntimeError: they are not the known ones.
    """
    path = cache / "movielens-1.npy"
    ratings = cached_array(path, lambda: _prepare(fetch(ARCHIVE, cache)))
    if ratings.shape != (NUM_RATINGS, 3) or ratings.dtype != np.int32:
        raise RuntimeError(
            f"{path} holds {ratings.dtype} {ratings.shape}, expected int32 {(NUM_RATINGS, 3)}; delete it and try again"
        )
    return ratings


def zipf_ratings(seed: int = 0) -> Array:
    """Returns seeded ratings for tests without the real ones, (100000, 3) int32, from hidden scores."""
    rng = np.random.default_rng(seed)
    users, films = (zipf_ranks(rng, NUM_RATINGS, types, ZIPF_EXPONENT) for types in (NUM_USERS, NUM_FILMS))
    score = rng.standard_normal(NUM_USERS)[users] + rng.standard_normal(NUM_FILMS)[films]
    stars = 1 + np.searchsorted(np.quantile(score, [0.06, 0.17, 0.45, 0.79]), score)
    return np.stack([users, films, stars], axis=1).astype(np.int32)


def _prepare(archive: Path) -> Array:
    with tarfile.open(archive) as tar:
        file = tar.extractfile(RATINGS_FILE)
        assert file is not None, f"{RATINGS_FILE} is a plain file in the archive of this digest"
        ratings = np.loadtxt(file, dtype=np.float64, skiprows=1, usecols=(0, 1, 2)).astype(np.int32)
    ratings[:, :2] -= 1
    got = (len(ratings), *(int(column.max()) + 1 for column in ratings[:, :2].T))
    if got != (expected := (NUM_RATINGS, NUM_USERS, NUM_FILMS)):
        raise RuntimeError(f"the ratings were read wrongly: got {got} ratings, users and films, expected {expected}")
    np.random.default_rng(SPLIT_SEED).shuffle(ratings)
    return ratings
