"""Plans with compressors in the engine: residuals live with the parameters, through checkpoints and other plans."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.bucket import TensorSpec, trainable_parameters
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.schemes import CompressedAllGather, CompressedTwoWay, Scheme, Sparsified
from tests.engine.models import Perceptron
from tests.engine.twins import averaged
from tests.world import Ranks

World = Callable[[int], Ranks]
FEEDBACK = ErrorFeedback(TopK(0.2))
TWO_WAY, GATHERED = CompressedTwoWay(FEEDBACK), CompressedAllGather(FEEDBACK)


def plan_for(model: nn.Module, scheme: Scheme[Any], *cuts: list[tuple[str, int, int]]) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    parts = list(cuts) or [[(name, 0, spec.numel) for name, spec in specs.items()]]
    return Plan.make(specs, dist.get_world_size(), [(part, scheme) for part in parts])


def train(model: nn.Module, steps: int, seed: int) -> list[Tensor]:
    """Its weights afterwards."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return [parameter.detach().clone() for parameter in model.parameters()]


def resumes_bit_by_bit() -> None:
    for scheme in (TWO_WAY, GATHERED, Sparsified(FEEDBACK)):
        torch.manual_seed(0)
        model = Perceptron()
        handle = gradsync.attach(model, plan=plan_for(model, scheme), timeout=10)
        train(model, 3, seed=0)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "gradsync": handle.state_dict()}, buffer)
        expected = train(model, 3, seed=7)
        handle.detach()
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        other = Perceptron()
        other.load_state_dict(saved["model"])
        handle = gradsync.attach(other, plan=plan_for(other, scheme), timeout=10)
        handle.load_state_dict(saved["gradsync"])
        for got, value in zip(train(other, 3, seed=7), expected, strict=True):
            assert torch.equal(got, value), scheme.title
        handle.detach()


def residuals_follow_parameters_into_other_cuts() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle = gradsync.attach(model, plan=plan_for(model, GATHERED), timeout=10)
    train(model, 3, seed=0)
    saved = handle.state_dict()
    before = saved["state"]["weight[0:18]/sent.residual"].clone()
    assert int(saved["state"]["bias[0:3]//sent.step"]) == 3
    handle.detach()
    cut = plan_for(model, GATHERED, [("weight", 11, 18), ("bias", 0, 3)], [("weight", 0, 11)])
    handle = gradsync.attach(model, plan=cut, timeout=10)
    handle.load_state_dict(saved)
    state = handle.state_dict()["state"]
    assert torch.equal(torch.cat([state["weight[0:11]/sent.residual"], state["weight[11:18]/sent.residual"]]), before)
    assert int(state["weight[0:11]//sent.step"]) == 3
    handle.detach()


def what_nobody_used_stays_none_and_inf_spoils_the_step() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"kept": nn.Linear(6, 3, bias=False), "unused": nn.Linear(2, 2)})
    handle = gradsync.attach(model, plan=plan_for(model, TWO_WAY), timeout=10)
    x = torch.randn(4, 6)
    model["kept"](x).sum().backward()
    assert model["unused"].weight.grad is None
    before = copy.deepcopy(handle.state_dict()["state"])
    model.zero_grad()
    (model["kept"](x).sum() * (float("inf") if dist.get_rank() == 1 else 1.0)).backward()
    assert model["kept"].weight.grad.isnan().all()
    for key, value in handle.state_dict()["state"].items():
        assert torch.equal(value, before[key]), key
    handle.detach()


def a_jump_of_the_learning_rate_loses_nothing() -> None:
    """The residual is in units of the gradient: what came at one rate is applied at a later one."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle = gradsync.attach(model, plan=plan_for(model, GATHERED), timeout=10)
    brought, given = torch.zeros(18), torch.zeros(18)
    for rate in (0.0, 0.0, 1.0, 0.1, 0.0, 0.01):
        model.zero_grad()
        x = torch.randn(4, 6)
        brought += averaged(x.sum(0).repeat(3))
        model(x).sum().backward()
        given += model.weight.grad.flatten()
        with torch.no_grad():
            model.weight -= rate * model.weight.grad
    left = averaged(handle.state_dict()["state"]["weight[0:18]/sent.residual"])
    torch.testing.assert_close(given + left, brought, rtol=1e-5, atol=1e-5)
    handle.detach()


def test_a_resumed_run_is_the_same_bit_by_bit(world: World) -> None:
    world(2).run(resumes_bit_by_bit)


def test_residuals_follow_parameters_into_other_cuts(world: World) -> None:
    world(2).run(residuals_follow_parameters_into_other_cuts)


def test_flags_ride_with_payloads(world: World) -> None:
    world(2).run(what_nobody_used_stays_none_and_inf_spoils_the_step)


def test_a_jump_of_the_learning_rate_loses_nothing(world: World) -> None:
    world(2).run(a_jump_of_the_learning_rate_loses_nothing)
