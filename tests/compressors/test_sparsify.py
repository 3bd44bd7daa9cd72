"""The laws of single sparsifiers, beside what all compressors promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradsync.compressors import Absolute, Biased, BlockTopK, Contraction, ErrorFeedback, GaussianK, Threshold, TopK
from gradsync.tensors.bucket import FlatSpec
from tests.compressors.family import compressed, gradient, spec_of
from tests.kernels.native import DTYPES, special_values

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_of_a_constant_gradient_every_element_is_sent_in_turn() -> None:
    compressor = ErrorFeedback(TopK(0.1))
    x = torch.linspace(1, 1.5, 100)
    state, sent = compressor.init(FlatSpec.of(x)), torch.zeros(100)
    for _ in range(20):
        payload, state = compressor.compress(x, state)
        sent += compressor.decompress(payload) != 0
    assert (sent >= 1).all()


def test_the_residual_takes_up_what_16_bits_round_off() -> None:
    compressor = ErrorFeedback(TopK(1.0))
    x = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    state = compressor.init(FlatSpec.of(x))
    state.elements["residual"][0] = 2.0**-10
    _, state = compressor.compress(x, state)
    assert state.elements["residual"].tolist() == [2.0**-10, 0.0]
    assert state.elements["residual"].dtype == torch.float32


@dtypes
def test_the_error_of_top_k_is_the_norm_of_the_tail(dtype: torch.dtype) -> None:
    x = gradient(1000, dtype)
    payload, _ = compressed(TopK(0.1), x)
    tail = x.double().abs().sort(descending=True).values[100:]
    assert TopK(0.1).elements(payload).nnz == 100
    error = (x - TopK(0.1).decompress(payload)).double()
    assert error.square().sum() == pytest.approx(float(tail.square().sum()), rel=1e-12)


def test_nan_and_infinity_are_sent() -> None:
    x = torch.cat([gradient(1000, torch.float32), special_values(torch.float32)])
    sent = TopK(0.005).decompress(compressed(TopK(0.005), x)[0])
    assert torch.equal(sent.isfinite(), x.isfinite())


def test_every_tensor_of_a_bucket_has_its_own_budget() -> None:
    spec = spec_of(torch.float32, [100, 1000, 3])
    x = torch.cat([torch.full((100,), 1e-6), torch.full((1000,), 1e6), torch.ones(3)])
    payload, _ = compressed(TopK(0.01), x, TopK(0.01).init(spec))
    assert TopK(0.01).elements(payload).indices.tolist() == [0, *range(100, 110), 1100]


@pytest.mark.parametrize(("numel", "k"), [(0, 0), (1, 1), (10, 1), (100, 1), (149, 1), (151, 2), (10_000, 100)])
def test_a_share_of_one_percent_is_at_least_one_element(numel: int, k: int) -> None:
    assert TopK(0.01).kept(numel) == k


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"TopK.ratio must be in \(0, 1\], got"):
        TopK(ratio)


@dtypes
@pytest.mark.parametrize("compressor", [TopK(0.1), TopK(0.1, values="bfloat16"), Threshold(1.0, 0.5)], ids=str)
def test_fused_feedback_is_what_its_steps_are(compressor: TopK | Threshold, dtype: torch.dtype) -> None:
    """The residual is added, the sum compressed, the payload subtracted; no addition of these numbers rounds."""
    spec = spec_of(dtype)
    x, wide = (gradient(spec.numel, dtype, seed=1) * 16).round(), torch.promote_types(dtype, torch.float32)
    residual = (gradient(spec.numel, wide, seed=2) * 16).round()
    payload, left, _ = compressor.compress_with_feedback(x, residual, compressor.init(spec))
    apart, _ = compressor.compress((residual + x).to(dtype), compressor.init(spec))
    assert torch.equal(payload.data, apart.data)
    assert torch.equal(left, residual + x - compressor.decompress(apart))


def test_values_may_travel_in_16_bits() -> None:
    x = torch.cat([gradient(1000, torch.float32), torch.tensor([1e5])])
    spec = FlatSpec.of(x)
    full = TopK(0.05).nbytes(spec)
    for values, law in (("bfloat16", Contraction), ("float16", Biased)):
        compressor = TopK(0.05, values=values)
        sent = compressor.decompress(compressed(compressor, x)[0])
        assert sent.dtype is torch.float32
        most = torch.finfo(getattr(torch, values)).max
        exact = TopK(0.05).decompress(compressed(TopK(0.05), x)[0]).clamp(-most, most)
        assert torch.equal(sent, exact.to(getattr(torch, values)).float())
        assert compressor.nbytes(spec) == full - 50 * 2
        assert isinstance(compressor.law(spec), law)
    with pytest.raises(ValueError, match=r"TopK.values must be 'same', 'bfloat16' or 'float16', got 'int8'"):
        TopK(0.05, values="int8")


def test_whole_blocks_are_sent_those_of_the_largest_norm() -> None:
    spec = spec_of(torch.float32, [0, 10, 3])  # blocks of 4, 4, 2 and 3
    x = torch.tensor([3.0, 3, 3, 3, 4, 0, 0, 0, 5, 4, 1, 2, 1])
    for ratio, kept in ((0.3, [8, 9, 10, 11, 12]), (0.7, [0, 1, 2, 3, 8, 9, 10, 11, 12]), (1.0, list(range(13)))):
        compressor = BlockTopK(ratio, block=4)
        payload, _ = compressor.compress(x, compressor.init(spec))
        elements = compressor.elements(payload)
        assert elements.indices.tolist() == kept
        assert torch.equal(elements.values, x[kept])
    x[4] = float("nan")
    assert compressor.decompress(compressor.compress(x, compressor.init(spec))[0])[4].isnan()


def test_blocks_are_compared_where_squares_would_vanish_or_overflow() -> None:
    compressor = BlockTopK(0.5, block=2)
    for scale in (1e-38, 1e30):
        x = torch.tensor([1.0, 1.0, 1.5, 0.0]) * scale
        assert compressor.elements(compressed(compressor, x)[0]).indices.tolist() == [2, 3]


def test_a_position_outside_is_refused_before_anything_is_overwritten() -> None:
    x = gradient(1000, torch.float32)
    good, bad = (TopK(0.001).compress(x, TopK(0.001).init(FlatSpec.of(x)))[0] for _ in range(2))
    for index in (1000, -1):
        bad.data[:4] = torch.tensor([index], dtype=torch.int32).view(torch.uint8)  # one position travels in a list
        out = torch.full((1000,), 7.0)
        with pytest.raises(ValueError, match=f"below that, got {index}"):
            TopK(0.001).sum_into(out, [good, bad])
        assert (out == 7.0).all()


def test_a_damaged_payload_is_told_where_it_can_be() -> None:
    x = gradient(10, torch.float32)
    payload, _ = compressed(GaussianK(0.5), x)
    for wrong in (-1, 7):
        data = payload.data.clone()
        data[:8].view(torch.int64).fill_(wrong)
        with pytest.raises(ValueError, match=f"has at most 6 of them, got {wrong}"):
            GaussianK(0.5).decompress(replace(payload, data=data))
    large = torch.zeros(70_000)
    payload, _ = compressed(BlockTopK(1e-5, block=1), large)
    payload.data[:4].view(torch.int32).fill_(70_000)
    with pytest.raises(ValueError, match="names blocks in .*, got "):
        BlockTopK(1e-5, block=1).decompress(payload)


def test_a_threshold_bounds_every_error_while_there_is_room() -> None:
    x = gradient(1000, torch.float32)
    above = int((x.abs() > 1.5).sum())
    ample, scarce = Threshold(1.5, most_ratio=0.2), Threshold(1.5, most_ratio=0.05)
    assert above < 200
    assert ample.elements(compressed(ample, x)[0]).nnz == above
    assert (x - ample.decompress(compressed(ample, x)[0])).abs().max() <= 1.5
    sent = scarce.elements(compressed(scarce, x)[0])
    assert sent.indices.tolist() == TopK(0.05).elements(compressed(TopK(0.05), x)[0]).indices.tolist()
    assert Threshold(1.5, most_ratio=1).law(FlatSpec.of(x)) == Absolute(1.5)
    assert isinstance(ample.law(FlatSpec.of(x)), Biased)


def test_an_empty_payload_is_one() -> None:
    x = torch.zeros(100)
    for compressor in (Threshold(1.0), GaussianK(0.1)):
        payload, _ = compressed(compressor, x)
        assert compressor.elements(payload).nnz == 0
        assert torch.equal(compressor.decompress(payload), x)


@pytest.mark.parametrize("shape", ["normal", "heavy tail", "shifted", "two values", "spike"])
def test_gaussian_k_contracts_by_what_it_found_within_its_capacity(shape: str) -> None:
    normal, k = gradient(10_000, torch.float32), 100
    x = {
        "normal": normal,
        "heavy tail": normal**5,
        "shifted": 0.3 + 0.1 * normal,
        "two values": torch.ones(10_000).copysign(normal),
        "spike": torch.zeros(10_000).index_fill(0, torch.tensor([77]), 5.0),
    }[shape]
    compressor = GaussianK(0.01)
    payload, _ = compressed(compressor, x)
    found = compressor.elements(payload)
    error = (x - compressor.decompress(payload)).double().square().sum()
    tail = x.double().square().sort(descending=True).values[found.nnz :].sum()
    assert error == pytest.approx(float(tail), rel=1e-9)
    assert error <= (1 - found.nnz / 10_000) * x.double().square().sum()
    assert found.nnz <= 4 * k // 3
    # Of what is shifted, one tail only is above: the third correction goes too far. A spike is all there is.
    assert found.nnz >= (1 if shape in ("shifted", "spike") else 2 * k / 3)


def test_gaussian_k_corrects_its_threshold_three_times_at_most() -> None:
    x = gradient(100_000, torch.float32)
    spec, deviation = FlatSpec.of(x), float(x.std())
    assert GaussianK(0.01).thresholds(x, spec).item() == pytest.approx(2.5758 * deviation, rel=0.01)
    spike = torch.zeros(10_000).index_fill(0, torch.tensor([77]), 1.0)
    first = 1e-4 + 2.5758 * 1e-2
    assert GaussianK(0.01).thresholds(spike, FlatSpec.of(spike)).item() == pytest.approx(first / 8, rel=1e-3)
