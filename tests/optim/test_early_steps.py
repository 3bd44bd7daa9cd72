"""Optimisers that step their parameters in parts end where one step of all parameters does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from gradsync.optim.early_steps import EarlySteps, begin_state, why_not_in_parts

MAKERS: list[Callable[..., Optimizer]] = [
    partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(SGD, lr=0.1, fused=True),
    partial(Adam, lr=0.1, amsgrad=True),
    partial(AdamW, lr=torch.tensor(0.1), foreach=False),
    *(partial(kind, lr=0.1) for kind in (Adagrad, NAdam, RMSprop)),
]


def three(make: Callable[..., Optimizer] = MAKERS[0]) -> tuple[list[nn.Parameter], Optimizer]:
    """Returns three parameters and their optimiser, with two parameter groups."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    return parameters, make([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}])


def bring_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(100 + seed)
    for p in parameters:
        p.grad = torch.randn_like(p)


@pytest.mark.parametrize("make", MAKERS)
def test_parts_end_where_one_step_does(make: Callable[..., Optimizer]) -> None:
    (parameters, optimizer), (others, whole) = three(make), three(make)
    early = EarlySteps(optimizer)
    for step in range(3):
        bring_gradients(parameters, step)
        bring_gradients(others, step)
        early.step(parameters[1:])
        early.step([])
        assert parameters[1] in early and parameters[0] not in early
        assert early.check({}) == ""
        early.take_out()
        optimizer.step()
        early.end()
        whole.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, others, strict=True))
    assert not early.stepped


def test_only_what_has_gradients_and_is_the_optimisers_is_stepped() -> None:
    parameters, optimizer = three()
    stranger = nn.Parameter(torch.ones(2))
    stranger.grad = torch.ones(2)
    before = parameters[0].detach().clone()
    EarlySteps(optimizer).step([parameters[0], stranger])
    assert torch.equal(parameters[0], before) and torch.equal(stranger, torch.ones(2))


def test_hooks_and_schedulers_see_one_step() -> None:
    parameters, optimizer = three()
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    early = EarlySteps(optimizer)
    bring_gradients(parameters, 0)
    early.step(parameters)
    assert not seen
    early.take_out()
    optimizer.step()
    early.end()
    scheduler.step()  # would warn if no step had been seen
    assert seen == ["before", "after"]


def groups_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def test_groups_come_back_even_if_taken_out_twice() -> None:
    parameters, optimizer = three()
    before, early = groups_of(optimizer), EarlySteps(optimizer)
    bring_gradients(parameters, 0)
    early.step(parameters[:1])
    early.take_out()
    early.take_out()
    with_gradients = [[id(p) for p in g["params"] if p.grad is not None] for g in optimizer.param_groups]
    assert with_gradients == [[id(parameters[1])], [id(parameters[2])]]
    early.put_back()
    early.put_back()
    assert groups_of(optimizer) == before
    assert parameters[0] in early, "until the end of the optimiser's own step"


def test_one_optimiser_may_have_the_parameters_of_two_models() -> None:
    """Each model's hooks run before and after the step, in the same order."""
    (parameters, optimizer), (others, whole) = three(), three()
    models, before = [EarlySteps(optimizer), EarlySteps(optimizer)], groups_of(optimizer)
    for step in range(3):
        bring_gradients(parameters, step)
        bring_gradients(others, step)
        for early, own in zip(models, (parameters[:1], parameters[2:]), strict=True):
            early.step(own)
        for early in models:
            early.take_out()
        optimizer.step()
        for early in models:
            early.end()
        whole.step()
        assert groups_of(optimizer) == before
    assert all(torch.equal(p, q) for p, q in zip(parameters, others, strict=True))


def test_a_part_that_raises_leaves_the_groups() -> None:
    parameters, optimizer = three()
    before, early = groups_of(optimizer), EarlySteps(optimizer)
    bring_gradients(parameters, 0)
    optimizer.param_groups[0]["weight_decay"] = "much"
    with pytest.raises(TypeError):
        early.step(parameters)
    assert groups_of(optimizer) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p, _: p.grad.mul_(0.5), "the gradient of 'weight' was changed"),
        (lambda p, _: setattr(p, "grad", p.grad * 0.5), "the gradient of 'weight' was changed"),
        (lambda p, _: setattr(p, "grad", None), "the gradient of 'weight' was changed"),
        (lambda _, group: group.update(lr=0.2), "the optimiser's 'lr' was changed"),
        (lambda _, group: group.update(momentum=0.5), "the optimiser's 'momentum' was changed"),
    ],
)
def test_what_is_changed_too_late_is_found(change: Callable[..., Any], said: str) -> None:
    parameters, optimizer = three()
    early = EarlySteps(optimizer)
    bring_gradients(parameters, 0)
    early.step(parameters[:1])
    change(parameters[0], optimizer.param_groups[0])
    assert said in early.check({parameters[0]: "weight"})


def test_a_rate_in_a_tensor_that_is_changed_too_late_is_found() -> None:
    parameters, optimizer = three(MAKERS[3])
    early = EarlySteps(optimizer)
    bring_gradients(parameters, 0)
    early.step(parameters[:1])
    assert early.check({}) == ""
    optimizer.param_groups[0]["lr"].mul_(0.5)
    assert "'lr' was changed" in early.check({})


def test_what_is_changed_between_steps_is_fine() -> None:
    parameters, optimizer = three()
    early = EarlySteps(optimizer)
    for step in range(2):
        bring_gradients(parameters, step)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        early.step(parameters)
        assert early.check({}) == ""
        early.take_out()
        optimizer.step()
        early.end()


def test_optimisers_of_whole_tensors_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert why_not_in_parts(SGD([parameter], lr=0.1)) == ""
    assert "got LBFGS" in why_not_in_parts(torch.optim.LBFGS([parameter]))


@pytest.mark.parametrize("make", MAKERS)
def test_state_is_begun_without_a_step(make: Callable[..., Optimizer]) -> None:
    parameters, optimizer = three(make)
    before, groups = [p.detach().clone() for p in parameters], groups_of(optimizer)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    begun = begin_state(optimizer, parameters[0])
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    assert parameters[0].grad is None and groups_of(optimizer) == groups
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == settings
    assert begun
    kept = optimizer.state[parameters[0]]
    averages = [kept.get(key) for key in ("exp_avg", "exp_avg_sq", "momentum_buffer")]
    assert not any(bool(each.any()) for each in averages if each is not None)
    bring_gradients(parameters, 0)
    optimizer.step()


def test_state_of_strangers_is_not_begun() -> None:
    parameters, optimizer = three()
    assert not begin_state(optimizer, nn.Parameter(torch.ones(2)))
    assert not begin_state(torch.optim.LBFGS(parameters[:1]), parameters[0])
