"""Hugging Face Accelerate: one line before `prepare()` makes gradsync exchange the gradients of the models it wraps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.rendezvous import meet
from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..frontends.arguments import DEFAULT_TIMEOUT_S, Arguments
from ..frontends.attach import Attachment, attach, attachment_of
from ..frontends.fsdp_internals import is_root_in_shards
from ..plans.plan import Plan
from ..state import has_ranks
from .frameworks import check_version
from .metrics import metrics_of

logger = logging.getLogger(__name__)

NO_ACCELERATOR = "expected an accelerate.Accelerator, got {found}: gradsync.integrations.accelerate.use(accelerator)"
PARALLEL = (
    "the accelerator's parallelism_config has {names}, where ranks hold parts of the model or of a sequence: expected "
    "plain data parallel, so leave parallelism_config out, or use it without gradsync"
)
PREPARED = (
    "accelerator.prepare() has had {number} model(s) already, without gradsync: call "
    "gradsync.integrations.accelerate.use(accelerator) before prepare()"
)
TWICE = "use() was called for this accelerator already: call it once, before prepare()"
OTHER_HOOK = (
    "DistributedDataParallelKwargs has comm_hook={hook!r}, and DDP takes one hook: leave comm_hook out, and say by "
    "plan= what gradsync sends, such as plan=CompressingPlanner(...)"
)
SHARDED = (
    "the accelerator's distributed_type is {kind}, where each rank does not have the whole model: expected plain data "
    "parallel (accelerate launch --multi_gpu, or --cpu), or FSDP. Use {kind} without gradsync"
)
FIRST_VERSION = (
    "the accelerator has FSDP's first version, which gradsync has no way into: expected "
    "FullyShardedDataParallelPlugin(fsdp_version=2)"
)
NO_REPLICAS = (
    "the accelerator shards the model over all ranks, so no gradients are left for gradsync to average: expected "
    "replicas, one for each node, by ParallelismConfig(dp_replicate_size=nodes, dp_shard_size=ranks of a node)"
)
FLOAT16 = (
    "mixed_precision='fp16' scales the loss, which was not tried yet with a model in shards under Accelerate: expected "
    "'bf16' or 'no', or gradsync.attach(model, grad_scaler=...) without Accelerate"
)
SHARED_BY_SHARDS = (
    "communicator={got!r} is not for a model in shards, for which gradsync chooses by the device: leave it out"
)
ALONE = "there is one process, so gradsync synchronises nothing: start the script by accelerate launch or torchrun"
WRAPPING = (
    "accelerator.prepare() (to which a rank comes back that alone ran out of memory and tries a smaller batch: start "
    "with one that fits on every rank)"
)
NO_FOLDER = (
    "the checkpoint %s has no state of gradsync for model %d: residuals, momenta of compressors and the settled plan "
    "begin anew"
)
DROPPED = (
    "%s has what gradsync kept on each rank, such as parts of gradients that compression has yet to send. One process "
    "synchronises nothing: it drops them, and checkpoints from now on lack them. Load this one on two processes or "
    "more to go on with them"
)
WHOLE_MODEL = (
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_HPU,
    DistributedType.MULTI_MLU,
    DistributedType.MULTI_MUSA,
    DistributedType.MULTI_NEURON,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_SDAA,
    DistributedType.MULTI_XPU,
)


class GradsyncKwargs(DistributedDataParallelKwargs):
    """Accelerate's handler of DDP arguments (`kwargs_handlers`) that also makes gradsync the communication hook.

    `use` makes one and gives it to the accelerator.

    Args:
        ddp: the arguments of DDP that the accelerator had.
        settings: arguments of `gradsync.attach`.
    """

    def __init__(self, ddp: DistributedDataParallelKwargs | None = None, **settings: Any) -> None:
        self._ddp = ddp or DistributedDataParallelKwargs()
        super().__init__(**vars(self._ddp))
        self._settings = settings

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns DDP's arguments, without those of gradsync."""
        arguments: dict[str, Any] = self._ddp.to_dict(*args, **kwargs)
        return arguments

    def to_kwargs(self) -> dict[str, Any]:
        """Waits until all ranks have come to wrap a model, then returns DDP's arguments.

        Accelerate calls it just before it wraps. Without the wait, DDP would wait inside of a collective, which could
        meet one of another rank's training step.

        Raises:
            GroupError: where a rank does not come in time.
        """
        given = Arguments.read(self._settings.get("timeout", DEFAULT_TIMEOUT_S))
        meet(None, WRAPPING, given.timeout).store.close()
        arguments: dict[str, Any] = super().to_kwargs()
        return arguments

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attaches gradsync to a model that Accelerate has just wrapped in DDP; Accelerate calls it on all ranks."""
        attach(model, **self._settings)


def use(
    accelerator: Accelerator,
    *,
    plan: Plan | Planner | Literal["auto"] | None = None,
    exclude: Sequence[str] = (),
    timeout: timedelta | float | None = None,
    verify_every: int = VERIFY_EVERY,
    verify_tolerance: float | None = None,
    communicator: Literal["own", "shared"] = "own",
) -> None:
    """Makes gradsync exchange the gradients of the models that `accelerator.prepare()` is going to wrap.

    With FSDP's second version and `ParallelismConfig(dp_replicate_size=...)` the model is put into shards, and gradsync
    averages gradients between the replicas.

    `accumulate()` and `clip_grad_norm_()` work as before. `save_state()` and `load_state()` also save and load every
    rank's state of gradsync, such as what compression left out, so call both on all ranks.
    `gradsync.attachment_of(model)` returns what `gradsync.attach` returned for a prepared model.

    Args:
        accelerator: one that has prepared no model yet. Arguments of DDP that it was given are kept.
        plan, exclude, timeout, verify_every, verify_tolerance, communicator: as in `gradsync.attach`.

    Raises:
        TypeError: for anything else than an Accelerator.
        ValueError: for a job that shards the model otherwise, without replicas, or with a scale of the loss, and where
            DDP has another communication hook.
        RuntimeError: after `prepare()`, and for a second call; from `prepare()`, where a rank does not come in time.

    Example:
        >>> gradsync.integrations.accelerate.use(accelerator)        # doctest: +SKIP
        >>> model, optimizer = accelerator.prepare(model, optimizer)  # doctest: +SKIP
    """
    check_version("accelerate")
    if not isinstance(accelerator, Accelerator):
        raise TypeError(NO_ACCELERATOR.format(found=type(accelerator).__name__))
    ddp = accelerator.ddp_handler
    if isinstance(ddp, GradsyncKwargs) or isinstance(getattr(accelerator.prepare, "__self__", None), _Preparing):
        raise RuntimeError(TWICE)
    if accelerator._models:
        raise RuntimeError(PREPARED.format(number=len(accelerator._models)))
    kind = accelerator.distributed_type
    if accelerator.num_processes == 1:
        logger.warning(ALONE)
        _before_loads(accelerator, _drop)
        return
    in_shards = kind is DistributedType.FSDP
    if kind not in WHOLE_MODEL and not in_shards:
        raise ValueError(SHARDED.format(kind=kind.value))
    if names := _parallel(accelerator, in_shards=in_shards):
        raise ValueError(PARALLEL.format(names=" and ".join(names)))
    if ddp is not None and ddp.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(OTHER_HOOK.format(hook=str(ddp.comm_hook)))
    settings: dict[str, Any] = {"plan": plan, "exclude": exclude, "communicator": communicator}
    settings |= {"verify_every": verify_every, "verify_tolerance": verify_tolerance, "grad_scaler": accelerator.scaler}
    if timeout is not None:
        settings["timeout"] = timeout
    if in_shards:
        _attach_when_in_shards(accelerator, settings)
    else:
        accelerator.ddp_handler = GradsyncKwargs(ddp, **settings)
    # Before hooks of the user's, which may take models off the list.
    saves = accelerator.register_save_state_pre_hook(_save)
    accelerator._save_model_state_pre_hook.move_to_end(saves.id, last=False)
    # Models in shards are not on the list that Accelerate gives to the hook.
    _before_loads(accelerator, lambda models, folder: _load(accelerator._models, folder))


def metrics(model: nn.Module) -> dict[str, float]:
    """Returns gradsync's metrics of the steps since the last call, for `accelerator.log`; logs the plan in words, once.

    Names and units are those of `gradsync.integrations.metrics.StepMetrics.read`. It takes no communication, so one
    rank may call it alone.

    Args:
        model: a model that `accelerator.prepare()` has wrapped.

    Returns:
        The metrics, by name; {} where no step has ended since the last call, and in a job of one process.

    Example:
        >>> accelerator.log({"loss": loss.item(), **metrics(model)}, step=step)  # doctest: +SKIP
    """
    ours = metrics_of(model)
    if ours is None:
        return {}
    ours.log_plan_once()
    return ours.read()


class _Preparing:
    """The `prepare` of an accelerator that puts models into shards: it attaches gradsync to each then.

    Args:
        accelerator: the accelerator, whose own `prepare` is called first.
        settings: arguments of `gradsync.attach`.
    """

    def __init__(self, accelerator: Accelerator, settings: dict[str, Any]) -> None:
        self._accelerator, self._prepare, self._settings = accelerator, accelerator.prepare, settings

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares as Accelerate does, and attaches gradsync to models that are in shards then. Collective."""
        prepared = self._prepare(*args, **kwargs)
        for model in self._accelerator._models:
            if is_root_in_shards(model) and attachment_of(model) is None:
                attach(model, **self._settings)
        return prepared


