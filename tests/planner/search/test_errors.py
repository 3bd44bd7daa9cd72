"""Measured errors of lossy schemes: the relative change of a step, whichever scheme carries the payloads."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from gradsync.compressors import BlockInt, Compressor, ErrorFeedback, MomentumCorrection, RandomK, TopK
from gradsync.planner.search.errors import delay_of, highest, name_of, relative_errors, sends_later
from gradsync.schemes import AllReduce, CompressedAllGather, CompressedTwoWay, HalfPrecision, PowerSGD
from gradsync.tensors.bucket import FlatSpec, Segment

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


def test_what_is_not_sent_now_is_sent_later_with_feedback() -> None:
    random = ErrorFeedback(RandomK(0.3))
    for way in (random, CompressedAllGather(random), PowerSGD(2), MomentumCorrection(TopK(0.3))):
        assert sends_later(way)
    assert not sends_later(HALF) and not sends_later(RandomK(0.3))


@pytest.mark.parametrize("selection", [RandomK(0.3), TopK(0.2)])
def test_the_delay_is_what_error_feedback_comes_to_hold_back(selection: Compressor[Any]) -> None:
    way = ErrorFeedback(selection)
    generator = torch.Generator().manual_seed(0)
    state = way.init(FlatSpec((Segment("w", 0, 1 << 14),), ((1 << 14,),), torch.float32), 0)
    squares = []
    for _ in range(60):
        x = torch.randn(1 << 14, generator=generator)
        _, state = way.compress(x, state)
        squares.append(float(state.elements["residual"].square().sum() / x.square().sum()))
    (error,) = relative_errors([way], "w", x).values()
    assert sum(squares[30:]) / 30 == pytest.approx(delay_of(error), rel=0.05)


def test_who_sends_nothing_holds_all_back() -> None:
    assert delay_of(0.7**0.5) == pytest.approx(0.7 / 0.3)
    assert delay_of(1.0) == delay_of(1.2) == inf
