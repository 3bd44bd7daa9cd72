"""Optimisers change nothing where no gradient arrived, and otherwise do as usual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from gradsync.optim.freezing import OF_ELEMENTS, Freezing
from gradsync.tensors.arrivals import Arrival, Arrivals, Sections
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec

SECTIONS = [(0, 3), (8, 10)]
MOVES = torch.tensor([start <= element < stop for element in range(12) for start, stop in SECTIONS]).view(12, 2).any(1)
BUCKET = Bucket("0", (Segment("weight", 0, 12),), (TensorSpec((3, 4), torch.float32),), Layout.FLAT)
MAKERS = [
    partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(SGD, lr=0.1),
    partial(Adam, lr=0.1, amsgrad=True),
    partial(Adam, lr=0.1, fused=True),
    partial(AdamW, lr=0.1, foreach=False),
    partial(Adagrad, lr=0.1, initial_accumulator_value=0.5),
    partial(RMSprop, lr=0.1, momentum=0.5, centered=True),
    *(partial(kind, lr=0.1) for kind in (ASGD, Adadelta, Adamax, NAdam, RAdam, Rprop)),
]
every_optimizer = pytest.mark.parametrize(
    "make", MAKERS, ids=lambda make: "-".join([make.func.__name__, *make.keywords])
)
in_both_ways = pytest.mark.parametrize("is_watched", [False, True], ids=["what arrived", "taken back"])


def arrived(sections: Sections | None, bucket: Bucket = BUCKET) -> Arrivals:
    return Arrivals([Arrival(bucket, sections, frozen=True)])


def trained(
    make: Callable[..., Optimizer], steps: list[Sections | None], *, is_watched: bool = False, sparse: bool = False
) -> tuple[nn.Parameter, dict[str, Any], list[Tensor]]:
    """Trains with these sections arriving; returns parameter, optimiser state and the parameter after each step."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4))
    other = nn.Parameter(torch.ones(2))  # not synchronised
    optimizer = make([weight, other])
    now = [Arrivals()]
    freezing = Freezing({"weight": weight}, lambda: now[0])
    after = []
    for step, sections in enumerate(steps):
        generator = torch.Generator().manual_seed(step)
        weight.grad, other.grad = torch.randn(3, 4, generator=generator), torch.ones(2)
        if sections is not None:
            weight.grad[~MOVES.view(3, 4)] = 0
        weight.grad = weight.grad.to_sparse(1) if sparse else weight.grad
        now[0] = arrived(sections)
        freezing.before(optimizer, is_watched=is_watched)
        optimizer.step()
        freezing.after(optimizer)
        assert optimizer.param_groups[0]["params"] == [weight, other] and optimizer.state.keys() <= {weight, other}
        after.append(weight.detach().clone())
    assert (other < 1).all() or not steps
    return weight, optimizer.state[weight], after


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # by Adagrad
@pytest.mark.parametrize("make", [partial(SGD, lr=0.1), partial(SGD, lr=0.1, momentum=0.9), partial(Adagrad, lr=0.1)])
def test_sparse_gradients_move_what_dense_ones_do(make: Callable[..., Optimizer]) -> None:
    """Sparse momentum, too, stays as it was where nothing arrived."""
    steps: list[Sections | None] = [None, SECTIONS, SECTIONS, None]
    dense, dense_state, _ = trained(make, steps)
    sparse, sparse_state, _ = trained(make, steps, sparse=True)
    assert torch.allclose(sparse, dense, atol=1e-6)
    for name, values in dense_state.items():
        if isinstance(values, Tensor):
            assert torch.allclose(sparse_state[name].to_dense(), values, atol=1e-6), name


def test_all_optimizers_that_step_what_arrived_are_tried() -> None:
    assert {make.func for make in MAKERS} == OF_ELEMENTS


@in_both_ways
@every_optimizer
def test_what_did_not_arrive_stays_as_it_was(make: Callable[..., Optimizer], is_watched: bool) -> None:
    """The optimiser's state stays as well, and goes on from there."""
    _, before, first = trained(make, [None, None])
    weight, state, after = trained(make, [None, None, SECTIONS, SECTIONS], is_watched=is_watched)
    still = ~MOVES.view(3, 4)
    assert torch.equal(after[1], first[1])
    assert torch.equal(weight[still], first[1][still]) and (weight[~still] != first[1][~still]).all()
    assert state.keys() == before.keys()
    for name, values in state.items():
        if isinstance(values, Tensor) and values.shape == weight.shape:
            assert torch.equal(values[still], before[name][still]), name


@in_both_ways
@every_optimizer
def test_what_arrived_moves_as_without(make: Callable[..., Optimizer], is_watched: bool) -> None:
    weight, state, _ = trained(make, [SECTIONS] * 3, is_watched=is_watched)
    free = nn.Parameter(trained(make, [])[0].detach().clone())
    optimizer = make([free])
    for step in range(3):
        free.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    moves = MOVES.view(3, 4)
    torch.testing.assert_close(weight[moves], free[moves], rtol=1e-6, atol=0)
    for name, values in state.items():
        if isinstance(values, Tensor):
            expected = optimizer.state[free][name]
            of_elements = values.shape == weight.shape
            mine, theirs = (values[moves], expected[moves]) if of_elements else (values, expected)
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0, msg=name)


@in_both_ways
@every_optimizer
def test_where_nothing_arrived_only_the_count_of_steps_goes_on(
    make: Callable[..., Optimizer], is_watched: bool
) -> None:
    _, before, _ = trained(make, [None, None])
    weight, state, after = trained(make, [None, None, [], []], is_watched=is_watched)
    assert torch.equal(weight, after[1])
    for name, values in state.items():
        if isinstance(values, Tensor) and values.shape == weight.shape:
            assert torch.equal(values, before[name]), name
        elif name == "step":
            assert values == before[name] + 2


