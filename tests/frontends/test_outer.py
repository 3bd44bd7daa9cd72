"""`OuterOptimizer`: steps of an outer optimiser on exchanged changes equal those written by hand; bytes are counted."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

import gradsync
from gradsync.compressors import QSGD, ErrorFeedback, TopK
from gradsync.planner import AveragingPlanner, CompressingPlanner
from tests.frontends.models import Perceptron
from tests.world import Ranks

World = Callable[[int], Ranks]

INNER_STEPS = 3
NESTEROV = partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


def new_model() -> nn.Module:
    torch.manual_seed(dist.get_rank())  # rank 0's is broadcast
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.BatchNorm1d(40), nn.Linear(40, 3))


def train(model: nn.Module, inner: Optimizer, number: int) -> None:
    """Trains alone, on other data on each rank."""
    for step in range(INNER_STEPS + dist.get_rank()):  # ranks need not make the same number of steps
        generator = torch.Generator().manual_seed(1000 * number + 10 * step + dist.get_rank())
        inner.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        inner.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def same_on_all(tensor: Tensor) -> bool:
    everyones = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, tensor)
    return all(torch.equal(each, tensor) for each in everyones)


def by_hand(outer_optimizer: Callable[[Iterable[Tensor]], Optimizer], rounds: int) -> Tensor:
    model = new_model()
    inner = Adam(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    start = [p.detach().clone() for p in model.parameters()]
    outer = outer_optimizer(start)
    for number in range(rounds):
        train(model, inner, number)
        for old, new in zip(start, model.parameters(), strict=True):
            old.grad = (old - new.detach()) / dist.get_world_size()
            dist.all_reduce(old.grad)
        outer.step()
        for old, new in zip(start, model.parameters(), strict=True):
            new.detach().copy_(old)
    return values(model)


def with_gradsync(rounds: int, plan: Any = None, **settings: Any) -> tuple[Tensor, gradsync.OuterOptimizer]:
    model = new_model()
    inner = Adam(model.parameters(), lr=0.01)
    outer = gradsync.OuterOptimizer(model, NESTEROV, plan=plan, timeout=10, **settings)
    for number in range(rounds):
        train(model, inner, number)
        assert not same_on_all(values(model)), "ranks train alone"
        outer.step()
        assert same_on_all(values(model))
        assert not same_on_all(model[2].running_mean), "buffers stay each rank's own"
    return values(model), outer


def steps_equal_those_by_hand(close: bool) -> None:
    ours, outer = with_gradsync(4)
    theirs = by_hand(NESTEROV, 4)
    if close:
        torch.testing.assert_close(ours, theirs)
    else:
        assert torch.equal(ours, theirs)
    outer.attachment.detach()


@pytest.mark.parametrize("size", [2, 3])
def test_outer_steps_equal_those_by_hand_with_whole_changes(world: World, size: int) -> None:
    world(size).run(steps_equal_those_by_hand, size > 2)


COMPRESSED = {"8 bits": QSGD(levels=127), "top k": ErrorFeedback(TopK(0.05))}


def bytes_are_counted(kind: str) -> None:
    def sent(plan: Any) -> tuple[float, list[str]]:
        _, outer = with_gradsync(4, plan)
        buckets, explained = outer.attachment.statistics(), outer.attachment.explain()
        outer.attachment.detach()
        assert all(bucket.sent_bytes == bucket.predicted_bytes for bucket in buckets)
        return sum(bucket.sent_bytes for bucket in buckets), explained

    whole, _ = sent(gradsync.planner.default_plan)
    less, explained = sent(CompressingPlanner(COMPRESSED[kind], exact=("*.bias",), matrices_only=True))
    assert any("0.weight" in line for line in explained), "parameters have the model's names"
    assert less < whole / 2, (less, whole)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_bytes_of_compressed_changes_are_those_predicted(world: World, kind: str) -> None:
    world(2).run(bytes_are_counted, kind)


def goes_on() -> None:
    """A job continued in the middle of a round ends with the bits of one that was not interrupted."""
    plan = CompressingPlanner(COMPRESSED["top k"], exact=("*.bias",), matrices_only=True)

    def job() -> tuple[nn.Module, Optimizer, gradsync.OuterOptimizer]:
        model = new_model()
        return model, Adam(model.parameters(), 0.01), gradsync.OuterOptimizer(model, NESTEROV, plan=plan, timeout=10)

    def half(parts: tuple[nn.Module, Optimizer, gradsync.OuterOptimizer], first: int) -> None:
        model, inner, outer = parts
        for number in (first, first + 1):
            outer.step()
            train(model, inner, number)

    whole, again = job(), job()
    half(whole, 0)
    states = torch.load(saved([each.state_dict() for each in whole]), weights_only=True)
    half(whole, 2)
    for each, state in zip(again, states, strict=True):
        each.load_state_dict(state)
    half(again, 2)
    assert torch.equal(values(again[0]), values(whole[0]))


def saved(states: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return file


def test_a_job_goes_on_in_the_middle_of_a_round(world: World) -> None:
    world(2).run(goes_on)


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals() -> dict[str, str]:
    attached, ddp, around = Perceptron(), DistributedDataParallel(Perceptron()), Perceptron()
    handle, wrapper = gradsync.attach(attached), DistributedDataParallel(around)
    frozen, gone, model = Perceptron(), Perceptron(), Perceptron()
    outer, detached, last = (gradsync.OuterOptimizer(each, NESTEROV, timeout=10) for each in (frozen, gone, model))
    detached.attachment.detach()
    if dist.get_rank() == 1:
        next(frozen.parameters()).requires_grad_(False)
    state = last.state_dict()
    if dist.get_rank() == 1:
        del state["optimizer"]

    def error(model: Any, **settings: Any) -> str:
        return said(lambda: gradsync.OuterOptimizer(model, NESTEROV, **settings))

    found = {
        "attached": error(attached),
        "ddp": error(ddp),
        "inside": error(nn.Sequential(ddp)),
        "around": error(wrapper.module),
        "sharded": error(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))),
        "number": error(3),
        "averages": error(Perceptron(), plan=AveragingPlanner()),
        "misspelt": error(Perceptron(), exclude=["hed.*"]),
        "one text": error(Perceptron(), exclude="head"),
        "frozen": said(outer.step),
        "detached": said(detached.step),
        "part": said(lambda: last.load_state_dict(state)),
    }
    for each in (handle, outer.attachment, last.attachment):
        each.detach()
    return found


REFUSALS = {
    "attached": "RuntimeError: gradsync is attached to this model",
    "ddp": "ValueError: DistributedDataParallel averages the model's gradients in every step already",
    "inside": "RuntimeError",
    "around": "RuntimeError: the model is inside DistributedDataParallel",
    "sharded": "RuntimeError: FSDP models are not supported yet",
    "number": "TypeError",
    "averages": "ValueError",
    "misspelt": "ValueError: exclude names 'hed.*', which no parameter",
    "one text": "ValueError: exclude",
    "detached": "RuntimeError: outer.attachment was detached",
}


def test_bad_input_is_refused_on_all_ranks(world: World) -> None:
    ranks = world(2).run(refusals)
    for each in ranks:
        for name, text in REFUSALS.items():
            assert each[name].startswith(text), (name, each[name])
    for name, text in {"frozen": "trainable parameters have changed", "part": "optimizer"}.items():
        assert "rank 1" in ranks[0][name] and text in ranks[0][name], ranks[0][name]
        assert text in ranks[1][name], ranks[1][name]


def excluded() -> None:
    model = new_model()
    outer = gradsync.OuterOptimizer(model, NESTEROV, exclude=["3.*"], timeout=10)
    before = model[3].weight.detach().clone()
    outer.step()
    assert torch.equal(model[3].weight, before) and not same_on_all(before)
    assert same_on_all(model[0].weight.detach())
    outer.attachment.detach()


def test_excluded_parameters_stay_each_ranks_own(world: World) -> None:
    world(2).run(excluded)
