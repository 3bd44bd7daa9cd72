"""State of models in shards: saved and loaded with the model, on the same mesh and on others; none of it is lost."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import gradsync
from gradsync.compressors import ErrorFeedback, MomentumCorrection, TopK, copies_at
from gradsync.engine.plan_control import PlanController
from gradsync.frontends import checkpoint, shard_ranks
from gradsync.planner import Constraints
from gradsync.plans.profile import Profile
from gradsync.schemes import AllReduce, CoarseGrained, CompressedAllGather, CompressedTwoWay, PowerSGD, Scheme
from gradsync.tuning.auto import AutoPlanner
from tests.frontends.test_sharded import by_one_bucket
from tests.frontends.test_state_checkpoints import quiet_library
from tests.quick import FEWER, patched
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]
Mesh = tuple[int, int]  # replicas, shards
FEEDBACK = ErrorFeedback(TopK(0.2))
GATHERED, TWO_WAY = CompressedAllGather(FEEDBACK), CompressedTwoWay(FEEDBACK)
LOW_RANK, COARSE = PowerSGD(1, min_compression=1.0), CoarseGrained(ratio=0.3, chunk=4)
MOMENTUM = CompressedAllGather(MomentumCorrection(TopK(0.2), momentum=0.9))
TIMEOUT_S = 20


class Net(nn.Module):
    """Layers of odd sizes: shards differ in rows, and a parameter of one row is in the first shard alone."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 5)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x).relu()) * self.scale
        return result


def attached(
    mesh: Mesh, scheme: Scheme[Any], net: Any = None, timeout: float = TIMEOUT_S, **settings: Any
) -> tuple[Any, gradsync.Attachment]:
    """Returns a model in shards, the same in every call, on (replicas, shards), all in one bucket."""
    torch.manual_seed(0)
    net = Net() if net is None else net
    on = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    for module in (net.first, net.second, net):
        fully_shard(module, mesh=on, **settings)
    return net, gradsync.attach(net, plan=by_one_bucket(scheme), timeout=timeout)


