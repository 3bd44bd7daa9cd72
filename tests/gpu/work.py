"""Functions that ranks run on a card: training beside DDP, and an engine on NCCL alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.comm import StreamGroup, TorchGroup
from gradsync.compressors import BlockInt, ErrorFeedback, TopK
from gradsync.engine.engine import Engine
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    AGSparse,
    AllReduce,
    BalancedParallelism,
    CoarseGrained,
    CompressedAllGather,
    CompressedTwoWay,
    PowerSGD,
    Route,
    Scheme,
)
from gradsync.tensors.bucket import TensorSpec
from gradsync.tuning.auto import AutoPlanner
from tests.quick import AT_ONCE, patched

STEPS, ROWS, WIDTH = 5, 4096, 128
EXACT: dict[str, Scheme[Any]] = {"all_reduce": AllReduce()}
LOSSY: dict[str, Scheme[Any]] = {
    "int8": CompressedAllGather(ErrorFeedback(BlockInt())),
    "top_k": CompressedAllGather(ErrorFeedback(TopK(0.1))),
    "two-way": CompressedTwoWay(ErrorFeedback(TopK(0.1))),
    "powersgd": PowerSGD(4),
    "chunks": CoarseGrained(chunk=256, ratio=0.3),
    "offload": Route(("compress@offload", "all_gather", "decompress@offload"), ErrorFeedback(BlockInt())),
}
TABLES: dict[str, Scheme[Any]] = {"agsparse": AGSparse(), "balanced": BalancedParallelism()}


class Net(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(self.table(rows).mean(1))


def plan_of(model: nn.Module, name: str, size: int) -> Plan | None:
    """Returns a plan with the scheme of this name for what it is for, and all-reduce for the rest; None by default."""
    if name == "default":
        return None
    specs = {each: TensorSpec.of(p) for each, p in model.named_parameters()}
    dense = [each for each in reversed(specs) if not each.startswith("table")]
    flat = {**EXACT, **LOSSY}.get(name, AllReduce())
    table = TABLES.get(name, flat)
    return Plan.make(specs, size, [(dense, flat), (["table.weight"], table)])


def stepped(model: nn.Module, device: str, seed: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randint(0, ROWS, (32, 4), generator=draws).to(device)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def beside_ddp(device: str, name: str, frontend: str) -> tuple[float, float, list[float]]:
    """Trains by DDP and by gradsync; returns the largest difference and value, and sums that all ranks must share.

    DDP gets dense gradients of tables over NCCL, which sums no sparse ones.
    """
    sparse, models = name in TABLES or name == "default", []
    for takes_sparse in ("nccl" not in dist.get_backend_config(), True):
        torch.manual_seed(0)
        models.append(Net(sparse=sparse and takes_sparse).to(device))
    rank = dist.get_rank()
    theirs = stepped(DistributedDataParallel(models[0]), device, rank)
    model: nn.Module = models[1]
    plan = plan_of(model, name, dist.get_world_size())
    if frontend == "class":
        model = gradsync.DistributedDataParallel(model, plan=plan, timeout=30)
    else:
        model = DistributedDataParallel(model) if frontend == "hook" else model
        gradsync.attach(model, plan=plan, timeout=30)
    ours = stepped(model, device, rank)
    off = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return off, max(float(b.abs().max()) for b in theirs), [float(each.double().sum()) for each in ours]


@patched(AT_ONCE)
def planned(device: str) -> tuple[str, bool, list[float]]:
    """Trains under plan="auto"; returns the profile, whether the plan has settled, and sums that ranks must share."""
    torch.manual_seed(0)
    model = Net(sparse=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gradsync.attach(model, plan=AutoPlanner(steps=4, warmup=3), timeout=30)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.randint(0, ROWS, (32, 4), generator=draws).to(device)).square().mean().backward()
        optimizer.step()
        if handle.settled:
            break
    profile = handle.profile
    assert profile is not None
    return profile.to_json(), handle.settled, [float(each.detach().double().sum()) for each in model.parameters()]


def group_alone(device: str) -> TorchGroup:
    """Returns a group of one rank, on NCCL where there is a card, else on gloo."""
    backend, kind = ("nccl", StreamGroup) if device.startswith("cuda") else ("gloo", TorchGroup)
    return kind(dist.new_group(backend=backend), timeout_s=30.0, device=torch.device(device))


@contextmanager
def engine_alone(device: str, scheme: Scheme[Any]) -> Iterator[tuple[nn.Module, Engine]]:
    """Yields a model and an engine of one rank, on NCCL where there is a card: its operations run, though alone."""
    group = group_alone(device)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
    parameters = dict(model.named_parameters())
    specs = {name: TensorSpec.of(p) for name, p in parameters.items()}
    plan = Plan.make(specs, 1, [([name], scheme) for name in reversed(specs)])
    engine = Engine(parameters, group, plan, timeout_s=30.0)
    try:
        yield model, engine
    finally:
        engine.close()


def step(model: nn.Module, engine: Engine, x: Tensor) -> None:
    """Makes one step, in which each gradient is loaded when backward has written it."""
    engine.begin()
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: engine.load(name, p.grad))
        for name, parameter in model.named_parameters()
    ]
    model(x).square().mean().backward()
    engine.finish()
    for name, parameter in model.named_parameters():
        parameter.grad = engine.unload(name, None, sparse=False).clone()
    engine.stepped()
    for handle in handles:
        handle.remove()


def operations(device: str) -> list[bool]:
    """Returns, for each operation of a group of one rank on NCCL, whether its result is what it got."""
    group = group_alone(device)
    x = torch.arange(1000.0, device=device)
    message = torch.zeros(64, dtype=torch.uint8, device=device)
    found = [
        torch.equal(group.all_reduce(x.clone()).wait(30.0), x),
        torch.equal(group.all_gather(x).wait(30.0)[0], x),
        torch.equal(group.all_to_all(x, [1000], [1000]).wait(30.0)[0], x),
        torch.equal(group.broadcast(x.clone()).wait(30.0), x),
        len(group.exchange([message], [64]).wait(30.0)[0]) == 64,
    ]
    group.close()
    return found


@contextmanager
def raises_at_waits() -> Iterator[None]:
    """Lets torch raise, inside, where a thread of this process waits for the card, as far as torch notices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def syncs_of_a_steady_step(device: str, name: str) -> None:
    """Makes steady steps in which torch raises where a thread waits for the card."""
    with engine_alone(device, {**EXACT, **LOSSY}[name]) as (model, engine):
        x = torch.randn(64, 1024, device=device)
        for _ in range(4):
            step(model, engine, x)
        with raises_at_waits() if device.startswith("cuda") else nullcontext():
            step(model, engine, x)


