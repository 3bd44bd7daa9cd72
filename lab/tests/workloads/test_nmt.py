"""Translation has the measured densities of three tables, ignores padding, does not look ahead, and learns."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from gradsync_lab.workloads import NMTWorkload, load
from gradsync_lab.workloads.nmt import BORDER, PADDING, UNKNOWN
from lab.tests.workloads.training import assert_trains_alike, opened, opened_or_skip, train

SMALL: dict[str, Any] = {
    **{"data": "zipf", "german_words": 1000, "english_words": 800, "num_negatives": 64, "batch_size": 8, "dim": 16},
}


def small(**options: Any) -> NMTWorkload:
    return opened(NMTWorkload, **{**SMALL, **options})


@pytest.fixture(scope="module")
def ding() -> NMTWorkload:
    return opened_or_skip(NMTWorkload)


def test_the_pairs_are_counted_and_ranked_by_frequency(ding: NMTWorkload) -> None:
    pairs = ding._opened[0]
    assert ding.source == ding.options["source"] == "ding"
    assert pairs.shape == (74_399, 2, 60)
    assert ding.num_train == 72_911
    for side, types in enumerate((52_848, 29_658)):
        counts = np.bincount(pairs[:, side].ravel())[1:]
        lengths = (pairs[:, side] != 0).sum(axis=1)
        assert len(counts) == types
        assert (np.diff(counts) <= 0).all()
        assert (lengths.min(), lengths.max()) == (4, 60)


def test_no_pair_is_there_twice(ding: NMTWorkload) -> None:
    texts = {pair.tobytes() for pair in np.asarray(ding._opened[0])}
    assert len(texts) == len(ding._opened[0])


@pytest.mark.parametrize(("world_size", "density"), [(1, 0.0267), (2, 0.0454), (4, 0.0753), (8, 0.123), (16, 0.195)])
def test_row_densities_are_those_of_the_design(ding: NMTWorkload, world_size: int, density: float) -> None:
    ranks = [ding.batches(rank, world_size, seed=0) for rank in range(world_size)]
    rows = 0
    for _ in range(12):
        parts = [next(rank) for rank in ranks]
        rows += torch.cat([german[german != PADDING] for german, _, _ in parts]).unique().numel()
        rows += torch.cat([read[read != PADDING] for _, read, _ in parts]).unique().numel()
        scored = [ids for _, english, drawn in parts for ids in (english[english != PADDING], drawn)]
        rows += torch.cat(scored).unique().numel()
    assert rows / 12 / (ding.german_words + 2 * ding.english_words) == pytest.approx(density, rel=0.05)


def test_english_stands_between_borders_and_rare_words_are_unknown() -> None:
    workload = small()
    rows = np.arange(6)
    german, english = workload.batch(rows)
    ranks = torch.from_numpy(workload._opened[0][rows].astype(np.int64))
    lengths = (ranks != 0).sum(dim=2)
    assert german.shape == (6, int(lengths[:, 0].max()))
    assert english.shape == (6, int(lengths[:, 1].max()) + 2)
    for row, (of_german, of_english) in enumerate(lengths.tolist()):
        words = ranks[row, 1, :of_english] + BORDER
        known = torch.where(words < 800, words, UNKNOWN).tolist()
        assert english[row, : of_english + 2].tolist() == [BORDER, *known, BORDER]
        assert (english[row, of_english + 2 :] == PADDING).all()
        assert (german[row] != PADDING).sum() == of_german
    assert (german == UNKNOWN).any()
    assert german.max() < 1000


def test_tables_have_sparse_gradients_with_the_rows_of_the_batch_and_never_padding() -> None:
    workload = small()
    model = workload.model(sparse=True)
    german, english, negatives = batch = next(workload.batches(0, 1, seed=0))
    assert (german == PADDING).any()
    assert (english == PADDING).any()
    workload.loss(model, batch).backward()
    scored = torch.cat([english[:, 1:].flatten(), negatives]).unique()
    tables = {model.german: german, model.english: english[:, :-1], model.scores: scored, model.bias: scored}
    for table, ids in tables.items():
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        assert torch.equal(table.weight.grad.coalesce().indices()[0], ids[ids != PADDING].unique())
    dense = [parameter for name, parameter in model.named_parameters() if "coder" in name or "norm" in name]
    assert len(dense) > 20
    assert all(p.grad is not None and not p.grad.is_sparse and p.grad.abs().sum() > 0 for p in dense)


def test_padding_changes_no_loss() -> None:
    workload = small()
    model = workload.model(sparse=True)
    rows = np.arange(8)
    german, english = workload.batch(rows)
    num_words = (english[:, 1:] != PADDING).sum(dim=1)
    with torch.no_grad():
        together = model(german, english)
        alone = torch.stack([model(*workload.batch(rows[row : row + 1])) for row in rows])
    assert num_words.min() < num_words.max()
    assert float(together) == pytest.approx(float((alone * num_words).sum() / num_words.sum()), rel=1e-5)


def test_a_state_sees_all_german_words_and_no_later_english_one() -> None:
    workload = small()
    model = workload.model(sparse=True)
    german, english = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[BORDER, 9, 10, 11]])
    other_english, other_german = english.clone(), german.clone()
    other_english[0, 2] = 12
    other_german[0, 3] = 12
    with torch.no_grad():
        states, ahead, otherwise = (
            model._decoded(*pair) for pair in ((german, english), (german, other_english), (other_german, english))
        )
    assert torch.allclose(states[:, :2], ahead[:, :2], atol=1e-6)
    assert not torch.allclose(states[:, 2:], ahead[:, 2:], atol=1e-3)
    assert not torch.allclose(states[:, 0], otherwise[:, 0], atol=1e-3)


def test_negatives_are_own_or_shared_and_never_padding() -> None:
    def drawn(negatives: str, rank: int) -> list[torch.Tensor]:
        workload = small(num_negatives=5000, negatives=negatives)
        return [batch[2] for batch in islice(workload.batches(rank, 2, seed=3), 2)]

    own, other_own = drawn("own", 0), drawn("own", 1)
    shared, other_shared = drawn("shared", 0), drawn("shared", 1)
    assert not any(torch.equal(a, b) for a, b in zip(own, other_own, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(shared, other_shared, strict=True))
    assert not torch.equal(shared[0], shared[1])
    assert int(torch.cat(own).min()) == PADDING + 1
    assert 790 < int(torch.cat(own).max()) < 800


def test_evaluation_is_the_full_softmax_and_leaves_the_model_as_it_was() -> None:
    workload = small()
    model = workload.model(sparse=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = workload.evaluate(model)
    german, english = workload.batch(np.arange(workload.num_train, len(workload._opened[0]))[:256])
    with torch.no_grad():
        logits = model._decoded(german, english[:, :-1]) @ model.scores.weight.T + model.bias.weight.squeeze(1)
        logits[..., PADDING] = -math.inf
        coming = english[:, 1:]
        expected = -logits.log_softmax(dim=-1).gather(2, coming[..., None]).squeeze(2)[coming != PADDING].mean()
    assert result["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert model.training
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_sparse_and_dense_gradients_train_alike() -> None:
    workload = small()
    assert_trains_alike(workload, 20, losses_within=1e-4, weights_within=1e-3)


def test_the_model_learns_to_translate(ding: NMTWorkload) -> None:
    workload = opened(NMTWorkload, german_words=8000, english_words=8000, num_negatives=512)
    before = workload.evaluate(workload.model(sparse=True))["loss"]
    model, losses = train(workload, 40, sparse=True)
    assert before == pytest.approx(math.log(8000), abs=0.6)
    assert max(losses) < before + 1  # no blow-up of the first steps
    loss = workload.evaluate(model)["loss"]
    assert loss < 5.55  # the words' frequencies alone give 5.77
    # It reads German and does not only continue English: that of another pair is of less use.
    german, english = workload.batch(np.arange(workload.num_train, workload.num_train + 256))
    with torch.no_grad():
        assert float(model(german.roll(1, dims=0), english)) > loss + 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"german_words": 3}, "german_words must be at least 4, got 3"),
        ({"english_words": 0}, "english_words must be at least 4, got 0"),
        ({"num_negatives": 0}, "num_negatives must be at least 1, got 0"),
        ({"dim": 30}, "dim must be a positive multiple of 4 .heads of attention., got 30"),
        ({"dim": 0}, "dim must be a positive multiple of 4 .* got 0"),
        ({"negatives": "mine"}, "negatives must be own or shared, got 'mine'"),
        ({"data": "europarl"}, "data must be ding, zipf or any, got 'europarl'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("nmt", **options)
