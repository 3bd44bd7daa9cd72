"""Scenarios of `test_accelerate.py`, by name, on 2 ranks under torchrun; rank 0 prints what was found as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.accelerate import metrics, use
from gradsync.planner import CompressingPlanner
from gradsync.state import to_bytes

LOSSY = CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


class Job:
    """A small classifier under Accelerate, with accumulation over 2 batches and clipping."""

    handles: ClassVar[list[gradsync.Attachment]] = []

    def __init__(self, plan: Any = None, *, with_gradsync: bool = True, pops: bool = False, **ddp: Any) -> None:
        torch.manual_seed(0)
        handlers = [DistributedDataParallelKwargs(**ddp)] if ddp else None
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=handlers)
        if pops:  # a user's own hook for models, as in Accelerate's documentation, which takes them off the list
            self.accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        if with_gradsync:
            use(self.accelerator, plan=plan)
        network = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, x.argmax(1) % 5), batch_size=8)
        self.prepare(network, optimizer, loader)

    def prepare(self, network: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        """Prepares them as scripts do."""
        self.model, self.optimizer, self.loader = self.accelerator.prepare(network, optimizer, loader)
        self.handle = gradsync.attachment_of(self.model)
        self.handles += [self.handle] if self.handle is not None else []

    def train(self, first: int = 0, last: int = 16) -> Tensor:
        """Trains on batches [first, last), and returns the parameters."""
        for number, (x, y) in enumerate(self.loader):
            if not first <= number < last:
                continue
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def common(name: str) -> str:
    """Returns a folder that both ranks know."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return str(Path(str(box[0])) / name)


def apart(values: Tensor) -> float:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return max(float((each - found[0]).abs().max()) for each in found)


def equal() -> dict[str, Any]:
    plain, ours = Job(with_gradsync=False).train(), Job()
    start = torch.cat([p.detach().reshape(-1) for p in ours.model.parameters()])
    values = ours.train()
    handle = gradsync.attachment_of(ours.model)
    assert handle is not None
    kept = Job(gradient_as_bucket_view=True, find_unused_parameters=True)
    difference = float((kept.train() - plain).abs().max())
    return {
        "difference": float((values - plain).abs().max()),
        "apart": apart(values),
        "moved": float((values - start).abs().max()),
        "steps": handle.totals().steps,
        "metrics": [sorted(metrics(each)) for each in (ours.model, ours.model, nn.Linear(2, 2))],
        "kept": [difference, kept.model.gradient_as_bucket_view, kept.model.find_unused_parameters],
    }


def resumed() -> dict[str, Any]:
    whole, folder = Job(LOSSY).train(), common("state")
    first = Job(LOSSY)
    first.train(last=8)
    first.accelerator.save_state(folder)
    dist.barrier()
    second = Job(LOSSY)
    second.accelerator.load_state(folder)
    state = second.handle.state_dict() if second.handle is not None else {}
    went_on = second.train(first=8)
    third, popping = Job(LOSSY), Job(LOSSY, pops=True)
    popping.accelerator.load_state(folder)
    loaded = popping.handle.state_dict() if popping.handle is not None else {}
    if dist.get_rank() == 1:
        Path(folder, "gradsync", "gradsync-rank-1-of-2.safetensors").unlink()
    dist.barrier()
    try:
        third.accelerator.load_state(folder)
        told = ""
    except (ValueError, RuntimeError) as error:
        told = str(error)
    return {
        "popped": to_bytes(loaded) == to_bytes(state),
        "difference": float((went_on - whole).abs().max()),
        "apart": apart(went_on),
        "told": told,
    }


def anew() -> dict[str, Any]:
    """A model is prepared again, with another optimiser: after `free_memory()`, then beside its first wrapper."""
    found, steps = [], []
    for job in (Job(with_gradsync=False), Job()):
        job.train()
        for let_go in (True, False):
            network = job.accelerator.unwrap_model(job.model)
            if let_go:
                job.accelerator.free_memory()
            job.prepare(network, torch.optim.Adam(network.parameters(), lr=0.01), job.loader)
            values = job.train()
            handle = gradsync.attachment_of(job.model)
            steps.append(handle.totals().steps if handle is not None else 0)
        found.append(values)
    return {"difference": float((found[0] - found[1]).abs().max()), "steps": steps}


def refused() -> dict[str, Any]:
    def error_of(function: Callable[[], Any]) -> str:
        try:
            function()
        except (TypeError, ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    late = Job(with_gradsync=False)
    twice = Job()
    return {
        "late": error_of(lambda: use(late.accelerator)),
        "twice": error_of(lambda: use(twice.accelerator)),
        "model": error_of(lambda: use(twice.model)),
        "hook": error_of(lambda: Job(comm_hook=DDPCommunicationHookType.FP16)),
        "inner": error_of(lambda: gradsync.attach(late.model.module)),
    }


def main() -> None:
    torch.set_num_threads(1)
    result = {"equal": equal, "resumed": resumed, "anew": anew, "refused": refused}[sys.argv[1]]()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(gathered))
    for handle in Job.handles:
        handle.detach()
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
