"""Real training loops that once failed: forwards on the side, shared weights, tables found late."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.comm import Group, Synchronization
from gradsync.schemes import AllReduce
from gradsync.tensors.bucket import TensorSpec, trainable_parameters
from tests.costs.test_steps import ByMember0
from tests.frontends.models import Perceptron
from tests.frontends.test_lifecycle import Coarse, plan_for, residuals, rows
from tests.frontends.twins import averaged
from tests.world import Ranks

World = Callable[[int], Ranks]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def forwards_on_the_side_start_nothing() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, timeout=10)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 3), float(number + dist.get_rank()))).mean().backward()
        if dist.get_rank() == 0:
            model(torch.ones(1, 3))  # for a metric, with gradients on
        optimizer.step()
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), number + 0.5))
    assert sum(bucket.steps for bucket in handle.statistics()) == 4
    handle.detach()


def shared_parameters_are_refused() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    handle = gradsync.attach(first, timeout=10)
    with pytest.raises(RuntimeError, match="'weight' is shared with a model that gradsync is attached to already"):
        gradsync.attach(second, timeout=10)
    gradsync.attach(second, timeout=10, exclude=["weight"]).detach()
    handle.detach()
    gradsync.attach(second, timeout=10).detach()


def loaded_state_wins_over_the_last_steps() -> None:
    torch.manual_seed(0)
    model = Perceptron()
    handle = gradsync.attach(model, plan=plan_for(model), timeout=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, rows())
    saved = handle.state_dict()
    expected = residuals(handle, model)
    step(model, optimizer, rows())
    handle.load_state_dict(saved)
    for name, residual in residuals(handle, model).items():
        torch.testing.assert_close(residual, expected[name])
    handle.load_state_dict({**saved, "state": {}})
    assert all(not residual.any() for residual in residuals(handle, model).values()), "what is missing starts anew"
    handle.detach()


def an_inf_anywhere_keeps_all_state() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"kept": nn.Linear(3, 3, bias=False), "plain": nn.Linear(3, 3, bias=False)})
    specs = {name: TensorSpec.of(p) for name, p in trainable_parameters(model).items()}
    plan = Plan.make(specs, dist.get_world_size(), [(["kept.weight"], Coarse()), (["plain.weight"], AllReduce())])
    handle = gradsync.attach(model, plan=plan, timeout=10)

    def state() -> Tensor:
        return handle.state_dict()["state"]["kept.weight[0:9]/residual"].clone()

    (model["kept"](torch.rand(2, 3)).sum() + model["plain"](torch.rand(2, 3)).sum()).backward()
    before = state()
    assert before.any()
    model.zero_grad()
    bad = torch.full((2, 3), float("inf") if dist.get_rank() == 1 else 1.0)
    (model["kept"](torch.rand(2, 3)).sum() + model["plain"](bad).sum()).backward()
    torch.testing.assert_close(state(), before)
    grad = model["kept"].weight.grad
    assert grad is not None and grad.isnan().all(), "what was not kept must not be used"
    handle.detach()


def long_runs_keep_no_ledger() -> None:
    model = nn.Linear(2, 2)
    handle = gradsync.attach(model, timeout=10)
    for _ in range(20):
        model(torch.ones(1, 2)).sum().backward()
    (run,) = handle._engine.bucket_runs
    assert run.group.ledger.entries == []
    (bucket,) = handle.statistics()
    assert bucket.sent_bytes == bucket.predicted_bytes and bucket.steps == 20 - (handle.plan is None)
    handle.detach()


class Average(nn.Module):
    """A module that replaces its buffer tensor instead of writing into it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x - self.mean)
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return result


