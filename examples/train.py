"""Trains on several ranks by gradsync: two lines differ from a script for DDP, the import and the call of `attach`.

torchrun --nproc-per-node 2 examples/train.py
"""

import logging

import torch
import torch.distributed as dist
from torch import nn

import gradsync


class Recommender(nn.Module):
    """An embedding table with sparse gradients below a dense network: two kinds of gradient, two schemes."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50_000, 32, sparse=True)
        self.network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.network(self.items(items).mean(dim=1)).squeeze(1)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    handle = gradsync.attach(model)  # instead of DistributedDataParallel(model)

    generator = torch.Generator().manual_seed(rank)
    for step in range(20):
        items = torch.randint(0, 50_000, (256, 8), generator=generator)
        liked = (items.min(dim=1).values < 3_000).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(items), liked)
        optimizer.zero_grad()
        loss.backward()  # returns with the gradients averaged over the ranks
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")

    if rank == 0:
        for bucket in handle.statistics():
            names = ", ".join(bucket.names)
            print(f"{names}: {bucket.scheme}, {bucket.sent_bytes / bucket.steps / 1e3:.1f} kB a step from this rank")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
