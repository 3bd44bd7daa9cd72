"""Scenarios for Lightning: torchrun --nproc-per-node 2 lightning_ranks.py FOLDER [SCENARIO...].

Each scenario prints a line "SCENARIO {...}" on rank 0, with what the tests look at.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import gradsync
from gradsync.compressors import ErrorFeedback, TopK
from gradsync.integrations.lightning import GradsyncCallback, GradsyncFabricStrategy, GradsyncStrategy
from gradsync.planner import AveragingPlanner, CompressingPlanner
from gradsync.schemes import CoarseGrained
from gradsync.tuning import pieces

FOLDER = Path(sys.argv[1])
WORLD = int(os.environ["WORLD_SIZE"])
BATCHES = 8
Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[], Result]] = {}

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


def scenario(function: Callable[[], Result]) -> Callable[[], Result]:
    SCENARIOS[function.__name__] = function
    return function


def lossy() -> CompressingPlanner:
    return CompressingPlanner(ErrorFeedback(TopK(0.05)), exact=("*.bias",), matrices_only=True)


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's batch of a number, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    x = torch.randn(16, 20, generator=generator)
    return x, (x[:, 0] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> int:
        return index


class Module(L.LightningModule):
    """A small model with momentum, whose batches are functions of rank and number of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, number: int) -> Tensor:
        x, y = batch_of(number)
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(self.trainer.current_epoch * BATCHES + index)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("held_out", self.loss(10_000 + index), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("held_out", self.loss(10_000 + index), sync_dist=True)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch_of(index)[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SeveralOptimizers(Module):
    """Two optimisers in manual optimisation, each with its own loss, and clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = nn.Linear(20, 2)
        nn.init.constant_(self.second.weight, 0.1)

    def training_step(self, batch: Tensor, index: int) -> None:
        first, second = self.optimizers()
        number = self.trainer.current_epoch * BATCHES + index
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.loss(number))
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        x, y = batch_of(number)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.second(x) + self(x), y))
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.second.parameters(), lr=0.01),
        ]


class ManualAccumulation(Module):
    """Accumulates over 2 in manual optimisation, by `toggle_model(sync_grad=False)`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        ends = index % 2 == 1
        with optimizer.toggle_model(sync_grad=ends):
            self.manual_backward(self.loss(self.trainer.current_epoch * BATCHES + index) / 2)
        if ends:
            optimizer.step()
            optimizer.zero_grad()


class IdleInOneStep(Module):
    """Has a loss that reaches no parameter on rank 1 in step 3, or gives it a gradient of zero by `uses_output`."""

    def __init__(self, uses_output: bool) -> None:
        super().__init__()
        self.uses_output = uses_output

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.trainer.global_step == 3 and dist.get_rank() == 1:
            return 0 * loss if self.uses_output else torch.zeros((), requires_grad=True)
        return loss


class ManualModule(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def trainer_of(strategy: Any, **settings: Any) -> L.Trainer:
    given = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "limit_val_batches": 0, **settings}
    return L.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        default_root_dir=FOLDER,
        enable_progress_bar=False,
        enable_model_summary=False,
        **given,
    )


def loader() -> torch.utils.data.DataLoader[int]:
    return torch.utils.data.DataLoader(Numbers(), batch_size=1)


def fit(strategy: Any, module: Module | None = None, ckpt_path: Any = None, **settings: Any) -> Module:
    module = Module() if module is None else module
    trainer = trainer_of(strategy, **settings)
    trainer.fit(module, loader(), ckpt_path=ckpt_path)
    return module


def flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def apart(module: nn.Module) -> float:
    """Returns the largest difference between parameters of two ranks."""
    mine = flat(module.parameters())
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return max((each - every[0]).abs().max().item() for each in every)


def difference(one: nn.Module, other: nn.Module) -> float:
    """Returns the largest difference between parameters and buffers of two models."""
    return (flat(one.state_dict().values()) - flat(other.state_dict().values())).abs().max().item()


def compared(ours: nn.Module, theirs: nn.Module) -> Result:
    start = flat(network().parameters())
    moved = (flat(theirs.parameters())[: start.numel()] - start).abs().max().item()
    return {"difference": difference(ours, theirs), "apart": apart(ours), "moved": moved}


@scenario
def exact() -> Result:
    return compared(fit(GradsyncStrategy()), fit(DDPStrategy()))


@scenario
def accumulation() -> Result:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    strategy = GradsyncStrategy()
    ours = fit(strategy, **settings)
    steps = strategy.attachment.totals().steps
    return {**compared(ours, fit(DDPStrategy(), **settings)), "steps": steps}


@scenario
def manual() -> Result:
    settings: Any = {"find_unused_parameters": True}
    ours = fit(GradsyncStrategy(**settings), SeveralOptimizers())
    return compared(ours, fit(DDPStrategy(**settings), SeveralOptimizers()))


@scenario
def manual_accumulation() -> Result:
    strategy = GradsyncStrategy()
    ours = fit(strategy, ManualAccumulation())
    steps = strategy.attachment.totals().steps
    return {**compared(ours, fit(DDPStrategy(), ManualAccumulation())), "steps": steps}


@scenario
def idle() -> Result:
    ours, theirs = (fit(GradsyncStrategy(timeout=20), IdleInOneStep(uses_output)) for uses_output in (False, True))
    return compared(ours, theirs)


@scenario
def freezing() -> Result:
    """Freezes what did not arrive, in automatic and manual optimisation, as a loop that steps without closures does."""
    bucket = CoarseGrained(ratio=0.25, chunk=16, freeze=True)
    plan = partial(CompressingPlanner, fewest_elements=100)
    results = [fit(GradsyncStrategy(plan=plan(bucket)), module) for module in (Module(), ManualModule())]
    free = fit(GradsyncStrategy(plan=plan(replace(bucket, freeze=False))))
    by_hand = Module()
    handle = gradsync.attach(by_hand, plan=plan(bucket))
    optimizer = by_hand.configure_optimizers()
    for number in range(2 * BATCHES):
        optimizer.zero_grad()
        by_hand.loss(number).backward()
        optimizer.step()
    handle.detach()
    manual, matters = difference(results[1], by_hand), difference(free, by_hand)
    return {**compared(results[0], by_hand), "manual": manual, "matters": matters}


@scenario
def resume() -> Result:
    """Saves in the middle of an epoch, and continues in a new strategy and Trainer."""
    whole = fit(GradsyncStrategy(plan=lossy()), accumulate_grad_batches=2)
    saving = ModelCheckpoint(dirpath=FOLDER / "resume", every_n_train_steps=2, save_top_k=-1)
    settings: Any = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "callbacks": [saving]}
    fit(GradsyncStrategy(plan=lossy()), max_epochs=1, **settings)
    path = next((FOLDER / "resume").glob("*step=2.ckpt"))
    strategy = GradsyncStrategy(plan=lossy())
    resumed = fit(strategy, ckpt_path=path, accumulate_grad_batches=2)
    torch.load(path, weights_only=True)
    without = torch.load(path, weights_only=False)
    del without["gradsync"]
    if dist.get_rank() == 0:
        torch.save(without, FOLDER / "without.ckpt")
    dist.barrier()
    lost = fit(GradsyncStrategy(plan=lossy()), ckpt_path=FOLDER / "without.ckpt", accumulate_grad_batches=2)
    exactly = fit(GradsyncStrategy())
    differences = {"without": difference(lost, whole), "exact": difference(exactly, whole)}
    return {**compared(resumed, whole), **differences}


