"""Models in shards: gradients are averaged between replicas as torch's HSDP does it, by any flat plan."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync import Plan
from gradsync.comm import distributed
from gradsync.comm.gloo import GlooGroup
from gradsync.compressors import BlockInt, ErrorFeedback, TopK
from gradsync.frontends import fsdp_internals
from gradsync.frontends.fsdp_internals import ParameterGroup, groups_of
from gradsync.frontends.shard_ranks import ShardRanks
from gradsync.planner import AveragingPlanner, CompressingPlanner, Job, candidate_plans
from gradsync.planner.search.ways import Constraints
from gradsync.schemes import AllReduce, CoarseGrained, CompressedAllGather, HalfPrecision, PowerSGD, Scheme
from gradsync.tensors.density import ParameterProfile
from gradsync.tuning.auto import AutoPlanner
from tests.quick import FEWER, patched
from tests.world import Ranks
from tests.world import World as RankProcesses

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]
FEEDBACK = CompressedAllGather(ErrorFeedback(TopK(0.2)))
EIGHT_BITS = CompressedAllGather(ErrorFeedback(BlockInt(8)))
COARSE = CoarseGrained(ratio=0.3, chunk=4)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
TIMEOUT_S = 20


class Net(nn.Module):
    """Three layers, of which one is used in odd steps only; sizes are odd, so that FSDP pads shards."""

    def __init__(self, *, checkpoints: bool = False, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.sometimes = nn.Linear(6, 7), nn.Linear(7, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(1))  # all of it is in the first shard
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)
        self.checkpoints, self.twice, self.step = checkpoints, twice, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.twice:
            x = x + self.second(x).sum(1, keepdim=True)
        x = checkpoint(self.second, x, use_reentrant=False) if self.checkpoints else self.second(x)
        x = x * self.scale
        return self.sometimes(x) * self.still if self.step % 2 else x


@dataclass(frozen=True)
class Case:
    """A way of training."""

    mp: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    accumulate: int = 1
    how: str = ""  # how the backwards before the last one are kept apart
    clip: float = 0.0
    checkpoints: bool = False
    compiles: bool = False
    keeps_unused: bool = False
    twice: bool = False  # a layer runs twice in a forward


CASES = {
    "clipped": Case(clip=0.1),
    "each backward exchanged": Case(accumulate=2),
    "accumulated by FSDP": Case(accumulate=2, how="sync"),
    "accumulated by no_sync": Case(accumulate=2, how="no_sync"),
    "reduced, not averaged": Case(accumulate=3, how="reduce"),
    "bfloat16, float32 reduced": Case(MixedPrecisionPolicy(param_dtype=BFLOAT16, reduce_dtype=FLOAT32)),
    "bfloat16": Case(MixedPrecisionPolicy(param_dtype=BFLOAT16), accumulate=2),
    "float32, bfloat16 reduced": Case(MixedPrecisionPolicy(reduce_dtype=BFLOAT16), accumulate=2, how="sync"),
    "checkpointed": Case(checkpoints=True),
    "compiled": Case(compiles=True),
    "zeros for the unused": Case(keeps_unused=True),
    "a layer used twice": Case(twice=True),
}
CORE = ("clipped", "accumulated by no_sync", "bfloat16, float32 reduced", "checkpointed")


def skip_unless_torch_keeps_unused() -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch never reduces gradients of unused parameters, as torch 2.11")


def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, case: Case = CASES["clipped"]) -> Any:
    """Returns a model in shards, the same in every call."""
    torch.manual_seed(0)
    net = Net(checkpoints=case.checkpoints, twice=case.twice)
    if case.compiles:
        net.second.compile(backend="eager")
    for module in (net.first, net.second, net):
        fully_shard(module, mesh=mesh, mp_policy=case.mp, reshard_after_forward=True)
    if case.keeps_unused:
        net.set_reduce_scatter_unused_params(True)
    return net


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 6, generator=generator)


def train(net: Any, case: Case = CASES["clipped"], handle: Any = None, *, steps: int = 6, seed: int = 0) -> Tensor:
    """Trains and returns this rank's shards, end to end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for step in range(steps):
        net.step = step
        for number in range(case.accumulate):
            is_last = number == case.accumulate - 1
            if case.how == "sync" or (case.how == "no_sync" and handle is None):
                net.set_requires_gradient_sync(is_last)
            if case.how == "reduce":
                net.set_requires_all_reduce(is_last)
            if case.how == "no_sync" and handle is not None and not is_last:
                with handle.no_sync():
                    net(batch(generator)).square().mean().backward()
            else:
                net(batch(generator)).square().mean().backward()
        if case.clip:
            nn.utils.clip_grad_norm_(net.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
    return shards_of(net)


def shards_of(net: nn.Module) -> Tensor:
    return torch.cat([p.to_local().detach().reshape(-1) for p in net.parameters()])


def is_gone() -> bool:
    """Attaches and trains a model, drops it, and returns whether it is gone, and its engine closed."""
    net = sharded(meshes())
    engine = gradsync.attach(net, timeout=TIMEOUT_S)._engine
    train(net, steps=1)
    known = weakref.ref(net)
    del net
    gc.collect()
    return known() is None and engine.peers.is_closed


def test_a_model_is_not_kept_alive(world: World) -> None:
    assert world(4).run(is_gone) == [True] * 4


def replicas_are_equal(mine: Tensor, mesh: DeviceMesh) -> bool:
    other = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(other, mine, group=mesh.get_group("replicate"))
    return torch.equal(other[0], other[1])


class Wrapper(nn.Module):
    """A module around one in shards, as that of Fabric is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def difference_in_a_wrapper() -> tuple[float, bool]:
    mesh = meshes()
    expected, net = train(sharded(mesh)), sharded(mesh)
    handle = gradsync.attach(Wrapper(net), timeout=TIMEOUT_S)
    found = float((train(net, handle=handle) - expected).abs().max())
    attached = gradsync.attachment_of(net) is handle and handle.statistics()[0].sent_bytes > 0
    handle.detach()
    return found, attached


def test_the_model_in_shards_may_be_in_a_wrapper(world: World) -> None:
    assert world(4).run(difference_in_a_wrapper) == [(0.0, True)] * 4


def refused_in_a_wrapper(kind: str) -> str:
    """Attaches to a wrapper with a frozen parameter or a buffer of its own, which nothing makes equal on all ranks."""
    wrapper = Wrapper(sharded(meshes()))
    if kind == "parameter":
        wrapper.more = nn.Parameter(torch.ones(1), requires_grad=False)
    else:
        wrapper.register_buffer("more", torch.ones(1))
    return message(lambda: gradsync.attach(wrapper, timeout=TIMEOUT_S))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_wrapper_with_tensors_of_its_own_is_refused(world: World, kind: str) -> None:
    assert all("a part of the model is in shards" in text for text in world(4).run(refused_in_a_wrapper, kind))


def by_one_bucket(scheme: Scheme[Any]) -> Callable[[Sequence[ParameterProfile], int], Plan]:
    """Returns a planner that sends all shards of parameters in one bucket."""

    def plan(profiles: Sequence[ParameterProfile], size: int) -> Plan:
        return Plan.make({p.name: p.tensor for p in profiles}, size, [([p.name for p in profiles], scheme)])

    return plan


def differences(name: str) -> list[float]:
    """Returns the largest differences from HSDP, on a mesh of shards and on one of replicas and shards."""
    case, mesh = CASES[name], meshes()
    expected = train(sharded(mesh, case), case)
    found = []
    for on, group in ((mesh["shard"], mesh.get_group("replicate")), (mesh, None)):
        net = sharded(on, case)
        handle = gradsync.attach(net, replicate_group=group, timeout=TIMEOUT_S)
        found.append(float((train(net, case, handle) - expected).abs().max()))
        handle.detach()
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.core) if name in CORE else name for name in CASES]
)
def test_an_exact_plan_trains_as_hsdp_does(world: World, name: str) -> None:
    if CASES[name].keeps_unused:
        skip_unless_torch_keeps_unused()
    assert all(set(found) == {0.0} for found in world(4).run(differences, name))


def attached_in_between() -> float:
    """Trains without gradsync, evaluates so that whole parameters are left, trains with gradsync, and without again."""
    mesh = meshes()
    expected, net = sharded(mesh), sharded(mesh)
    for each in (expected, net):
        train(each, steps=2, seed=2)
        each.set_reshard_after_forward(False)
        with torch.no_grad():
            each(torch.ones(1, 6))
        each.set_reshard_after_forward(True)
    fsdp_internals.reshard(expected)  # attach does it to `net`
    handle = gradsync.attach(net, timeout=TIMEOUT_S)
    train(expected, steps=2)
    train(net, steps=2)
    handle.detach()
    patched = [
        vars(group._found).keys() & {"post_backward"} or group._found._all_reduce_hook for group in groups_of(net)
    ]
    assert not any(patched)
    return float((train(net, seed=1) - train(expected, seed=1)).abs().max())


def test_training_is_the_same_before_attach_and_after_detach(world: World) -> None:
    assert world(4).run(attached_in_between) == [0.0] * 4


def with_table(attaches: bool) -> tuple[Tensor, str]:
    """Trains a large embedding with dense gradients, and a layer of one row, which the second shard lacks."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Embedding(20000, 8), nn.Linear(8, 1))
    for module in (net[0], net):
        fully_shard(module, mesh=meshes())
    handle = gradsync.attach(net, timeout=TIMEOUT_S) if attaches else None
    optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        for _ in range(2):
            net(torch.randint(0, 20000, (20,), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return shards_of(net), "" if handle is None else " ".join(handle.explain())


def zeros_are_found() -> tuple[float, str]:
    (found, plan), (expected, _) = with_table(True), with_table(False)
    return float((found - expected).abs().max()), plan


def test_rows_of_zeros_are_not_sent_and_shards_may_be_empty(world: World) -> None:
    for difference, plan in world(4).run(zeros_are_found):
        assert difference == 0
        assert "agsparse" in plan


def four_replicas() -> float:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh)
    gradsync.attach(net, timeout=TIMEOUT_S)
    return float((train(net) - train(sharded(mesh))).abs().max())


def test_more_replicas_differ_in_last_bits_only(world: World) -> None:
    assert max(world(4).run(four_replicas)) < 1e-6


@patched(FEWER)
def planned() -> tuple[int, bool, float]:
    """Trains under plan="auto" until the plan has settled; returns after how many steps, and the distance from HSDP."""
    mesh = meshes()
    net, expected = sharded(mesh), sharded(mesh)
    handle = gradsync.attach(net, plan=AutoPlanner(steps=2, warmup=3), timeout=TIMEOUT_S)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, expected)]
    generator, steps = torch.Generator().manual_seed(dist.get_rank()), 0
    while not handle.settled and steps < 300:
        x, steps = batch(generator), steps + 1
        for each, optimizer in zip((net, expected), optimizers, strict=True):
            each.step = steps
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    return steps, handle.profile is not None, float((shards_of(net) - shards_of(expected)).abs().max())