def train(net: Any, steps: int = 3, seed: int = 0) -> Tensor:
    """Trains and returns this rank's shards, end to end."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(steps):
        net(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.to_local().detach().reshape(-1) for p in net.parameters()])


def left_in_all(net: nn.Module, handle: gradsync.Attachment, kind: str = "residual") -> dict[str, Tensor]:
    """Returns the sum over replicas of the residuals, or momentum, of each whole parameter, in float64."""
    state = handle.state_dict()
    totals = {}
    for name, parameter in net.named_parameters():
        whole = torch.zeros(parameter.numel(), dtype=torch.float64)
        index, count = state["shard"]["index"], state["shard"]["count"]
        begin = index * -(-parameter.shape[0] // count) * (parameter.numel() // parameter.shape[0])
        for key, values in state["state"].items():
            form = re.fullmatch(r"(.*)\[(\d+):(\d+)\]/([^/]*)\.(\w+)", key)
            if form is not None and form[1] == name and form[5] == kind:
                here = whole[begin + int(form[2]) : begin + int(form[3])]
                here += values / (copies_at(form[4]) or 1)
        dist.all_reduce(whole)
        totals[name] = whole
    return totals


def write(folder: str, net: nn.Module, handle: gradsync.Attachment) -> None:
    with quiet_library():
        dcp.save({"model": get_model_state_dict(net), "gradsync": handle.checkpoint()}, checkpoint_id=folder)


def read(folder: str, net: nn.Module, handle: gradsync.Attachment) -> None:
    with quiet_library():
        model = get_model_state_dict(net)
        dcp.load({"model": model, "gradsync": handle.checkpoint()}, checkpoint_id=folder)
        set_model_state_dict(net, model)


def saved(folder: str, mesh: Mesh, scheme: Scheme[Any]) -> dict[str, Tensor]:
    """Trains, saves through `torch.distributed.checkpoint` and as a folder of files; returns what is left to send."""
    net, handle = attached(mesh, scheme)
    train(net)
    left = left_in_all(net, handle)
    assert all(values.any() for name, values in left.items() if name.endswith("weight"))
    write(folder, net, handle)
    handle.checkpoint().save(f"{folder}/files")
    handle.detach()
    return left


def goes_on(folder: str, mesh: Mesh, scheme: Scheme[Any]) -> bool:
    net, handle = attached(mesh, scheme)
    train(net)
    write(folder, net, handle)
    handle.checkpoint().save(f"{folder}/files")
    whole = handle.checkpoint(gather=True).state_dict()
    expected = train(net, seed=7)
    found = []
    for way in ("dcp", "files", "gathered"):
        handle.detach()
        other, handle = attached(mesh, scheme)
        read(folder, other, handle)
        if way != "dcp":
            train(other, 1)
            with quiet_library():
                model = get_model_state_dict(other)
                dcp.load({"model": model}, checkpoint_id=folder)
                set_model_state_dict(other, model)
        if way == "files":
            assert handle.checkpoint().load(f"{folder}/files")
        elif way == "gathered":
            handle.checkpoint(gather=True).load_state_dict(whole)
        found.append(torch.equal(train(other, seed=7), expected))
    handle.detach()
    return all(found)


@pytest.mark.parametrize(
    "scheme",
    [pytest.param(GATHERED, marks=pytest.mark.core), LOW_RANK, COARSE, MOMENTUM],
    ids=["top-k", "low rank", "chunks", "momentum"],
)
def test_training_goes_on_to_the_bit_on_the_same_mesh(world: World, scheme: Scheme[Any], tmp_path: Path) -> None:
    assert world(4).run(goes_on, str(tmp_path), (2, 2), scheme) == [True] * 4


def loaded_elsewhere(folder: str, mesh: Mesh, scheme: Scheme[Any], left: dict[str, Tensor]) -> None:
    for plan in (scheme,) if scheme in (LOW_RANK, COARSE) else (scheme, AllReduce()):  # which keeps nothing else
        for by_files in (False, True):
            net, handle = attached(mesh, plan)
            if by_files:
                assert handle.checkpoint().load(f"{folder}/files")
            else:
                read(folder, net, handle)
            assert handle.state_dict()["step"] == 3
            found = left_in_all(net, handle)
            assert found.keys() == left.keys()
            for name, values in left.items():
                torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-9)
            assert train(net, 2, seed=1).isfinite().all()
            handle.detach()


@pytest.mark.parametrize(
    ("before", "after", "scheme"),
    [
        ((2, 2), (1, 2), GATHERED),
        ((2, 2), (2, 1), GATHERED),
        ((1, 4), (2, 2), GATHERED),
        ((2, 2), (1, 3), GATHERED),
        *(((2, 2), (4, 1), scheme) for scheme in (GATHERED, LOW_RANK, COARSE)),
        *(((4, 1), (2, 2), scheme) for scheme in (TWO_WAY, LOW_RANK, COARSE)),
        ((1, 2), (2, 2), LOW_RANK),
        ((2, 1), (2, 2), TWO_WAY),
    ],
    ids=str,
)
def test_the_sum_of_what_is_left_is_kept_on_other_meshes(
    world: World, before: Mesh, after: Mesh, scheme: Scheme[Any], tmp_path: Path
) -> None:
    left = world(before[0] * before[1]).run(saved, str(tmp_path), before, scheme)[0]
    world(after[0] * after[1]).run(loaded_elsewhere, str(tmp_path), after, scheme, left)


def in_another_order(folder: str, by_hand: bool) -> bool:
    """Goes on from each way of saving on a mesh whose replicas are in another order for each shard."""
    on = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("replicate", "shard"))

    def attached_on_it() -> tuple[Any, gradsync.Attachment]:
        torch.manual_seed(0)
        net: Any = Net()
        for module in (net.first, net.second, net):
            fully_shard(module, mesh=on["shard"] if by_hand else on)
        return net, gradsync.attach(
            net,
            plan=by_one_bucket(GATHERED),
            replicate_group=on.get_group("replicate") if by_hand else None,
            timeout=TIMEOUT_S,
        )

    net, handle = attached_on_it()
    train(net)
    write(folder, net, handle)
    handle.checkpoint().save(f"{folder}/files")
    written: list[Any] = [handle.checkpoint(gather=True).state_dict()]
    dist.broadcast_object_list(written)  # rank 0's, as libraries do in which it alone writes
    left = left_in_all(net, handle)
    handle.detach()
    for way in ("dcp", "files", "gathered"):
        other, handle = attached_on_it()
        if way == "dcp":
            read(folder, other, handle)
        elif way == "files":
            assert handle.checkpoint().load(f"{folder}/files")
        else:
            handle.checkpoint().load_state_dict(written[0])
        found = left_in_all(other, handle)
        assert all(torch.equal(found[name], values) for name, values in left.items()), way
        train(other, 1)
        handle.detach()
    return handle.rank == on.get_coordinate()[0]


@pytest.mark.parametrize("by_hand", [False, True])
def test_replicas_may_be_in_another_order_for_each_shard(world: World, by_hand: bool, tmp_path: Path) -> None:
    assert world(4).run(in_another_order, str(tmp_path), by_hand) == [True, True, False, False]


def planned(net: Any, **settings: Any) -> gradsync.Attachment:
    planner = AutoPlanner(Constraints((FEEDBACK,), always=True), steps=2, warmup=3, must_plan=True, **settings)
    return gradsync.attach(net, plan=planner, timeout=TIMEOUT_S)


def settle(net: Any, handle: gradsync.Attachment) -> int:
    """Trains until the plans of all shards have settled; returns after how many steps."""
    steps = 0
    while not handle.settled and steps < 300:
        train(net, 1, seed=steps)
        steps += 1
    assert handle.settled
    return steps


def in_shards() -> Any:
    torch.manual_seed(0)
    net: Any = Net()
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (net.first, net.second, net):
        fully_shard(module, mesh=on)
    return net


@patched(FEWER)
def goes_on_with_plans(folder: str) -> tuple[bool, int]:
    """Saves a job whose plans have settled, and resumes it in each way; returns whether state and plans are the same.

    Where the plan of one shard cannot be gone on with, as its measurements are of another torch, that shard is measured
    anew: returned is also after how many steps all have settled then.
    """
    net = in_shards()
    handle = planned(net)
    settle(net, handle)
    train(net)
    write(folder, net, handle)
    handle.checkpoint().save(f"{folder}/files")
    state, plan = copy.deepcopy(handle.state_dict()), handle.plan
    assert "planned" in state
    handle.detach()
    found = []
    for way in ("dcp", "files", "own"):
        net = in_shards()
        handle = planned(net)
        if way == "dcp":
            read(folder, net, handle)
        elif way == "files":
            assert handle.checkpoint().load(f"{folder}/files")
        else:
            handle.load_state_dict(state)
        found.append(handle.settled and handle.plan == plan)
        now = handle.state_dict()
        found.append(now["planned"] == state["planned"] and now["state"].keys() == state["state"].keys())
        found += [torch.equal(now["state"][key], values) for key, values in state["state"].items()]
        train(net, 2)
        found.append(handle.settled and handle.plan == plan)
        handle.detach()
    net = in_shards()
    handle = planned(net)
    if dist.get_rank() % 2:
        profile = Profile.from_json(state["planned"]["profile"]).model_copy(update={"torch": "2.0"})
        state["planned"] = state["planned"] | {"profile": profile.to_json()}
    handle.load_state_dict(state)
    found.append(not handle.settled)
    found.append((handle.plan == plan) == (dist.get_rank() % 2 == 0))
    return all(found), settle(net, handle)


def test_a_job_goes_on_with_the_plans_of_its_shards(world: World, tmp_path: Path) -> None:
    found = world(4).run(goes_on_with_plans, str(tmp_path))
    assert len(set(found)) == 1
    assert found[0][0] and found[0][1] > 3 + 2 * 2


@patched(FEWER)
def one_shard_drifts() -> list[bool]:
    """Returns, for each step after all plans have settled, whether they still were, while shard 1 is measured anew."""
    net = in_shards()
    handle = planned(net)
    settle(net, handle)
    drifts = iter([False, dist.get_rank() % 2 == 1])
    settled = []
    with patch.object(PlanController, "drifted", lambda *arguments: next(drifts, False)):
        while len(settled) < 4 or (not settled[-1] and len(settled) < 300):
            train(net, 1, seed=len(settled))
            settled.append(handle.settled)
    return settled


def test_all_ranks_know_that_a_shard_is_measured_anew(world: World) -> None:
    found = world(4).run(one_shard_drifts)
    assert all(settled == found[0] for settled in found)
    assert found[0][:3] == [True, False, False] and found[0][-1]


def momentum_moves() -> bool:
    net, handle = attached((2, 2), MOMENTUM)
    train(net)
    before, parts = left_in_all(net, handle, "momentum"), handle.checkpoint(gather=True).state_dict()
    handle.detach()
    net, handle = attached((4, 1), MOMENTUM)
    handle.checkpoint().load_state_dict(parts)
    after = left_in_all(net, handle, "momentum")
    train(net)
    assert before["first.weight"].any() and before["second.weight"].any()
    return all(torch.allclose(after[name], values) for name, values in before.items())


def test_momentum_of_compressors_moves_with_its_elements(world: World) -> None:
    assert world(4).run(momentum_moves) == [True] * 4


def file_of(folder: str, replica: int, shard: int) -> str:
    return f"{folder}/{replica}.{shard}.safetensors"


def in_files(folder: str) -> dict[str, Tensor]:
    net, handle = attached((2, 2), GATHERED)
    train(net)
    state = handle.state_dict()
    gradsync.state.save_file(state, file_of(folder, handle.rank, state["shard"]["index"]))
    return left_in_all(net, handle)


def redistributed(folder: str, left: dict[str, Tensor]) -> None:
    net, handle = attached((1, 2), GATHERED)
    states = {
        (replica, shard): gradsync.state.load_file(file_of(folder, replica, shard))
        for replica in range(2)
        for shard in range(2)
    }
    for mixed in ([states[0, 0], states[1, 1]], list(states.values())):
        with pytest.raises(ValueError, match=r"of shards 0, 1 of a model: give those of all replicas with one shard"):
            gradsync.state.redistribute(mixed, 1)
    shard = dist.get_rank()
    wrong, mine = (
        gradsync.state.redistribute([states[0, each], states[1, each]], 1)[handle.rank] for each in (1 - shard, shard)
    )
    assert "each rank loads its own state, on the same mesh" in message(lambda: handle.load_state_dict(wrong))
    handle.load_state_dict(mine)
    found = left_in_all(net, handle)
    for name, values in left.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-9)
    train(net)


def test_files_of_one_shard_are_redistributed_to_other_numbers_of_replicas(world: World, tmp_path: Path) -> None:
    left = world(4).run(in_files, str(tmp_path))[0]
    world(2).run(redistributed, str(tmp_path), left)


def message(load: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        load()
    return f"{caught.type.__name__}: {caught.value}"


def changed(parts: dict[str, Any], number: int, **entries: Any) -> dict[str, Any]:
    """Returns parts of all ranks, with other entries in the state of the rank of this number."""
    state = gradsync.state.from_bytes(bytes(parts[f"rank {number}"].numpy()))
    content = gradsync.state.to_bytes({**state, **entries})
    return {**parts, f"rank {number}": torch.frombuffer(bytearray(content), dtype=torch.uint8)}


def damaged(parts: dict[str, Any], rank: int) -> dict[str, Any]:
    """Returns parts of all ranks, with one number of one rank's state that is not finite."""
    state = gradsync.state.from_bytes(bytes(parts[f"rank {rank}"].numpy()))
    next(values for values in state["state"].values() if values.numel())[0] = torch.nan
    return changed(parts, rank, state=state["state"])


