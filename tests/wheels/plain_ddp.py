"""The training script of the quick start under plain DistributedDataParallel: what a stranger begins with."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50_000, 32, sparse=True), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = DistributedDataParallel(model)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(30):
        words = torch.randint(0, 50_000, (64, 10), generator=generator)
        loss = nn.functional.cross_entropy(model(words), words.sum(dim=1) % 2)
        optimizer.zero_grad()
        loss.backward()  # returns with gradients averaged over the ranks
        optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
