"""LARS: tensors move in proportion to the norms of weights and arrived gradients."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.optim.freezing import Freezing
from gradsync.optim.lars import LARS
from gradsync.optim.momentum import momentum_of, take_momentum
from gradsync.tensors.arrivals import Arrival, Arrivals
from gradsync.tensors.bucket import Bucket, Layout, Segment, TensorSpec

SETTINGS: dict[str, Any] = {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02}


def stepped(weights: Tensor, gradients: list[Tensor], **settings: Any) -> Tensor:
    """Returns the weights after steps with these gradients."""
    parameter = nn.Parameter(weights.clone())
    optimizer = LARS([parameter], **{**SETTINGS, **settings})
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_steps_are_those_of_the_paper() -> None:
    """v = m v + lr t |w| / (|g| + d |w|) (g + d w); w -= v."""
    weights, velocity = random(4, 6, seed=0), torch.zeros(4, 6, dtype=torch.float64)
    gradients = [random(4, 6, seed=seed) for seed in range(1, 5)]
    expected = weights.clone()
    for gradient in gradients:
        norm = float(expected.norm())
        rate = 2.0 * 0.02 * norm / (float(gradient.norm()) + 0.01 * norm)
        velocity = 0.9 * velocity + rate * (gradient + 0.01 * expected)
        expected = expected - velocity
    torch.testing.assert_close(stepped(weights, gradients), expected, rtol=1e-12, atol=1e-12)


def test_a_layer_moves_by_its_own_norm_whatever_the_gradients() -> None:
    weights, gradient = random(5, 5, seed=0), random(5, 5, seed=1)
    for scale in (1e-3, 1.0, 1e3):
        moved = stepped(weights, [scale * gradient], weight_decay=0.0) - weights
        assert float(moved.norm() / weights.norm()) == pytest.approx(2.0 * 0.02)


def test_biases_move_as_by_sgd_and_do_not_decay() -> None:
    for shape in ((7,), ()):
        weights, gradients = random(*shape, seed=0), [random(*shape, seed=seed) for seed in (1, 2)]
        sgd = nn.Parameter(weights.clone())
        optimizer = torch.optim.SGD([sgd], lr=2.0, momentum=0.9)
        for gradient in gradients:
            sgd.grad = gradient
            optimizer.step()
        torch.testing.assert_close(stepped(weights, gradients), sgd.detach())


def test_what_is_all_zero_moves_at_the_plain_rate() -> None:
    zero, gradient = torch.zeros(2, 3, dtype=torch.float64), random(2, 3, seed=1)
    torch.testing.assert_close(stepped(zero, [gradient]), -2.0 * gradient)


def test_a_gradient_of_zeros_decays_nothing() -> None:
    """Only weight decay bounds the trust ratio here, which would make decay the whole step."""
    weights = random(2, 3, seed=0)
    assert torch.equal(stepped(weights, [torch.zeros(2, 3, dtype=torch.float64)]), weights)
    assert torch.equal(stepped(weights, [torch.zeros(2, 3, dtype=torch.float64)], weight_decay=0.0), weights)


@pytest.mark.parametrize("sections", [[], [(0, 5), (12, 18)], [(23, 24)], [(0, 24)]])
def test_what_arrived_moves_as_if_it_were_the_layer_and_the_rest_by_momentum_alone(
    sections: list[tuple[int, int]],
) -> None:
    """The first step brings all elements: momentum starts, and weights decay."""
    weights, gradients = random(4, 6, seed=0), [random(4, 6, seed=seed) for seed in (1, 2)]
    arrived = torch.zeros(24, dtype=torch.bool)
    for start, stop in sections:
        arrived[start:stop] = True
    gradients[1] = torch.where(arrived.view(4, 6), gradients[1], 0.0)
    known: list[Any] = [None, sections]
    first = stepped(weights, gradients[:1]).view(-1)
    both = stepped(weights, gradients, arrived=lambda parameter: known.pop(0)).view(-1)
    momentum = 0.9 * (first - weights.view(-1))
    torch.testing.assert_close((both - first)[~arrived], momentum[~arrived])
    cut, sent = (x.view(-1)[arrived].view(1, -1) for x in (first, gradients[1]))
    alone = stepped(cut, [sent]) - cut if sections else cut
    torch.testing.assert_close((both - first - momentum)[arrived], alone.view(-1))


def test_a_bias_that_arrived_in_part_moves_there() -> None:
    moved = stepped(torch.zeros(4), [torch.ones(4)], arrived=lambda parameter: [(1, 3)])
    assert moved.tolist() == [0.0, -2.0, -2.0, 0.0]


def test_a_part_would_move_too_far_by_the_norm_of_all_weights() -> None:
    weights = torch.ones(4, 4)
    gradient = torch.zeros(16).index_fill(0, torch.arange(4), 1.0).view(4, 4)
    settings: dict[str, Any] = {"lr": 1.0, "trust": 0.1, "weight_decay": 0.0}
    told, untold = (stepped(weights, [gradient], arrived=known, **settings) for known in (lambda _: [(0, 4)], None))
    assert (float(told[0, 0]), float(untold[0, 0])) == pytest.approx((0.9, 0.8))


def test_elements_are_counted_by_their_index_in_any_order_of_memory() -> None:
    weights = torch.ones(1, 4, 2, 2).to(memory_format=torch.channels_last)
    moved = stepped(weights, [torch.ones_like(weights)], arrived=lambda parameter: [(0, 4)])
    assert (moved.reshape(-1) < 1).tolist() == [True] * 4 + [False] * 12


def test_norms_have_more_range_than_half_precision() -> None:
    weights = torch.full((300, 300), 300.0, dtype=torch.float16)  # of norm 9e4; float16 ends at 6.5e4
    moved = stepped(weights, [weights], lr=1.0, trust=0.5, weight_decay=0.0)
    assert torch.equal(moved, torch.full_like(weights, 150.0))


def test_what_is_frozen_stays_where_momentum_would_move_it() -> None:
    parameter = nn.Parameter(random(3, 4, seed=0))
    spec = TensorSpec((3, 4), torch.float64)
    bucket = Bucket("0", (Segment("weight", 0, 12),), (spec,), Layout.FLAT)
    known: list[Any] = [None]
    optimizer = LARS([parameter], **SETTINGS, arrived=lambda _: known[0])
    freezing = Freezing({"weight": parameter}, lambda: arrivals)
    for seed, known[0] in enumerate([None, [(2, 5)]]):
        arrivals = Arrivals([Arrival(bucket, known[0], frozen=True)])
        before = parameter.detach().clone()
        parameter.grad = random(3, 4, seed=seed)
        freezing.before(optimizer)
        optimizer.step()
        freezing.after(optimizer)
    assert (parameter != before).reshape(-1).nonzero().flatten().tolist() == [2, 3, 4]


def test_a_copy_takes_all_for_arrived() -> None:
    again = copy.deepcopy(LARS([nn.Parameter(torch.ones(2, 2))], lr=0.1, arrived=lambda parameter: []))
    (parameter,) = again.param_groups[0]["params"]
    parameter.grad = torch.ones(2, 2)
    again.step()
    assert again.arrived is None and (parameter < 1).all()


def test_the_rate_rises_in_equal_parts() -> None:
    bias, gradient = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    rates = []
    for steps in range(1, 7):
        after, before = (stepped(bias, [gradient] * n, momentum=0.0, warmup_steps=4) for n in (steps, steps - 1))
        rates.append(float((before - after)[0]))
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_the_rate_falls_by_the_square_of_the_steps_that_are_left() -> None:
    bias, gradient = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    settings = {"momentum": 0.0, "warmup_steps": 2, "decay_steps": 4}
    after = [float(stepped(bias, [gradient] * steps, **settings)[0]) for steps in range(7)]
    rates = [before - now for before, now in zip(after, after[1:], strict=False)]
    assert rates == pytest.approx([0.5 * 2.0, 0.75**2 * 2.0, 0.5**2 * 2.0, 0.25**2 * 2.0, 0.0, 0.0])


def test_training_resumes_in_the_middle_of_the_warm_up() -> None:
    gradients = [random(4, 4, seed=seed) for seed in range(6)]
    straight = stepped(random(4, 4, seed=9), gradients, warmup_steps=5)
    parameter = nn.Parameter(random(4, 4, seed=9))
    optimizer = LARS([parameter], **SETTINGS, warmup_steps=5)
    for number, gradient in enumerate(gradients):
        if number == 3:
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer = LARS([parameter], lr=1.0, arrived=lambda parameter: None)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        parameter.grad = gradient
        optimizer.step()
    assert torch.equal(parameter.detach(), straight) and optimizer.arrived is not None


def test_a_closure_is_called_with_gradients_on() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 4.0
    assert (parameter < 1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, r"LARS.lr must be in \(0, inf\), got 0.0"),
        ({"trust": float("inf")}, r"LARS.trust must be in \(0, inf\), got inf"),
        ({"momentum": 1.0}, r"LARS.momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1.0}, r"LARS.weight_decay must be in \[0, inf\), got -1.0"),
        ({"warmup_steps": 1.5}, "LARS.warmup_steps must be a whole number, got 1.5"),
        ({"warmup_steps": True}, "LARS.warmup_steps must be a whole number, got True"),
        ({"decay_steps": 0}, "LARS.decay_steps must be at least 1 or None, got 0"),
        ({"lr": "1"}, "LARS.lr must be a number, got '1'"),
    ],
)
def test_wrong_settings_are_refused_in_groups_too(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(2))], **{**SETTINGS, **settings})
    with pytest.raises(ValueError, match=message):
        LARS([{"params": [nn.Parameter(torch.ones(2))], **settings}], lr=1.0)


def test_sparse_gradients_are_refused_before_anything_has_changed() -> None:
    parameter, table = nn.Parameter(torch.ones(2, 2)), nn.Embedding(5, 2, sparse=True)
    parameter.grad = torch.ones(2, 2)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer = LARS([parameter, table.weight], lr=0.1)
    with pytest.raises(RuntimeError, match="LARS is for dense gradients, got torch.sparse_coo of"):
        optimizer.step()
    assert (parameter == 1).all() and optimizer.param_groups[0]["steps"] == 0


def test_momentum_is_seen_and_not_taken() -> None:
    """Momentum sums steps, each by its own norms, rather than gradients as SGD's does."""
    optimizer = LARS([nn.Parameter(torch.ones(2, 2))], lr=0.1, momentum=0.8)
    assert take_momentum(optimizer, optimizer.param_groups[0]["params"]) == 0
    assert momentum_of(optimizer.param_groups[0]) == 0.8