def refused(folder: str, mesh: Mesh, width: int, kinds: list[str]) -> dict[str, str]:
    """Loads what is not for this model or mesh, on all ranks or some; then trains on, from what was there before."""
    net, handle = attached((2, 2), GATHERED)
    train(net)
    state, parts = copy.deepcopy(handle.state_dict()), handle.checkpoint(gather=True).state_dict()
    handle.detach()
    net, handle = attached(mesh, GATHERED, Net(width))
    train(net, 1, seed=3)
    before = copy.deepcopy(handle.state_dict())
    shard, rank = {**state["shard"], "index": 0, "count": 1}, dist.get_rank()
    given: dict[str, dict[str, Any]] = {
        "other model": parts,
        "other mesh": state,
        "other rank": {**state, "rank": 1 - state["rank"]} if rank == 1 else state,
        "other rank, not strict": {**state, "rank": 1 - state["rank"]} if rank == 1 else state,
        "other step": {**state, "step": 4} if rank % 2 else state,
        "no shard": {key: value for key, value in state.items() if key != "shard"},
        "a part is missing": {key: value for key, value in parts.items() if key != "rank 2"},
        "part of another step": changed(parts, 1, step=4),
        "part of other shards": changed(parts, 1, rank=1, world=4, shard=shard),
        "damaged": damaged(parts, 1),
    }
    said = {}
    for kind in kinds:
        if kind == "empty folder":
            said[kind] = message(lambda: handle.checkpoint().load(folder))
        else:
            load = handle.checkpoint().load_state_dict if "rank 0" in given[kind] else handle.load_state_dict
            said[kind] = message(partial(load, given[kind], strict=kind != "other rank, not strict"))
        after = handle.state_dict()
        assert after["step"] == before["step"] == 1
        assert all(torch.equal(after["state"][key], values) for key, values in before["state"].items())
    assert train(net, 2, seed=4).isfinite().all()
    handle.detach()
    return said