def _attach_when_in_shards(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    """Makes `accelerator.prepare` attach gradsync to models in shards; raises where it will not make replicas."""
    if not accelerator.is_fsdp2:
        raise ValueError(FIRST_VERSION)
    if not getattr(accelerator.parallelism_config, "dp_replicate_enabled", False):
        raise ValueError(NO_REPLICAS)
    if settings.pop("grad_scaler") is not None:
        raise ValueError(FLOAT16)
    if (communicator := settings.pop("communicator")) != "own":
        raise ValueError(SHARED_BY_SHARDS.format(got=communicator))
    accelerator.prepare = _Preparing(accelerator, settings).prepare


def _parallel(accelerator: Accelerator, *, in_shards: bool) -> list[str]:
    """Returns the kinds of parallelism that the accelerator was configured for, and gradsync has no way into.

    `in_shards`: whether models are put into shards, which needs `fully_shard`.
    """
    config = accelerator.parallelism_config
    kinds = {"tp": "tensor parallel", "cp": "context parallel", "sp": "sequence parallel"}
    kinds |= {} if in_shards else {"dp_shard": "sharding"}
    return [words for kind, words in kinds.items() if getattr(config, f"{kind}_enabled", False)]


def _save(models: list[Any], weights: list[Any], folder: str) -> None:
    """Writes this rank's state of gradsync for each model; Accelerate calls it on all ranks."""
    for number, handle in _attached(models):
        handle.checkpoint().save(_folder(folder, number))


def _load(models: list[Any], folder: str) -> None:
    """Loads this rank's state of gradsync for each model; Accelerate calls it on all ranks."""
    for number, handle in _attached(models):
        if not handle.checkpoint().load(_folder(folder, number), missing_ok=True) and dist.get_rank() == 0:
            logger.warning(NO_FOLDER, folder, number)


def _drop(models: list[Any], folder: str) -> None:
    """Warns of gradsync's state in the checkpoint, which one process drops."""
    for number in range(len(models)):
        if has_ranks(place := _folder(folder, number)):
            logger.warning(DROPPED, place)


def _before_loads(accelerator: Accelerator, call: Callable[[list[Any], str], None]) -> None:
    """Makes `accelerator.load_state` call `call(models, folder)` before hooks of the user's."""
    hook = accelerator.register_load_state_pre_hook(call)
    accelerator._load_model_state_pre_hook.move_to_end(hook.id, last=False)


def _attached(models: list[Any]) -> list[tuple[int, Attachment]]:
    handles = [(number, attachment_of(model)) for number, model in enumerate(models)]
    return [(number, handle) for number, handle in handles if handle is not None]


def _folder(folder: str, number: int) -> Path:
    return Path(folder) / ("gradsync" if number == 0 else f"gradsync_{number}")
