"""Writes a plan by hand, with a scheme for each bucket, keeps it as JSON and gives it to `attach`.

torchrun --nproc-per-node 2 examples/own_plan.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.schemes import AGSparse, AllReduce
from gradsync.tensors.bucket import TensorSpec


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.ModuleDict({"words": nn.Embedding(10_000, 16, sparse=True), "head": nn.Linear(16, 4)})
    specs = {name: TensorSpec.of(p) for name, p in model.named_parameters()}

    plan = gradsync.Plan.make(
        specs,
        world=dist.get_world_size(),
        buckets=[(["head.weight", "head.bias"], AllReduce()), (["words.weight"], AGSparse())],
    )
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        handle = gradsync.attach(model, plan=gradsync.Plan.load(Path(folder) / "plan.json"))

    words = torch.randint(0, 10_000, (32, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    model["head"](model["words"](words).mean(dim=1)).square().mean().backward()
    if dist.get_rank() == 0:
        print("\n".join(handle.explain()))
        print(plan.to_json())
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
