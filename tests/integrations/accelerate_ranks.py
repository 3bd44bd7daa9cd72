"""Scenarios of `test_accelerate.py`, by names ("a", "a+b"), under torchrun; rank 0 prints what was found as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, TorchDynamoPlugin
from findings import Told, apart, common, error_of, owed, tell
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.accelerate import metrics, use
from gradsync.planner import CompressingPlanner
from gradsync.state import to_bytes

LOSSY = CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5))


class Layers(nn.Module):
    """Two equal blocks, which Accelerate may compile one by one, and a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Returns 5 values for each row of `x`."""
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Job:
    """A small classifier under Accelerate, with accumulation over 2 batches and clipping."""

    handles: ClassVar[list[gradsync.Attachment]] = []

    def __init__(
        self,
        plan: Any = None,
        *,
        with_gradsync: bool = True,
        pops: bool = False,
        network: Callable[[], nn.Module] | None = None,
        of_accelerator: Mapping[str, Any] | None = None,
        **ddp: Any,
    ) -> None:
        torch.manual_seed(0)
        handlers = [DistributedDataParallelKwargs(**ddp)] if ddp else None
        if of_accelerator is not None:
            AcceleratorState._reset_state()  # which keeps the settings of the first Accelerator
        settings = {"gradient_accumulation_steps": 2, "kwargs_handlers": handlers, **(of_accelerator or {})}
        self.accelerator = Accelerator(cpu=True, **settings)
        if pops:  # a user's own hook for models, as in Accelerate's documentation, which takes them off the list
            self.accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        if with_gradsync:
            use(self.accelerator, plan=plan)
        model = (network or classifier)()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, x.argmax(1) % 5), batch_size=8)
        self.prepare(model, optimizer, loader)

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


def varied() -> dict[str, Any]:
    """Compiled models, mixed precision, and a wrapper of hooks, which Accelerate ignores where there is no hook."""
    regions = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    ways: dict[str, dict[str, Any]] = {
        "compiled": {"of_accelerator": {"dynamo_backend": "eager"}},
        "compiled in regions": {"of_accelerator": {"dynamo_plugin": regions}, "network": Layers},
        "bf16": {"of_accelerator": {"mixed_precision": "bf16"}},
        "comm_wrapper": {"of_accelerator": {}, "comm_wrapper": DDPCommunicationHookType.FP16},
    }
    found = {}
    for name, settings in ways.items():
        values, jobs = [], [Job(with_gradsync=ours, **settings) for ours in (False, True)]
        for job in jobs:
            job.train()
            job.accelerator.unwrap_model(job.model)  # as for saving: it takes DDP out of a compiled model
            values.append(job.train())
        handle = gradsync.attachment_of(jobs[1].model)
        found[name] = {
            "difference": float((values[1] - values[0]).abs().max()),
            "apart": apart(values[1]),
            "exchanged": handle is not None and handle.totals().steps >= 16,
        }
    return found


class Pair:
    """A generator and a discriminator under one Accelerator, prepared one after the other, with an optimiser each."""

    def __init__(self, plan: Any = None, *, with_gradsync: bool = True) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        if with_gradsync:
            use(self.accelerator, plan=plan)
        self.generator, self.of_generator = self.prepared(8, 20)
        self.discriminator, self.of_discriminator = self.prepared(20, 1)

    def prepared(self, inputs: int, outputs: int) -> tuple[nn.Module, Any]:
        network = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))
        prepared = self.accelerator.prepare(network, torch.optim.Adam(network.parameters(), lr=0.01))
        handle = gradsync.attachment_of(prepared[0])
        Job.handles += [handle] if handle is not None else []
        return prepared  # type: ignore[no-any-return]

    def train(self, first: int = 0, last: int = 8) -> Tensor:
        """Trains for the steps [first, last), and returns all parameters."""
        for step in range(first, last):
            torch.manual_seed(10 * step + dist.get_rank())
            noise, real = torch.randn(16, 8), torch.randn(16, 20) + 1
            with torch.no_grad():
                made = self.generator(noise)
            self.of_discriminator.zero_grad()
            judged = self.discriminator(torch.cat([made, real]))
            self.accelerator.backward(nn.functional.softplus(torch.cat([judged[:16], -judged[16:]])).mean())
            self.of_discriminator.step()
            # Either the discriminator's gradients are exchanged, and dropped, or it is frozen and out of its wrapper.
            frozen = step % 2 == 0
            self.discriminator.requires_grad_(not frozen)
            judge = self.accelerator.unwrap_model(self.discriminator) if frozen else self.discriminator
            self.of_generator.zero_grad()
            self.accelerator.backward(nn.functional.softplus(-judge(self.generator(noise))).mean())
            self.of_generator.step()
            self.discriminator.requires_grad_(True)
        models = (self.generator, self.discriminator)
        return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def several() -> dict[str, Any]:
    """Two models in turns: as with DDP, and resumed with the residuals of both."""
    exact, plain = Pair().train(), Pair(with_gradsync=False).train()
    whole, folder = Pair(LOSSY).train(), common("state")
    first, second = Pair(LOSSY), Pair(LOSSY)
    first.train(last=4)
    first.accelerator.save_state(folder)
    dist.barrier()
    second.accelerator.load_state(folder)
    went_on = second.train(first=4)
    handles = [gradsync.attachment_of(model) for model in (second.generator, second.discriminator)]
    return {
        "difference": float((exact - plain).abs().max()),
        "lossy": float((whole - plain).abs().max()) > 0,
        "resumed": float((went_on - whole).abs().max()),
        "apart": apart(went_on),
        "steps": [handle.totals().steps for handle in handles if handle is not None],
    }


def resized() -> dict[str, Any]:
    """Saves after four steps on three ranks; goes on from there on two."""
    folder, job = Path(sys.argv[2], "state"), Job(LOSSY)
    if folder.exists():
        job.accelerator.load_state(str(folder))
        found = owed(job.handle.state_dict())
    else:
        job.train(last=8)
        found = owed(job.handle.state_dict())
        job.accelerator.save_state(str(folder))
    return {"owed": found, "apart": apart(job.train(first=8))}


def alone() -> dict[str, Any]:
    """Returns the warnings of one process that goes on from the state of several ranks, and from its own."""
    folder, told = Path(sys.argv[2], "state"), Told()
    job = Job(LOSSY)
    job.accelerator.load_state(str(folder))
    job.train(first=8)
    own = folder.with_name("own")
    job.accelerator.save_state(str(own))
    job.accelerator.load_state(str(own))
    return {"attached": job.handle is not None, "saved": (own / "gradsync").exists(), "told": told.lines}


def refused() -> dict[str, Any]:
    late = Job(with_gradsync=False)
    twice = Job()
    return {
        "late": error_of(lambda: use(late.accelerator)),
        "twice": error_of(lambda: use(twice.accelerator)),
        "model": error_of(lambda: use(twice.model)),
        "hook": error_of(lambda: Job(comm_hook=DDPCommunicationHookType.FP16)),
        "inner": error_of(lambda: gradsync.attach(late.model.module)),
    }


SCENARIOS = (equal, resumed, anew, varied, several, resized, alone, refused)


def main() -> None:
    torch.set_num_threads(1)
    known, names = {each.__name__: each for each in SCENARIOS}, sys.argv[1].split("+")
    found = {name: known[name]() for name in names}
    result = found if len(names) > 1 else found[names[0]]
    tell(result, lambda: [handle.detach() for handle in Job.handles])


if __name__ == "__main__":
    main()
