"""Random sparsifiers: which elements they draw, and what ranks can do with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradsync.compressors import CompressorState, ErrorFeedback, RandomK, Summand
from gradsync.tensors.bucket import FlatSpec, Segment
from tests.compressors.family import gradient, spec_of

SPEC = FlatSpec.of(torch.zeros(1000), "weight")


def support(compressor: RandomK, state: CompressorState) -> Tensor:
    payload, _ = compressor.compress(torch.ones(state.spec.numel), state)
    return compressor.decompress(payload).nonzero().flatten()


def test_ranks_that_share_draw_the_same_elements_and_others_at_the_next_step() -> None:
    for compressor in (RandomK(0.1), RandomK(0.1, block=7)):
        states = [compressor.init(SPEC, stream) for stream in range(3)]
        first = [support(compressor, state) for state in states]
        assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])
        later = support(compressor, replace(states[0], step=1))
        other = support(compressor, compressor.init(FlatSpec.of(torch.zeros(1000), "bias")))
        assert len(first[0]) == len(later) == len(other) == compressor.kept(1000)
        for drawn in (later, other, support(replace(compressor, seed=1), states[0])):
            assert torch.isin(first[0], drawn).sum() < 40, "10 are expected"


def test_ranks_of_their_own_draw_other_elements_and_say_which_in_8_bytes() -> None:
    compressor, x = RandomK(0.1, shared=False), gradient(1000, torch.float32)
    payloads = [compressor.compress(x, compressor.init(SPEC, stream))[0] for stream in range(2)]
    drawn = [compressor.elements(payload) for payload in payloads]
    assert torch.isin(drawn[0].indices, drawn[1].indices).sum() < 30
    assert compressor.nbytes(SPEC) == 8 + 100 * 4
    for vector in drawn:
        assert torch.equal(vector.values, x[vector.indices.long()])
        assert (vector.indices.diff() > 0).all()


@pytest.mark.parametrize(("ratio", "omega"), [(1 / 8, 7.0), (0.5, 1.0)])
def test_the_mean_errors_are_as_computed(ratio: float, omega: float) -> None:
    """Every draw of a constant tensor has the same error: d/k - 1 scaled, and 1 - k/d unscaled."""
    x = torch.full((1000,), 3.0, dtype=torch.float64)
    spec = FlatSpec.of(x)
    for compressor, expected in ((RandomK(ratio, scaled=True), omega), (RandomK(ratio), 1 - ratio)):
        payload, _ = compressor.compress(x, compressor.init(spec))
        error = (compressor.decompress(payload) - x).square().sum() / x.square().sum()
        assert float(error) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_all_reduce_of_the_values_is_the_sum_of_what_each_decodes_to(scaled: bool) -> None:
    compressor, spec = RandomK(0.2, block=5, scaled=scaled), spec_of(torch.float64)
    payloads = [
        compressor.compress(gradient(spec.numel, torch.float64, rank), compressor.init(spec, rank))[0]
        for rank in range(4)
    ]
    assert all(isinstance(payload, Summand) for payload in payloads)
    summed = replace(payloads[0], data=torch.stack([payload.data for payload in payloads]).sum(0))
    expected = torch.stack([compressor.decompress(payload) for payload in payloads]).sum(0)
    torch.testing.assert_close(compressor.decompress(summed), expected, rtol=1e-14, atol=1e-14)


def test_with_feedback_every_element_is_sent_in_time() -> None:
    compressor = ErrorFeedback(RandomK(0.1))
    x, sent = torch.linspace(1, 2, 300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    state = compressor.init(FlatSpec.of(x))
    for _ in range(150):
        payload, state = compressor.compress(x, state)
        sent += compressor.decompress(payload)
    torch.testing.assert_close(sent + state.elements["residual"], 150 * x, rtol=1e-13, atol=0)
    assert (sent > 0).all()


def test_parts_of_one_tensor_draw_for_themselves() -> None:
    both = FlatSpec((Segment("w", 0, 500), Segment("w", 500, 1000)), ((500,), (500,)), torch.float32)
    drawn = support(RandomK(0.1), RandomK(0.1).init(both))
    first, second = drawn[drawn < 500], drawn[drawn >= 500] - 500
    assert len(first) == len(second) == 50
    assert torch.isin(first, second).sum() < 20


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"RandomK.ratio must be in \(0, 1\], got 0"):
        RandomK(0)
    with pytest.raises(ValueError, match="RandomK.block must be at least 1, got 0"):
        RandomK(0.1, block=0)