@scenario
def saved_after_fit() -> Result:
    whole = fit(GradsyncStrategy(plan=lossy()))
    module = Module()
    trainer = trainer_of(GradsyncStrategy(plan=lossy()), max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(FOLDER / "after.ckpt")
    resumed = fit(GradsyncStrategy(plan=lossy()), ckpt_path=FOLDER / "after.ckpt")
    return compared(resumed, whole)


@scenario
def nothing_left() -> Result:
    """Fits a checkpoint that has had all of its epochs, and saves it again."""
    whole = fit(GradsyncStrategy(plan=lossy()))
    first = trainer_of(GradsyncStrategy(plan=lossy()), max_epochs=1)
    first.fit(Module(), loader())
    first.save_checkpoint(FOLDER / "done.ckpt")
    again = trainer_of(GradsyncStrategy(plan=lossy()), max_epochs=1)
    again.fit(Module(), loader(), ckpt_path=FOLDER / "done.ckpt")
    again.save_checkpoint(FOLDER / "again.ckpt")
    resumed = fit(GradsyncStrategy(plan=lossy()), ckpt_path=FOLDER / "again.ckpt")
    return compared(resumed, whole)


@scenario
def other_number_of_ranks() -> Result:
    """Continues alone what `saved_after_fit` saved on 2 ranks."""
    strategy = GradsyncStrategy(plan=lossy())
    fit(strategy, ckpt_path=FOLDER / "after.ckpt")
    return {"ranks": WORLD, "steps": strategy.attachment.totals().steps}


@scenario
def exception() -> Result:
    """Saves after an error, when ranks cannot be asked for their states, and continues."""
    saving = ModelCheckpoint(dirpath=FOLDER / "exception", save_on_exception=True, filename="stopped")
    settings: Any = {"enable_checkpointing": True, "callbacks": [saving]}
    text = said(lambda: fit(GradsyncStrategy(plan=lossy()), FailsInStep3(), **settings))
    path = FOLDER / "exception" / "stopped.ckpt"
    fit(GradsyncStrategy(plan=lossy()), ckpt_path=path)
    return {"error": text, "saved": torch.load(path)["gradsync"]}


@scenario
def signal() -> Result:
    """Saves as in Lightning's handler of SLURM's signal, which has this name."""

    class Signalled(Module):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            def _slurm_sigusr_handler_fn() -> None:
                self.trainer.save_checkpoint(FOLDER / "signal.ckpt")

            if index == 3:
                _slurm_sigusr_handler_fn()
            return super().training_step(batch, index)

    fit(GradsyncStrategy(plan=lossy()), Signalled(), max_epochs=1)
    return {"saved": torch.load(FOLDER / "signal.ckpt", weights_only=False)["gradsync"]}


class LooksAtStart(Module):
    settled = False

    def on_train_start(self) -> None:
        self.settled = self.trainer.strategy.attachment.settled


@scenario
@mock.patch.object(pieces, "SHARE_OF_A_STEP", 1e6)  # measures all in one step, as there are few
def settled_plan() -> Result:
    strategy, module = GradsyncStrategy(plan="auto"), LooksAtStart()
    trainer = trainer_of(strategy, max_epochs=12)
    trainer.fit(module, loader())
    trainer.save_checkpoint(FOLDER / "settled.ckpt")
    again = GradsyncStrategy(plan="auto")
    resumed = fit(again, LooksAtStart(), ckpt_path=FOLDER / "settled.ckpt", max_epochs=13)
    same = again.attachment.explain() == strategy.attachment.explain()
    return {"settled at once": resumed.settled and not module.settled, "same plan": same}


@scenario
def fit_twice() -> Result:
    """Fits, evaluates in all ways, and fits again with the same strategy and Trainer."""
    module, strategy = Module(), GradsyncStrategy()
    trainer = trainer_of(strategy, max_epochs=1, limit_val_batches=2)
    trainer.validate(module, loader(), verbose=False)
    none_yet = gradsync.attachment_of(module) is None
    trainer.fit(module, loader(), loader())
    left = gradsync.attachment_of(module)
    first = strategy.attachment
    trainer.test(module, loader(), verbose=False)
    trainer.predict(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    other = Module()
    theirs = trainer_of(DDPStrategy(), max_epochs=1, limit_val_batches=2)
    theirs.validate(other, loader(), verbose=False)
    theirs.fit(other, loader(), loader())
    theirs.test(other, loader(), verbose=False)
    theirs.fit_loop.max_epochs = 2
    theirs.fit(other, loader(), loader())
    states = {"none yet": none_yet, "left": left is not None, "anew": first is not strategy.attachment}
    return {**compared(module, other), **states, "steps": strategy.attachment.totals().steps}


@scenario
def averaging() -> Result:
    strategy = GradsyncStrategy(plan=AveragingPlanner())
    ours = fit(strategy, limit_val_batches=2)
    return {**compared(ours, ours), "what": str(strategy.attachment.plan.what)}


@scenario
def logging_of_metrics() -> Result:
    csv, lines = CSVLogger(FOLDER, name="csv", version=0), BufferingHandler(1000)
    logging.getLogger("lightning.pytorch").addHandler(lines)
    fit(GradsyncStrategy(plan=lossy()), logger=csv, callbacks=[GradsyncCallback()], log_every_n_steps=4)
    heading, *rows = (
        (FOLDER / "csv" / "version_0" / "metrics.csv").read_text().splitlines() if dist.get_rank() == 0 else [""]
    )
    fit(GradsyncStrategy(), callbacks=[GradsyncCallback()])
    told = [each.getMessage() for each in lines.buffer]
    return {"heading": heading, "rows": len(rows), "plans": told.count("gradsync's plan has settled:")}


def said(act: Callable[[], object]) -> str:
    """Returns the error of `act`, which all ranks must raise."""
    text = "no error"
    try:
        act()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return text if len({each.split(":")[0] for each in texts}) == 1 else f"ranks differ: {texts}"


class FailsInStep3(Module):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.trainer.global_step == 3:
            raise RuntimeError("out of memory")
        return super().training_step(batch, index)


class AttachesItself(Module):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def setup(self, stage: str) -> None:
        if self.hook == "setup":
            gradsync.attach(self)

    def on_fit_start(self) -> None:
        if self.hook == "on_fit_start":
            gradsync.attach(self)
        if self.hook == "wrapper":
            gradsync.attach(self.trainer.strategy.model)


class Sharded(Module):
    def configure_model(self) -> None:
        fully_shard(self.net)


@scenario
def bad_input() -> Result:

    if not dist.is_initialized():
        dist.init_process_group("gloo")

    def other_world() -> None:
        checkpoint = torch.load(FOLDER / "bad.ckpt", weights_only=False)
        checkpoint["gradsync"]["rank 1"] = checkpoint["gradsync"]["rank 0"]
        if dist.get_rank() == 0:
            torch.save(checkpoint, FOLDER / "worse.ckpt")
        dist.barrier()
        fit(GradsyncStrategy(plan=lossy()), ckpt_path=FOLDER / "worse.ckpt")

    def lacks_a_rank() -> None:
        checkpoint = torch.load(FOLDER / "bad.ckpt", weights_only=False)
        del checkpoint["gradsync"]["rank 1"]
        if dist.get_rank() == 0:
            torch.save(checkpoint, FOLDER / "worst.ckpt")
        dist.barrier()
        fit(GradsyncStrategy(plan=lossy()), ckpt_path=FOLDER / "worst.ckpt")

    trainer = trainer_of(GradsyncStrategy(plan=lossy()), max_epochs=1)
    trainer.fit(Module(), loader())
    trainer.save_checkpoint(FOLDER / "bad.ckpt")
    return {
        "hook": said(lambda: GradsyncStrategy(ddp_comm_hook=gradsync.ddp_hook)),
        "fabric hook": said(lambda: GradsyncFabricStrategy(ddp_comm_hook=gradsync.ddp_hook)),
        "sharding": said(lambda: GradsyncStrategy(sharding_strategy="FULL_SHARD")),
        "sharding callback": said(lambda: fit(DDPStrategy(), callbacks=[GradsyncCallback()])),
        "other trainer": said(lambda: L.Trainer(strategy=GradsyncFabricStrategy(), accelerator="cpu", logger=False)),
        "other fabric": said(lambda: L.Fabric(strategy=GradsyncStrategy(), accelerator="cpu")),
        "setup": said(lambda: fit(GradsyncStrategy(), AttachesItself("setup"))),
        "on_fit_start": said(lambda: fit(GradsyncStrategy(), AttachesItself("on_fit_start"))),
        "wrapper": said(lambda: fit(GradsyncStrategy(), AttachesItself("wrapper"))),
        "inner in ddp": said(lambda: fit(DDPStrategy(), AttachesItself("on_fit_start"))),
        "no fit": said(lambda: GradsyncStrategy().attachment),
        "another rank": said(other_world),
        "lacks a rank": said(lacks_a_rank),
        "sharded model": said(lambda: fit(GradsyncStrategy(), Sharded())),
        "fabric setup": said(lambda: fabric_of(GradsyncFabricStrategy(plan=AveragingPlanner())).setup(network())),
        "fabric wrapper": said(lambda: gradsync.attach(fabric_of(FabricDDPStrategy()).setup(network()))),
        "fabric key": said(lambda: fabric_of(GradsyncFabricStrategy()).save(FOLDER / "key.ckpt", {"gradsync": 1})),
        "plan": said(lambda: fit(GradsyncStrategy(plan="fast"))),
        "optimisers": said(lambda: fit(GradsyncStrategy(plan=AveragingPlanner()), SeveralOptimizers())),
    }


def fabric_of(strategy: Any) -> L.Fabric:
    fabric = L.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
    fabric.launch()
    return fabric


def fabric_run(
    strategy: Any, numbers: range, *, load: Path | None = None, save: Path | None = None, accumulate: int = 1
) -> nn.Module:
    fabric = fabric_of(strategy)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "number": 0}
    if load is not None:
        fabric.load(load, state)
    for number in numbers:
        x, y = batch_of(number)
        with fabric.no_backward_sync(model, enabled=number % accumulate != accumulate - 1):
            fabric.backward(nn.functional.cross_entropy(model(x), y) / accumulate)
        if number % accumulate == accumulate - 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        fabric.save(save, {**state, "number": numbers.stop})
    found = gradsync.attachment_of(model)
    if found is not None:
        found.detach()
    return model


@scenario
def fabric() -> Result:
    return compared(
        fabric_run(GradsyncFabricStrategy(), range(12), accumulate=2),
        fabric_run(FabricDDPStrategy(), range(12), accumulate=2),
    )


@scenario
def fabric_resume() -> Result:
    whole = fabric_run(GradsyncFabricStrategy(plan=lossy()), range(12))
    fabric_run(GradsyncFabricStrategy(plan=lossy()), range(6), save=FOLDER / "fabric.ckpt")
    resumed = fabric_run(GradsyncFabricStrategy(plan=lossy()), range(6, 12), load=FOLDER / "fabric.ckpt")
    return compared(resumed, whole)


def two_setups(numbers: range, *, load: Path | None = None, save: Path | None = None) -> nn.Module:
    """Trains a module with two parts that Fabric sets up one by one; saves and loads the module as a whole."""
    fabric = fabric_of(GradsyncFabricStrategy(plan=lossy()))
    model = nn.ModuleDict({"first": network(), "second": nn.Sequential(nn.Linear(2, 2))})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, second = (fabric.setup(part) for part in model.values())
    optimizer = fabric.setup_optimizers(optimizer)
    state = {"model": model, "optimizer": optimizer}
    if load is not None:
        fabric.load(load, state)
    for number in numbers:
        x, y = batch_of(number)
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(second(first(x)), y))
        optimizer.step()
    if save is not None:
        fabric.save(save, state)
    for part in model.values():
        found = gradsync.attachment_of(part)
        assert found is not None
        found.detach()
    return model


@scenario
def fabric_two_setups() -> Result:
    whole = two_setups(range(12))
    two_setups(range(6), save=FOLDER / "two.ckpt")
    saved = torch.load(FOLDER / "two.ckpt", weights_only=False)["gradsync"]
    return {**compared(two_setups(range(6, 12), load=FOLDER / "two.ckpt"), whole), "saved": sorted(saved)}


def main() -> None:
    of_two_ranks = [name for name in SCENARIOS if name != "other_number_of_ranks"]
    for name in sys.argv[2:] or of_two_ranks:
        result = SCENARIOS[name]()
        if dist.get_rank() == 0:
            print(name, json.dumps(result), flush=True)
    dist.barrier()  # gloo's threads let go of the tensors above, for which they need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
