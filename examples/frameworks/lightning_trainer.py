"""Trains with Lightning's Trainer and top-k gradients with error feedback; "exact" as argument: with whole gradients.

torchrun --nproc-per-node 2 examples/frameworks/lightning_trainer.py
"""

import hashlib
import sys
import tempfile

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.lightning import GradsyncCallback, GradsyncStrategy
from gradsync.planner import CompressingPlanner


class Classifier(L.LightningModule):
    """Tells on which side of a plane a point lies."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 2))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("held-out loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def points(number: int, seed: int) -> DataLoader:
    x = torch.randn(number, 20, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32)


def main() -> None:
    L.seed_everything(0, verbose=False)
    plan = None
    if "exact" not in sys.argv:
        plan = CompressingPlanner(ErrorFeedback(TopK(0.1)), exact=("*.bias",), matrices_only=True)
    settings = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 8,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "default_root_dir": tempfile.mkdtemp(),
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    settings |= {"logger": CSVLogger(settings["default_root_dir"]), "log_every_n_steps": 10}
    if "ddp" not in sys.argv:
        settings["callbacks"] = [GradsyncCallback()]
    trainer = L.Trainer(strategy=GradsyncStrategy(plan=plan), **settings)
    model = Classifier()
    trainer.fit(model, points(2048, seed=1))
    loss = trainer.test(model, points(1024, seed=2), verbose=False)[0]["held-out loss"]

    if trainer.is_global_zero:
        if isinstance(trainer.strategy, GradsyncStrategy):
            totals = trainer.strategy.attachment.totals()
            print(f"{totals.steps} steps, {totals.sent_bytes / totals.steps / 1e3:.1f} kB sent in each")
            print("\n".join(trainer.strategy.attachment.explain()))
        content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        print(f"held-out loss {loss:.4f}, parameters {hashlib.sha256(content).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
