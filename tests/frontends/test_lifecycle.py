"""Attaching, checkpointing, copying and detaching a model, and the memory of its gradients."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import Plan
from gradsync.comm import Group
from gradsync.schemes import AllReduce, Scheme, State, Traits, register
from gradsync.tensors.bucket import Bucket, Layout, TensorSpec, trainable_parameters
from tests.frontends.models import Convolutions, Perceptron
from tests.frontends.twins import assert_same_on_all_ranks, averaged, compare_with_ddp, make_twins
from tests.world import Ranks

World = Callable[[int], Ranks]


@register
@dataclass(frozen=True)
class Coarse(Scheme[Tensor]):
    """All-reduce of values rounded to multiples of `unit`, with error feedback: a scheme with state."""

    unit: float = 0.5
    traits = Traits(Layout.FLAT, lossy=True)

    def stages(self, size: int) -> tuple[str, ...]:
        return ("all_reduce",)

    def init(self, bucket: Bucket, group: Group) -> State:
        return {"residual": torch.zeros(bucket.numel)}

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        wanted = x + state["residual"]
        sent = torch.round(wanted / self.unit) * self.unit
        return await group.all_reduce(sent * scale), {"residual": wanted - sent}

    def steps(self, *arguments: Any, **settings: Any) -> tuple[Any, ...]:
        return ()


def rows() -> Tensor:
    return torch.randn(4, 6)


def plan_for(model: nn.Module, *cuts: list[tuple[str, int, int]]) -> Plan:
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    parts = list(cuts) or [[(name, 0, spec.numel) for name, spec in specs.items()]]
    return Plan.make(specs, dist.get_world_size(), [(part, Coarse()) for part in parts])


def residuals(handle: gradsync.Attachment, model: nn.Module) -> dict[str, Tensor]:
    """Returns the residuals by parameter, flat, however the plan slices parameters."""
    flat = {name: torch.full((p.numel(),), float("nan")) for name, p in trainable_parameters(model).items()}
    for key, part in handle.state_dict()["state"].items():
        name, _, span = key.removesuffix("/residual").rpartition("[")
        start = int(span.partition(":")[0])
        flat[name][start : start + part.numel()] = part
    return flat


def residuals_add_up() -> None:
    """Checks over several steps that gradients are what was sent plus the residual."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle = gradsync.attach(model, plan=plan_for(model), timeout=10)
    brought = {name: torch.zeros(p.numel()) for name, p in model.named_parameters()}
    delivered = {name: torch.zeros_like(value) for name, value in brought.items()}
    for _ in range(3):
        model.zero_grad()
        x = rows() * (1 + dist.get_rank())
        brought["weight"] += x.sum(0).repeat(3)
        brought["bias"] += 4.0
        model(x).sum().backward()
        for name, parameter in model.named_parameters():
            delivered[name] += parameter.grad.flatten()
    for name, kept in residuals(handle, model).items():
        torch.testing.assert_close(delivered[name] + averaged(kept), averaged(brought[name]))
    handle.detach()


def state_survives_bad_steps() -> None:
    """Makes values non-finite on one rank, or gives up on the step: every rank's state stays as before."""
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=plan_for(model), timeout=10)
    model(rows()).mean().backward()
    before = residuals(handle, model)
    assert any(bool(value.any()) for value in before.values())
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    loss = model(rows()).mean() * (float("inf") if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 0.5
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), "the step was not skipped"
    for name, value in residuals(handle, model).items():
        assert torch.equal(value, before[name]), f"{name}: the skipped step left something"
    optimizer.zero_grad()
    model(rows()).mean().backward()
    assert any(not torch.equal(value, before[name]) for name, value in residuals(handle, model).items())
    handle.detach()


@register
@dataclass(frozen=True)
class Breaking(Scheme[Tensor]):
    """All-reduce that raises on a negative result, after the exchange."""

    traits = Traits(Layout.FLAT)

    def stages(self, size: int) -> tuple[str, ...]:
        return ("all_reduce",)

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        total = await group.all_reduce(x.mul_(scale))
        if bool((total < 0).any()):
            raise ValueError("a bad sum")
        return total, state

    def steps(self, *arguments: Any, **settings: Any) -> tuple[Any, ...]:
        return ()