@in_both_ways
def test_state_that_a_step_makes_is_zero_where_nothing_arrived(is_watched: bool) -> None:
    """SGD's momentum begins with the gradient and the weight decay, neither of which applies where nothing arrived."""
    make = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    weight, state, _ = trained(make, [SECTIONS], is_watched=is_watched)
    assert (state["momentum_buffer"] != 0).equal(MOVES.view(3, 4))


@in_both_ways
def test_weights_in_another_order_of_memory_are_frozen_by_their_index(is_watched: bool) -> None:
    weight = nn.Parameter(torch.arange(16.0).view(1, 4, 2, 2).to(memory_format=torch.channels_last))
    before = weight.detach().clone()
    bucket = Bucket("0", (Segment("weight", 0, 16),), (TensorSpec((1, 4, 2, 2), torch.float32),), Layout.FLAT)
    optimizer = SGD([weight], lr=1.0, momentum=0.5)
    now = arrived([(0, 4)], bucket)
    freezing = Freezing({"weight": weight}, lambda: now)
    weight.grad = torch.ones_like(weight)
    freezing.before(optimizer, is_watched=is_watched)
    optimizer.step()
    freezing.after(optimizer)
    moved = torch.tensor([1.0] * 4 + [0.0] * 12)
    assert torch.equal((before - weight).reshape(-1), moved)
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert torch.equal(momentum.reshape(-1), moved) and momentum.stride() == weight.stride()


@in_both_ways
@every_optimizer
def test_of_one_number_nothing_changes_unless_it_arrived(make: Callable[..., Optimizer], is_watched: bool) -> None:
    spec = TensorSpec((), torch.float32)
    bucket = Bucket("0", (Segment("scale", 0, 1),), (spec,), Layout.FLAT)
    scale, free = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(2.0))
    optimizer, other = make([scale]), make([free])
    now = [Arrivals()]
    freezing = Freezing({"scale": scale}, lambda: now[0])
    steps: list[Sections | None] = [[(0, 1)], [], None, [], [(0, 1)]]
    for sections in steps:
        scale.grad, free.grad, now[0] = torch.tensor(1.0), torch.tensor(1.0), arrived(sections, bucket)
        freezing.before(optimizer, is_watched=is_watched)
        optimizer.step()
        freezing.after(optimizer)
        if sections != []:
            other.step()
        assert torch.equal(scale, free)


@in_both_ways
def test_an_optimizer_has_its_parameters_again_after_a_step_that_raised(is_watched: bool) -> None:
    weight, table = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 2))
    optimizer = Adam([weight, table])
    now = [arrived(SECTIONS)]
    freezing = Freezing({"weight": weight}, lambda: now[0])
    weight.grad, table.grad = torch.ones(3, 4), torch.ones(2, 2).to_sparse(1)
    freezing.before(optimizer, is_watched=is_watched)
    with pytest.raises(RuntimeError, match="does not support sparse"):
        optimizer.step()
    table.grad, now[0] = torch.ones(2, 2), Arrivals()
    with torch.no_grad():
        weight.fill_(5.0)  # from a checkpoint, say
    freezing.before(optimizer, is_watched=is_watched)
    optimizer.step()
    freezing.after(optimizer)
    assert optimizer.param_groups[0]["params"][0] is weight and len(optimizer.state) == 2
    assert (weight < 5.0).all() and (weight > 4.9).all()


def test_gradients_that_were_exchanged_later_in_the_step_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = SGD([weight], lr=0.1)
    now = [Arrivals()]
    freezing = Freezing({"weight": weight}, lambda: now[0])
    freezing.before(optimizer)
    now[0] = Arrivals([Arrival(BUCKET, SECTIONS, frozen=False)])
    freezing.after(optimizer)
    now[0] = arrived(SECTIONS)
    freezing.after(SGD([torch.ones(2)], lr=0.1))
    with pytest.raises(ValueError, match=r"SGD.step\(closure\) called its closure several times"):
        freezing.after(optimizer)


@in_both_ways
def test_one_optimiser_may_have_the_parameters_of_two_models(is_watched: bool) -> None:
    """Each model's hooks run before and after the step, in the same order."""
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    optimizer = Adam(weights, lr=0.1)
    now = arrived(SECTIONS)
    models = [Freezing({"weight": weight}, lambda: now) for weight in weights]
    for step in range(3):
        for weight in weights:
            weight.grad = torch.ones(3, 4)
        for freezing in models:
            freezing.before(optimizer, is_watched=is_watched)
        optimizer.step()
        for freezing in models:
            freezing.after(optimizer)
        assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, weights))
        for weight in weights:
            assert torch.equal(weight < 1 - 0.05 * step, MOVES.view(3, 4))


@in_both_ways
def test_state_of_rprop_begins_with_the_learning_rate_where_nothing_arrived(is_watched: bool) -> None:
    _, state, _ = trained(partial(Rprop, lr=0.1), [SECTIONS], is_watched=is_watched)
    assert torch.equal(state["step_size"][~MOVES.view(3, 4)], torch.full((int((~MOVES).sum()),), 0.1))


def test_an_optimiser_whose_step_has_raised_gets_its_parameters_back() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.ones(3, 4)
    optimizer = SGD([weight], lr=0.1)
    now = arrived(SECTIONS)
    freezing = Freezing({"weight": weight}, lambda: now)
    freezing.before(optimizer)
    assert optimizer.param_groups[0]["params"][0] is not weight
    freezing.give_up()
    assert optimizer.param_groups[0]["params"][0] is weight
    freezing.after(optimizer)
    assert torch.equal(weight, torch.ones(3, 4))