def test_a_job_is_measured_and_planned_and_settles_on_all_ranks_at_once(world: World) -> None:
    """Each shard's replicas plan apart, and may need other numbers of steps."""
    found = world(4).run(planned)
    assert len({steps for steps, _, _ in found}) == 1
    for steps, is_measured, off in found:
        assert steps < 300 and is_measured and off < 1e-6


def replicated() -> float:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    mesh, nets = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Net())
        for module in (nets[-1].first, nets[-1]):
            replicate(module, mesh=mesh)
    handle = gradsync.attach(nets[0], timeout=TIMEOUT_S)
    assert handle.world_size == dist.get_world_size()
    return float((train(nets[0]) - train(nets[1])).abs().max())


def test_replicate_is_taken_over(world: World) -> None:
    assert world(2).run(replicated) == [0.0] * 2


def memory_after_forward() -> tuple[list[int], list[int]]:
    mesh, held = meshes(), []
    for attaches in (False, True):
        net = sharded(mesh)
        if attaches:
            gradsync.attach(net, timeout=TIMEOUT_S)
        train(net, steps=1)
        net(torch.randn(4, 6))
        held.append([shard.held_bytes for group in groups_of(net) for shard in group.parameters])
    return held[0], held[1]


@pytest.mark.core
def test_memory_after_reshard_is_as_before(world: World) -> None:
    for expected, found in world(4).run(memory_after_forward):
        assert found == expected
        assert sum(found) == 0


