"""A small job that trains one model by gradsync and by torch's DDP, and compares the parameters' bits.

It runs under torchrun with two ranks: the sum of two gradients has the same bits in any order.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..devices.streams import use_device
from ..frontends.attach import attach

STEPS, WIDTH = 3, 64


def new_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)


def train(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Trains the model for `STEPS` steps on random data that depends on the rank, and returns its parameters."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        batch = torch.randn(16, WIDTH, generator=draws).to(device)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def main(backend: str, *devices: str) -> None:
    """Runs one of the two ranks: trains a model by DDP and by gradsync, and compares the parameters.

    Args:
        backend: the backend for `init_process_group`.
        devices: one device for each rank, or one for all.

    Raises:
        AssertionError: if parameters differ in a bit.
    """
    dist.init_process_group(backend)
    device = torch.device(devices[dist.get_rank() % len(devices)])
    use_device(device)
    expected = train(DistributedDataParallel(new_model(device)), device)
    model = new_model(device)
    handle = attach(model, timeout=30.0)
    found = train(model, device)
    handle.detach()
    unlike = [
        name
        for (name, _), ours, theirs in zip(model.named_parameters(), found, expected, strict=True)
        if not torch.equal(ours, theirs)
    ]
    if unlike:
        raise AssertionError(f"gradsync and DDP trained other bits in {', '.join(unlike)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