REFUSALS = {
    "other model": "the state is of a model with other parameters: their names, whole shapes and element types",
    "other mesh": "'shard': '0 of 1'}: each rank loads its own state, on the same mesh",
    "other rank": "each rank loads its own state, on the same mesh; on another mesh save and load handle.checkpoint()",
    "other rank, not strict": "each rank loads its own state, on the same mesh",
    "other step": "the ranks were given states of different steps, 3, 4, 3, 4 by rank",
    "no shard": "the state is of a model that was not in shards",
    "empty folder": "has no state of gradsync",
    "a part is missing": "the checkpoint must have the parts of all ranks that saved it, these ranks found rank 0 of 4",
    "part of another step": "got parts of step 3, 4, of models of 2 shards",
    "part of other shards": "got parts of step 3, of models of 1, 2 shards",
    "damaged": "no step would be finite again",
}


@pytest.mark.parametrize(
    ("mesh", "width", "kinds"),
    [
        ((2, 2), 8, ["other model"]),
        ((4, 1), 7, ["other mesh", "damaged"]),
        ((2, 2), 7, [kind for kind in REFUSALS if kind not in ("other model", "other mesh")]),
    ],
    ids=["other model", "other mesh", "same mesh"],
)
def test_what_is_wrong_is_refused_on_all_ranks_before_anything_changes(
    world: World, mesh: Mesh, width: int, kinds: list[str], tmp_path: Path
) -> None:
    for said in world(4).run(refused, str(tmp_path), mesh, width, kinds):
        assert said.keys() == set(kinds)
        for kind, text in said.items():
            assert REFUSALS[kind] in text


