"""Parts of the strategies for Lightning that serve both of its packages, `lightning` and `pytorch_lightning`.

A part comes before Lightning's own class among the bases of a strategy. The model becomes gradsync's
DistributedDataParallel, so whatever Lightning does with DDP (unwrapping, `no_sync`, manual optimisation) goes on.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..frontends.attach import Attachment, attachment_of
from ..frontends.data_parallel import DistributedDataParallel
from ..planner import AveragingPlanner
from ..plans.plan import Plan, What
from ..state import to_bytes
from .frameworks import check_version
from .metrics import StepMetrics

logger = logging.getLogger(__name__)

PlanArgument = Plan | Planner | AveragingPlanner | Literal["auto"] | None
KEY = "gradsync"  # of our state in Lightning's checkpoint
MISSING = "missing"  # the key, in place of the state, of the reason why there is none
OF_HOOKS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
OF_LIGHTNING = ("module", "device_ids", "output_device", "process_group", "device_mesh")  # it gives these to DDP

NO_HOOKS = (
    "{strategy} got {names}, but gradsync exchanges gradients itself and has no place for communication hooks: plan= "
    "says how, such as plan=CompressingPlanner(...) in place of a hook that compresses. For a hook of your own use "
    "Lightning's DDPStrategy, with a GPU: on the CPU Lightning ignores ddp_comm_hook silently"
)
UNKNOWN = (
    "{strategy} got unknown arguments {names}: expected those of gradsync.attach, of Lightning's DDPStrategy, or of "
    "DistributedDataParallel. It keeps the whole model on each rank: GradsyncShardedStrategy serves models in shards "
    "(fully_shard in configure_model()); use FSDPStrategy and DeepSpeedStrategy without gradsync"
)
NOT_ATTACHED = (
    "{strategy} has no attachment yet: trainer.fit() makes one when it sets up the model, after setup() and before "
    "on_fit_start() of module and callbacks; validate(), test() and predict() make none"
)
ATTACHED = (
    "gradsync is attached to the model already, and {strategy} attaches to it by itself: leave out gradsync.attach() "
    "in the module and in callbacks; the attachment is trainer.strategy.attachment, from on_fit_start() on"
)
NO_STATE = (
    "the checkpoint has no state of gradsync (%s): weights and optimisers go on, while residuals, momenta of "
    "compressors and the settled plan begin anew"
)
NOT_TAKEN = (
    "the checkpoint has state of gradsync for %s, which was not loaded, as no model under this name was set up: call "
    "fabric.setup() first, and name models as fabric.save() did"
)
ONE_OPTIMIZER = (
    "this plan averages parameters after the steps of one optimiser, got {number}: let configure_optimizers() return "
    "one, or use a plan of gradients"
)
ONE_OPTIMIZER_OF_FABRIC = (
    "this plan averages parameters after the steps of one optimiser, got {number}: call fabric.setup(model, optimizer) "
    "with both at once, or use a plan of gradients"
)
SYNC_BATCHNORM = (
    "Trainer(sync_batchnorm=True) calls collectives inside forward and backward, which NCCL wants in one order with "
    "gradsync's: expected {strategy}(communicator='shared'), got communicator='own'"
)
OTHER_STRATEGY = (
    "GradsyncCallback logs what GradsyncStrategy exchanges, but the Trainer has {found}: use "
    "Trainer(strategy=GradsyncStrategy(...)), GradsyncShardedStrategy for a model in shards, or leave the callback out"
)
NO_LOGGER = "GradsyncCallback logs nothing, as the Trainer has no logger: use Trainer(logger=...)"

_Base: Any = object  # in a strategy Lightning's class comes next


class LogsPlans(_Base):
    """A strategy that logs plans on rank 0 once they have settled, where Lightning logs."""

    _untold: list[ref[Attachment]]  # whose plans have not been logged, as they have not settled

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the step, and logs a plan on rank 0 once it has settled, where Lightning logs."""
        of_lightning = super().optimizer_step
        output = of_lightning(*args, **kwargs)
        for known in list(self._untold):
            attachment = known()
            if attachment is None or attachment.settled:
                self._untold.remove(known)
                if attachment is not None and self.is_global_zero:
                    StepMetrics(attachment).log_plan_once(logging.getLogger(of_lightning.__module__).info)
        return output