def state_survives_a_failed_step() -> None:
    """Fails in the second bucket when the first has its result and next state: the state stays as before the step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"kept": nn.Linear(6, 3, bias=False), "broken": nn.Linear(6, 3, bias=False)})
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    plan = Plan.make(specs, dist.get_world_size(), [(["kept.weight"], Coarse()), (["broken.weight"], Breaking())])
    handle = gradsync.attach(model, plan=plan, timeout=10)
    run = handle._engine.bucket_runs["0"]

    def backward(sign: float) -> None:
        (model["kept"](rows()).mean() + sign * model["broken"](rows().abs()).mean()).backward()

    backward(1.0)
    before = handle.state_dict()["state"]["kept.weight[0:18]/residual"]
    with pytest.raises((ValueError, gradsync.GroupError), match="a bad sum"):
        backward(-100.0)
    assert run.next_state is not None and not torch.equal(run.next_state["residual"], before)
    assert torch.equal(handle.state_dict()["state"]["kept.weight[0:18]/residual"], before)
    handle.detach()


def state_follows_parameters() -> None:
    """Saves under one plan and loads under one with other slices; the next step is the same."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    handle = gradsync.attach(model, plan=plan_for(model), timeout=10)
    for _ in range(2):
        model(rows() * (1 + dist.get_rank())).square().mean().backward()
    buffer = io.BytesIO()
    torch.save(handle.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    expected = residuals(handle, model)
    handle.detach()
    cut = [[("weight", 11, 18), ("bias", 0, 3)], [("weight", 0, 4)], [("weight", 4, 11)]]
    handle = gradsync.attach(model, plan=plan_for(model, *cut), timeout=10)
    handle.load_state_dict(saved)
    for name, value in residuals(handle, model).items():
        assert torch.equal(value, expected[name]), name
    assert handle.state_dict()["step"] == 2
    with pytest.raises(ValueError, match="the state holds 'ghost', which is no parameter"):
        handle.load_state_dict({**saved, "state": {"ghost[0:1]/residual": torch.zeros(1)}})
    for version in (1, 2, 7):  # in 1 elements were as they lay in memory, in 2 nobody knew whose it was
        with pytest.raises(
            ValueError, match=f"state of version 3, got version {version}: load it with the gradsync that"
        ):
            handle.load_state_dict({**saved, "version": version})
    handle.detach()


def gradients_of_cut_parameters_stay_where_autograd_made_them() -> None:
    """Checks that the result of a sliced parameter stays in autograd's memory, and an unsliced one's in its bucket."""
    torch.manual_seed(0)
    model, made = nn.Linear(6, 3), {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: made.update({name: p.grad.data_ptr()}))
    exact = [([("weight", 0, 7), ("bias", 0, 3)], AllReduce()), ([("weight", 7, 18)], AllReduce())]
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    handle = gradsync.attach(model, plan=Plan.make(specs, dist.get_world_size(), exact), timeout=10)
    model(rows()).square().mean().backward()
    assert model.weight.grad is not None and model.bias.grad is not None
    assert model.weight.grad.data_ptr() == made["weight"]
    assert model.bias.grad.data_ptr() != made["bias"]
    handle.detach()


def class_and_state_dict_stay() -> None:
    model = Perceptron()
    kind, keys = type(model), list(model.state_dict())
    handle = gradsync.attach(model, timeout=10)
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    model(rows()).mean().backward()
    assert list(model.state_dict()) == keys
    handle.detach()


def copies_are_free() -> None:
    """Checks that copies by deepcopy and pickle train alone."""
    model = Perceptron()
    handle = gradsync.attach(model, timeout=10)
    model(rows()).mean().backward()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        if dist.get_rank() == 0:  # alone: it would wait for ever if it were attached
            twin.zero_grad()
            twin(rows()).mean().backward()
            assert twin.scale.grad is not None
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    model(rows()).mean().backward()
    handle.detach()


def handles_stay_out_of_copies() -> None:
    model = Perceptron()
    model.handle = gradsync.attach(model, timeout=10)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    averaged_model = torch.optim.swa_utils.AveragedModel(model).module
    for twin in (copy.deepcopy(model), averaged_model, torch.load(saved, weights_only=False)):
        assert twin.handle is None
    model(torch.randn(4, 6)).sum().backward()
    assert_same_on_all_ranks({name: p.grad for name, p in model.named_parameters()})
    model.handle.detach()


def detach_and_attach_again() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, timeout=10)
    model(rows()).mean().backward()
    handle.detach()
    with pytest.raises(RuntimeError, match=r"its state is gone: call state_dict\(\) before"):
        handle.state_dict()
    model.zero_grad()
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:  # alone
        model(rows()).mean().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    handle = gradsync.attach(model, timeout=10)
    assert_same_on_all_ranks(dict(model.named_parameters()))
    model.zero_grad()
    model(rows()).mean().backward()
    assert_same_on_all_ranks({name: p.grad for name, p in model.named_parameters()})
    handle.detach()