def without_place() -> str:
    net, handle = attached((2, 2), LOW_RANK)
    train(net)
    left, parts = left_in_all(net, handle), handle.checkpoint(gather=True).state_dict()
    handle.detach()
    net, handle = attached((2, 2), AllReduce())
    said = message(lambda: handle.checkpoint().load_state_dict(parts))
    handle.checkpoint().load_state_dict(parts, strict=False)
    found = left_in_all(net, handle)
    assert all(torch.allclose(found[name], values, rtol=1e-6, atol=1e-9) for name, values in left.items())
    return said


def test_state_without_a_place_is_refused_or_dropped(world: World) -> None:
    for text in world(4).run(without_place):
        assert "the plan has no place for the state" in text and "drop it by load_state_dict(" in text


def some_load(kind: str) -> str:
    """Loads on ranks of the first shard only, or fails on one rank of the second when state is being changed."""
    net, handle = attached((2, 2), GATHERED, timeout=4 if kind == "absent" else TIMEOUT_S)
    train(net)
    parts = handle.checkpoint(gather=True).state_dict()
    if kind == "absent" and dist.get_rank() % 2:
        return ""
    if kind == "fails" and dist.get_rank() == 1:
        handle._engine.state.take_over = lambda saved: no_memory()
    said = message(lambda: handle.checkpoint().load_state_dict(parts))
    if kind == "fails":
        assert handle._engine.peers.failure is not None
    return said