class OfTrainer(_Base):
    """A strategy for the Trainer, whose `attachment` is that of the model which the Trainer has fitted last."""

    _attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment:
        """The result of `gradsync.attach` for the model of the last `trainer.fit()`: plan, statistics, state.

        After the training its statistics stay.

        Raises:
            RuntimeError: before the first `trainer.fit()` has set up the model.
        """
        if self._attachment is None:
            raise RuntimeError(NOT_ATTACHED.format(strategy=type(self).__name__))
        return self._attachment


class _Part(LogsPlans):
    """Arguments of gradsync beside those of Lightning, and the wrapping of a model."""

    package = "lightning"  # on PyPI

    def __init__(
        self,
        *,
        plan: PlanArgument = None,
        exclude: Sequence[str] = (),
        timeout: timedelta | float | None = None,
        verify_every: int = VERIFY_EVERY,
        verify_tolerance: float | None = None,
        communicator: Literal["own", "shared"] = "own",
        **kwargs: Any,
    ) -> None:
        hooks = [name for name in OF_HOOKS if kwargs.get(name) is not None]
        if hooks:
            raise ValueError(NO_HOOKS.format(strategy=type(self).__name__, names=", ".join(hooks)))
        for name in OF_HOOKS:
            kwargs.pop(name, None)
        known = {*_parameters_of(super().__init__), *_parameters_of(DistributedDataParallel)} - set(OF_LIGHTNING)
        if unknown := sorted(kwargs.keys() - known):
            raise TypeError(UNKNOWN.format(strategy=type(self).__name__, names=", ".join(unknown)))
        verification = {"verify_every": verify_every, "verify_tolerance": verify_tolerance}
        given = {"plan": plan, "exclude": exclude, "communicator": communicator, **verification}
        self._settings = settings_of(given, timeout, kwargs)
        super().__init__(**kwargs)
        check_version(self.package)
        self._untold = []

    @property
    def _averages_parameters(self) -> bool:
        """Whether the plan averages parameters, or a planner may choose to, which needs the optimiser."""
        plan = self._settings["plan"]
        return (
            isinstance(plan, AveragingPlanner)
            or getattr(plan, "averaging", None) is not None
            or (isinstance(plan, Plan) and plan.what is not What.GRADIENT)
        )

    def _wrapped(
        self, model: nn.Module, device_ids: Sequence[int] | None, precision: object, optimizers: Sequence[Optimizer]
    ) -> DistributedDataParallel:
        wrapper = DistributedDataParallel(
            model,
            device_ids=device_ids,
            grad_scaler=getattr(precision, "scaler", None),
            optimizer=optimizers[0] if self._averages_parameters else None,
            **self._ddp_kwargs,
            **self._settings,
        )
        self._untold.append(ref(wrapper.attachment))
        return wrapper