def buffers_of_all_kinds_come_from_rank_0() -> None:
    def buffers(rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        image = torch.randn(2, 3, 4, 5, generator=generator)
        return {
            "empty": torch.zeros(0, 3),
            "bool": torch.rand(7, generator=generator) < 0.5,
            "count": torch.tensor(rank),
            "complex": torch.randn(3, dtype=torch.complex64, generator=generator),
            "narrow": torch.randn(5, generator=generator).half(),
            "transposed": torch.randn(3, 4, generator=generator).T,
            "channels last": image.contiguous(memory_format=torch.channels_last),
        }

    model = nn.Linear(3, 1)
    for name, buffer in buffers(dist.get_rank()).items():
        model.register_buffer(name, buffer)
    handle = gradsync.attach(model, timeout=10)
    for own in (buffers(dist.get_rank()), {}):
        for name, buffer in own.items():
            getattr(model, name).copy_(buffer)  # they drift apart
        model(torch.ones(2, 3)).sum().backward()
        for name, buffer in buffers(0).items():
            assert torch.equal(getattr(model, name), buffer), name
    handle.detach()


def replaced_buffers_still_come_from_rank_0() -> None:
    model = Average()
    handle = gradsync.attach(model, timeout=10)
    seen = []
    for _ in range(4):
        model(torch.full((2, 2), 1.0 + dist.get_rank())).sum().backward()
        seen.append(model.mean.clone())
    # Each forward starts from rank 0's average: 0, 1, 1.5, 1.75
    starts = [0.0, 1.0, 1.5, 1.75]
    expected = [0.5 * start + 1.0 + dist.get_rank() for start in starts]
    torch.testing.assert_close(torch.stack(seen)[:, 0], torch.tensor(expected))
    handle.detach()


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(50, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor | None) -> Tensor:
        x = torch.ones(2, 4) if ids is None else nn.functional.embedding(ids, self.table, sparse=True)
        result: Tensor = self.head(x)
        return result


def a_table_first_used_late_stays_sparse() -> None:
    torch.manual_seed(0)
    model = Late()
    handle = gradsync.attach(model, timeout=10)
    for number in range(4):
        model.zero_grad()
        ids = None if number == 0 else torch.tensor([number, 7 + dist.get_rank()])
        model(ids).sum().backward()
        if number:
            gradient = model.table.grad
            assert gradient is not None and gradient.layout is torch.sparse_coo
            local = torch.zeros(50, 4).index_add_(0, ids, model.head.weight.detach().expand(2, 4))
            torch.testing.assert_close(gradient.to_dense(), averaged(local))
    handle.detach()


def detach_can_be_called_twice_and_too_early() -> None:
    model = nn.Linear(2, 1)
    handle = gradsync.attach(model, timeout=10)
    loss = model(torch.ones(1, 2)).sum()
    hook = model.weight.register_hook(lambda gradient: handle.detach())
    with pytest.raises(RuntimeError, match="detached"):
        loss.backward()
    hook.remove()
    handle.detach()
    again = gradsync.attach(model, timeout=10)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    again.detach()


def what_cannot_be_attached_can_be_tried_again() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, allreduce_hook)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="comm_hook can only be called once"):
            gradsync.attach(model, timeout=10)
    inner = model.module
    with pytest.raises(RuntimeError, match="the model is inside DistributedDataParallel"):
        gradsync.attach(inner, timeout=10)
    del model
    gradsync.attach(inner, timeout=10).detach()


def dropped_models_take_their_threads_along() -> None:
    def threads() -> int:
        return sum(thread.name == "gradsync" for thread in threading.enumerate())

    before = threads()
    for _ in range(3):
        model = nn.Linear(2, 2)
        gradsync.attach(model, timeout=10)
        model(torch.ones(1, 2)).sum().backward()
        del model
        gc.collect()
    deadline = time.monotonic() + 10
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() == before


def buckets_are_ready_with_their_last_gradient() -> None:
    """A small gradient lies in the bucket from the start, a large one is copied into it: either may be the last."""
    for order in (lambda layers: layers, lambda layers: layers[::-1]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 300), *order([nn.Linear(300, 300, bias=False), nn.LayerNorm(300)]))
        names = [name for name, _ in model.named_parameters()]
        specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
        plan = Plan.make(
            specs, 2, [([n for n in names if n[0] != "0"], AllReduce()), (["0.bias", "0.weight"], AllReduce())]
        )
        handle = gradsync.attach(model, plan=plan, timeout=10)
        seen: list[str] = []
        usual = Synchronization.mark_ready

        def mark_ready(running: Synchronization, bucket: str, usual: Any = usual, seen: list[str] = seen) -> None:
            seen.append(bucket)
            usual(running, bucket)

        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, seen=seen: seen.append(name))
        with patch.object(Synchronization, "mark_ready", mark_ready):
            for _ in range(3):
                seen.clear()
                model.zero_grad()
                model(torch.randn(2, 4)).square().mean().backward()
                theirs = {name for name in names if name[0] != "0"}
                assert seen.index(plan.buckets[0].id) == len(theirs), seen  # our hooks run behind the test's
        handle.detach()


CASES = [
    buckets_are_ready_with_their_last_gradient,
    forwards_on_the_side_start_nothing,
    shared_parameters_are_refused,
    loaded_state_wins_over_the_last_steps,
    an_inf_anywhere_keeps_all_state,
    long_runs_keep_no_ledger,
    buffers_of_all_kinds_come_from_rank_0,
    replaced_buffers_still_come_from_rank_0,
    a_table_first_used_late_stays_sparse,
    detach_can_be_called_twice_and_too_early,
    what_cannot_be_attached_can_be_tried_again,
    dropped_models_take_their_threads_along,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks(world: World, case: Callable[[], None]) -> None:
    world(2).run(case)


def predicted_over_a_star() -> None:
    with patch.object(Group, "transport", property(lambda group: ByMember0())):
        model = Perceptron()
        handle = gradsync.attach(model)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
        for bucket in handle.statistics():
            assert bucket.sent_bytes == bucket.predicted_bytes > 0
        handle.detach()


def test_bytes_are_predicted_as_the_groups_transport_carries_them(world: World) -> None:
    world(3).run(predicted_over_a_star)
