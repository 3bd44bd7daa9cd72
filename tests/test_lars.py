"""LARS: tensors move in proportion to their norms, by what of their gradients arrived."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.lars import LARS

SETTINGS: dict[str, Any] = {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02}


def stepped(weights: Tensor, gradients: list[Tensor], **settings: Any) -> Tensor:
    """The weights after steps with these gradients."""
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


def test_the_rate_is_by_the_norms_of_what_arrived() -> None:
    """As if the layer had no more."""
    weights, gradient = random(4, 6, seed=0), random(4, 6, seed=1)
    sections = [(0, 5), (12, 18)]
    arrived = torch.zeros(24, dtype=torch.bool)
    for start, stop in sections:
        arrived[start:stop] = True
    partly = torch.where(arrived.view(4, 6), gradient, 0.0)
    got = stepped(weights, [partly], arrived=lambda parameter: sections, weight_decay=0.0)
    cut, sent = (x.reshape(-1)[arrived].view(1, -1) for x in (weights, gradient))
    alone = stepped(cut, [sent], weight_decay=0.0)
    torch.testing.assert_close(got.reshape(-1)[arrived], alone.view(-1))
    assert torch.equal(got.reshape(-1)[~arrived], weights.reshape(-1)[~arrived])
    whole = stepped(weights, [gradient], arrived=lambda parameter: None)
    assert torch.equal(whole, stepped(weights, [gradient]))


def test_where_nothing_arrived_momentum_alone_moves() -> None:
    weights, gradient = random(3, 4, seed=0), random(3, 4, seed=1)
    first = stepped(weights, [gradient], weight_decay=0.0)
    sections: list[Any] = [None, []]
    parameter = nn.Parameter(weights.clone())
    optimizer = LARS([parameter], **{**SETTINGS, "weight_decay": 0.0}, arrived=lambda _: sections.pop(0))
    for each in (gradient, torch.zeros_like(gradient)):
        parameter.grad = each
        optimizer.step()
    torch.testing.assert_close(parameter.detach() - first, 0.9 * (first - weights))


def test_the_rate_rises_in_equal_parts() -> None:
    bias, gradient = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    rates = []
    for steps in range(1, 7):
        after, before = (stepped(bias, [gradient] * n, momentum=0.0, warmup_steps=4) for n in (steps, steps - 1))
        rates.append(float((before - after)[0]))
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


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
            optimizer = LARS([parameter], lr=1.0)
            optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        parameter.grad = gradient
        optimizer.step()
    assert torch.equal(parameter.detach(), straight)


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
        ({"lr": 0.0}, "LARS.lr must be positive and finite, got 0.0"),
        ({"trust": float("inf")}, "LARS.trust must be positive and finite, got inf"),
        ({"momentum": 1.0}, r"LARS.momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1.0}, "LARS.weight_decay must be finite and not negative, got -1.0"),
        ({"warmup_steps": 1.5}, "LARS.warmup_steps must be a whole number from 0 on, got 1.5"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LARS([nn.Parameter(torch.ones(2))], **{**SETTINGS, **settings})


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="LARS is for dense gradients, got torch.sparse_coo of"):
        LARS(table.parameters(), lr=0.1).step()
