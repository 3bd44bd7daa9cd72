"""Trains by Ray Train on a cluster of this machine; "exact" as argument: with whole gradients, else a tenth of them.

python examples/frameworks/ray_train.py
"""

import hashlib
import os
import sys
import tempfile
from typing import Any

import ray
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.ray import prepare_model, report
from gradsync.planner import CompressingPlanner


def points(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(number, 20, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def train(config: dict[str, Any]) -> str:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 2))
    model = prepare_model(network, **config["arguments"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    rank, first = ray.train.get_context().get_world_rank(), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/training.pt", weights_only=True)
            network.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            model.attachment.checkpoint().load(folder)
            first = saved["epoch"]

    for epoch in range(first, 6):
        for batch in range(128):
            x, y = points(32, seed=100_000 * rank + 1000 * epoch + batch)
            if batch % 2 == 0:
                with model.no_sync():  # gradients accumulate over two batches
                    nn.functional.cross_entropy(model(x), y).backward()
                continue
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                saved = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
                torch.save(saved, f"{folder}/training.pt")
                checkpoint = Checkpoint.from_directory(folder)
            report({"epoch": epoch + 1}, checkpoint, model=model)

    x, y = points(1024, seed=10**9)
    loss = nn.functional.cross_entropy(network(x), y).item()
    content = b"".join(value.numpy().tobytes() for value in network.state_dict().values())
    return f"held-out loss {loss:.4f}, parameters {hashlib.sha256(content).hexdigest()[:12]}"


def main() -> None:
    planner = CompressingPlanner(ErrorFeedback(TopK(0.1)), exact=("*.bias",), matrices_only=True)
    config = {"arguments": {} if "exact" in sys.argv else {"plan": planner}}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        scaling, run = ScalingConfig(num_workers=2), RunConfig(name="example", storage_path=folder)
        result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    print(result.metrics, result.return_value, sep="\n")


if __name__ == "__main__":
    main()
