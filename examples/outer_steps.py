"""Trains each rank alone for 20 steps, then exchanges what has changed, in 8 bits, for an outer optimiser (DiLoCo).

torchrun --nproc-per-node 2 examples/outer_steps.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.compressors import QSGD
from gradsync.planner import CompressingPlanner

INNER_STEPS = 20


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 200), nn.LayerNorm(200), nn.ReLU(), nn.Linear(200, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = gradsync.OuterOptimizer(
        model,
        partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        plan=CompressingPlanner(QSGD(levels=127), exact=("*.bias",), matrices_only=True),
    )

    generator = torch.Generator().manual_seed(dist.get_rank())
    held_out = torch.randn(500, 20, generator=torch.Generator().manual_seed(99))
    for step in range(200):
        x = torch.randn(64, 20, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        inner.zero_grad()
        loss.backward()  # exchanges nothing
        inner.step()
        if step % INNER_STEPS == INNER_STEPS - 1:
            outer.step()  # on all ranks: they have one model now
            with torch.no_grad():
                right = (model(held_out).argmax(dim=1) == (held_out[:, 0] > 0).long()).float().mean()
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}, {right:.1%} of the held-out samples right")
    if dist.get_rank() == 0:
        totals = outer.attachment.totals()
        print("\n".join(outer.attachment.explain()))
        print(f"{totals.steps} exchanges of {totals.sent_bytes / totals.steps / 1e3:.1f} kB")
    outer.attachment.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
