"""Models in shards that gradsync cannot follow, as torch makes them: `attach` refuses them on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

import gradsync
from gradsync.frontends.agreement import FSDP
from tests.frontends.test_sharded import Net, meshes, message, sharded
from tests.world import Ranks

pytestmark = pytest.mark.waiting

World = Callable[[int], Ranks]
NAMES = ("replicate", "shard")


def of_subclasses(mesh: DeviceMesh) -> Any:
    net = nn.Linear(6, 8, bias=False)
    net.weight = nn.Parameter(TwoTensor(torch.ones(8, 6), torch.ones(8, 6)))
    return fully_shard(net, mesh=mesh)


def in_several_groups(mesh: DeviceMesh) -> Any:
    """Returns one module whose weight and bias are in shards on meshes of their own, as torch 2.13 can make it."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    other = common.FSDPMeshInfo(mesh=init_device_mesh("cpu", (dist.get_world_size(),)), shard_mesh_dim=0)

    def placed(parameter: nn.Parameter) -> Any:
        return common.ShardPlacementResult(Shard(0), other) if parameter.ndim == 1 else None

    return fully_shard(nn.Linear(6, 8), mesh=mesh, shard_placement_fn=placed)


def tensor_parallel(mesh: DeviceMesh) -> Any:
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(net, mesh=mesh[NAMES])


def on_several_meshes() -> Any:
    net, other = Net(), init_device_mesh("cpu", (4, 1), mesh_dim_names=NAMES)
    fully_shard(net.first, mesh=other)
    return fully_shard(net, mesh=meshes())


def model_of(kind: str) -> Any:
    if kind == "FSDP's first version":
        return FullyShardedDataParallel(nn.Linear(6, 8), device_id=torch.device("cpu"))
    if kind == "several groups":
        return in_several_groups(meshes()["shard"])
    if kind == "several meshes":
        return on_several_meshes()
    if kind == "reshards to an int":
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=NAMES)
        return fully_shard(nn.Linear(6, 8), mesh=mesh, reshard_after_forward=2)
    if kind == "tensor parallel":
        return tensor_parallel(init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(*NAMES, "tensor")))
    return of_subclasses(meshes())


def refused(kind: str) -> str:
    """Attaches to a model that is not supported; a good one must attach afterwards."""
    model, mesh = model_of(kind), meshes()
    group = mesh.get_group("replicate") if kind == "several groups" else None
    said = message(lambda: gradsync.attach(model, replicate_group=group, timeout=20))
    gradsync.attach(sharded(mesh), timeout=20).detach()
    return said


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("FSDP's first version", f"RuntimeError: {FSDP}"),
        ("several groups", "ValueError: 'the model' has 2 groups of parameters on meshes of their own"),
        ("several meshes", "ValueError: modules of the model are on several meshes; one is supported"),
        ("reshards to an int", "ValueError: 'the model': reshard_after_forward=<int> is not supported yet on a mesh"),
        ("tensor parallel", "ValueError: 'the model': it is on a mesh with further dimensions (tensor parallel)"),
        ("tensor subclass", "ValueError: the shard of 'weight' is a TwoTensor, which is not supported yet"),
    ],
)
def test_a_model_that_torch_shards_in_another_way_is_refused_on_all_ranks(
    world: World, kind: str, expected: str
) -> None:
    if kind == "several groups":
        pytest.importorskip("torch", minversion="2.13", reason="torch 2.11 has one mesh for all parameters of a module")
    assert [text.startswith(expected) or text for text in world(4).run(refused, kind)] == [True] * 4


def on_another_mesh_than_others(kind: str, by_hand: bool) -> str:
    """Attaches to models of which those of ranks 0 and 1 are on another mesh; a good one must attach afterwards."""
    ranks = [[0], [1], [2], [3]] if kind == "other shape" else [[0, 3], [1, 2]]
    mesh, other = meshes(), DeviceMesh("cpu", ranks, mesh_dim_names=NAMES)
    mine = other if dist.get_rank() < 2 else mesh
    model = sharded(mine["shard"] if by_hand else mine)
    group = mine.get_group("replicate") if by_hand else None
    said = message(lambda: gradsync.attach(model, replicate_group=group, timeout=20))
    gradsync.attach(sharded(mesh), timeout=20).detach()
    return said


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", ["other shape", "other order"])
def test_ranks_with_models_on_different_meshes_all_raise(world: World, kind: str, by_hand: bool) -> None:
    for text in world(4).run(on_another_mesh_than_others, kind, by_hand):
        assert text.startswith("ValueError: the ranks differ: "), text
