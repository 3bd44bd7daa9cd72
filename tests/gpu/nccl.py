"""Functions that ranks run over NCCL though they share a card: NCCL is told that each rank is a host of its own.

So they exchange by sockets, as nodes on Ethernet do. In a dry run they are on gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync import Plan
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.planner import AveragingPlanner
from gradsync.plans.plan import What
from gradsync.schemes import AllReduce, CompressedAllGather, Scheme
from gradsync.tensors.bucket import TensorSpec
from tests.gpu import work

TIMEOUT_S = 60
LEFT = "left"  # what a rank returns that stays away from a step


def over_nccl(function: Callable[..., Any], device: str, *arguments: Any) -> Any:
    """Calls `function(device, *arguments)` in a default process group on NCCL, for tensors on a card."""
    if device.startswith("cuda") and "nccl" not in dist.get_backend_config():
        rank, size = dist.get_rank(), dist.get_world_size()
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        torch.cuda.set_device(device)
        store = dist.PrefixStore("nccl", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    return function(device, *arguments)


def plan_of(model: nn.Module, scheme: Scheme[Any], what: What = What.GRADIENT) -> Plan:
    """Returns a plan of one bucket."""
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}
    return Plan.make(specs, dist.get_world_size(), [(list(reversed(specs)), scheme)], what=what)


def made(device: str) -> nn.Module:
    torch.manual_seed(0)
    return work.Net(sparse=False).to(device)


def scaled(device: str) -> tuple[float, list[float]]:
    """Trains in float16 with a GradScaler, one step of which overflows; returns the difference from DDP, and scales."""
    kind, found, scales = torch.device(device).type, [], []
    for ours in (False, True):
        net = made(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=2)
        model = net if ours else DistributedDataParallel(net)
        if ours:
            gradsync.attach(net, plan=plan_of(net, AllReduce()), grad_scaler=scaler, timeout=TIMEOUT_S)
        draws = torch.Generator().manual_seed(dist.get_rank())
        for step in range(work.STEPS):
            rows = torch.randint(0, work.ROWS, (32, 4), generator=draws).to(device)
            optimizer.zero_grad()
            with torch.autocast(kind, dtype=torch.float16 if kind == "cuda" else torch.bfloat16):
                loss = model(rows).square().mean()
            if step == 2 and dist.get_rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
        found.append([p.detach().cpu() for p in net.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True)), scales


def continued(device: str) -> float:
    """Trains with error feedback, saves, and goes on in a new attachment; returns the difference from going on."""
    feedback, ends = CompressedAllGather(ErrorFeedback(TopK(0.1))), []
    net = made(device)
    handle = gradsync.attach(net, plan=plan_of(net, feedback), timeout=TIMEOUT_S)
    work.stepped(net, device, dist.get_rank())
    saved = handle.state_dict()
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    for again in (False, True):
        if again:
            handle.detach()
            net.load_state_dict(weights)
            handle = gradsync.attach(net, plan=plan_of(net, feedback), timeout=TIMEOUT_S)
            handle.load_state_dict(saved)
        ends.append(work.stepped(net, device, 100 + dist.get_rank()))
    return max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True))


def averaged(device: str, name: str) -> list[float]:
    """Trains with averaged parameters, of all ranks or of groups; returns sums that all ranks must share afterwards."""
    net = made(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    what = What.EARLY_PARAMETER if name == "early" else What.PARAMETER
    plan = AveragingPlanner() if name == "groups" else plan_of(net, AllReduce(), what)
    handle = gradsync.attach(net, plan=plan, optimizer=optimizer, timeout=TIMEOUT_S)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(work.STEPS):
        optimizer.zero_grad()
        net(torch.randint(0, work.ROWS, (32, 4), generator=draws).to(device)).square().mean().backward()
        optimizer.step()
    with gradsync.consensus(net):
        sums = [float(p.detach().double().sum()) for p in net.parameters()]
    handle.detach()
    return sums


def accumulated(device: str, communicator: str) -> float:
    """Accumulates two backwards a step under no_sync; returns the difference from DDP."""
    found = []
    for ours in (False, True):
        net = made(device)
        model: Any = gradsync.DistributedDataParallel(net, communicator=communicator) if ours else None
        model = model or DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            rows = [torch.randint(0, work.ROWS, (32, 4), generator=draws).to(device) for _ in range(2)]
            with model.no_sync():
                model(rows[0]).square().mean().backward()
            model(rows[1]).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        found.append([p.detach().cpu() for p in net.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def one_stays_away(device: str) -> str:
    """Leaves after two steps on rank 1; returns the error of the other ranks, whose hosts run ahead of the card."""
    net = made(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = gradsync.attach(net, plan=plan_of(net, AllReduce()), timeout=5)
    rows = torch.zeros(32, 4, dtype=torch.int64, device=device)
    for step in range(100):
        if step == 2 and dist.get_rank() == 1:
            return LEFT
        try:
            optimizer.zero_grad()
            net(rows).square().mean().backward()
            optimizer.step()
            time.sleep(0.2)
        except RuntimeError as error:
            handle.detach()
            return str(error)
    return "no error"


def in_shards(device: str, name: str) -> tuple[float, int, int]:
    """Trains a model in shards by HSDP and by gradsync; returns the difference, and the peak bytes of each."""
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if name == "mixed" else MixedPrecisionPolicy()
    found, peaks = [], []
    for ours in (False, True):
        torch.manual_seed(0)
        net: Any = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6))).to(device)
        alone = ours and name == "alone"
        for layer in (*net, net):
            fully_shard(layer, mesh=mesh["shard"] if alone else mesh, mp_policy=policy)
        if ours:
            gradsync.attach(net, replicate_group=mesh.get_group("replicate") if alone else None, timeout=TIMEOUT_S)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(dist.get_rank())
        if kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(work.STEPS):
            optimizer.zero_grad()
            net(torch.randn(16, 512, generator=draws).to(device)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        found.append([p.to_local().detach().cpu() for p in net.parameters()])
        peaks.append(torch.cuda.max_memory_allocated() if kind == "cuda" else 0)
        del net, optimizer
    off: Tensor = torch.stack([(a - b).abs().max() for a, b in zip(*found, strict=True) if len(a)]).max()
    return float(off), peaks[0], peaks[1]
