"""Emulated computation gives real gradients in the order and at the times that were measured, and learns nothing."""

from __future__ import annotations

import time

import pytest
import torch

from gradsync_lab.workloads import Workload, load
from gradsync_lab.workloads.emulated import BATCHES, ComputeTimes, Emulated, measured_times


@pytest.fixture(scope="module")
def task() -> Workload:
    return load("deepfm", data="zipf", dim=4, batch_size=64)


def emulated(task: Workload, ready_s: dict[str, float], *, sparse: bool) -> Emulated:
    times = ComputeTimes(forward_s=0.0, ready_s=ready_s, backward_s=max(ready_s.values()) + 0.002, optimizer_s=0.0)
    return Emulated(task, {sparse: times}, rank=0, world_size=1)


def test_times_are_those_of_every_gradient_in_the_order_of_backward(task: Workload) -> None:
    times = measured_times(task, sparse=True, steps=2)
    assert times.ready_s.keys() == dict(task.model(sparse=True).named_parameters()).keys()
    assert 0 < max(times.ready_s.values()) <= times.backward_s
    assert times.ready_s["perceptron.4.bias"] < times.ready_s["perceptron.0.weight"] < times.ready_s["factors.weight"]


@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_are_those_of_real_batches_and_come_when_they_are_due(task: Workload, sparse: bool) -> None:
    real = task.model(sparse=sparse, seed=0)
    names = [name for name, _ in real.named_parameters()]
    ready_s = {name: 0.001 * number for number, name in enumerate(reversed(names))}
    slept = emulated(task, ready_s, sparse=sparse)
    model = slept.model(sparse=sparse, seed=0)
    optimizer, steps, batches = slept.optimizer(model), slept.batches(0, 1, 0), task.batches(0, 1, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arrived: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, n=name: arrived.append((n, time.perf_counter())))
    for _ in range(2):
        arrived.clear()
        optimizer.zero_grad()
        loss = slept.loss(model, next(steps))
        began_s = time.perf_counter()
        loss.backward()
        ended_s = time.perf_counter()
        optimizer.step()
        real.zero_grad()
        task.loss(real, next(batches)).backward()
        assert [name for name, _ in arrived] == list(reversed(names))
        assert all(at_s - began_s >= ready_s[name] for name, at_s in arrived)
        assert ended_s - began_s >= slept.times[sparse].backward_s
        for (name, mine), (_, theirs) in zip(model.named_parameters(), real.named_parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            assert mine.grad.layout is theirs.grad.layout
            torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), rtol=0, atol=0)
            torch.testing.assert_close(mine.detach(), before[name], rtol=0, atol=0)


def test_batches_come_again_and_models_share_them(task: Workload) -> None:
    slept = emulated(task, {name: 0.0 for name, _ in task.model(sparse=False).named_parameters()}, sparse=False)
    first, second = slept.model(sparse=False), slept.model(sparse=False)

    def gradients(model: torch.nn.Module, step: int) -> list[torch.Tensor]:
        model.zero_grad()
        slept.loss(model, (torch.tensor(step),)).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    a, b = gradients(first, 0), gradients(second, BATCHES)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(a, gradients(first, 1), strict=True))
