"""Loss scaling: residuals follow the scale, and an overflow on one rank changes no state on any rank."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, Threshold, TopK, dgc
from gradsync.planner import CompressingPlanner, Constraints
from gradsync.schemes import (
    AllReduce,
    CoarseGrained,
    CompressedAllGather,
    CompressedTwoWay,
    HalfPrecision,
    MajorityVote,
    Scheme,
    SchemeOrCompressor,
)
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import ParameterProfile
from gradsync.tuning.auto import AutoPlanner
from tests.world import Ranks

World = Callable[[int], Ranks]
CHUNKS = CoarseGrained(ratio=0.2, chunk=16, max_age=12)
FEEDBACK = ErrorFeedback(TopK(0.2))
SCHEMES: dict[str, Scheme[Any]] = {
    "late": CHUNKS,
    "exact": replace(CHUNKS, choice="exact", scoring="relative"),
    "frozen": replace(CHUNKS, scoring="agreement", freeze=True),
    "halves": replace(CHUNKS, scheme=HalfPrecision(values="bfloat16")),
    "momentum": replace(CHUNKS, momentum=0.5),
    "one chunk": replace(CHUNKS, chunk=10_000),
    "gathered": CompressedAllGather(FEEDBACK),
    "two-way": CompressedTwoWay(FEEDBACK),
    "dgc": CompressedAllGather(dgc(0.2, momentum=0.5)),
    "bfloat16": HalfPrecision(values="bfloat16"),
}
BAD_STEP, STEPS = 3, 8


class Twice(nn.Module):
    """Two layers; the second one's gradients have a bucket of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def plan_of(model: nn.Module, scheme: Scheme[Any]) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    names = {layer: [name for name in specs if name.startswith(layer)] for layer in ("first", "second")}
    return Plan.make(specs, dist.get_world_size(), [(names["second"], AllReduce()), (names["first"], scheme)])


class Training:
    """A model in training, with or without a loss scale."""

    def __init__(self, scheme: Scheme[Any], *, scaled: bool, behind_ddp: bool = False) -> None:
        torch.manual_seed(0)
        self.inner = Twice()
        self.model = DistributedDataParallel(self.inner) if behind_ddp else self.inner
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2, enabled=scaled)
        self.handle = gradsync.attach(
            self.model, plan=plan_of(self.inner, scheme), timeout=10, grad_scaler=self.scaler if scaled else None
        )

    def step(self, number: int, *, bad: int | None = None) -> None:
        """Takes a step; `bad`: the element of the first weight's gradient that is infinite on rank 1."""
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        self.optimizer.zero_grad()
        weight = self.inner.first.weight
        spoil = weight.register_hook(lambda gradient: spoilt(gradient, bad) if dist.get_rank() == 1 else None)
        self.scaler.scale(self.model(torch.randn(5, 16, generator=generator)).square().mean()).backward()
        spoil.remove()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.inner.parameters()]

    @property
    def left(self) -> dict[str, Tensor]:
        """Returns the residuals by element, in units of the gradient."""
        saved = self.handle.state_dict()
        scale = saved.get("loss_scale", 1.0)
        return {key: values / scale for key, values in saved["state"].items() if "//" not in key}


def spoilt(gradient: Tensor, bad: int | None) -> Tensor | None:
    if bad is None:
        return None
    gradient = gradient.clone()
    gradient.view(-1)[bad] = torch.inf
    return gradient


def scaled_training_is_the_same(name: str, bad: int, behind_ddp: bool) -> None:
    """Compares bit by bit with training without scale and bad step; the scale doubles, and is halved once."""
    plain = Training(SCHEMES[name], scaled=False, behind_ddp=behind_ddp)
    for number in range(STEPS):
        plain.step(number)
    expected, left = plain.weights, plain.left
    plain.handle.detach()
    scaled = Training(SCHEMES[name], scaled=True, behind_ddp=behind_ddp)
    scales = []
    for number in range(STEPS):
        if number == BAD_STEP:
            before = scaled.weights, scaled.left
            scaled.step(1000, bad=bad)
            for got, value in zip(scaled.weights, before[0], strict=True):
                assert torch.equal(got, value), "the step was not skipped"
            assert all(torch.equal(scaled.left[key], values) for key, values in before[1].items())
        scaled.step(number)
        scales.append(scaled.scaler.get_scale())
    assert scales == [2.0**power for power in (4, 5, 5, 4, 5, 5, 6, 6)]
    for got, value in zip(scaled.weights, expected, strict=True):
        assert torch.equal(got, value)
    assert (
        all(torch.equal(scaled.left[key], values) for key, values in left.items()) and scaled.left.keys() == left.keys()
    )
    scaled.handle.detach()