def feedback_conserves() -> float:
    """Returns the largest part of gradients that was neither sent nor kept."""
    mesh = meshes()
    alone, net = sharded(mesh["shard"]), sharded(mesh["shard"])
    group = mesh.get_group("replicate")
    handle = gradsync.attach(net, plan=by_one_bucket(FEEDBACK), replicate_group=group, timeout=TIMEOUT_S)
    data, worst = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank())), 0.0
    given: dict[str, Tensor] = {}
    arrived: dict[str, Tensor] = {}
    for _ in range(4):
        for each in (alone, net):
            each.zero_grad()
            each(data).square().mean().backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None and parameter.grad.to_local().numel():
                own = alone.get_parameter(name).grad.to_local().reshape(-1).clone()
                dist.all_reduce(own, group=group)
                given[name] = given.get(name, 0) + own / 2
                arrived[name] = arrived.get(name, 0) + parameter.grad.to_local().reshape(-1)
    left, total_kept = handle.state_dict()["state"], 0.0
    for name, total in given.items():
        kept = torch.zeros_like(total)
        for key, values in left.items():
            if key.startswith(f"{name}[") and key.endswith(".residual"):
                kept[int(key.split("[")[1].split(":")[0]) :][: len(values)] += values
        dist.all_reduce(kept, group=group)
        worst = max(worst, float((total - arrived[name] - kept / 2).abs().max()))
        total_kept += float(kept.abs().sum())
    assert total_kept > 0
    return worst


@pytest.mark.core
def test_error_feedback_keeps_what_it_does_not_send(world: World) -> None:
    assert max(world(4).run(feedback_conserves)) < 1e-6


def stay_equal(scheme: Scheme[Any]) -> tuple[bool, bool]:
    mesh = meshes()
    net = sharded(mesh)
    handle = gradsync.attach(net, plan=by_one_bucket(scheme), timeout=TIMEOUT_S, verify_every=2)
    before = shards_of(net).clone()
    after = train(net)
    assert handle.totals().comparisons > 0
    return replicas_are_equal(after, mesh), bool((after != before).any() and after.isfinite().all())


@pytest.mark.core
@pytest.mark.parametrize(
    "scheme",
    [FEEDBACK, PowerSGD(1, min_compression=1.0), COARSE, HalfPrecision(values="bfloat16"), EIGHT_BITS],
    ids=["top-k", "low rank", "chunks", "16 bits", "8 bits"],
)
def test_replicas_stay_equal_bit_by_bit(world: World, scheme: Scheme[Any]) -> None:
    assert world(4).run(stay_equal, scheme) == [(True, True)] * 4