def no_memory() -> None:
    raise RuntimeError("there is no memory")


def test_ranks_that_load_while_other_shards_do_not_raise(world: World) -> None:
    said = world(4).run(some_load, "absent")
    named = r"GroupError: loading of a checkpoint, step 3: rank [13] (did not come to|detached before) "
    assert all(re.match(named, text) for text in said[::2]), said


def test_a_load_that_fails_midway_ends_training_on_all_ranks(world: World) -> None:
    said = world(4).run(some_load, "fails")
    assert "there is no memory" in said[1]
    assert all("there is no memory" in text for text in said), said


NO_MEMORY = {
    "packing for a shard": ((4, 1), (2, 2), shard_ranks, "to_bytes"),
    "adding up": ((4, 1), (2, 2), shard_ranks, "sum_of_states"),
    "packing for replicas": ((1, 2), (2, 2), checkpoint, "to_bytes"),
    "looking": ((2, 2), (2, 2), checkpoint, "has_ranks"),
}


def without_memory(folder: str, kind: str, loads: bool) -> tuple[str, bool]:
    """Saves, or loads while one rank has no memory; returns the error, and whether training goes on with its state."""
    before, after, module, function = NO_MEMORY[kind]
    net, handle = attached(after if loads else before, GATHERED)
    train(net)
    if not loads:
        handle.checkpoint().save(folder)
        return "", True
    kept = copy.deepcopy(handle.state_dict()["state"])
    with patch.object(module, function, side_effect=MemoryError) if dist.get_rank() == 0 else nullcontext():
        said = ""
        try:
            handle.checkpoint().load(folder, missing_ok=True)
        except (MemoryError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    state = handle.state_dict()["state"]
    is_same = all(torch.equal(state[key], values) for key, values in kept.items())
    return said, is_same and bool(train(net, 2, seed=4).isfinite().all())


@pytest.mark.parametrize("kind", NO_MEMORY)
def test_what_one_rank_cannot_do_while_it_loads_is_an_error_on_all_and_training_goes_on(
    world: World, kind: str, tmp_path: Path
) -> None:
    replicas, shards = NO_MEMORY[kind][0]
    world(replicas * shards).run(without_memory, str(tmp_path), kind, False)
    for rank, (said, goes_on) in enumerate(world(4).run(without_memory, str(tmp_path), kind, True)):
        assert said == (
            "MemoryError: " if rank == 0 else "RuntimeError: loading of state: rank 0 could not: MemoryError"
        )
        assert goes_on


def gathered_without_memory(is_sharded: bool) -> tuple[str, int, bool]:
    """Gathers while rank 0 has no memory, and again; returns the error, the number of parts, and whether it trains."""
    net, handle = attached((2, 2), GATHERED) if is_sharded else (plain := Net(), gradsync.attach(plain, timeout=20))
    with patch.object(checkpoint, "to_bytes", side_effect=MemoryError) if dist.get_rank() == 0 else nullcontext():
        said = ""
        try:
            handle.checkpoint(gather=True).state_dict()
        except (MemoryError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    parts = handle.checkpoint(gather=True).state_dict()
    net(torch.ones(4, 6)).sum().backward()
    return said, len(parts), all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("is_sharded", [True, False])
def test_what_one_rank_cannot_gather_is_an_error_on_all_and_training_goes_on(world: World, is_sharded: bool) -> None:
    for rank, (said, parts, trains) in enumerate(world(4).run(gathered_without_memory, is_sharded)):
        there = "MemoryError: " if rank == 0 else "RuntimeError: gathering of state: rank 0 could not: MemoryError"
        assert said.startswith(there)
        assert parts == 4 and trains


def between_kinds() -> tuple[str, str]:
    """Loads state of a model in shards into one that is in none, and the other way round."""
    net, handle = attached((2, 2), GATHERED)
    train(net)
    sharded = handle.checkpoint(gather=True).state_dict()
    plain = gradsync.attach(Net(), timeout=TIMEOUT_S)
    whole = plain.checkpoint(gather=True).state_dict()
    return message(lambda: plain.checkpoint().load_state_dict(sharded)), message(
        lambda: handle.checkpoint().load_state_dict(whole)
    )


def test_state_of_models_in_shards_and_of_others_is_kept_apart(world: World) -> None:
    for into_plain, into_shards in world(4).run(between_kinds):
        assert "the state is of a model in 2 shards, and this model is in none" in into_plain
        assert "the state is of a model that was not in shards, and this model is" in into_shards


def by_columns(folder: str) -> str:
    """Goes on with shards of columns on the same mesh, and tries to on another number of shards."""

    def placed(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 4 == 0 else None

    net, handle = attached((2, 2), GATHERED, Net(8), shard_placement_fn=placed)
    train(net)
    parts = handle.checkpoint(gather=True).state_dict()
    left = handle.state_dict()["state"]
    train(net, 1)
    handle.checkpoint().load_state_dict(parts)
    assert all(torch.equal(values, left[key]) for key, values in handle.state_dict()["state"].items())
    handle.detach()
    _, handle = attached((1, 4), GATHERED, Net(8), shard_placement_fn=placed)
    return message(lambda: handle.checkpoint().load_state_dict(parts))


def test_shards_of_columns_stay_on_their_number_of_shards(world: World, tmp_path: Path) -> None:
    for text in world(4).run(by_columns, str(tmp_path)):
        assert "'second.weight' is in shards along another than its first dimension" in text


def attached_to_replicas() -> bool:
    """Goes on with `replicate`, whose models have one shard, from a checkpoint of two shards."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    net, handle = attached((2, 2), GATHERED)
    train(net)
    left, parts = left_in_all(net, handle), handle.checkpoint(gather=True).state_dict()
    torch.manual_seed(0)
    other: Any = replicate(Net(), mesh=init_device_mesh("cpu", (4,)))
    handle = gradsync.attach(other, timeout=TIMEOUT_S)
    handle.checkpoint().load_state_dict(parts)
    found = left_in_all(other, handle)
    return all(torch.allclose(found[name], values, rtol=1e-6, atol=1e-9) for name, values in left.items())


def test_replicate_takes_over_the_state_of_shards(world: World) -> None:
    assert world(4).run(attached_to_replicas) == [True] * 4
