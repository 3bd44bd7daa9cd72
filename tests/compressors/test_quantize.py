"""The laws of casts and quantisers, beside what all compressors promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradsync.compressors import (
    QSGD,
    BlockInt,
    Cast,
    Compressor,
    ErrorFeedback,
    Float8,
    Natural,
    SharedBlockInt,
    SharedTernGrad,
    TernGrad,
)
from gradsync.tensors.bucket import FlatSpec
from tests.compressors.family import compressed, gradient, with_agreement

DRAWS = 300


def sent(compressor: Compressor, x: Tensor, stream: int = 0) -> Tensor:
    payload, _ = compressed(compressor, x, compressor.init(FlatSpec.of(x), stream))
    return compressor.decompress(payload)


def squared_errors(compressor: Compressor, x: Tensor) -> Tensor:
    """Returns the squared errors of `DRAWS` draws, (DRAWS,) float64."""
    return torch.stack([(sent(compressor, x, n).double() - x.double()).square().sum() for n in range(DRAWS)])


def assert_mean(drawn: Tensor, expected: float) -> None:
    assert abs(float(drawn.mean()) - expected) <= 4.5 * float(drawn.std()) / math.sqrt(len(drawn)) + 1e-6 * expected


@pytest.mark.parametrize(("bits", "levels"), [(8, 127), (4, 7)])
def test_to_the_nearest_the_error_is_half_a_level_of_the_largest(bits: int, levels: int) -> None:
    x = gradient(1000, torch.float64)
    for block in range(0, 1000, 256):
        part = slice(block, block + 256)
        error = (sent(BlockInt(bits), x) - x)[part].abs().max()
        assert 0.8 < error * 2 * levels / x[part].abs().max() <= 1 + 1e-6
    worst = torch.full((256,), 0.5 / levels * 0.999)
    worst[0] = 1.0
    lost = (sent(BlockInt(bits), worst) - worst).square().sum() / worst.square().sum()
    allowed = 1 - BlockInt(bits).law(FlatSpec.of(worst)).delta
    assert 0.99 * allowed < lost <= allowed, "the bound is reached"


def test_what_was_sent_is_sent_again_as_it_is() -> None:
    x = gradient(1000, torch.float32)
    for compressor in (BlockInt(8), BlockInt(4), Float8("e4m3"), Float8("e5m2", 100), Natural(), Cast()):
        once = sent(compressor, x)
        torch.testing.assert_close(sent(compressor, once), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "compressor",
    [BlockInt(), BlockInt(4, 99, stochastic=True), QSGD(7), TernGrad(clip=2.5), Float8(), SharedBlockInt(4)],
)
def test_powers_of_two_are_scale(compressor: Compressor) -> None:
    x = gradient(1000, torch.float32)
    assert torch.equal(sent(compressor, x * 2**-20), sent(compressor, x) * 2**-20)


def test_a_block_of_zeros_stays_zero_and_one_that_is_not_finite_harms_no_other() -> None:
    for compressor in (BlockInt(8, 10), QSGD(3, 10), TernGrad(10, 2.5), Float8("e5m2", 10), SharedTernGrad(2, 10)):
        x = gradient(40, torch.float32)
        x[:10], x[15], x[25] = 0.0, float("nan"), float("-inf")
        back = sent(compressor, x)
        assert not back[:10].any()
        assert back[10:30].isnan().all()
        assert back[30:].isfinite().all() and back[30:].any()


def test_the_variance_of_qsgd_is_that_of_its_fractions() -> None:
    x = gradient(200, torch.float64)
    for levels, norm in ((1, "l2"), (7, "l2"), (100, "max")):
        scale = x.norm() if norm == "l2" else x.abs().max()
        fractions = (levels * x.abs() / scale) % 1
        expected = (scale / levels).square() * (fractions * (1 - fractions)).sum()
        assert_mean(squared_errors(QSGD(levels, 200, norm), x), float(expected))


def test_the_variance_of_terngrad_and_the_mean_of_the_clipped_one() -> None:
    x = gradient(200, torch.float64)
    expected = (x.abs().max() * x.abs() - x.square()).sum()
    assert_mean(squared_errors(TernGrad(), x), float(expected))
    x[0] = 40.0
    limit = float(2.5 * x.square().mean().sqrt())
    draws = torch.stack([sent(TernGrad(clip=2.5), x, n) for n in range(DRAWS)])
    assert set((draws / limit).round(decimals=4).flatten().tolist()) == {-1.0, 0.0, 1.0}
    assert_mean(draws @ x.sign(), float(x.abs().clamp(max=limit).sum()))


def test_natural_compression_rounds_to_powers_of_two_and_its_worst_is_an_eighth() -> None:
    powers = 2.0 ** torch.arange(-109, 17)
    x = torch.cat([powers, -powers, torch.tensor([0.0, 1e30, 1e-40])])
    assert torch.equal(sent(Natural(), x), torch.cat([powers, -powers, torch.tensor([0.0, 2.0**16, 0.0])]))
    worst = torch.full((500,), 4 / 3)
    assert_mean(squared_errors(Natural(), worst) / worst.square().sum(), 1 / 8)
    normal = gradient(5000, torch.float32)
    assert 0.08 < squared_errors(Natural(), normal).mean() / normal.square().sum() < 0.09


@pytest.mark.parametrize(
    "compressor",
    [SharedBlockInt(5), SharedBlockInt(5, 100, stochastic=True), SharedTernGrad(5), SharedTernGrad(clip=2.5)],
)
def test_sums_of_codes_are_codes_of_the_sum(compressor: Compressor) -> None:
    inputs = [gradient(1000, torch.float32, seed) * 10.0**-seed for seed in range(5)]
    inputs = [torch.where(x == x.abs().max(), 3.0, x) for x in inputs]  # so that some sums are as large as can be
    states = [compressor.init(FlatSpec.of(x), stream) for stream, x in enumerate(inputs)]
    states = with_agreement(compressor, inputs, states)
    payloads = [compressor.compress(x, state)[0] for x, state in zip(inputs, states, strict=True)]
    summed = torch.stack([payload.data.int() for payload in payloads]).sum(dim=0)
    assert summed.abs().max() <= 127
    total, decoded = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    compressor.sum_into(total, payloads)
    compressor.sum_into(decoded, [replace(payloads[0], data=summed.to(torch.int8))])
    torch.testing.assert_close(decoded, total, rtol=1e-12, atol=1e-12)


def test_as_many_can_be_summed_as_the_settings_say() -> None:
    assert SharedBlockInt(8).traits.most_summands == ErrorFeedback(SharedBlockInt(8)).traits.most_summands == 8
    assert (SharedTernGrad().traits.most_summands, Cast().traits.most_summands) == (127, None)
    assert SharedBlockInt(127).grid.levels == 1 and SharedBlockInt(1).grid.levels == 127
    for summands in (0, 128):
        with pytest.raises(ValueError, match=r"summands must be in \[1, 127\], got"):
            SharedBlockInt(summands)


def test_shared_scales_have_to_be_agreed_on() -> None:
    compressor, x = SharedBlockInt(2), torch.ones(10)
    state = compressor.init(FlatSpec.of(x))
    with pytest.raises(ValueError, match="needs scales that the ranks agreed on"):
        compressor.compress(x, state)
    payload, _ = compressed(compressor, x)
    with pytest.raises(ValueError, match="comes with the scales"):
        compressor.decompress(replace(payload, agreed=None))


def test_casts_saturate_what_is_finite_and_keep_what_is_not() -> None:
    x = torch.tensor([1e6, -1e6, float("inf"), float("-inf"), 1.0, 1e-30])
    assert sent(Cast("float16"), x).tolist() == [65504.0, -65504.0, float("inf"), float("-inf"), 1.0, 0.0]
    half = x.to(torch.float16)
    assert compressed(Cast("bfloat16"), half)[0].data.dtype == torch.float16, "16 bits pass as they are"


@pytest.mark.parametrize(
    ("compressor", "settings", "message"),
    [
        (Cast, {"dtype": "float32"}, "Cast.dtype must be 'bfloat16' or 'float16', got 'float32'"),
        (BlockInt, {"bits": 2}, "BlockInt.bits must be 8 or 4, got 2"),
        (BlockInt, {"block": 0}, "BlockInt.block must be at least 1, got 0"),
        (QSGD, {"levels": 128}, r"QSGD.levels must be in \[1, 127\], got 128"),
        (QSGD, {"levels": 1, "norm": "l1"}, "QSGD.norm must be 'l2' or 'max', got 'l1'"),
        (TernGrad, {"clip": 0.0}, "TernGrad.clip must be greater than 0 or None, got 0.0"),
        (TernGrad, {"block": -1}, "TernGrad.block must be at least 0, got -1"),
        (Float8, {"format": "e3m4"}, "Float8.format must be 'e4m3' or 'e5m2', got 'e3m4'"),
    ],
)
def test_settings_that_are_none_are_refused(compressor: type[Compressor], settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compressor(**settings)