def resumed() -> tuple[bool, str, str]:
    """Returns whether training goes on bit by bit from saved state, and errors for the state of other ranks."""
    mesh = meshes()
    net = sharded(mesh)
    handle = gradsync.attach(net, plan=by_one_bucket(FEEDBACK), timeout=TIMEOUT_S)
    train(net, steps=3)
    state = copy.deepcopy(handle.state_dict())
    weights = [p.to_local().detach().clone() for p in net.parameters()]
    expected = train(net, steps=3, seed=1)
    handle.detach()

    other = sharded(mesh)
    again = gradsync.attach(other, plan=by_one_bucket(FEEDBACK), timeout=TIMEOUT_S)
    errors = []
    moved = (
        {**state, "shard": {**state["shard"], "index": 1 - state["shard"]["index"]}} if dist.get_rank() == 1 else state
    )
    for wrong in (moved, {**state, "world": 3}):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            again.load_state_dict(wrong)
        errors.append(f"{caught.type.__name__}: {caught.value}")
    again.load_state_dict(state)
    with torch.no_grad():
        for parameter, saved in zip(other.parameters(), weights, strict=True):
            parameter.to_local().copy_(saved)
    return bool(torch.equal(train(other, steps=3, seed=1), expected)), errors[0], errors[1]


@pytest.mark.core
def test_training_goes_on_from_saved_state(world: World) -> None:
    for rank, (is_equal, moved, other_world) in enumerate(world(4).run(resumed)):
        assert is_equal
        said = "the state was saved by {'rank': 0, 'world': 2, 'shard': '0 of 2'}"
        assert moved.startswith(
            f"ValueError: {said}" if rank == 1 else f"RuntimeError: loading of state: rank 1 could not: {said}"
        )
        assert "on another mesh save and load handle.checkpoint()" in other_world


def differing_use() -> tuple[bool, bool, bool]:
    """Trains replicas of which one uses a layer and the other does not, with a parameter left out."""
    mesh = meshes()
    net = sharded(mesh)
    gradsync.attach(net, timeout=TIMEOUT_S, exclude=["second.bias"])
    net.step = mesh.get_local_rank("replicate")
    (net(batch(torch.Generator().manual_seed(dist.get_rank()))) ** 3).mean().backward()
    gradients = {n: p.grad.to_local().reshape(-1) for n, p in net.named_parameters() if p.requires_grad}
    own = gradients.pop("second.bias")
    sometimes = gradients["sometimes.weight"]
    return replicas_are_equal(torch.cat(list(gradients.values())), mesh), replicas_are_equal(own, mesh), sometimes.any()


def test_a_layer_that_one_replica_uses_is_averaged_and_an_excluded_parameter_is_not(world: World) -> None:
    assert world(4).run(differing_use) == [(True, False, True)] * 4


def levelled() -> tuple[bool, str]:
    """Attaches replicas that differ, then makes them differ in training."""
    mesh = meshes()
    net = sharded(mesh["shard"])
    group = mesh.get_group("replicate")
    with torch.no_grad():
        net.first.weight.to_local().add_(dist.get_rank())
    gradsync.attach(net, replicate_group=group, timeout=TIMEOUT_S, verify_every=1)
    alike = replicas_are_equal(shards_of(net), mesh)
    train(net, steps=4)
    if dist.get_rank() >= 2:  # the second replica, in both of its shards
        with torch.no_grad():
            net.first.weight.to_local().add_(1)
    try:
        train(net, steps=8)
    except RuntimeError as error:
        return alike, str(error)
    return alike, ""


def test_replicas_begin_alike_and_are_compared(world: World) -> None:
    found = world(4).run(levelled)
    assert all(alike for alike, _ in found)
    assert all("the ranks' models have drifted apart: 'first.weight' differs" in text for _, text in found)


