"""Gives models with a class such as torchft's to each adapter, and prints the errors; `test_torchft.py` runs it."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync

sys.modules["torchft"] = ModuleType("torchft")  # the real one is not needed: gradsync goes by the name of the module
OfTorchft = type("DistributedDataParallel", (DistributedDataParallel,), {"__module__": "torchft.ddp"})


def models() -> dict[str, nn.Module]:
    """Returns new models that torchft averages, by where its class is."""
    inner = nn.Linear(4, 2)
    inner.wrapper = [OfTorchft(inner)]  # it lives as long as the model; a list is no submodule
    return {"outside": OfTorchft(nn.Linear(4, 2)), "around": inner, "inside": nn.Sequential(OfTorchft(nn.Linear(4, 2)))}


def by_lightning(model: nn.Module) -> object:
    import lightning as L
    from torch.utils.data import DataLoader

    from gradsync.integrations.lightning import GradsyncStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.network(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=GradsyncStrategy(), max_steps=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    return trainer.fit(Module(), DataLoader(torch.randn(8, 4), batch_size=2))


def by_fabric(model: nn.Module) -> object:
    import lightning as L

    from gradsync.integrations.lightning import GradsyncFabricStrategy

    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=GradsyncFabricStrategy())
    fabric.launch()
    return fabric.setup(model)


def by_accelerate(model: nn.Module) -> object:
    from accelerate import Accelerator

    from gradsync.integrations.accelerate import use

    accelerator = Accelerator(cpu=True)
    use(accelerator)
    return accelerator.prepare(model)


def by_torchrec(model: nn.Module) -> object:
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingPlan

    from gradsync.integrations.torchrec import GradsyncWrapper

    return DistributedModelParallel(model, plan=ShardingPlan({}), data_parallel_wrapper=GradsyncWrapper())


WAYS: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "attach": ("torch", gradsync.attach),
    "drop-in class": ("torch", gradsync.DistributedDataParallel),
    "lightning": ("lightning", by_lightning),
    "fabric": ("lightning", by_fabric),
    "accelerate": ("accelerate", by_accelerate),
    "torchrec": ("torchrec", by_torchrec),
}


def error_of(way: Callable[[nn.Module], object], model: nn.Module) -> str:
    try:
        way(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, (package, way) in WAYS.items():
        ours = name in ("attach", "drop-in class") or importlib.util.find_spec(f"gradsync.integrations.{package}")
        if not ours or importlib.util.find_spec(package) is None:
            continue
        for where, model in models().items():
            said: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(said, error_of(way, model))
            found[f"{name}, {where}"] = said
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(found))
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
