"""All frontends on an accelerator, as a model: events order what a training loop and gradsync do to the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.plans.plan import Plan, What
from gradsync.schemes import AGSparse, AllReduce, CoarseGrained, CompressedAllGather, CompressedTwoWay, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.stream_model import ModelCopy, on_a_pretended_accelerator
from tests.world import Ranks

pytestmark = pytest.mark.streams

World = Callable[[int], Ranks]

STEPS, STEADY, ROWS, WIDTH = 6, 3, 24, 8  # `STEADY`: the first step in which nothing is agreed on any more
FEW = ErrorFeedback(TopK(0.2))
SCHEMES: dict[str, Scheme[Any] | None] = {
    "exact": AllReduce(),
    "compressed": CompressedAllGather(FEW),
    "two-way": CompressedTwoWay(FEW),
    "chunks": CoarseGrained(chunk=16, ratio=0.3),
    "frozen chunks": CoarseGrained(chunk=16, ratio=0.3, freeze=True),
    "default": None,
}


class Net(nn.Module):
    """A table below a perceptron with a buffer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(self.table(rows).mean(1)) * self.scale + self.shift


def plan_of(model: nn.Module, scheme: Scheme[Any] | None, what: What) -> Plan | None:
    """Returns a plan of two buckets, the table apart; None: gradsync's default."""
    if scheme is None:
        return None
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    dense = [name for name in reversed(specs) if not name.startswith("table")]
    table: Scheme[Any] = AGSparse() if model.table.sparse else scheme
    return Plan.make(specs, dist.get_world_size(), [(dense, scheme), (["table.weight"], table)], what=what)


