"""Steps each rank by its own gradients, then averages parameters within groups that change (after DS-Sync).

torchrun --nproc-per-node 2 examples/averaging.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.planner import AveragingPlanner


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = gradsync.attach(model, optimizer, AveragingPlanner(momentum_every=4))

    generator = torch.Generator().manual_seed(dist.get_rank())
    held_out = torch.randn(500, 20, generator=torch.Generator().manual_seed(99))
    for step in range(50):
        x = torch.randn(64, 20, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()  # exchanges nothing
        optimizer.step()  # begins the exchange; the next forward waits for what it needs
        if step % 10 == 9:
            with gradsync.consensus(model), torch.no_grad():  # on all ranks: they have one model now
                model.eval()
                right = (model(held_out).argmax(dim=1) == (held_out[:, 0] > 0).long()).float().mean()
                model.train()
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}, {right:.1%} of the held-out samples right")
    if dist.get_rank() == 0:
        print("\n".join(handle.explain()))
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