class TrainerPart(OfTrainer, _Part):
    """The part of `GradsyncStrategy` that replaces methods of the Trainer's DDPStrategy."""

    _kept: bytes | None = None  # this rank's state when the fit ended, for checkpoints after it

    # Setting up and tearing down.

    def configure_ddp(self) -> None:
        """Wraps the model, before there are optimisers, as Lightning does.

        If the plan averages parameters instead of gradients, this does nothing: `setup_optimizers` wraps the model
        then.
        """
        if not self._averages_parameters:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimisers; if the plan averages parameters after optimiser steps, it wraps the model then.

        Raises:
            ValueError: if the plan averages parameters and there are several optimisers, or none.
        """
        super().setup_optimizers(trainer)
        if self._averages_parameters and not self._is_attached:
            if len(self.optimizers) != 1:
                raise ValueError(ONE_OPTIMIZER.format(number=len(self.optimizers)))
            super().configure_ddp()

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        if self._layer_sync and self.root_device.type == "cuda" and self._settings["communicator"] == "own":
            raise ValueError(SYNC_BATCHNORM.format(strategy=type(self).__name__))
        if attachment_of(model) is not None:
            raise RuntimeError(ATTACHED.format(strategy=type(self).__name__))
        wrapper = self._wrapped(model, self.determine_ddp_device_ids(), self.precision_plugin, self.optimizers)
        self._attachment, self._kept = wrapper.attachment, None
        return wrapper

    def _register_ddp_hooks(self) -> None:
        """Does nothing, as the arguments for hooks are refused."""

    @property
    def _is_attached(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def teardown(self) -> None:
        """Detaches gradsync from the model on this rank; the model goes back to the CPU.

        Unless the training was interrupted, checkpoints that are saved after it have gradsync's state of now.
        """
        if self._attachment is not None:
            if self._is_attached and not self.lightning_module.trainer.interrupted:
                self._kept = to_bytes(self._attachment.state_dict())
            self._attachment.detach()
        super().teardown()

    # Steps.

    def pre_backward(self, closure_loss: object) -> None:
        """Makes gradsync accept a manual backward inside `no_sync`, although the forward began outside.

        Lightning calls it before each backward; the forward is that around the training step.
        """
        is_manual = self._is_attached and not self.lightning_module.automatic_optimization
        if is_manual and not self.model.require_backward_grad_sync:
            with self.attachment.no_sync():  # its end forgets that a forward awaits a synchronised backward
                pass

    def post_backward(self, closure_loss: object) -> None:
        """Does nothing, in place of Lightning's own method, which asks for DDP's Reducer with a static graph."""

    def on_exception(self, exception: BaseException) -> None:
        """Does nothing: Lightning's own method adds advice on its strategies to the error of unused parameters."""

    # Consensus, where a plan averages parameters: one model to evaluate, to save, and to end with.

    def on_validation_start(self) -> None:
        """Sets parameters to their mean over the ranks, if the plan averages parameters: all validate one model."""
        super().on_validation_start()
        self._reach_consensus()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state; if the plan averages parameters, all ranks take their mean before."""
        self._reach_consensus()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def on_train_end(self) -> None:
        """Sets parameters to their mean over the ranks, if the plan averages parameters."""
        super().on_train_end()
        self._reach_consensus()

    def _reach_consensus(self) -> None:
        if self._is_attached and self.attachment.plan.what is not What.GRADIENT and not self._why_apart():
            self.attachment.consensus()

    # Checkpoints.

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves the checkpoint, with every rank's state of gradsync added; Lightning calls it on all ranks.

        A checkpoint of weights only is saved as it is.
        """
        if "optimizer_states" in checkpoint and self._attachment is not None:  # not one of weights only
            checkpoint[KEY] = self._state()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _state(self) -> dict[str, Any]:
        """Returns all ranks' states on rank 0, or the reason why there are none. Collective."""
        if why := self._why_apart():
            if self.is_global_zero:
                logger.error("a checkpoint is written without the state of gradsync, as %s", why)
            return {MISSING: why}
        if self._is_attached:
            return self.attachment.checkpoint(gather=True).state_dict()
        assert self._kept is not None  # as training has ended, and was not interrupted
        return _gathered(self._kept, self.root_device)

    def _why_apart(self) -> str:
        """Returns why ranks may be at different places of training, so that none must wait for the others; or ""."""
        if not self._is_attached and self._kept is None:
            return "training did not reach its end"
        return why_apart(self.lightning_module.trainer if self._is_attached else None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of the optimisers, then each rank's state of gradsync."""
        super().load_optimizer_state_dict(checkpoint)
        load(self.attachment, checkpoint.get(KEY))


class FabricPart(_Part):
    """The part of `GradsyncFabricStrategy` that replaces methods of Fabric's DDPStrategy."""

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wraps a model in `gradsync.DistributedDataParallel` and returns the wrapper.

        Raises:
            ValueError: if the plan averages parameters, which needs the optimiser: call `fabric.setup(model,
                optimizer)`.
        """
        return self._set_up(module, ())

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Wraps a model in `gradsync.DistributedDataParallel`, and returns (wrapper, optimisers, scheduler).

        Raises:
            ValueError: if the plan averages parameters and there are several optimisers, or none.
        """
        wrapper = self._set_up(module, optimizers)
        return wrapper, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def _set_up(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> DistributedDataParallel:
        if self._averages_parameters and len(optimizers) != 1:
            raise ValueError(ONE_OPTIMIZER_OF_FABRIC.format(number=len(optimizers)))
        return self._wrapped(module, self._determine_ddp_device_ids(), self.precision, optimizers)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Saves what `state` has, and every rank's state of gradsync for the models in it. Collective.

        If a plan averages parameters, they are set to their mean over the ranks before.

        Raises:
            ValueError: if `state` has the key that gradsync uses for its own state.
        """
        if KEY in state:
            raise ValueError(f"the key {KEY!r} of a checkpoint is for gradsync's state of models: use another key")
        attached = _attached(state)
        for attachment in attached.values():
            if attachment.plan.what is not What.GRADIENT:
                attachment.consensus()
        ours = {name: attachment.checkpoint(gather=True).state_dict() for name, attachment in attached.items()}
        super().save_checkpoint(path, {**state, KEY: ours} if ours else state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint into the objects in `state`, and gradsync's state of each rank into its models.

        Returns what the checkpoint has beyond `state`, or all of it without a `state`, as Fabric does.
        """
        remainder: dict[str, Any] = super().load_checkpoint(path, state, strict, **kwargs)
        if not isinstance(state, dict) or not state:  # raw content for the caller, or raw weights
            return remainder
        saved = remainder.pop(KEY, {})
        for name, attachment in _attached(state).items():
            load(attachment, saved.pop(name, None))
        if saved and self.is_global_zero:
            logger.warning(NOT_TAKEN, ", ".join(map(repr, saved)))
        return remainder


class CallbackPart(_Base):
    """The part of `GradsyncCallback` that handles the Trainer's events."""

    _metrics: StepMetrics | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Gets ready to read metrics of the strategy's model; warns on rank 0 if the Trainer has no logger.

        Raises:
            TypeError: if the Trainer's strategy is not one of gradsync's.
        """
        if not isinstance(trainer.strategy, OfTrainer):
            raise TypeError(OTHER_STRATEGY.format(found=type(trainer.strategy).__name__))
        if not trainer.loggers and trainer.is_global_zero:
            logger.warning(NO_LOGGER)
        self._metrics = StepMetrics(trainer.strategy.attachment) if trainer.loggers else None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Logs gradsync's metrics of the steps since the last time, if the Trainer logs (`log_every_n_steps`)."""
        if trainer._logger_connector.should_update_logs:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs gradsync's metrics of the steps since they were logged last."""
        self._log(trainer)

    def _log(self, trainer: Any) -> None:
        metrics = {} if self._metrics is None else self._metrics.read()
        if metrics:
            for each in trainer.loggers:
                each.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def settings_of(
    given: dict[str, Any], timeout: timedelta | float | None, of_lightning: dict[str, Any]
) -> dict[str, Any]:
    """Returns arguments of `gradsync.attach`, those in `given`, with a timeout, which Lightning's arguments get, too.

    `timeout`: seconds or a timedelta; None: the default of each.
    """
    if timeout is None:
        return given
    of_lightning["timeout"] = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    return {**given, "timeout": timeout}


def load(attachment: Attachment, saved: Mapping[str, Any] | None) -> None:
    """Loads gradsync's state of all ranks, `saved`, from a checkpoint; call it on all ranks.

    If `saved` is None, or says why it has no state, nothing is loaded, and rank 0 warns.
    """
    why = "it was written without gradsync, or names the model otherwise" if saved is None else saved.get(MISSING)
    if saved is not None and why is None:
        attachment.checkpoint().load_state_dict(saved)
    elif dist.get_rank() == 0:
        logger.warning(NO_STATE, why)


def _attached(state: Mapping[str, Any]) -> dict[str, Attachment]:
    """Returns the attachments of the models in `state`, by their keys; of a module with several, also by its parts."""
    modules = [(name, each) for name, each in state.items() if isinstance(each, nn.Module)]
    return {part: attachment for name, module in modules for part, attachment in _parts(name, module)}


def _parts(name: str, module: nn.Module) -> Iterator[tuple[str, Attachment]]:
    """Yields the attachment of a module under its name, or those of its parts, whose names it begins."""
    try:
        found = attachment_of(module)
    except ValueError:  # several parts have attachments of their own
        for part, child in module.named_children():
            yield from _parts(f"{name}.{part}", child)
    else:
        if found is not None:
            yield name, found


def _gathered(mine: bytes, device: torch.device) -> dict[str, Tensor]:
    """Returns the states that the ranks kept, as `handle.checkpoint(gather=True)` would. Collective."""
    part = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    size = torch.tensor([part.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(each) for each in sizes)
    padded = torch.cat([part, part.new_zeros(longest - part.numel())])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return {f"rank {rank}": parts[rank][: int(each)].cpu() for rank, each in enumerate(sizes)}


def why_apart(trainer: Any) -> str:
    """Returns why ranks may be at different places of training, so that none must wait for the others; or "".

    `trainer`: Lightning's; None: the training has ended.
    """
    if trainer is not None and trainer.interrupted:
        return "training was interrupted by an error or a signal"
    return "a signal asked for it in the middle of a step" if _is_in_signal_handler() else ""


def _is_in_signal_handler() -> bool:
    """Whether Lightning handles a signal of SLURM now, which may have come inside a step."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if caller.f_code.co_name == "_slurm_sigusr_handler_fn":
            return True
        frame = caller
    return False


def _parameters_of(function: Any) -> Iterable[str]:
    with suppress(ValueError):
        return [
            name
            for name, each in inspect.signature(function).parameters.items()
            if each.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        ]
    return ()
