"""Scenarios of models in shards under Accelerate on 2 x 2 ranks; each rank's findings are printed as JSON on rank 0.

Accelerate shards on accelerators only. So its state is told that it has one, and the device is the CPU all the same.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from findings import common, error_of, tell
from torch import Tensor, nn

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.accelerate import metrics, use
from gradsync.planner import CompressingPlanner

LOSSY = CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


def accelerator(fsdp_version: int = 2, **sizes: int) -> Accelerator:
    """Returns an accelerator whose `prepare` puts models into shards."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    made = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=fsdp_version,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="size_based_wrap",
        min_num_params=500,
        state_dict_type="SHARDED_STATE_DICT",
    )
    parallel = ParallelismConfig(**(sizes or {"dp_replicate_size": 2, "dp_shard_size": 2}))
    known = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin, "parallelism_config": parallel}
    for name, value in {**known, "device_mesh": parallel.get_device_mesh("cpu")}.items():
        setattr(made.state, name, value)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    return made


class Job:
    """A small classifier in shards, with accumulation over 2 batches and clipping."""

    def __init__(self, plan: Any = None, *, with_gradsync: bool = True) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator()
        if with_gradsync:
            use(self.accelerator, plan=plan)
        model = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.handle = gradsync.attachment_of(self.model)

    def train(self, first: int = 0, last: int = 16) -> Tensor:
        """Trains on batches [first, last), and returns the whole parameters."""
        for number in range(first, last):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), x.argmax(1) % 5))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in self.model.parameters()])


def equal() -> dict[str, Any]:
    plain, ours = Job(with_gradsync=False).train(), Job()
    values = ours.train()
    assert ours.handle is not None
    return {
        "difference": float((values - plain).abs().max()),
        "steps": ours.handle.totals().steps,
        "replicas": ours.handle.world_size,
        "metrics": len(metrics(ours.model)) > 0,
    }


def resumed() -> dict[str, Any]:
    exact, whole, folder = Job().train(), Job(LOSSY).train(), common("state")
    first = Job(LOSSY)
    first.train(last=8)
    first.accelerator.save_state(folder)
    dist.barrier()
    second = Job(LOSSY)
    second.accelerator.load_state(folder)
    return {
        "difference": float((second.train(first=8) - whole).abs().max()),
        "lossy": float((exact - whole).abs().max()) > 0,
    }


def refused() -> dict[str, Any]:
    twice = accelerator()
    use(twice)
    scaled = accelerator()
    scaled.scaler = torch.amp.GradScaler("cpu")
    return {
        "fp16": error_of(lambda: use(scaled)),
        "twice": error_of(lambda: use(twice)),
        "first version": error_of(lambda: use(accelerator(fsdp_version=1))),
        "no replicas": error_of(lambda: use(accelerator(dp_shard_size=4))),
        "shared": error_of(lambda: use(accelerator(), communicator="shared")),
    }


def main() -> None:
    Accelerator(cpu=True)
    tell({"equal": equal, "resumed": resumed, "refused": refused}[sys.argv[1]]())


main()
