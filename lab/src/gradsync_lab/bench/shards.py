"""Puts a model into shards: inside each emulated node, with a replica on every node, as HSDP does."""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@cache
def mesh() -> DeviceMesh:
    """Returns the mesh of all ranks: (replicas, one a node; shards, one a rank of a node). Collective."""
    shards = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def put_into_shards(model: nn.Module, reduce_dtype: torch.dtype) -> None:
    """Applies `fully_shard` to the model's transformer layers and to the model itself, in place. Collective.

    `reduce_dtype`: in which gradients are summed, inside nodes and between them.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for layer in [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]:
        fully_shard(layer, mesh=mesh(), mp_policy=policy)
    fully_shard(model, mesh=mesh(), mp_policy=policy)
