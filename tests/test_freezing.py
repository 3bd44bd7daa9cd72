"""Optimisers change nothing where no gradient arrived, and elsewhere what they would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from gradsync.arrivals import Arrival, Arrivals
from gradsync.bucket import Bucket, Layout, Segment, TensorSpec
from gradsync.freezing import Freezing

SECTIONS = [(0, 3), (8, 10)]
MOVES = torch.tensor([start <= element < stop for element in range(12) for start, stop in SECTIONS]).view(12, 2).any(1)
BUCKET = Bucket("0", (Segment("weight", 0, 12),), (TensorSpec((3, 4), torch.float32),), Layout.FLAT)
MAKERS = [
    pytest.param(partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1), id="SGD"),
    pytest.param(partial(SGD, lr=0.1, momentum=0.9, nesterov=True), id="Nesterov"),
    pytest.param(partial(Adam, lr=0.1, amsgrad=True), id="Adam"),
    pytest.param(partial(AdamW, lr=0.1, foreach=False), id="AdamW"),
    pytest.param(partial(Adagrad, lr=0.1, initial_accumulator_value=0.5), id="Adagrad"),
]


def trained(
    make: Callable[..., Optimizer], steps: list[list[tuple[int, int]] | None]
) -> tuple[nn.Parameter, dict[str, Any], list[torch.Tensor]]:
    """The parameter, the optimiser's state of it and what the parameter was after each step, which brought so much."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4))
    other = nn.Parameter(torch.ones(2))  # not synchronised
    optimizer = make([weight, other])
    now: list[list[tuple[int, int]] | None] = [None]
    freezing = Freezing({"weight": weight}, lambda: Arrivals([Arrival(BUCKET, now[0], frozen=True)]))
    optimizer.register_step_pre_hook(freezing.before)
    optimizer.register_step_post_hook(freezing.after)
    after = []
    for step, sections in enumerate(steps):
        generator = torch.Generator().manual_seed(step)
        weight.grad, other.grad = torch.randn(3, 4, generator=generator), torch.ones(2)
        if sections is not None:
            weight.grad[~MOVES.view(3, 4)] = 0
        now[0] = sections
        optimizer.step()
        after.append(weight.detach().clone())
    assert (other < 1).all() or not steps
    return weight, optimizer.state[weight], after


@pytest.mark.parametrize("make", MAKERS)
def test_what_did_not_arrive_stays_as_it_was(make: Callable[..., Optimizer]) -> None:
    """Also in the optimiser's state, which goes on from there."""
    _, before, first = trained(make, [None, None])
    weight, state, after = trained(make, [None, None, SECTIONS, SECTIONS])
    still = ~MOVES.view(3, 4)
    assert torch.equal(after[1], first[1])
    assert torch.equal(weight[still], first[1][still]) and (weight[~still] != first[1][~still]).all()
    for name, values in state.items():
        if isinstance(values, torch.Tensor) and values.shape == weight.shape:
            assert torch.equal(values[still], before[name][still]), name


@pytest.mark.parametrize("make", MAKERS)
def test_what_arrived_moves_as_without(make: Callable[..., Optimizer]) -> None:
    weight, state, _ = trained(make, [SECTIONS] * 3)
    free = nn.Parameter(trained(make, [])[0].detach().clone())
    optimizer = make([free])
    for step in range(3):
        free.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    moves = MOVES.view(3, 4)
    assert torch.equal(weight[moves], free[moves])
    for name, values in state.items():
        if isinstance(values, torch.Tensor) and values.shape == weight.shape:
            assert torch.equal(values[moves], optimizer.state[free][name][moves]), name


def test_state_that_a_step_makes_is_zero_where_nothing_arrived() -> None:
    """SGD's momentum begins with the gradient and the decay of weights, of which one has not come."""
    weight, state, _ = trained(partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1), [SECTIONS])
    assert (state["momentum_buffer"] != 0).equal(MOVES.view(3, 4))


def test_weights_in_another_order_of_memory_are_frozen_by_their_index() -> None:
    weight = nn.Parameter(torch.arange(16.0).view(1, 4, 2, 2).to(memory_format=torch.channels_last))
    before = weight.detach().clone()
    bucket = Bucket("0", (Segment("weight", 0, 16),), (TensorSpec((1, 4, 2, 2), torch.float32),), Layout.FLAT)
    optimizer = SGD([weight], lr=1.0)
    freezing = Freezing({"weight": weight}, lambda: Arrivals([Arrival(bucket, [(0, 4)], frozen=True)]))
    weight.grad = torch.ones_like(weight)
    freezing.before(optimizer)
    optimizer.step()
    freezing.after(optimizer)
    assert torch.equal((before - weight).reshape(-1), torch.tensor([1.0] * 4 + [0.0] * 12))