def in_a_part_of_the_job(fails: bool) -> str:
    """Trains two models, each on two ranks of four; attaching fails on rank 1, if it is to."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))["replicate", "shard"]
    net = sharded(mesh)
    if fails and dist.get_rank() == 1:
        net.first.set_gradient_divide_factor(3.0)
    if fails and dist.get_rank() < 2:
        return message(lambda: gradsync.attach(net, timeout=TIMEOUT_S))
    gradsync.attach(net, timeout=TIMEOUT_S)
    expected = train(sharded(mesh))
    return str(float((train(net) - expected).abs().max()))


def test_a_model_may_be_on_a_part_of_the_jobs_ranks(world: World) -> None:
    assert world(4).run(in_a_part_of_the_job, False) == ["0.0"] * 4
    found = world(4).run(in_a_part_of_the_job, True)
    assert found[2:] == ["0.0"] * 2
    assert all("'first': a custom gradient divide factor is set" in text for text in found[:2])


def shard_here() -> int:
    return dist.get_rank() % 2  # on the mesh of `meshes`, with two shards


def no_plan_for_shard_1(job: Job, constraints: Constraints) -> list[Plan]:
    if shard_here() == 1:
        raise ValueError("nothing will do")
    return candidate_plans(job, constraints)


def fails_in_the_second_call(kind: str) -> Callable[[Sequence[ParameterProfile], int], Plan]:
    """Returns a planner that fails after the first step: for shard 1, or by Ctrl-C on rank 3."""
    calls: list[int] = []

    def plan(profiles: Sequence[ParameterProfile], size: int) -> Plan:
        calls.append(size)
        if len(calls) > 1 and kind == "planner" and shard_here() == 1:
            raise ValueError("there is no further plan")
        if len(calls) > 1 and kind == "ctrl-c" and dist.get_rank() == 3:
            raise KeyboardInterrupt
        return by_one_bucket(FEEDBACK)(profiles, size)

    return plan


@patched(FEWER)
def fails_for_one_shard(kind: str) -> list[str]:
    """Trains until shard 1, or rank 3 of it, fails in a step; returns the errors of this and a further try."""
    net = sharded(meshes())
    auto = AutoPlanner(steps=2, warmup=3, search=no_plan_for_shard_1, must_plan=True)
    handle = gradsync.attach(net, plan=auto if kind == "search" else fails_in_the_second_call(kind), timeout=TIMEOUT_S)
    if kind == "hook" and dist.get_rank() == 3:
        net.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    said = []
    for _ in range(1 if kind == "hook" else 2):  # raised inside FSDP, an error leaves FSDP in the middle of a step
        try:
            train(net, steps=40)
        except (RuntimeError, ValueError, KeyboardInterrupt) as error:
            said.append(f"{type(error).__name__}: {error}")
    handle.detach()
    return said


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("search", "no plan was found: ValueError: nothing will do"),
        ("planner", "there is no further plan"),
        ("ctrl-c", "KeyboardInterrupt"),
        ("hook", "'first.weight' has a hook by register_post_accumulate_grad_hook"),
    ],
)
def test_what_fails_for_one_shard_is_said_on_all_ranks_in_the_same_step(world: World, kind: str, cause: str) -> None:
    for first, *again in world(4).run(fails_for_one_shard, kind):
        assert cause in first
        assert all("gradient synchronisation stopped earlier" in text and cause in text for text in again)


def with_nan_in(net: Any, unit: int) -> None:
    """Lets the gradients of one output of the first layer be NaN from now on: those of one row and one bias."""

    def spoil(gradient: Tensor) -> Tensor:
        spoilt = gradient.clone()
        spoilt[:, unit] = torch.nan
        return spoilt

    net.first.register_forward_hook(lambda module, given, output: output.register_hook(spoil) and None)


def bad_in_one_shard(shard: int, keeps: int | None) -> tuple[bool, bool, bool]:
    """Makes a step in which one shard of one replica alone sees NaN; the shard `keeps` alone has residuals, or all.

    Returns whether gradients without NaN show it on this rank, whether it is as it was before, and has some residual.
    """
    mesh = meshes()
    net = sharded(mesh)
    scheme = FEEDBACK if keeps in (None, mesh.get_local_rank("shard")) else AllReduce()
    handle = gradsync.attach(net, plan=by_one_bucket(scheme), timeout=TIMEOUT_S)
    train(net)
    before = copy.deepcopy(handle.state_dict()["state"])
    if mesh.get_local_rank("replicate") == 1:
        with_nan_in(net, (0, 6)[shard])
    net(batch(torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
    others = [p.grad.to_local() for n, p in net.second.named_parameters()]
    shows = all(gradient.isnan().all() for gradient in others)
    net.zero_grad()
    after = handle.state_dict()["state"]
    is_same = after.keys() == before.keys() and all(torch.equal(after[key], values) for key, values in before.items())
    return shows, is_same, any(values.any() for values in before.values())


@pytest.mark.parametrize("keeps", [None, 0, 1], ids=["all keep residuals", "shard 0 does", "shard 1 does"])
@pytest.mark.parametrize("shard", [0, 1])
def test_no_shard_counts_what_was_sent_in_a_step_that_another_must_skip(
    world: World, shard: int, keeps: int | None
) -> None:
    """Users skip a step as a whole, where the norm of its gradients is not finite."""
    for rank, found in enumerate(world(4).run(bad_in_one_shard, shard, keeps)):
        has_state = keeps in (None, rank % 2)
        assert found == (has_state, True, has_state), rank


def told_in_each_step(scheme: Scheme[Any]) -> list[int]:
    """Returns how often this rank told the other shards about its step, in each of the steps."""
    net, told = sharded(meshes()), []
    gradsync.attach(net, plan=by_one_bucket(scheme), timeout=TIMEOUT_S)
    with patch.object(ShardRanks, "summed", autospec=True, side_effect=ShardRanks.summed) as summed:
        for step in range(6):
            summed.reset_mock()
            train(net, steps=1, seed=step)
            told.append(summed.call_count)
    return told


def test_shards_tell_each_other_of_steps_only_while_there_may_be_something_to_tell(world: World) -> None:
    for told in world(4).run(told_in_each_step, AllReduce()):
        assert told[0] == 1 and told[-3:] == [0] * 3
    for told in world(4).run(told_in_each_step, FEEDBACK):
        assert told == [1] * 6


def one_row() -> Any:
    """Returns a model in shards with parameters of one row, of which the second shard has nothing."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    for module in (net[0], net):
        fully_shard(module, mesh=meshes())
    return net


def each_alone(scheme: Scheme[Any]) -> Callable[[Sequence[ParameterProfile], int], Plan]:
    """Returns a planner with a bucket for each parameter, so that some buckets of the second shard are empty."""
    return lambda profiles, size: Plan.make(
        {p.name: p.tensor for p in profiles}, size, [([p.name], scheme) for p in profiles]
    )


