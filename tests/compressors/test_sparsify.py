"""The laws of single sparsifiers, beside what all compressors promise."""

from __future__ import annotations

import pytest
import torch

from gradsync.bucket import FlatSpec
from gradsync.compressors import ErrorFeedback, TopK
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
