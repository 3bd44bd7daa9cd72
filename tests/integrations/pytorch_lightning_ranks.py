"""Trains with the package pytorch_lightning: torchrun --nproc-per-node 2 pytorch_lightning_ranks.py."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.integrations.pytorch_lightning import GradsyncCallback, GradsyncStrategy


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(4, 2)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.trainer.global_rank + index)
        return self.network(torch.randn(8, 4, generator=generator)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy = GradsyncStrategy()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=[GradsyncCallback()], **quiet
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(range(8), batch_size=1))
    mine = module.network.weight.detach()
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine)
    if trainer.is_global_zero:
        print("ranks agree:", bool((every[0] == every[1]).all()), strategy.attachment.totals().steps)
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
