"""Ray Train: `prepare_model` and `report` in place of Ray's, with every rank's residuals in Ray's checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal

import pyarrow.fs
import ray.train
import ray.train.collective
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ..engine.plan_control import Planner
from ..frontends.arguments import require_module
from ..frontends.attach import Attachment
from ..frontends.data_parallel import DistributedDataParallel
from ..planner import AveragingPlanner
from ..plans.plan import Plan
from .frameworks import check_version
from .metrics import metrics_of

OTHER_STRATEGY = (
    "parallel_strategy must be 'ddp', got {strategy!r}: {way}. gradsync keeps the whole model on each rank and "
    "averages its gradients"
)
SHARDED = "for a model in shards call ray.train.torch.prepare_model(model, parallel_strategy='fsdp'), without gradsync"
MOVED_ONLY = (
    "to attach yourself, call ray.train.torch.prepare_model(model, parallel_strategy=None), then gradsync.attach(model)"
)
PREPARED = (
    "the model is in {wrapper} already: give prepare_model() the model itself, once, and leave out "
    "ray.train.torch.prepare_model()"
)
NO_GROUP = (
    "Ray Train's local mode (num_workers=0) has no process group, so there is nothing to synchronise: expected "
    "ScalingConfig(num_workers=1) or more, or local mode under torchrun"
)
OTHER_WORLD = (
    "Ray Train has {workers} workers, and the process group {ranks} ranks, over which alone gradients would be "
    "averaged. With TorchftConfig averaging over replica groups is torchft's: use ray.train.torch.prepare_model() "
    "there, or TorchConfig here"
)
NOT_ATTACHED = (
    "gradsync is not attached to the model that report() got: expected what gradsync.integrations.ray.prepare_model() "
    "returned, or a model that gradsync.attach() got"
)
ONLY_SOME = (
    "rank {rank} reports a checkpoint, and rank 0 does not: expected one from rank 0, too, as all ranks add their state"
)
NOT_LOCAL = (
    "report() writes this rank's state of gradsync to the checkpoint's folder before Ray uploads it, got a checkpoint "
    "on {filesystem}: expected Checkpoint.from_directory(local folder). Or call "
    "gradsync.attachment_of(model).checkpoint().save(folder) before your own upload, and ray.train.report()"
)
NO_FOLDER = (
    "with CheckpointUploadMode.NO_UPLOAD all ranks report the folder in Ray's storage, got none on rank {rank}: "
    "expected Checkpoint.from_directory(folder) on each rank"
)


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: Literal["ddp"] = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan | Planner | AveragingPlanner | Literal["auto"] | None = None,
    **arguments: Any,
) -> DistributedDataParallel:
    """Moves the model to this worker's device and wraps it in `gradsync.DistributedDataParallel`. Call it on all ranks.

    A single worker's model is wrapped, too, unlike by Ray's function, so that a job may go on with fewer workers.

    Args:
        model: the model.
        move_to_device: whether to move the model, or the device for it, as in `ray.train.torch.prepare_model`.
        parallel_strategy: "ddp", the only one.
        parallel_strategy_kwargs: arguments of DistributedDataParallel, such as `find_unused_parameters`.
        plan, arguments: those of `gradsync.DistributedDataParallel`, such as `exclude` and `grad_scaler`.

    Raises:
        TypeError: for a model that is none.
        ValueError: for another strategy, and for a model that is wrapped already.
        RuntimeError: outside of a function that Ray Train runs, without a process group of all workers, and as
            `gradsync.attach`.

    Example:
        >>> model = prepare_model(Net(), plan="auto")  # doctest: +SKIP
    """
    check_version("ray")
    require_module(model)
    if parallel_strategy != "ddp":
        way = MOVED_ONLY if parallel_strategy is None else SHARDED
        raise ValueError(OTHER_STRATEGY.format(strategy=parallel_strategy, way=way))
    if isinstance(model, TorchDistributedDataParallel):
        package = type(model).__module__.partition(".")[0]
        raise ValueError(PREPARED.format(wrapper=f"{package}'s {type(model).__name__}"))
    workers = ray.train.get_context().get_world_size()
    if not dist.is_initialized():
        raise RuntimeError(NO_GROUP)
    if dist.get_world_size() != workers:
        raise RuntimeError(OTHER_WORLD.format(workers=workers, ranks=dist.get_world_size()))
    moved = ray.train.torch.prepare_model(model, move_to_device, parallel_strategy=None)
    device = next((parameter.device for parameter in moved.parameters()), torch.device("cpu"))
    ids = {} if device.type == "cpu" else {"device_ids": [device], "output_device": device}
    return DistributedDataParallel(moved, plan=plan, **arguments, **{**ids, **(parallel_strategy_kwargs or {})})


def report(
    metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None, *, model: nn.Module, **options: Any
) -> None:
    """Calls `ray.train.report` with gradsync's metrics, and with every rank's state of gradsync in the checkpoint.

    Call it on all ranks in place of `ray.train.report`. If rank 0 reports a checkpoint, each rank writes its state to
    the folder that it reports, or to one of its own if it reports none; Ray merges these folders. The plan is logged
    once, on rank 0, when the trials of plans are over.

    Args:
        metrics: numbers to report; those of gradsync are added: see `gradsync.integrations.metrics.StepMetrics.read`.
        checkpoint: a local folder, as of `Checkpoint.from_directory`.
        model: the result of `prepare_model`.
        options: other arguments of `ray.train.report`.

    Raises:
        TypeError: for a model that is none.
        ValueError: for a model without gradsync, for a checkpoint that is no local folder or is reported on other ranks
            than rank 0 only, and for `CheckpointUploadMode.NO_UPLOAD` on a rank that reports no folder.

    Example:
        >>> report({"loss": loss.item()}, Checkpoint.from_directory(folder), model=model)  # doctest: +SKIP
    """
    require_module(model)
    ours = metrics_of(model)
    if ours is None:
        raise ValueError(NOT_ATTACHED)
    handle = ours.handle
    ours.log_plan_once()
    with ExitStack() as after:
        if ray.train.collective.broadcast_from_rank_zero(checkpoint is not None):
            checkpoint, options = _with_state(handle, checkpoint, options, after)
        elif checkpoint is not None:
            raise ValueError(ONLY_SOME.format(rank=handle.rank))
        ray.train.report({**ours.read(), **metrics}, checkpoint, **options)


def _with_state(
    handle: Attachment, checkpoint: Checkpoint | None, options: dict[str, Any], after: ExitStack
) -> tuple[Checkpoint, dict[str, Any]]:
    """Writes this rank's state to the checkpoint's folder, or to a new one; returns the checkpoint and the options."""
    if checkpoint is None:
        mode = options.get("checkpoint_upload_mode", CheckpointUploadMode.SYNC)
        if mode is CheckpointUploadMode.NO_UPLOAD:
            raise ValueError(NO_FOLDER.format(rank=handle.rank))
        checkpoint = Checkpoint.from_directory(tempfile.mkdtemp(prefix="gradsync-"))
        if mode is CheckpointUploadMode.ASYNC:  # Ray removes the folder once it has read it
            options = {**options, "delete_local_checkpoint_after_upload": True}
        else:
            after.callback(shutil.rmtree, checkpoint.path, ignore_errors=True)
    elif not isinstance(checkpoint.filesystem, pyarrow.fs.LocalFileSystem):
        raise ValueError(NOT_LOCAL.format(filesystem=type(checkpoint.filesystem).__name__))
    handle.checkpoint().save(checkpoint.path)
    return checkpoint, options