@pytest.mark.parametrize("behind_ddp", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_scaled_training_is_the_same_to_the_bit(name: str, behind_ddp: bool, world: World) -> None:
    world(2).run(scaled_training_is_the_same, name, 255 if behind_ddp else 0, behind_ddp)


def training_resumes_at_another_scale(name: str) -> None:
    """Saves residuals at a scale of 32 and goes on at one of 8."""
    first = Training(SCHEMES[name], scaled=True)
    for number in range(3):
        first.step(number)
    buffer = io.BytesIO()
    torch.save({"model": first.inner.state_dict(), "gradsync": first.handle.state_dict()}, buffer)
    for number in range(3, 6):
        first.step(number)
    first.handle.detach()
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert saved["gradsync"]["loss_scale"] == 32.0
    other = Training(SCHEMES[name], scaled=True)
    other.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    other.handle.detach()
    other.handle = gradsync.attach(
        other.inner, plan=plan_of(other.inner, SCHEMES[name]), timeout=10, grad_scaler=other.scaler
    )
    other.inner.load_state_dict(saved["model"])
    for wrong in (0.0, "16"):
        with pytest.raises(ValueError, match="loss_scale must be .* or None, got"):
            other.handle.load_state_dict({**saved["gradsync"], "loss_scale": wrong})
    other.handle.load_state_dict(saved["gradsync"])
    for number in range(3, 6):
        other.step(number)
    for got, value in zip(other.weights, first.weights, strict=True):
        assert torch.equal(got, value)
    other.handle.detach()


@pytest.mark.parametrize("name", ["late", "frozen", "gathered"])
def test_training_resumes_at_another_scale(name: str, world: World) -> None:
    world(2).run(training_resumes_at_another_scale, name)


def training_resumes_without_a_scale() -> None:
    """Saves residuals at a scale of 32 and goes on without a scale."""
    ends = []
    for scaled in (False, True):
        first = Training(CHUNKS, scaled=scaled)
        for number in range(3):
            first.step(number)
        saved = first.handle.state_dict()
        first.handle.detach()
        other = Training(CHUNKS, scaled=False)
        other.inner.load_state_dict(first.inner.state_dict())
        other.handle.load_state_dict(saved)
        assert "loss_scale" not in other.handle.state_dict()
        for number in range(3, 6):
            other.step(number)
        ends.append(other.weights)
        other.handle.detach()
    for got, value in zip(*ends, strict=True):
        assert torch.equal(got, value)


def test_training_resumes_without_a_scale(world: World) -> None:
    world(2).run(training_resumes_without_a_scale)


def a_scaler_on_one_rank_only() -> None:
    scaler = torch.amp.GradScaler("cpu") if dist.get_rank() == 1 else None
    with pytest.raises(ValueError, match="grad_scaler"):
        gradsync.attach(nn.Linear(2, 2), grad_scaler=scaler, timeout=10)


def test_a_scaler_on_one_rank_only_is_refused(world: World) -> None:
    world(2).run(a_scaler_on_one_rank_only)


ABSOLUTE = ErrorFeedback(Threshold(0.01))
UNSCALED: dict[str, SchemeOrCompressor] = {
    "vote": MajorityVote(),
    "clipped": dgc(0.2, clip=1.0, ranks=2),
    "threshold": CompressedTwoWay(ABSOLUTE),
}
REFUSED = "beside a GradScaler, but its result does not follow the loss scale"


def without_its_scale(name: str, behind_ddp: bool) -> None:
    """Attaches what does not follow a scaler, beside an enabled one (which all ranks refuse) and a disabled one."""
    plan = CompressingPlanner(UNSCALED[name])
    model: nn.Module = Twice()
    if behind_ddp:
        model = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=REFUSED):
        gradsync.attach(model, plan=plan, timeout=10, grad_scaler=torch.amp.GradScaler("cpu"))
    handle = gradsync.attach(model, plan=plan, timeout=10, grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    model(torch.ones(2, 16)).sum().backward()
    handle.detach()


@pytest.mark.parametrize("behind_ddp", [False, True])
@pytest.mark.parametrize("name", UNSCALED)
def test_what_does_not_follow_the_scale_is_refused(name: str, behind_ddp: bool, world: World) -> None:
    world(2).run(without_its_scale, name, behind_ddp)


def a_planner_may_not_begin_to_vote() -> None:
    exact, votes = CompressingPlanner(HalfPrecision()), CompressingPlanner(MajorityVote())
    asked: Iterator[CompressingPlanner] = iter((exact, votes))

    def plan(profiles: Sequence[ParameterProfile], size: int) -> Plan:
        return next(asked)(profiles, size)

    model = Twice()
    handle = gradsync.attach(model, plan=plan, timeout=10, grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=REFUSED):
        model(torch.ones(2, 16)).sum().backward()
    handle.detach()
    for lossy in (MajorityVote(), ABSOLUTE):
        auto = AutoPlanner(Constraints((TopK(0.1), lossy)))
        with pytest.raises(ValueError, match=f"Constraints.lossy: .* {REFUSED}"):
            gradsync.attach(model, plan=auto, timeout=10, grad_scaler=torch.amp.GradScaler("cpu"))
    gradsync.attach(model, timeout=10).detach()


def test_a_planner_may_not_begin_to_vote(world: World) -> None:
    world(2).run(a_planner_may_not_begin_to_vote)
