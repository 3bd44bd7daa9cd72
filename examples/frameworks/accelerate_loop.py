"""Trains with Accelerate and top-k gradients with error feedback; "exact" as argument: with whole gradients.

torchrun --nproc-per-node 2 examples/frameworks/accelerate_loop.py
"""

import hashlib
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.accelerate import use
from gradsync.planner import CompressingPlanner


def points(number: int, seed: int) -> TensorDataset:
    x = torch.randn(number, 20, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def main() -> None:
    plan = None
    if "exact" not in sys.argv:
        plan = CompressingPlanner(ErrorFeedback(TopK(0.1)), exact=("*.bias",), matrices_only=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    use(accelerator, plan=plan)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9)
    loader = DataLoader(points(2048, seed=1), batch_size=32)
    model, optimizer, loader = accelerator.prepare(network, optimizer, loader)

    for _ in range(8):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    x, y = points(1024, seed=2).tensors
    loss = nn.functional.cross_entropy(network(x), y).item()
    handle = gradsync.attachment_of(model)
    if handle is not None and accelerator.is_main_process:
        totals = handle.totals()
        print(f"{totals.steps} steps, {totals.sent_bytes / totals.steps / 1e3:.1f} kB sent in each")
        print("\n".join(handle.explain()))
    content = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
    accelerator.print(f"held-out loss {loss:.4f}, parameters {hashlib.sha256(content).hexdigest()[:12]}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
