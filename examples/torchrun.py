"""Trains with gradsync's DistributedDataParallel, and goes on from its last checkpoint when it is started again.

torchrun --nproc-per-node 2 examples/torchrun.py [--exact] [FOLDER OF CHECKPOINTS]
"""

import hashlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.planner import CompressingPlanner

EPOCHS = 6
LOSSY = CompressingPlanner(ErrorFeedback(TopK(0.1)), exact=("*.bias",), matrices_only=True)


def points(number: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(number, 20, generator=torch.Generator().manual_seed(seed))
    return x.to(device), (x[:, 0] > 0).long().to(device)


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, folders = dist.get_rank(), [Path(argument) for argument in sys.argv[1:] if argument != "--exact"]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 2)).to(device)
    arguments = {} if "--exact" in sys.argv else {"plan": LOSSY}
    model = DistributedDataParallel(network, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    complete = sorted(folders[0].glob("epoch-*/training.pt")) if folders else []
    if complete:
        saved = torch.load(complete[-1], map_location=device, weights_only=True)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model.attachment.checkpoint().load(complete[-1].parent)

    for epoch in range(len(complete), EPOCHS):
        for batch in range(128):
            x, y = points(32, 100_000 * rank + 1000 * epoch + batch, device)
            if batch % 2 == 0:
                with model.no_sync():  # gradients accumulate over two batches
                    nn.functional.cross_entropy(model(x), y).backward()
                continue
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if folders:
            folder = folders[0] / f"epoch-{epoch + 1:03}"
            folder.mkdir(parents=True, exist_ok=True)
            model.attachment.checkpoint().save(folder)
            dist.barrier()  # all ranks have written
            if rank == 0:  # last, as its file marks the checkpoint as complete
                torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, folder / "unfinished")
                (folder / "unfinished").rename(folder / "training.pt")

    x, y = points(1024, 10**9, device)
    loss = nn.functional.cross_entropy(network(x), y).item()
    content = b"".join(value.cpu().numpy().tobytes() for value in network.state_dict().values())
    if rank == 0:
        print(f"epochs {len(complete)} to {EPOCHS}: held-out loss {loss:.4f}, parameters", end=" ")
        print(hashlib.sha256(content).hexdigest()[:12])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