@patched(FEWER)
def with_empty_shards(kind: str) -> tuple[bool, bool]:
    """Trains by a planner that names a parameter of one row; returns whether it is exact, and whether others are."""
    net, expected = one_row(), one_row()
    exact = ("1.weight",)
    planner: Any = CompressingPlanner(ErrorFeedback(TopK(0.2)), exact=exact)
    if kind == "auto":
        lossy = Constraints((ErrorFeedback(TopK(0.2)),), always=True, exact=exact)
        planner = AutoPlanner(lossy, steps=2, warmup=3, must_plan=True)
    handle = gradsync.attach(net, plan=planner, timeout=TIMEOUT_S)
    generator, steps = torch.Generator().manual_seed(dist.get_rank()), 0
    while (steps < 3 or not handle.settled) and steps < 300:
        x, steps = batch(generator), steps + 1
        for each in (net, expected):
            each.zero_grad()
            each(x).square().mean().backward()
    gradients = [{n: p.grad.to_local() for n, p in each.named_parameters()} for each in (net, expected)]
    is_equal = {name: torch.equal(one, gradients[1][name]) for name, one in gradients[0].items()}
    return is_equal["1.weight"], is_equal["0.weight"]


@pytest.mark.parametrize("kind", ["compressing", "auto"])
def test_planners_may_name_a_parameter_that_some_shards_have_nothing_of(world: World, kind: str) -> None:
    assert world(4).run(with_empty_shards, kind) == [(True, False)] * 4