def handle_need_not_be_kept() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    gradsync.attach(model, timeout=10)
    gc.collect()
    torch.manual_seed(dist.get_rank())
    model(rows()).mean().backward()
    assert_same_on_all_ranks({name: p.grad for name, p in model.named_parameters()})


def excluded_parameters_are_left_alone() -> None:
    torch.manual_seed(dist.get_rank())
    model = Perceptron()
    own = model.layers[0].weight.detach().clone()
    handle = gradsync.attach(model, exclude=["layers.0.*", "scale"], timeout=10)
    assert torch.equal(model.layers[0].weight, own)
    model(rows()).mean().backward()
    assert_same_on_all_ranks({"layers.2.weight": model.layers[2].weight.grad})
    other = model.layers[0].weight.grad.clone()
    dist.broadcast(other, src=1)
    assert torch.equal(other, model.layers[0].weight.grad) == (dist.get_rank() == 1)
    handle.detach()


def buffers_come_from_rank_0() -> None:
    """Compares running statistics with DDP's after each training forward."""

    def step(twin: Any, number: int) -> None:
        twin.model(torch.randn(2, 2, 6, 6) * (1 + dist.get_rank())).mean().backward()

    twins = make_twins(Convolutions)
    for number in range(3):
        for twin in twins:
            torch.manual_seed(10 * number + dist.get_rank())
            step(twin, number)
        for theirs, ours in zip(twins[0].module.buffers(), twins[1].module.buffers(), strict=True):
            assert torch.equal(theirs, ours)
    twins[1].handle.detach()


def only_a_part_of_the_ranks() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    torch.manual_seed(dist.get_rank())
    model = Perceptron()
    mine = groups[dist.get_rank() % 2]
    handle = gradsync.attach(model, process_group=mine, timeout=10)
    for _ in range(2):
        model.zero_grad()
        model(rows()).mean().backward()
    if dist.get_rank() != 1:
        other = model.scale.grad.clone()
        dist.broadcast(other, src=0, group=groups[0])
        assert torch.equal(model.scale.grad, other)
        assert sum(bucket.sent_bytes for bucket in handle.statistics()) > 0
    handle.detach()


def alone() -> None:
    """Trains in a world of one rank: gradients are the local ones, and nothing is sent."""
    compare_with_ddp(Perceptron, lambda twin, _: twin.model(rows()).mean().backward())
    model = Perceptron()
    handle = gradsync.attach(model, timeout=10)
    model(rows()).mean().backward()
    assert sum(bucket.sent_bytes for bucket in handle.statistics()) == 0
    assert handle.explain()
    handle.detach()


def nothing_to_train() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    handle = gradsync.attach(model, timeout=10)
    model(torch.ones(1, 2))
    handle.detach()
    assert_same_on_all_ranks(dict(model.named_parameters()))


TWO = [
    residuals_add_up,
    state_survives_bad_steps,
    state_survives_a_failed_step,
    state_follows_parameters,
    gradients_of_cut_parameters_stay_where_autograd_made_them,
    class_and_state_dict_stay,
    copies_are_free,
    handles_stay_out_of_copies,
    detach_and_attach_again,
    handle_need_not_be_kept,
    excluded_parameters_are_left_alone,
    buffers_come_from_rank_0,
    nothing_to_train,
]


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.__name__)
def test_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case, limit_s=30)


def test_a_process_group_of_some_ranks(world: World) -> None:
    world(3).run(only_a_part_of_the_ranks)


def test_one_rank_alone(world: World) -> None:
    world(1).run(alone)
