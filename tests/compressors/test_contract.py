"""What every compressor promises, and what error feedback adds to it. A member of the family is a row of `MEMBERS`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsync.bucket import TensorSpec
from gradsync.compressors import Compressor, ErrorFeedback, TopK
from tests.kernels.native import DTYPES, assert_same_bits, special_values

MEMBERS: dict[str, Compressor] = {
    "top_k": TopK(0.01),
    "top_k of all": TopK(1.0),
    "error_feedback of top_k": ErrorFeedback(TopK(0.05)),
}
SIZES = [0, 1, 3, 1000, 2**16 + 1]

members = pytest.mark.parametrize("compressor", MEMBERS.values(), ids=MEMBERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gradient(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@members
@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_shape_dtype_and_size_are_as_announced(compressor: Compressor, dtype: torch.dtype, size: int) -> None:
    x = gradient(size, dtype)
    payload, _ = compressor.compress(x, compressor.init(TensorSpec.of(x)))
    back = compressor.decompress(payload)
    assert (back.shape, back.dtype) == (x.shape, x.dtype)
    assert compressor.nbytes(TensorSpec.of(x)) == payload.nbytes


@members
@dtypes
def test_a_step_repeats_and_changes_nothing_that_was_passed_in(compressor: Compressor, dtype: torch.dtype) -> None:
    x = gradient(1000, dtype)
    _, state = compressor.compress(x, compressor.init(TensorSpec.of(x)))
    before = x.clone(), {name: value.clone() for name, value in state.items()}
    first, again = (compressor.compress(x, state) for _ in range(2))
    assert_same_bits(compressor.decompress(first[0]), compressor.decompress(again[0]))
    assert first[1].keys() == state.keys()
    for name, value in before[1].items():
        assert_same_bits(first[1][name], again[1][name])
        assert_same_bits(state[name], value)
    assert_same_bits(x, before[0])


@members
def test_zeros_and_constants_come_back_without_error_where_they_are_sent(compressor: Compressor) -> None:
    for x in (torch.zeros(1000), torch.full((1000,), -2.5)):
        payload, _ = compressor.compress(x, compressor.init(TensorSpec.of(x)))
        assert set(compressor.decompress(payload).unique().tolist()) <= {0.0, float(x[0])}


@dtypes
def test_residual_plus_sent_equals_input(dtype: torch.dtype) -> None:
    compressor = ErrorFeedback(TopK(0.01))
    x = gradient(5000, dtype)
    state = compressor.init(TensorSpec.of(x))
    for step in range(5):
        x = gradient(5000, dtype, seed=step)
        came_in = state["residual"] + x
        payload, state = compressor.compress(x, state)
        sent = compressor.decompress(payload)
        assert torch.equal(sent.to(came_in.dtype) + state["residual"], came_in)
        assert 0 < sent.count_nonzero() <= 50


def test_all_that_was_sent_and_the_residual_are_all_that_came_in() -> None:
    compressor = ErrorFeedback(TopK(0.05))
    gradients = [gradient(2000, torch.float64, seed) for seed in range(20)]
    state, total = compressor.init(TensorSpec.of(gradients[0])), torch.zeros(2000, dtype=torch.float64)
    for x in gradients:
        payload, state = compressor.compress(x, state)
        total += compressor.decompress(payload)
    torch.testing.assert_close(total + state["residual"], torch.stack(gradients).sum(dim=0), rtol=0, atol=1e-13)
    assert state["residual"].abs().max() > 0.1, "something is on its way"


def test_of_a_constant_gradient_every_element_is_sent_in_turn() -> None:
    compressor = ErrorFeedback(TopK(0.1))
    x = torch.linspace(1, 1.5, 100)
    state, sent = compressor.init(TensorSpec.of(x)), torch.zeros(100)
    for _ in range(20):
        payload, state = compressor.compress(x, state)
        sent += compressor.decompress(payload) != 0
    assert (sent >= 1).all()


def test_the_residual_takes_up_what_16_bits_round_off() -> None:
    compressor = ErrorFeedback(TopK(1.0))
    x = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    _, state = compressor.compress(x, {"residual": torch.tensor([2.0**-10, 0.0])})
    assert state["residual"].tolist() == [2.0**-10, 0.0]
    assert state["residual"].dtype == torch.float32


@dtypes
def test_the_error_of_top_k_is_the_norm_of_the_tail(dtype: torch.dtype) -> None:
    x = gradient(1000, dtype)
    payload, _ = TopK(0.1).compress(x, {})
    tail = x.double().abs().sort(descending=True).values[100:]
    assert payload.nnz == 100
    error = (x - TopK(0.1).decompress(payload)).double()
    assert error.square().sum() == pytest.approx(float(tail.square().sum()), rel=1e-12)
    assert error.square().sum() <= (1 - 0.1) * x.double().square().sum()


def test_nan_and_infinity_are_sent() -> None:
    x = torch.cat([gradient(1000, torch.float32), special_values(torch.float32)])
    payload, _ = TopK(0.005).compress(x, {})
    sent = TopK(0.005).decompress(payload)
    assert torch.equal(sent.isfinite(), x.isfinite())


@pytest.mark.parametrize(("numel", "k"), [(0, 0), (1, 1), (10, 1), (100, 1), (149, 1), (151, 2), (10_000, 100)])
def test_a_share_of_one_percent_is_at_least_one_element(numel: int, k: int) -> None:
    assert TopK(0.01).kept(numel) == k


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"TopK.ratio must be in \(0, 1\], got"):
        TopK(ratio)


def test_error_feedback_is_not_stacked() -> None:
    with pytest.raises(ValueError, match="ErrorFeedback of ErrorFeedback"):
        ErrorFeedback(ErrorFeedback(TopK(0.1)))