def empty_buckets(scheme: Scheme[Any]) -> bool:
    """Trains by buckets that are empty in the second shard; saves and loads; returns whether replicas are alike."""
    net = one_row()
    handle = gradsync.attach(net, plan=each_alone(scheme), timeout=TIMEOUT_S, verify_every=2)
    for _ in range(2):
        optimizer, generator = torch.optim.SGD(net.parameters(), lr=0.1), torch.Generator().manual_seed(dist.get_rank())
        for _ in range(4):
            net(batch(generator)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        handle.checkpoint().load_state_dict(handle.checkpoint(gather=True).state_dict())
    return replicas_are_equal(shards_of(net), meshes())


@pytest.mark.parametrize(
    "scheme",
    [AllReduce(), FEEDBACK, PowerSGD(1, min_compression=1.0), COARSE, HalfPrecision(values="bfloat16"), EIGHT_BITS],
    ids=["exact", "top-k", "low rank", "chunks", "16 bits", "8 bits"],
)
def test_buckets_may_be_empty_in_some_shards(world: World, scheme: Scheme[Any]) -> None:
    assert world(4).run(empty_buckets, scheme) == [True] * 4


def used_by_one_replica() -> float:
    """Returns the norm of gradients of a model whose layer of one row was used by the first replica only."""
    net = one_row()
    gradsync.attach(net, timeout=TIMEOUT_S)
    x = batch(torch.Generator().manual_seed(dist.get_rank()))
    (net(x) if dist.get_rank() < 2 else net[0](x)).square().mean().backward()
    return float(nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor())


def test_all_shards_of_what_one_replica_used_get_gradients(world: World) -> None:
    """Otherwise ranks would sum the norms of more gradients than others do."""
    found = world(4).run(used_by_one_replica)
    assert len(set(found)) == 1


def measurements() -> int:
    """Attaches, and returns how often this rank measured links."""
    with patch.object(distributed, "measured_link", wraps=distributed.measured_link) as measured:
        gradsync.attach(sharded(meshes()), timeout=TIMEOUT_S)
    return measured.call_count


def test_only_the_links_between_replicas_are_measured(world: World) -> None:
    assert world(4).run(measurements) == [1] * 4


def begins_before_backward_ends(in_small_buckets: bool) -> bool:
    """Whether the last layer's exchange begins while autograd waits in front of the first layer's gradients."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 40))
    for module in (net[0], net[1], net):
        fully_shard(module, mesh=meshes())

    def in_order_of_backward(profiles: Sequence[ParameterProfile], size: int) -> Plan:
        names = [p.name for p in reversed(profiles)]
        buckets = [[name] for name in names] if in_small_buckets else [names]
        return Plan.make({p.name: p.tensor for p in profiles}, size, [(each, AllReduce()) for each in buckets])

    gradsync.attach(net, plan=in_order_of_backward, timeout=TIMEOUT_S)
    began, in_time = threading.Event(), []
    last = net[1].weight.to_local().numel()
    all_reduce = GlooGroup.all_reduce

    def noted(group: GlooGroup, buffer: Tensor) -> Any:
        if buffer.numel() >= last:
            began.set()
        return all_reduce(group, buffer)

    def waiting(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: in_time.append(began.wait(10 if in_small_buckets else 0.1)))
        return x

    net.forward = lambda x: net[1](waiting(net[0](x)))
    with patch.object(GlooGroup, "all_reduce", noted):
        net(batch(torch.Generator().manual_seed(dist.get_rank()))).square().mean().backward()
    assert began.is_set() and len(in_time) == 1
    return bool(in_time[0])


def test_exchanges_begin_while_backward_goes_on(world: World) -> None:
    assert world(4).run(begins_before_backward_ends, True) == [True] * 4
    assert world(4).run(begins_before_backward_ends, False) == [False] * 4, "one bucket waits for all gradients"


def fails_at_the_end_of_a_step() -> str:
    net = sharded(meshes())
    gradsync.attach(net, plan=by_one_bucket(FEEDBACK), timeout=TIMEOUT_S)
    train(net, steps=2)
    error = ValueError("there is no sum")
    with patch.object(ShardRanks, "summed", side_effect=error) if dist.get_rank() == 3 else nullcontext():
        return message(lambda: train(net, steps=2))


def test_an_error_at_the_end_of_a_step_names_this_step(world: World) -> None:
    found = world(4).run(fails_at_the_end_of_a_step)
    assert "the end of the step in all shards, step 2" in found[2] and "there is no sum" in found[2]


def message(attach: Callable[[], Any]) -> str:
    try:
        attach()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


AGAIN = ("no replicas on one rank", "plan fails on one rank", "other shard", "hook")


def no_plan_on_rank_3(profiles: Sequence[ParameterProfile], size: int) -> Plan:
    if dist.get_rank() == 3:
        raise ValueError("there is no plan")
    return by_one_bucket(FEEDBACK)(profiles, size)


def wrong(kind: str) -> str:
    """Attaches in a wrong way, on all ranks or on rank 3 only; after some, a right attachment must succeed."""
    mesh = meshes()
    group, on, settings = mesh.get_group("replicate"), mesh["shard"], {}
    odd = dist.get_rank() == 3
    model: Any = None
    if kind == "no replicas":
        group = None
    elif kind == "no replicas on one rank":
        group = None if odd else group
    elif kind == "group of the replica":
        group = mesh.get_group("shard")
    elif kind == "plain model":
        model = nn.Linear(2, 2)
    elif kind == "group beside a mesh":
        on = mesh
    elif kind == "auto with averages":
        settings = {"plan": AutoPlanner(averaging=AveragingPlanner())}
    elif kind == "auto with freezing":
        settings = {"plan": AutoPlanner(Constraints((replace(COARSE, freeze=True),)))}
    elif kind == "parameters":
        settings = {"plan": AveragingPlanner()}
    elif kind == "process group":
        settings = {"process_group": group}
    elif kind == "scaler on one rank":
        settings = {"grad_scaler": torch.amp.GradScaler("cpu") if odd else None}
    elif kind == "freezing":
        settings = {"plan": by_one_bucket(CoarseGrained(ratio=0.3, chunk=4, freeze=True))}
    elif kind == "plan fails on one rank":
        settings = {"plan": no_plan_on_rank_3}
    elif kind == "settings differ":
        settings = {"verify_every": 7 if odd else 5}
    elif kind == "buffers differ":
        settings = {"broadcast_buffers": odd}
    elif kind == "other shard":
        ranks = [[0, 3], [1, 2]]
        groups = [dist.new_group(each) for each in ranks]
        group = groups[0] if dist.get_rank() in ranks[0] else groups[1]
    elif kind == "offload":
        model = Net()
        fully_shard(model, mesh=on, offload_policy=CPUOffloadPolicy(pin_memory=False))
    elif kind == "part":
        model = Net()
        fully_shard(model.first, mesh=on)
        group = None
    elif kind == "embedding":
        model = nn.Embedding(4, 2, sparse=True)
        fully_shard(model, mesh=on)
    model = sharded(on) if model is None else model
    if kind == "factor":
        model.first.set_gradient_divide_factor(3.0)
    elif kind == "sums":
        model.set_force_sum_reduction_for_comms(True)
    elif kind == "hook" and odd:
        model.first.set_all_reduce_hook(lambda flat: None)
    elif kind == "after accumulation":
        model.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    said = message(lambda: gradsync.attach(model, replicate_group=group, timeout=TIMEOUT_S, **settings))
    if kind in AGAIN:
        gradsync.attach(sharded(mesh), timeout=TIMEOUT_S).detach()
    return said


REFUSALS = {
    "no replicas": "the model is on a mesh of shards only: give replicate_group",
    "no replicas on one rank": "the model is on a mesh of shards only: give replicate_group",
    "group of the replica": "are both in replicate_group and in this replica",
    "plain model": "replicate_group is for models that fully_shard() was applied to",
    "group beside a mesh": "this model's mesh names its replicas",
    "auto with averages": "a plan that averages parameters is not supported",
    "auto with freezing": "leave freeze=False",
    "parameters": "a plan that averages parameters is not supported",
    "process group": "process_group is not for a model in shards",
    "scaler on one rank": "the ranks differ: 2 replicas of 2 shards",
    "freezing": "leave freeze=False",
    "plan fails on one rank": "there is no plan",
    "settings differ": "the settings of attach differ between the ranks",
    "buffers differ": "the ranks differ: 2 replicas of 2 shards, broadcast_buffers=False",
    "other shard": "the ranks of replicate_group have the shards 0 to 1 of 2; expected the ranks with the same shard",
    "offload": "CPU offload moves gradients to the host",
    "part": "a part of the model is in shards",
    "embedding": "'weight' gets sparse gradients",
    "factor": "'first': a custom gradient divide factor is set",
    "sums": "set_force_sum_reduction_for_comms(True) is not supported yet",
    "hook": "'first': it has an all-reduce hook of its own",
    "after accumulation": "'first.weight' has a hook by register_post_accumulate_grad_hook",
}


@pytest.mark.core
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_wrong_is_said_on_all_ranks(world: World, kind: str) -> None:
    assert [REFUSALS[kind] in text or text for text in world(4).run(wrong, kind)] == [True] * 4


def changed_torch(kind: str) -> str:
    """Attaches under a torch that has changed inside, on rank 3 or on all."""
    mesh = meshes()
    take_out, reduced = ParameterGroup.take_out_all_reduce, ParameterGroup.reduced
    if kind.startswith("another order"):
        by_hand = kind.endswith("by hand")
        net, group = sharded(mesh["shard"] if by_hand else mesh), mesh.get_group("replicate") if by_hand else None
        with patch.object(ParameterGroup, "reduced", lambda group: reduced(group)[::-1]):
            return message(lambda: gradsync.attach(net, replicate_group=group, timeout=TIMEOUT_S))

    def takes_out_badly(group: ParameterGroup) -> None:
        if kind == "averages itself":
            return
        post = group._found.post_forward_mesh_info
        take_out(group)
        group._found.post_forward_mesh_info = post

    release = "9.9.0" if kind == "release" and dist.get_rank() == 3 else torch.__version__
    with patch.object(torch, "__version__", release):
        if kind == "release":
            return message(lambda: gradsync.attach(sharded(mesh), timeout=TIMEOUT_S))
        with patch.object(ParameterGroup, "take_out_all_reduce", takes_out_badly):
            return message(lambda: gradsync.attach(sharded(mesh), timeout=TIMEOUT_S))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("release", "this release of torch (9.9.0) is none of those that gradsync knows the inside of"),
        ("averages itself", "gradients are averaged over replicas already when a hook sees them"),
        ("another order", "where a hook finds it differs by"),
        ("another order, replicas given by hand", "where a hook finds it differs by"),
        ("copies a shard", "bytes of whole parameters, and [0, 0, 0, 0, 0, 0] were expected"),
    ],
)
def test_a_torch_that_has_changed_is_refused_on_all_ranks(world: World, kind: str, expected: str) -> None:
    assert [expected in text or text for text in world(4).run(changed_torch, kind)] == [True] * 4


def detaching(x: Tensor, handle: gradsync.Attachment) -> Tensor:
    """Returns `x`, whose gradient lets the handle be detached in the middle of a backward."""
    x.register_hook(lambda gradient: handle.detach())
    return x


def in_training(kind: str) -> str:
    """Does in training what cannot be followed."""
    mesh = meshes()
    net = sharded(mesh, Case(twice=kind == "twice", keeps_unused=kind == "twice"))
    handle = gradsync.attach(net, timeout=TIMEOUT_S)
    if kind == "join":
        return message(handle.join)
    if kind == "attached":
        return message(lambda: gradsync.attach(net, timeout=TIMEOUT_S))
    if kind == "hook":
        net.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    if kind == "nested":
        net.forward = lambda x: checkpoint(net.second, net.first(x), use_reentrant=True)
    if kind == "further":
        net.further = fully_shard(nn.Linear(2, 2), mesh=mesh)
    if kind == "detached":
        net.forward = lambda x: net.second(detaching(net.first(x), handle))
    if kind == "unfrozen":
        net.still.requires_grad_(True)
        net.step = 1
    return message(lambda: net(torch.randn(2, 6)).square().mean().backward())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("join", "RuntimeError: join() is not supported for a model in shards"),
        ("attached", "RuntimeError: gradsync is attached to this model"),
        ("detached", "RuntimeError: gradsync was detached from this model"),
        ("twice", "RuntimeError: 'second' got gradients twice in one backward"),
        ("nested", "RuntimeError: gradients became ready inside a nested backward"),
        ("further", "RuntimeError: fully_shard() was applied to a further module after attach()"),
        ("hook", "RuntimeError: 'first.weight' has a hook by register_post_accumulate_grad_hook"),
        ("unfrozen", "RuntimeError: a parameter of 'the model' was frozen when gradsync was attached"),
    ],
)
def test_what_cannot_be_followed_is_refused(world: World, kind: str, expected: str) -> None:
    if kind == "twice":
        skip_unless_torch_keeps_unused()
    assert [text.startswith(expected) or text for text in world(4).run(in_training, kind)] == [True] * 4


def lost() -> str:
    mesh = meshes()
    net = sharded(mesh)
    gradsync.attach(net, timeout=3)
    train(net, steps=2)
    if dist.get_rank() == 3:
        os._exit(0)
    return message(lambda: train(net, steps=2))


@pytest.mark.waiting
def test_a_lost_rank_ends_training_on_all() -> None:
    with RankProcesses(4) as ranks:
        ranks.start(lost)
        found = ranks.outcomes(60.0)
    assert all("Error" in outcome.value for outcome in found[:3])
    assert "rank 3" in found[1].value  # it has the same shard


def test_the_tested_release_is_the_one_here() -> None:
    assert fsdp_internals.is_tested_torch()