def train(frontend: str, name: str, what: What, sparse: bool, without: str = "") -> list[tuple[str, str]]:
    """Trains on a pretended accelerator, and returns on which streams and where steady steps wait for it."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(dist.get_rank())
    with on_a_pretended_accelerator(without) as model:
        net: nn.Module = Net(sparse=sparse)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        settings: dict[str, Any] = {"plan": plan_of(net, SCHEMES[name], what), "timeout": 20, "optimizer": optimizer}
        if frontend == "class":
            net = gradsync.DistributedDataParallel(net, **settings)
            handle = net._attachment
        else:
            net = DistributedDataParallel(net) if frontend == "hook" else net
            handle = gradsync.attach(net, **settings)
        assert handle is not None
        for step in range(STEPS):
            if step == STEADY:
                model.host_reads.clear()
            rows = torch.randint(0, ROWS, (6, 3), generator=draws)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with handle.no_sync() if step == 1 else ExitStack():
                net(rows).square().mean().backward()
                optimizer.step()
        reads = list(model.host_reads)
        handle.detach()
        return reads


CASES = [
    *(("attach", name, What.GRADIENT, sparse) for name in SCHEMES for sparse in (False, True)),
    *((frontend, name, What.GRADIENT, True) for frontend in ("class", "hook") for name in ("compressed", "default")),
    *(("attach", name, What.PARAMETER, False) for name in ("exact", "compressed")),
    ("attach", "exact", What.EARLY_PARAMETER, False),
]
AT_TIMES = "guard.py"  # in which the thread of backward reads from the device


@pytest.mark.parametrize(("frontend", "name", "what", "sparse"), CASES, ids=str)
def test_all_accesses_are_ordered_by_events(world: World, frontend: str, name: str, what: What, sparse: bool) -> None:
    for reads in world(2).run(train, frontend, name, what, sparse):
        assert not {read for stream, read in reads if stream == "thread" and AT_TIMES not in read}


# Without the event that is recorded in this function, the loop of which case reads or writes too early.
NEEDED = {
    "Synchronization.mark_ready": ("attach", "compressed", What.GRADIENT, False),
    "Synchronization.advance": ("attach", "exact", What.GRADIENT, False),
}


def scaled(frontend: str) -> tuple[list[tuple[str, str]], list[float]]:
    """Trains a compressed plan with a GradScaler that grows; returns where steady steps wait, and residuals' scales."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(dist.get_rank())
    with on_a_pretended_accelerator() as model:
        net: nn.Module = Net(sparse=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        settings: dict[str, Any] = {"plan": plan_of(net, SCHEMES["compressed"], What.GRADIENT), "grad_scaler": scaler}
        net = DistributedDataParallel(net) if frontend == "hook" else net
        handle = gradsync.attach(net, timeout=20, **settings)
        found = []
        for step in range(STEPS):
            if step == STEADY:
                model.host_reads.clear()
            optimizer.zero_grad()
            loss = net(torch.randint(0, ROWS, (6, 3), generator=draws)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            reads = list(model.host_reads)
            found.append(handle.state_dict()["loss_scale"])
            model.host_reads[:] = reads
        handle.detach()
        return reads, found


@pytest.mark.parametrize("frontend", ["attach", "hook"])
def test_the_loss_scale_is_there_when_backward_asks_for_it(world: World, frontend: str) -> None:
    for reads, scales in world(2).run(scaled, frontend):
        assert scales == [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]
        backward = {read for stream, read in reads if stream == "thread" and "guard.py" not in read}
        assert not backward if frontend == "attach" else all("loss_scale.py" in read for read in backward)


@pytest.mark.parametrize("without", NEEDED)
def test_each_event_is_needed(world: World, without: str) -> None:
    with pytest.raises(AssertionError, match="without an event"):
        for _ in range(5):  # memory is lent out anew before it may be only as threads happen to run
            world(2).run(train, *NEEDED[without], without)


def written(what: What, by: str) -> tuple[str, bool]:
    """Writes to a weight while it is averaged; returns the error, and whether the write was kept.

    `by`: what is to tell of it, later steps or a call of the handle after the next forward.
    """
    torch.manual_seed(0)
    with on_a_pretended_accelerator() as model:
        net = Net(sparse=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        handle = gradsync.attach(net, plan=plan_of(net, SCHEMES["exact"], what), timeout=20, optimizer=optimizer)
        weight = net.layers[0].weight

        def loss() -> Tensor:
            return net(torch.zeros(6, 3, dtype=torch.int64)).square().mean()

        said, is_kept = "", False
        for step in range(4):
            optimizer.zero_grad()
            try:
                after = loss()
                if step == 2:
                    is_kept = bool(weight.abs().max() <= 1e-3)
                    if by == "wait":
                        handle.wait()
                    elif by == "detach":
                        handle.detach()
                after.backward()
                optimizer.step()
            except RuntimeError as error:
                said = str(error)
                break
            if step == 1:
                weight.data.clamp_(-1e-3, 1e-3)
        with model.unmetered():
            handle.detach()
        return said, is_kept


@pytest.mark.parametrize("by", ["steps", "wait", "detach"])
@pytest.mark.parametrize("what", [What.PARAMETER, What.EARLY_PARAMETER])
def test_writes_while_averages_are_under_way_are_kept_and_told_later(world: World, what: What, by: str) -> None:
    for said, is_kept in world(2).run(written, what, by):
        assert "'layers.0.weight' was changed between optimizer.step()" in said and is_kept


def clipped_too_late() -> list[str]:
    """Clips a gradient that its parameter was stepped by; returns each step's error."""
    torch.manual_seed(0)
    with on_a_pretended_accelerator():
        net = Net(sparse=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plan = plan_of(net, SCHEMES["exact"], What.EARLY_PARAMETER)
        handle = gradsync.attach(net, plan=plan, timeout=20, optimizer=optimizer)
        said = []
        for step in range(3):
            optimizer.zero_grad()
            try:
                net(torch.zeros(6, 3, dtype=torch.int64)).square().mean().backward()
                if step == 1:
                    net.layers[0].weight.grad.mul_(0.5)
                optimizer.step()
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        handle.detach()
        return said


def test_gradients_that_change_after_they_were_used_are_told_in_the_next_step(world: World) -> None:
    for first, second, third in world(2).run(clipped_too_late):
        assert not first and not second and "gradient of 'layers.0.weight' was changed between backward" in third


LATE = 1  # the step in which rank 1's backward reaches no parameter


def on_the_second_look(copy: ModelCopy) -> bool:
    """Lets copies arrive between two looks: the engine's at the end of backward, and one at the optimiser's step."""
    looked, copy.looked = hasattr(copy, "looked"), True
    return looked


def changed_in(step_of_change: int, soon: bool = False) -> list[str]:
    """Changes gradients between backward and optimiser in one step; returns each step's error, up to the first.

    `soon`: the device's answers are there at the optimiser's step. Rank 1 leaves before rank 0 raises: gloo, unlike
    NCCL, would block its host until a timeout.
    """
    torch.manual_seed(0)
    with ExitStack() as within:
        within.enter_context(on_a_pretended_accelerator())
        if soon:
            within.enter_context(patch.object(ModelCopy, "has_arrived", property(on_the_second_look)))
        net = Net(sparse=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plan = plan_of(net, SCHEMES["exact"], What.GRADIENT)
        handle = gradsync.attach(net, plan=plan, timeout=20, broadcast_buffers=False)
        said = [""] * (LATE + 2)
        for step in range(step_of_change + 1 if dist.get_rank() == 1 else LATE + 2):
            optimizer.zero_grad()
            try:
                output = net(torch.zeros(6, 3, dtype=torch.int64))
                is_late = step == LATE and dist.get_rank() == 1
                loss = torch.ones(2, requires_grad=True).sum() if is_late else output.square().mean()
                loss.backward()
                if step == step_of_change and not is_late:
                    net.layers[0].weight.grad.mul_(0.5)
                optimizer.step()
            except RuntimeError as error:
                said[step] = str(error)
                break
        handle.detach()
        return said


def test_changes_that_a_late_rank_cannot_have_made_are_told_in_the_next_step(world: World) -> None:
    (*before, told), _ = world(2).run(changed_in, LATE)
    assert not any(before)
    assert f"in step {LATE} on some rank backward reached no parameter" in told
    assert "the ranks' parameters differ" in told


def test_they_are_told_at_once_where_the_answer_has_come(world: World) -> None:
    (*before, told, after), _ = world(2).run(changed_in, LATE, True)
    assert not any(before) and not after
    assert f"in step {LATE} on some rank" in told and "the ranks' parameters differ" not in told


def test_changes_in_the_step_after_a_late_rank_s_are_blamed_for_nothing(world: World) -> None:
    for said in world(2).run(changed_in, LATE + 1):
        assert not any(said)
