"""Puts a model into shards: inside each emulated node with a replica on every node, as HSDP does, or over all ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradsync.compressors import Compressor
from gradsync.frontends.reduce_scatter import CompressedReduceScatter


@dataclass(frozen=True)
class Sharding:
    """How a model is put into shards.

    - `reduces_in`: the element type in which gradients are summed, inside replicas and between them.
    - `replicated`: whether each node has a replica; otherwise there is one, in shards over all ranks.
    - `compressor`: that of the reduce-scatter, in place of torch's own.
    """

    reduces_in: torch.dtype = torch.float32
    replicated: bool = True
    compressor: Compressor[Any] | None = None


@cache
def mesh(replicated: bool) -> DeviceMesh:
    """Returns the mesh of all ranks: (replicas, one a node; shards, one a rank of a node), or shards alone. Collective.

    Args:
        replicated: whether each node has a replica.
    """
    if not replicated:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    shards = int(os.environ["LOCAL_WORLD_SIZE"])
    return init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def put_into_shards(model: nn.Module, sharding: Sharding) -> None:
    """Applies `fully_shard` to the model's transformer layers and to the model itself, in place. Collective."""
    policy, ranks = MixedPrecisionPolicy(reduce_dtype=sharding.reduces_in), mesh(sharding.replicated)
    for part in [*(m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)), model]:
        module = fully_shard(part, mesh=ranks, mp_policy=policy)
        if sharding.compressor is not None:
            reduce_scatter: Any = CompressedReduceScatter(sharding.compressor)  # torch's class for types is private
            module.set_custom_reduce_scatter(reduce_scatter)
