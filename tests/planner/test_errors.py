"""Measured errors of lossy ways: what a step would change, whoever carries a compressor's payloads."""

from __future__ import annotations

from math import inf

import pytest
import torch

from gradsync.bucket import FlatSpec, Segment
from gradsync.compressors import BlockInt, ErrorFeedback, RandomK, TopK
from gradsync.planner.errors import delay_of, highest, name_of, relative_errors, sends_later
from gradsync.schemes import AllReduce, CompressedAllGather, CompressedTwoWay, HalfPrecision, PowerSGD

HALF, TOP = HalfPrecision(values="bfloat16"), ErrorFeedback(TopK(0.25))


def test_errors_are_what_is_changed_in_a_gradient() -> None:
    x = torch.tensor([[8.0, 1.0], [1.0, 1.0]])
    found = relative_errors([TOP, HALF, AllReduce()], "w", x)
    assert found == {
        str(TOP): pytest.approx((3 / 67) ** 0.5),
        str(HALF): 0.0,
    }, "one of four is kept; these numbers are bfloat16's; an exact scheme has no error"
    assert torch.equal(x, torch.tensor([[8.0, 1.0], [1.0, 1.0]])), "the gradient stays"


def test_ways_that_carry_the_same_payloads_have_the_same_error() -> None:
    assert name_of(CompressedTwoWay(TOP)) == name_of(CompressedAllGather(TOP)) == name_of(TOP)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    (error,) = relative_errors([CompressedTwoWay(TOP), CompressedAllGather(TOP), TOP], "w", x).values()
    assert 0.1 < error < 1.0


def test_finer_ways_change_less() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator) + 10 * torch.randn(64, 1, generator=generator)
    eight, four = (ErrorFeedback(BlockInt(bits)) for bits in (8, 4))
    found = relative_errors([eight, four, PowerSGD(1, min_compression=1.0), PowerSGD(4, min_compression=1.0)], "w", x)
    assert found[str(eight)] < 0.02 < found[str(four)] < 0.3
    assert found[str(PowerSGD(4, min_compression=1.0))] < found[str(PowerSGD(1, min_compression=1.0))] < 0.5


@pytest.mark.parametrize("x", [torch.zeros(3), torch.ones(3, dtype=torch.int64), torch.eye(3).to_sparse()])
def test_of_zeros_integers_and_sparse_gradients_there_is_nothing_to_say(x: torch.Tensor) -> None:
    assert relative_errors([TOP, HALF], "w", x) == {}


def test_of_the_ranks_the_highest_error_counts() -> None:
    assert highest([{"a": 0.1, "b": 0.5}, {"a": 0.2}, {}]) == {"a": 0.2, "b": 0.5}


def test_the_delay_is_what_error_feedback_comes_to_hold_back() -> None:
    random = ErrorFeedback(RandomK(0.3))
    assert sends_later(random) and sends_later(CompressedAllGather(random)) and sends_later(PowerSGD(2))
    assert not sends_later(HALF) and not sends_later(RandomK(0.3))
    generator = torch.Generator().manual_seed(0)
    state = random.init(FlatSpec((Segment("w", 0, 1 << 14),), ((1 << 14,),), torch.float32), 0)
    squares = []
    for _ in range(60):
        x = torch.randn(1 << 14, generator=generator)
        _, state = random.compress(x, state)
        squares.append(float(state.elements["residual"].square().sum() / x.square().sum()))
    assert delay_of(0.7**0.5) == pytest.approx(0.7 / 0.3)
    assert sum(squares[30:]) / 30 == pytest.approx(delay_of(0.7**0.5), rel=0.05)
    assert delay_of(1.0) == delay_of(1.2) == inf
