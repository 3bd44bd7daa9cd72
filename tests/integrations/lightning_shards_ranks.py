"""Scenarios of models in shards under Lightning: torchrun --nproc-per-node 4 lightning_shards_ranks.py FOLDER.

Each scenario prints a line "SCENARIO {...}" on rank 0, with what the tests look at.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.lightning import GradsyncCallback, GradsyncShardedStrategy
from gradsync.planner import CompressingPlanner

FOLDER = Path(sys.argv[1])
BATCHES = 8
Result = dict[str, Any]

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> int:
        return index


class Module(L.LightningModule):
    """A small model in shards, whose batches are functions of rank and number of the step."""

    def __init__(self, how: str = "whole") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=how == "outside")
        self.how = how

    def configure_model(self) -> None:
        """Puts the model into shards: all of it, or in a wrong way."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        if self.how in ("whole", "outside", "two roots"):
            for part in (self.net[0], self.net[2]):
                fully_shard(part, mesh=mesh)
        if self.how in ("whole", "outside"):
            fully_shard(self.net, mesh=mesh)
        if self.how == "no replicas":
            fully_shard(self.net, mesh=init_device_mesh("cpu", (4,)))

    def training_step(self, number: Tensor, index: int) -> Tensor:
        """Returns the loss of this rank's batch."""
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + int(self.trainer.fit_loop.batch_idx))
        x = torch.randn(16, 20, generator=generator)
        return nn.functional.cross_entropy(self.net(x), (x[:, 0] > 0).long())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD with momentum."""
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def lossy() -> CompressingPlanner:
    return CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


def fit(strategy: Any, ckpt_path: Any = None, how: str = "whole", **settings: Any) -> Module:
    module = Module(how)
    usual = {"enable_checkpointing": False, "logger": False, "max_epochs": 1}
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=4, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=True, **{**usual, **settings},
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Numbers(), batch_size=1), ckpt_path=ckpt_path)
    return module


def ours(plan: Any = None, **settings: Any) -> GradsyncShardedStrategy:
    return GradsyncShardedStrategy(plan=plan, data_parallel_size=4, tensor_parallel_size=1, timeout=60, **settings)


def theirs(**settings: Any) -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, **settings)


def values(module: Module) -> Tensor:
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in module.net.parameters()])  # type: ignore[operator]


def difference(one: Module, other: Module) -> float:
    return float((values(one) - values(other)).abs().max())


def exact() -> Result:
    found = {}
    for name, settings in {"plain": {}, "accumulated": {"accumulate_grad_batches": 2}}.items():
        strategy = ours()
        module = fit(strategy, **settings)
        found[name] = [difference(module, fit(theirs(), **settings)), strategy.attachment.totals().steps]
    return found


def resumed() -> Result:
    """Goes on from a checkpoint in the middle, as a folder and as a file, and from one of Lightning's own."""
    whole = fit(ours(lossy()))
    found: Result = {"lossy": difference(whole, fit(theirs()))}
    for name, distributed in {"folder": True, "file": False}.items():
        path = FOLDER / name
        keep = ModelCheckpoint(path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        fit(
            ours(lossy(), save_distributed_checkpoint=distributed),
            enable_checkpointing=True, callbacks=[keep, GradsyncCallback()],
        )  # fmt: skip
        strategy = ours(lossy(), save_distributed_checkpoint=distributed)
        module = fit(strategy, ckpt_path=path / "step=4.ckpt")
        found[name] = difference(module, whole)
    kept_in = FOLDER / "folder" / "step=4.ckpt" / "gradsync"
    found["replaced"] = [kept_in.is_dir()]
    strategy = ours(save_distributed_checkpoint=True)
    ended = fit(strategy)
    ended.trainer.save_checkpoint(kept_in.parent)  # when gradsync is detached already
    dist.barrier()
    found["replaced"].append(kept_in.is_dir())
    keep = ModelCheckpoint(FOLDER / "plain", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    fit(theirs(), enable_checkpointing=True, callbacks=[keep])
    found["plain"] = difference(fit(ours(), ckpt_path=FOLDER / "plain" / "step=4.ckpt"), fit(theirs()))
    return found


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused() -> Result:
    ways = ("nothing", "two roots", "outside", "no replicas")
    texts: Result = {way: said(lambda way=way: fit(ours(), how=way)) for way in ways}  # type: ignore[misc]
    texts["early"] = said(lambda: ours().attachment)
    texts["unknown"] = said(lambda: ours(gradient_as_bucket_view=True))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, texts)
    assert all(each == texts for each in told), told
    return texts


def main() -> None:
    for scenario in (exact, resumed, refused):
        found = scenario()
        if dist.get_rank() == 0:
            print(scenario.__name__, json.dumps(found), flush=True)
    dist.destroy_process_group()


main()
