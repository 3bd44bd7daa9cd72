"""The laws of single compressors to signs, beside what all compressors promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradsync.compressors import Compressor, Contraction, ErrorFeedback, OneBit, ScaledSign, Sign, Signum
from gradsync.tensors.bucket import FlatSpec
from tests.compressors.family import compressed, data, gradient, spec_of


def relative_error(compressor: Compressor, x: Tensor) -> float:
    back = compressor.decompress(compressed(compressor, x)[0])
    return float((back - x).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize("case", sorted(data(999 * 2).keys() - {"zeros"}))
def test_the_error_of_the_scaled_sign_is_known_exactly(case: str) -> None:
    x = data(999 * 2)[case].double()
    l1, l2 = float(x.abs().sum()), float(x.norm())
    assert relative_error(ScaledSign(), x) == pytest.approx(1 - l1**2 / (len(x) * l2**2), abs=1e-12)
    assert relative_error(ScaledSign("rms"), x) == pytest.approx(
        2 - 2 * l1 / (math.sqrt(len(x)) * l2), rel=1e-6, abs=1e-6
    )


def test_numbers_of_the_papers_come_out() -> None:
    spike = torch.zeros(64).double()
    spike[5] = -3.0
    assert relative_error(ScaledSign(), spike) == pytest.approx(0.984, abs=5e-4)
    assert relative_error(ScaledSign("rms"), spike) == pytest.approx(1.75, abs=1e-6)
    assert relative_error(ScaledSign(), gradient(1 << 18, torch.float32)) == pytest.approx(1 - 2 / math.pi, abs=3e-3)
    for compressor in (ScaledSign(), ScaledSign("rms"), OneBit()):
        for constant in (0.1, -2.5):
            x = torch.full((100,), constant)
            assert torch.equal(compressor.decompress(compressed(compressor, x)[0]), x)


def test_two_means_are_never_worse_than_one_and_better_on_shifted_data() -> None:
    for block in (0, 50):
        for x in data().values():
            if x.any():
                assert relative_error(OneBit(block), x) <= relative_error(ScaledSign(block=block), x) + 1e-7
    shifted = 0.5 + gradient(4096, torch.float32)
    assert relative_error(OneBit(), shifted) < 0.95 * relative_error(ScaledSign(), shifted)
    codes = torch.tensor([4.0, 2.0, 0.0, -6.0, 8.0, 1.0])
    assert OneBit(4).decompress(compressed(OneBit(4), codes)[0]).tolist() == [2.0, 2.0, 2.0, -6.0, 4.5, 4.5]


def test_contraction_is_by_the_longest_block() -> None:
    spec = spec_of(torch.float32, [10, 0, 300])
    assert ScaledSign().law(spec) == OneBit().law(spec) == Contraction(1 / 300)
    assert ScaledSign(block=20).law(spec) == Contraction(1 / 20)
    assert ScaledSign().law(spec_of(torch.float32, [])) == Contraction(1)


def test_a_message_is_its_scales_and_bits_and_no_bit_behind_is_set() -> None:
    x = -torch.ones(13)
    for compressor, expected in ((Sign(), 2), (ScaledSign(), 8 + 2), (ScaledSign(block=5), 16 + 2), (OneBit(), 8 + 2)):
        payload, _ = compressed(compressor, x)
        assert payload.nbytes == expected
        assert payload.data[-2:].tolist() == [0xFF, 0b11111]


def test_zeros_of_both_signs_are_positive() -> None:
    x = torch.tensor([0.0, -0.0, -1.0, float("inf"), -float("inf")])
    assert Sign().decompress(compressed(Sign(), x)[0]).tolist() == [1, 1, -1, 1, -1]


def test_the_sum_of_signs_counts_votes() -> None:
    inputs = [gradient(1003, torch.float32, seed) for seed in range(5)]
    payloads = [compressed(Sign(), x)[0] for x in inputs]
    votes = torch.empty(1003)
    Sign().sum_into(votes, payloads)
    assert torch.equal(votes, sum(x.sign() for x in inputs))


def test_signum_sends_the_signs_of_a_running_mean() -> None:
    gradients = [gradient(500, torch.bfloat16, seed) for seed in range(4)]
    for beta in (0.0, 0.9):
        compressor = Signum(beta)
        state, mean = compressor.init(FlatSpec.of(gradients[0])), torch.zeros(500)
        for x in gradients:
            payload, state = compressor.compress(x, state)
            mean = beta * mean + (1 - beta) * x.float()
            torch.testing.assert_close(state.elements["momentum"], mean, rtol=1e-6, atol=1e-7)
            assert torch.equal(compressor.decompress(payload) < 0, state.elements["momentum"] < 0)
            if beta == 0:
                assert torch.equal(payload.data, compressed(Sign(), x)[0].data)
        assert state.elements["momentum"].dtype == torch.float32


def test_signs_go_astray_where_error_feedback_does_not() -> None:
    """Counter-example 2 of Karimireddy et al.: f = |x1 + x2| / 2 + |x1 - x2|, whose least value is at 0.

    Its slopes have the signs of (1, -1) or (-1, 1), so that steps of signs never change x1 + x2.
    """

    def slope(x: Tensor) -> Tensor:
        along, across = 0.5 * torch.sign(x.sum()), 1.0 if x[0] >= x[1] else -1.0
        return torch.stack([along + across, along - across])

    def reached(compressor: Compressor) -> float:
        x = torch.tensor([1.0, 1.001], dtype=torch.float64)
        state = compressor.init(FlatSpec.of(x))
        for step in range(1000):
            payload, state = compressor.compress(slope(x), state)
            x = x - 0.05 / math.sqrt(step + 1) * compressor.decompress(payload)
        return float(x.sum().abs())

    assert reached(Sign()) == pytest.approx(2.001, abs=1e-9)
    assert reached(ScaledSign()) == pytest.approx(2.001, abs=1e-9)
    assert reached(ErrorFeedback(ScaledSign())) < 0.1


@pytest.mark.parametrize(
    "make",
    [
        lambda: ScaledSign("max"),
        lambda: ScaledSign(block=-1),
        lambda: OneBit(-1),
        lambda: Signum(1.0),
        lambda: Signum(-0.1),
    ],
)
def test_settings_that_mean_nothing_are_refused(make) -> None:
    with pytest.raises(ValueError, match=r"must (not )?be .*, got"):
        make()
