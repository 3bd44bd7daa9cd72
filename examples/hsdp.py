"""Shards a model inside a replica, and compresses the exchange between two replicas to 5 % of each matrix.

torchrun --nproc-per-node 4 examples/hsdp.py [FOLDER]

With a folder training goes on from the checkpoint there, if any, and leaves one; on 2 ranks as on 4.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.planner import CompressingPlanner


def in_shards() -> nn.Sequential:
    """Returns a model, each layer of which is in shards; its replicas are meant to be in different nodes."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, handle: gradsync.Attachment) -> dict[str, Any]:
    """Returns all that a checkpoint has, on each rank its part."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "gradsync": handle.checkpoint()}


def main() -> None:
    dist.init_process_group("gloo")
    model = in_shards()
    planner = CompressingPlanner(ErrorFeedback(TopK(0.05)), matrices_only=True)
    handle = gradsync.attach(model, plan=planner)  # without a plan: exact, as HSDP

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    if folder is not None and Path(folder, ".metadata").exists():
        state = state_of(model, optimizer, handle)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        for last in (False, True):  # two batches a step
            model.set_requires_gradient_sync(last)
            x = torch.randn(64, 20, generator=generator)
            loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        for words, bucket in zip(handle.explain(), handle.statistics(), strict=True):
            print(f"{words}: {bucket.sent_bytes / bucket.steps / 1e3:.1f} kB a step from this rank")
    if folder is not None:
        dcp.save(state_of(model, optimizer, handle), checkpoint_id=folder)
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