def overlap_of_a_step(device: str) -> tuple[float, float]:
    """Returns the microseconds that kernels ran on several streams at once in a step, and on the busier of these."""
    with engine_alone(device, LOSSY["int8"]) as (model, engine):
        x = torch.randn(32768, 1024, device=device)  # backward on the card takes longer than its exchange on the host
        for _ in range(3):
            step(model, engine, x)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiled:
            step(model, engine, x)
            torch.cuda.synchronize()
        spans: dict[int, list[tuple[float, float]]] = {}
        for event in profiled.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                began = event.start_ns() / 1e3
                spans.setdefault(event.device_resource_id(), []).append((began, began + event.duration_ns() / 1e3))
        busiest = sorted(spans.values(), key=lambda each: -sum(b - a for a, b in each))[:2]
        shared = sum(
            max(min(b, d) - max(a, c), 0.0) for a, b in busiest[0] for c, d in (busiest[1] if len(busiest) > 1 else ())
        )
        return shared, sum(b - a for a, b in busiest[0])


if __name__ == "__main__":  # for the sanitizer, which watches a whole process
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    for scheme in (EXACT["all_reduce"], *LOSSY.values()):
        with engine_alone("cuda:0", scheme) as (made, engine_of_it):
            for _ in range(3):
                step(made, engine_of_it, torch.randn(64, 1024, device="cuda:0"))
            torch.cuda.synchronize()
    print("no fault was found")
