"""Trains by Ray Train on a cluster of this machine, and prints what was found as JSON; `test_ray.py` runs it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow.fs
import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.ray import prepare_model, report
from gradsync.planner import CompressingPlanner

STEPS, INTERRUPTED_AT = 8, 4
LOCAL_ONLY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_METRICS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 2))


def lossy() -> CompressingPlanner:
    return CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Makes one optimiser step with gradients of two batches, clipped."""
    optimizer.zero_grad()
    for part in range(2):
        seed = 100 * number + 10 * part + dist.get_rank()
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(seed))
        with model.no_sync() if part == 0 else nullcontext():
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def after(model: nn.Module, steps: range = range(STEPS)) -> Tensor:
    optimizer = optimizer_of(model)
    for number in steps:
        step(model, optimizer, number)
    return flat(model)


def of_all_ranks(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


# Scenarios on both workers, each at the same time.


def equal() -> dict[str, Any]:
    theirs = after(ray.train.torch.prepare_model(network()))
    model = prepare_model(network())
    ours = after(model)
    found = {
        "difference": float((ours - theirs).abs().max()),
        "moved": float((ours - flat(network())).abs().max()),
        "apart": max(float((each - ours).abs().max()) for each in of_all_ranks(ours)),
        "steps": model.attachment.totals().steps,
    }
    kwargs = {"find_unused_parameters": True}
    again = after(prepare_model(network(), torch.device("cpu"), "ddp", kwargs, exclude=()))
    return {**found, "with arguments": float((again - theirs).abs().max())}


def without_resuming() -> dict[str, Any]:
    """Returns digests of a run with residuals, and of one that loses them in the middle."""
    whole = after(prepare_model(network(), plan=lossy()))
    model = network()
    optimizer = optimizer_of(model)
    wrapper = prepare_model(model, plan=lossy())
    for number in range(STEPS):
        if number == INTERRUPTED_AT:
            wrapper.attachment.detach()
            wrapper = prepare_model(model, plan=lossy())
        step(wrapper, optimizer, number)
    return {"whole": digest(whole), "lost": float((whole - flat(model)).abs().max())}


def asynchronous() -> list[list[str]]:
    """Reports from both ranks while training goes on; returns the files of each checkpoint."""
    model = prepare_model(network(), plan=lossy())
    optimizer = optimizer_of(model)
    for number in range(2):
        step(model, optimizer, number)
        folder = Path(tempfile.mkdtemp())
        (folder / f"of-rank-{dist.get_rank()}").write_text("ours")
        mine = Checkpoint.from_directory(folder) if dist.get_rank() == 0 or number else None
        report({}, mine, model=model, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
    reported = ray.train.get_all_reported_checkpoints()
    return [sorted(path.name for path in Path(each.checkpoint.path).iterdir()) for each in reported]


def bad_input() -> dict[str, list[str]]:
    """Returns the error of each rank, by what was wrong."""
    prepared = prepare_model(network())
    model = prepare_model(network(), plan=lossy())
    after(model, range(1))
    folder = tempfile.mkdtemp()
    model.attachment.checkpoint().save(folder)
    rank = dist.get_rank()
    wrong = tempfile.mkdtemp()
    own = Path(folder, f"gradsync-rank-{rank}-of-2.safetensors")
    Path(wrong, own.name).write_bytes(of_all_ranks(own.read_bytes())[1 - rank])
    attached = network()
    gradsync.attach(attached)
    sharded = type("FullyShardedDataParallel", (nn.Sequential,), {})(nn.Linear(2, 2))
    elsewhere = Checkpoint("bucket/folder", filesystem=pyarrow.fs._MockFileSystem())
    here = Checkpoint.from_directory(folder)
    few = patch.object(ray.train, "get_context", lambda: SimpleNamespace(get_world_size=lambda: 4))
    unreported = patch.object(ray.train, "report", lambda *_: None)
    in_torchft = of_torchft()(network())
    cases: dict[str, Callable[[], object]] = {
        "fsdp": lambda: prepare_model(network(), parallel_strategy="fsdp"),  # type: ignore[arg-type]
        "none": lambda: prepare_model(network(), parallel_strategy=None),  # type: ignore[arg-type]
        "twice": lambda: prepare_model(prepared),
        "by ray": lambda: prepare_model(ray.train.torch.prepare_model(network())),
        "attached": lambda: prepare_model(attached),
        "sharded": lambda: prepare_model(sharded),
        "torchft": lambda: prepare_model(in_torchft),
        "inside of torchft": lambda: prepare_model(in_torchft.module),
        "no model": lambda: prepare_model(network),  # type: ignore[arg-type]
        "other world": lambda: inside(few, lambda: prepare_model(network())),
        "not attached": lambda: report({}, model=network()),
        "rank 1 only": lambda: inside(unreported, lambda: report({}, here if rank else None, model=model)),
        "elsewhere": lambda: report({}, elsewhere, model=model),
        "no upload": lambda: no_upload(None, model),
        "no state": lambda: model.attachment.checkpoint().load(tempfile.mkdtemp()),
        "another rank": lambda: model.attachment.checkpoint().load(wrong),
    }
    return {name: of_all_ranks(error_of(case)) for name, case in cases.items()}


def no_upload(checkpoint: Checkpoint | None, model: nn.Module) -> None:
    """Reports without a checkpoint here, as if rank 0 had one."""
    with patch.object(ray.train.collective, "broadcast_from_rank_zero", lambda _: True):
        report({}, checkpoint, model=model, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def inside(context: Any, call: Callable[[], object]) -> object:
    with context:
        return call()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def of_torchft() -> type[nn.Module]:
    """Returns a class such as torchft's DistributedDataParallel, of a module that is not installed."""
    sys.modules.setdefault("torchft", ModuleType("torchft"))
    return type("DistributedDataParallel", (nn.parallel.DistributedDataParallel,), {"__module__": "torchft.ddp"})


def compare(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "equal": equal(),
        "without resuming": without_resuming(),
        "asynchronous": asynchronous(),
        "bad input": bad_input(),
    }


def with_failure(config: dict[str, Any]) -> dict[str, Any]:
    """Trains with a checkpoint after each step; the first time rank 1 fails in the middle."""
    model, first = prepare_model(network(), plan=lossy()), 0
    optimizer = optimizer_of(model)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradsync").addHandler(handler)
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/training.pt")
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            model.attachment.checkpoint().load(folder)
            first = saved["step"]
    rank = dist.get_rank()
    for number in range(first, config["steps"]):
        if number == INTERRUPTED_AT and first == 0 and rank == 1:
            raise RuntimeError("the worker fails")
        step(model, optimizer, number)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": number + 1}
                torch.save(saved, f"{folder}/training.pt")
                checkpoint = Checkpoint.from_directory(folder)
            report({"step": number + 1}, checkpoint, model=model)
    report({"step": -1}, model=model)  # without a checkpoint
    return {"first": first, "ranks": dist.get_world_size(), "after": digest(flat(model)), "log": lines}


def fit(train: Callable[[dict[str, Any]], Any], name: str, folder: str, workers: int = 2, **config: Any) -> Any:
    run = RunConfig(name=name, storage_path=folder, failure_config=FailureConfig(max_failures=1))
    trainer = TorchTrainer(
        train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=workers), run_config=run
    )
    return trainer.fit()


def main() -> None:
    os.environ.update(LOCAL_ONLY)
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found |= fit(compare, "compare", folder).return_value
        failed = fit(with_failure, "failed", folder, steps=STEPS)
        found["failed"] = {
            **failed.return_value,
            "metrics": failed.metrics,
            "files": sorted(path.name for path in Path(failed.checkpoint.path).iterdir()),
        }
        found["local"] = error_of(lambda: fit(lambda config: prepare_model(network()), "local", folder, workers=0))
        found["fewer"] = fit(with_failure, "failed", folder, workers=1, steps=STEPS + 1).return_value
    ray.shutdown()
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
