"""Momentum correction and warm-up: what DGC adds to a sparsifier."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradsync.compressors import (
    Biased,
    Cast,
    Compressor,
    CompressorState,
    Contraction,
    ErrorFeedback,
    MomentumCorrection,
    SharedBlockInt,
    Threshold,
    TopK,
    Warmup,
    dgc,
)
from gradsync.compressors.expressions import from_expression, to_expression
from gradsync.tensors.bucket import FlatSpec
from tests.compressors.family import gradient, spec_of
from tests.kernels.native import assert_same_bits


def run(
    compressor: MomentumCorrection | ErrorFeedback, gradients: list[Tensor]
) -> tuple[list[Tensor], CompressorState]:
    """Returns what is sent of each gradient, and the last state."""
    state, sent = compressor.init(FlatSpec.of(gradients[0])), []
    for x in gradients:
        payload, state = compressor.compress(x, state)
        assert payload.nbytes == compressor.nbytes(payload.spec, payload.step)
        sent.append(compressor.decompress(payload))
    return sent, state


def some_gradients(steps: int, size: int = 1000, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [gradient(size, dtype, seed) for seed in range(steps)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sending_all_is_the_trajectory_of_momentum_sgd(nesterov: bool) -> None:
    gradients = some_gradients(10)
    weights = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9, nesterov=nesterov)
    ours = torch.zeros(1000, dtype=torch.float64)
    sent, state = run(MomentumCorrection(TopK(1.0), 0.9, nesterov=nesterov, masking=False), gradients)
    for x, update in zip(gradients, sent, strict=True):
        weights.grad = x
        optimizer.step()
        ours -= 0.1 * update
        torch.testing.assert_close(ours, weights.detach(), rtol=0, atol=1e-13)
    assert not state.elements["residual"].any()


def test_masking_what_is_all_sent_leaves_no_momentum() -> None:
    gradients = some_gradients(3)
    sent, state = run(dgc(1.0), gradients)
    assert all(torch.equal(update, x) for update, x in zip(sent, gradients, strict=True))
    assert not state.elements["momentum"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_momentum_it_is_error_feedback_bit_by_bit(dtype: torch.dtype) -> None:
    gradients = some_gradients(6, dtype=dtype)
    ours, our_state = run(dgc(0.05, momentum=0.0, masking=False), gradients)
    theirs, their_state = run(ErrorFeedback(TopK(0.05)), gradients)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_bits(mine, other)
    assert torch.equal(our_state.elements["residual"], their_state.elements["residual"])


@pytest.mark.parametrize("masking", [False, True])
def test_a_step_is_that_of_the_paper(masking: bool) -> None:
    gradients = some_gradients(8)
    compressor = dgc(0.05, masking=masking)
    state = compressor.init(FlatSpec.of(gradients[0]))
    u, v = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for x in gradients:
        payload, state = compressor.compress(x, state)
        u = 0.9 * u + x
        v = v + u
        mask = torch.zeros(1000, dtype=torch.bool).index_fill(0, v.abs().topk(50).indices, True)
        torch.testing.assert_close(compressor.decompress(payload), v * mask, rtol=0, atol=1e-13)
        v = v * ~mask
        u = u * ~mask if masking else u
        torch.testing.assert_close(state.elements["residual"], v, rtol=0, atol=1e-13)
        torch.testing.assert_close(state.elements["momentum"], u, rtol=0, atol=1e-13)


def test_what_is_kept_is_not_below_what_is_left() -> None:
    sent, state = run(dgc(0.03), some_gradients(5))
    kept = sent[-1][sent[-1] != 0]
    assert len(kept) == 30
    assert kept.abs().min() >= state.elements["residual"].abs().max()


def test_a_state_that_was_stored_goes_on_as_if_it_had_not_been() -> None:
    gradients, compressor = some_gradients(6, dtype=torch.float32), dgc(0.05, warmup=(0.25,), steps_per_ratio=4)
    _, state = run(compressor, gradients[:3])
    file = io.BytesIO()
    torch.save(dict(state.elements), file)
    file.seek(0)
    stored = replace(compressor.init(state.spec), step=state.step, elements=torch.load(file))
    for x in gradients[3:]:
        expected, state = compressor.compress(x, state)
        got, stored = compressor.compress(x, stored)
        assert_same_bits(got.data, expected.data)


def test_the_gradient_of_each_tensor_is_clipped_by_the_share_of_a_rank() -> None:
    spec = spec_of(torch.float32, [3, 0, 4, 2])
    x = torch.tensor([3.0, 4.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0])
    compressor = MomentumCorrection(TopK(1.0), masking=False, clip=2.0, ranks=4)
    payload, _ = compressor.compress(x, compressor.init(spec))
    torch.testing.assert_close(compressor.decompress(payload), torch.cat([x[:3] / 5, x[3:]]))


def test_warmup_changes_the_size_with_the_step() -> None:
    compressor = dgc(0.001, warmup=(0.25, 0.0625, 0.015625, 0.004), steps_per_ratio=2)
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    state, spec = compressor.init(FlatSpec.of(x)), FlatSpec.of(x)
    counts = []
    for step in range(12):
        payload, state = compressor.compress(x, state)
        assert payload.nbytes == compressor.nbytes(spec, step)
        counts.append(payload.maker.elements(payload).nnz)
        assert int((compressor.decompress(payload) != 0).sum()) == counts[-1]
    assert counts == [2500, 2500, 625, 625, 156, 156, 40, 40, 10, 10, 10, 10]
    assert compressor.law(spec) == Contraction(0.001)


def test_payloads_of_other_steps_are_not_summed() -> None:
    compressor, x = Warmup((TopK(0.5), TopK(0.1)), (0, 1)), gradient(100, torch.float32)
    first, state = compressor.compress(x, compressor.init(FlatSpec.of(x)))
    second, _ = compressor.compress(x, state)
    with pytest.raises(ValueError, match=r"must be of one step, got \[0, 1\]"):
        compressor.sum_into(torch.zeros(100), [first, second])


def test_settings_out_of_range_are_refused() -> None:
    top_k = TopK(0.1)
    for settings, match in (
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"clip": 0.0}, "clip must be greater than 0 or None, got 0.0"),
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            MomentumCorrection(top_k, **settings)
    for outer in (ErrorFeedback, MomentumCorrection):
        for inner in (ErrorFeedback, MomentumCorrection):
            with pytest.raises(ValueError, match=f"{outer.__name__} of {inner.__name__}"):
                outer(inner(top_k))
    for starts in ((), (0,), (1, 2), (0, 0), (0, 2, 1)):
        with pytest.raises(ValueError, match="one step for each of 2 compressors, ascending from 0, got"):
            Warmup((top_k, top_k), starts)
    with pytest.raises(ValueError, match="put the feedback around the Warmup"):
        Warmup((top_k, ErrorFeedback(top_k)), (0, 1))
    for differing, match in (
        ((SharedBlockInt(3, block=1), SharedBlockInt(3, block=2)), "equally many numbers, got 5, 3 for 5 elements"),
        ((Cast("float16"), Cast("bfloat16")), "sum one dtype, got torch.float16, torch.bfloat16 for 5 elements"),
    ):
        with pytest.raises(ValueError, match=match):
            Warmup(differing, (0, 1)).init(FlatSpec.of(torch.zeros(5)))


def test_a_plan_can_name_all_of_it() -> None:
    compressor = dgc(0.001, warmup=(0.25, 0.01), steps_per_ratio=2, clip=1.0)
    tree = json.loads(json.dumps(to_expression(compressor)))
    assert from_expression(tree, Compressor) == compressor


def test_a_warmup_of_other_laws_has_the_last() -> None:
    spec = FlatSpec.of(torch.zeros(10))
    assert isinstance(Warmup((TopK(0.5), Threshold(0.1)), (0, 1)).law(spec), Biased)
