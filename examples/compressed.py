"""Compresses matrices to 1 % of their elements, with error feedback; the head, norms and biases are sent exactly.

torchrun --nproc-per-node 2 examples/compressed.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.planner import CompressingPlanner


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(20, 500), nn.LayerNorm(500), nn.ReLU(), nn.Linear(500, 500), nn.ReLU())
    model = nn.ModuleDict({"body": body, "head": nn.Linear(500, 2)})
    planner = CompressingPlanner(ErrorFeedback(TopK(0.01)), exact=("head.*",), matrices_only=True)
    handle = gradsync.attach(model, plan=planner)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(50):
        x = torch.randn(64, 20, generator=generator)
        loss = nn.functional.cross_entropy(model["head"](model["body"](x)), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        for words, bucket in zip(handle.explain(), handle.statistics(), strict=True):
            print(f"{words}: {bucket.sent_bytes / bucket.steps / 1e3:.1f} kB a step from this rank")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
