"""Sketches: what buckets promise of their values, and what counters find."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradsync.compressors import CountSketch, SketchML, TopK
from gradsync.tensors.bucket import FlatSpec
from tests.compressors.family import compressed, data, gradient, spec_of


@pytest.mark.parametrize("buckets", [2, 16, 256])
def test_values_stay_in_the_range_of_their_bucket_and_keep_sign_and_order(buckets: int) -> None:
    compressor = SketchML(0.1, buckets)
    for case, x in data().items():
        sent = compressor.elements(compressed(compressor, x)[0])
        kept = TopK(0.1).elements(compressed(TopK(0.1), x)[0])
        assert torch.equal(sent.indices, kept.indices), case
        assert len(sent.values.unique()) <= buckets
        assert (sent.values[kept.values < 0] < 0).all()
        assert (sent.values[kept.values >= 0] >= 0).all()
        by_value = sent.values[kept.values.sort(stable=True).indices]
        assert (by_value.diff() >= -1e-6 * by_value.abs()[1:]).all(), "monotone"
        for mean in sent.values.unique():
            members = kept.values[sent.values == mean]
            slack = 1e-6 * members.abs().max()
            assert members.min() - slack <= mean <= members.max() + slack


def test_means_of_buckets_keep_the_sum_of_what_is_sent() -> None:
    x = gradient(5000, torch.float64)
    sent = SketchML(0.1, 16).elements(compressed(SketchML(0.1, 16), x)[0])
    kept = TopK(0.1).elements(compressed(TopK(0.1), x)[0])
    assert float(sent.values.sum()) == pytest.approx(float(kept.values.sum()), rel=1e-12)
    sizes = sent.values.unique(return_counts=True)[1]
    assert len(sizes) == 16
    assert sizes.max() - sizes.min() <= 4, "of about as many: 500 over 16, cut between the signs"


def test_a_bucket_that_is_none_is_refused() -> None:
    compressor, x = SketchML(0.1, 4), gradient(1000, torch.float32)
    payload, _ = compressed(compressor, x)
    payload.data[-1] = 4
    with pytest.raises(ValueError, match=r"quantile buckets in \[0, 4\), got"):
        compressor.decompress(payload)


def test_counters_find_what_is_large_in_the_sum_of_the_ranks() -> None:
    """Even an element that is large on no rank."""
    compressor, ranks = CountSketch(0.42, keep=0.0025, rows=7), 4
    inputs = [0.01 * gradient(2000, torch.float32, rank) for rank in range(ranks)]
    hidden = torch.arange(100, 2000, 400)
    for x in inputs:
        x[hidden] += 0.5
    spec = FlatSpec.of(inputs[0])
    payloads = [compressor.compress(x, compressor.init(spec, rank))[0] for rank, x in enumerate(inputs)]
    summed = replace(payloads[0], data=torch.stack([payload.data for payload in payloads]).sum(0))
    found = compressor.decompress(summed)
    assert torch.equal(found.nonzero().flatten(), hidden)
    torch.testing.assert_close(found[hidden], sum(inputs)[hidden], rtol=0.2, atol=0)


def test_without_collisions_counters_are_exact() -> None:
    x = torch.zeros(1000)
    x[[3, 500]] = torch.tensor([2.0, -1.0])
    compressor = CountSketch(1.0, keep=0.002, rows=5)
    payload, _ = compressed(compressor, x)
    assert torch.equal(compressor.decompress(payload), x)
    assert compressor.nbytes(spec_of(torch.float32, [1000])) == 4 * 5 * 200


def test_settings_that_make_no_sense_are_refused() -> None:
    for make, message in (
        (lambda: SketchML(0.0), "ratio must be in"),
        (lambda: SketchML(0.1, 257), "buckets must be in"),
        (lambda: CountSketch(0.0, 0.1), "CountSketch.ratio must be in"),
        (lambda: CountSketch(0.1, 2.0), "CountSketch.keep must be in"),
        (lambda: CountSketch(0.1, 0.1, rows=4), "rows must be odd"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
