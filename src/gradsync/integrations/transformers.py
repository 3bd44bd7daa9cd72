"""Hugging Face Trainer: one line before `train()` makes gradsync exchange the gradients of the model it wraps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import DistributedType
from accelerate.utils import broadcast
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend
from transformers.utils import logging

from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..frontends.attach import Attachment, attachment_of
from ..plans.plan import Plan
from ..state import has_ranks
from . import accelerate
from .frameworks import check_version
from .metrics import metrics_of

logger = logging.get_logger(__name__)

FOLDER = "gradsync"  # inside of a checkpoint
NO_TRAINER = (
    "expected a transformers.Trainer, got {found}: gradsync.integrations.transformers.use(trainer), before "
    "trainer.train()"
)
TWICE = "use() was called for this Trainer already: call it once, before trainer.train()"
TRAINED = (
    "trainer.train(), or evaluate() under torch_compile, has wrapped the model already: call "
    "gradsync.integrations.transformers.use(trainer) before it"
)
IN_SHARDS = (
    "the Trainer shards the model (FSDP), which gradsync does not support here yet: expected plain data parallel; with "
    "Accelerate alone, gradsync.integrations.accelerate.use(accelerator) serves FSDP's second version"
)
NOT_WRAPPED = (
    "the Trainer did not wrap the model in DistributedDataParallel, so gradsync would synchronise nothing: expected "
    "plain data parallel, where each process has the whole model (no device_map, tp_plan, --fsdp, --deepspeed). Was "
    "evaluate() or predict() called before train()? Then Accelerate takes the model for wrapped, and the ranks would "
    "train apart, without gradsync too: call them after train(), or on another Trainer"
)
NOT_EXCHANGED = (
    "gradsync exchanged nothing in the first step of this train(), so the ranks would train apart, without gradsync "
    "too: expected the DistributedDataParallel of an earlier train() in trainer.model_wrapped, which an evaluation "
    "in a second train() replaces under torch_compile. Make a new Trainer instead of a third train()"
)
PRUNED = (
    "optuna pruned this trial, which the Trainer tells rank 0 alone, so the other ranks would wait for it: expected a "
    "search without pruning, as there are several ranks: hyperparameter_search(..., pruner=optuna.pruners.NopPruner())"
)
NO_FOLDER = (
    "the checkpoint %s has no state of gradsync: residuals, momenta of compressors and the settled plan begin anew"
)


def use(
    trainer: Trainer,
    *,
    plan: Plan | Planner | Literal["auto"] | None = None,
    exclude: Sequence[str] = (),
    timeout: timedelta | float | None = None,
    verify_every: int = VERIFY_EVERY,
    verify_tolerance: float | None = None,
    communicator: Literal["own", "shared"] = "own",
) -> None:
    """Makes gradsync exchange the gradients of the model that `trainer.train()` is going to wrap in DDP.

    Checkpoints then also hold every rank's state of gradsync, and `trainer.log` gets its bytes and times beside the
    loss. `gradsync.attachment_of(trainer.model_wrapped)` returns the attachment, during and after `train()`.

    Args:
        trainer: a `Trainer` or one of a class derived from it, such as `Seq2SeqTrainer`, before `train()`. Arguments
            of DDP in its `TrainingArguments` are kept.
        plan, exclude, timeout, verify_every, verify_tolerance, communicator: as in `gradsync.attach`.

    Raises:
        TypeError: for anything else than a Trainer.
        ValueError: for a job that shards the model (FSDP, DeepSpeed, tensor parallel).
        RuntimeError: after `train()`, and for a second call; from `train()`, where the Trainer does not use DDP; from
            `hyperparameter_search()`, where optuna prunes a trial.

    Example:
        >>> gradsync.integrations.transformers.use(trainer)  # doctest: +SKIP
        >>> trainer.train()                                   # doctest: +SKIP
    """
    check_version("transformers")
    if not isinstance(trainer, Trainer):
        raise TypeError(NO_TRAINER.format(found=type(trainer).__name__))
    if any(isinstance(each, _Callback) for each in trainer.callback_handler.callbacks):
        raise RuntimeError(TWICE)
    if trainer.model_wrapped is not trainer.model:
        raise RuntimeError(TRAINED)
    if trainer.accelerator.distributed_type is DistributedType.FSDP:
        raise ValueError(IN_SHARDS)
    settings: dict[str, Any] = {"plan": plan, "exclude": exclude, "timeout": timeout, "verify_every": verify_every}
    settings |= {"verify_tolerance": verify_tolerance, "communicator": communicator}
    trainer.accelerator.free_memory()  # of a model that evaluate() prepared, as train() does
    accelerate.use(trainer.accelerator, **settings)
    callback = _Callback(trainer)
    trainer.add_callback(callback)
    # A search for hyperparameters makes an accelerator for each trial.
    _after(trainer, "create_accelerator_and_postprocess", lambda: accelerate.use(trainer.accelerator, **settings))
    trainer._report_to_hp_search = _on_all_ranks(trainer._report_to_hp_search, trainer)
    _after(trainer, "_save_optimizer_and_scheduler", callback.save)
    _after(trainer, "_load_optimizer_and_scheduler", callback.load)
    trainer.log = _with_metrics(trainer.log, callback)


class _Callback(TrainerCallback):
    """Checks that training goes through gradsync, and keeps its state in checkpoints."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._steps: int | None = None  # exchanged before this train(), until its first step has been checked

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError where there are several processes, and no attachment."""
        if self._trainer.accelerator.num_processes > 1:
            if (handle := self._handle()) is None:
                raise RuntimeError(NOT_WRAPPED)
            self._steps = handle.totals().steps

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError where an earlier wrapper has the attachment, and the first step exchanged nothing."""
        handle = self._handle()
        if self._steps is not None and handle is not None and handle.totals().steps == self._steps:
            raise RuntimeError(NOT_EXCHANGED)
        self._steps = None

    def save(self, folder: str) -> None:
        """Writes this rank's state into the checkpoint at `folder`; the Trainer calls it on all ranks."""
        if (handle := self._handle()) is not None:
            handle.checkpoint().save(Path(folder) / FOLDER)

    def load(self, folder: str | None) -> None:
        """Loads this rank's state from the checkpoint at `folder`; the Trainer calls it on all ranks.

        One process, which has no attachment, drops the state with a warning.
        """
        handle = self._handle()
        if folder is None:
            return
        if handle is None:
            if has_ranks(place := Path(folder) / FOLDER):
                logger.warning(accelerate.DROPPED, place)
        elif not handle.checkpoint().load(Path(folder) / FOLDER, missing_ok=True) and handle.rank == 0:
            logger.warning(NO_FOLDER, folder)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the steps since the last call, and logs the plan once it has settled."""
        metrics = metrics_of(self._trainer.model_wrapped)
        if metrics is None:
            return {}
        metrics.log_plan_once(logger.info)
        return metrics.read()

    def _handle(self) -> Attachment | None:
        return attachment_of(self._trainer.model_wrapped)


def _after(trainer: Trainer, name: str, also: Callable[..., None]) -> None:
    """Makes `trainer` call `also` after its method `name`, with the same arguments."""
    method = getattr(trainer, name)

    @wraps(method)
    def both(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        also(*args, **kwargs)

    setattr(trainer, name, both)


def _on_all_ranks(report: Callable[..., None], trainer: Trainer) -> Callable[..., None]:
    """Returns `trainer._report_to_hp_search` such that all ranks raise RuntimeError where optuna prunes on rank 0."""

    @wraps(report)
    def both(*args: Any, **kwargs: Any) -> None:
        if trainer.hp_search_backend != HPSearchBackend.OPTUNA or trainer.accelerator.num_processes == 1:
            report(*args, **kwargs)
            return
        pruned: Exception | None = None
        try:
            report(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "TrialPruned":
                raise
            pruned = error
        mine = torch.tensor([int(pruned is not None)], device=trainer.accelerator.device)
        if int(broadcast(mine)):  # rank 0's
            raise RuntimeError(PRUNED) from pruned

    return both


def _with_metrics(log: Callable[..., None], callback: _Callback) -> Callable[..., None]:
    """Returns `trainer.log` with gradsync's metrics beside the loss in training, for all of the Trainer's loggers."""

    @wraps(log)
    def both(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(callback.metrics())
        log(logs, *args, **kwargs)  # which adds to them, too

    return both
