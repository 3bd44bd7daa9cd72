"""`attach`: looks at a model, makes all ranks agree, and puts the right frontend on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..costs.timeline import Task
from ..engine.bucket_run import BucketStatistics
from ..engine.engine import LOADING, Engine
from ..engine.guard import VERIFY_EVERY, Verification
from ..engine.plan_control import Planner
from ..planner import AveragingPlanner
from ..plans.plan import Plan, What
from ..plans.profile import Profile
from ..tensors.arrivals import Sections
from ..tensors.bucket import matches
from ..tuning.default import planner_of
from .agreement import DEFAULT_TIMEOUT_S, agreed_engine, buffers_of, exclusions, forget
from .autograd import AutogradHooks
from .averaging import Averaging, check_saved
from .checkpoint import Checkpoint
from .choosing import GradientsOrParameters
from .ddp import DDPState, ddp_hook, has_reducer
from .regrouping import Regrouping
from .switching import (
    Attached,
    Frontend,
    FrontendSwitch,
    ParametersBeside,
    averaging_frontend,
    level,
    survive,
    why_not_parameters,
)
from .uneven import UnevenInputs

DROP_IN = (
    "gradsync.DistributedDataParallel synchronises its model itself: there is nothing to attach; after "
    "model.attachment.detach(), attach to model.module"
)
NO_JOIN = "join() is of averaged gradients; a plan of parameters exchanges them behind optimizer.step()"

# A caller need not keep what `attach` returns: it lives as long as any module of the model, as a wrapper (of
# torch.compile, say) may be dropped while the model inside goes on.
_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
# DDP takes one hook for life: who attaches again follows the state that was registered first.
_registered: weakref.WeakKeyDictionary[nn.Module, DDPState] = weakref.WeakKeyDictionary()


class Attachment:
    """What `attach` returns: the synchronisation of one model's gradients, or parameters, until `detach`."""

    def __init__(self, switch: FrontendSwitch, model: nn.Module) -> None:
        self._switch = switch
        modules = weakref.WeakSet(model.modules())
        for module in modules:
            _attachments[module] = self
        # A model that is dropped takes its thread and communicator along; at exit the process' end does.
        self._release = weakref.finalize(self, _release, modules, switch)
        self._release.atexit = False
        self._modules = modules

    @property
    def _engine(self) -> Engine:
        return self._switch.present.engine

    @property
    def _averaging(self) -> Averaging | None:
        return self._switch.present.averaging

    @property
    def _regrouping(self) -> Regrouping | None:
        return self._switch.present.regrouping

    @property
    def plan(self) -> Plan:
        """The plan in force; unless one was given to `attach`, it may change until `settled`."""
        return self._engine.plan

    @property
    def settled(self) -> bool:
        """Whether the plan in force stays: what the first steps show was seen, and what they should try was tried."""
        return self._engine.settled and (self._switch.choice is None or self._switch.choice.made)

    @property
    def profile(self) -> Profile | None:
        """What `plan="auto"` measured of the job, and made its plans by; None before, and with other plans."""
        return self._engine.profile

    def explain(self) -> list[str]:
        """The plan in words, a line a bucket."""
        return self._engine.words()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate locally; forward *and* backward belong inside, as with DDP."""
        with self._switch.present.no_sync():
            yield

    def wait(self) -> None:
        """Waits for averages of parameters that are under way, and has them in the model; else there are none.

        By a plan of parameters an exchange goes on behind `optimizer.step()`. Modules wait for their own parameters
        when their forward begins; evaluation for all, as do `state_dict()` and `load_state_dict()` of the model, parts
        of it and the optimiser. Who reads or writes parameters otherwise waits here.
        """
        if self._averaging is not None:
            self._averaging.land()

    @torch.inference_mode(False)  # what is made here is trained on
    def consensus(self) -> None:
        """Makes the ranks' models one: parameters are their mean, the same bits, variances of normalisation are pooled.

        Where the plan averages parameters; with gradients averaged the models are one already. On all ranks at once,
        between two steps; training goes on from there, by other groups where an `AveragingPlanner` finds that links
        have changed, or is to hold the ranks together.
        """
        self._switch.consensus()

    def state_dict(self) -> dict[str, Any]:
        """Plan, step and scheme state by parameter; belongs into a checkpoint of this rank.

        It says whose it is: `rank`, `world` and a digest of the parameters. Of tensors, numbers and text only, so that
        `torch.load(..., weights_only=True)` reads it; for safetensors there is `gradsync.state.save_file`.

        Raises:
            RuntimeError: after `detach`: what was left to be sent is gone; and after a load that has failed midway.
        """
        self.wait()
        state = self._engine.state_dict()
        if self._regrouping is not None:
            state["groups"] = self._regrouping.state_dict()
        return state if self._averaging is None else {**state, **self._averaging.state_dict()}

    def checkpoint(self, *, gather: bool = False) -> Checkpoint:
        """An object with `state_dict` and `load_state_dict` that checkpointing libraries take: all ranks' state in one.

        Each rank's part has an entry of its own, so that nothing is taken for a copy of another rank's. Loaded on
        another number of ranks, what was left to be sent is handed over, see `gradsync.state.redistribute`.

        Args:
            gather: `state_dict()` brings all ranks' parts to each rank, for libraries that let rank 0 alone write
                (Accelerate, Lightning): collective, and so many times the memory. Else each rank has its own part, for
                `torch.distributed.checkpoint`, where all write.

        Example:
            >>> dcp.save({"model": model.state_dict(), "gradsync": handle.checkpoint()}, ...)  # doctest: +SKIP
            >>> dcp.load({"model": model.state_dict(), "gradsync": handle.checkpoint()}, ...)  # doctest: +SKIP
        """
        return Checkpoint(lambda: self._engine, self.state_dict, self._load, gather=gather)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Takes over what this rank's `state_dict` gave; on all ranks at once, between two steps.

        State follows parameters, whatever plan is in force now; under `plan="auto"` the plan comes along, if it had
        settled, under the same constraints and for the same job: model, ranks, their nodes, torch. So does that of an
        `AveragingPlanner` of the same settings that may change groups, for ranks on the same nodes. What nothing was
        saved for begins anew. What was left to be sent of gradients that are not compressed now goes with the next
        ones. Other state that has no place here would be lost: of unknown parameters, or the momentum of a compressor
        that the plan does not name. What goes with a matrix as a whole begins anew where the plan cuts elsewhere.

        Where ranks keep state of their own, each loads its own, on as many ranks as saved; else any rank's will do.

        Args:
            strict: False drops state that has no place, another rank's, and that of parameters of other sizes, and
                takes other element types.

        Raises:
            TypeError, ValueError: on all ranks, before anything has changed, for state of another version, another
                rank, another number of ranks or another model; that is not finite, has elements twice or another
                element type; or that has no place here. And for one rank's whose model was apart from the others', if
                now there is another number of ranks, or gradients are averaged: save at a consensus.
            RuntimeError: where another rank raises, inside a step, and after `detach`.
            GroupError: on all ranks, where only some load and the others train, gather, or have left.

        State of different steps, or with different plans to go on with, is refused like what has no place.
        """
        self._load(lambda: state, strict=strict)

    @torch.inference_mode(False)  # what is made here is trained on
    def _load(self, find: Callable[[], object], *, strict: bool = True, what: str = LOADING) -> None:
        """Loads what `find` returns, behind a barrier; for the same `what` it says the same to all ranks."""
        self.wait()
        engine, averaging = self._engine, self._averaging
        with engine.at_barrier(what):
            found = find()
            state = check_saved(engine, found, None if averaging is None else averaging.specs, strict=strict)
            groups = None if self._regrouping is None else self._regrouping.saved(state)
            engine.load_state_dict(state, strict=strict)
            with engine.all_or_none(LOADING):
                if self._regrouping is not None:
                    self._regrouping.go_on(groups)
                if averaging is not None:
                    averaging.load_state_dict(state)

    def arrived(self, parameter: Tensor) -> Sections | None:
        """Which elements of the parameter's gradient the last step brought; None: all of them.

        Sections [start, stop) of its elements as `parameter.reshape(-1)` counts them, ascending. The gradient is 0
        elsewhere: a scheme such as `CoarseGrained` sent other chunks in that step. None also for parameters that are
        not synchronised here.
        """
        for name, ours in self._engine.parameters.items():
            if ours is parameter:
                return self._engine.arrivals.of(name)
        return None

    def statistics(self) -> list[BucketStatistics]:
        """Bytes, time and overlap of each bucket since attach, or since the plan changed."""
        return self._engine.statistics()

    def timeline(self) -> list[Task]:
        """What happened when in the last step."""
        return self._engine.timeline()

    def predicted_timeline(self) -> list[Task]:
        """The last step as predicted from the plan and the measured network; empty where that is not known."""
        return self._engine.predicted_timeline()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context manager for a training loop in which ranks have different numbers of steps, as DDP's `join`.

        A rank that is through contributes zeros to the others' gradients until all are; then all have the model of a
        rank that was last. Each forward with gradients on is followed by its backward before the next one.

        Args:
            divide_by_initial_world_size: sums of gradients are divided by the number of all ranks, else by that of the
                ranks that still have inputs.
            enable: False: the context manager does nothing.
            throw_on_early_termination: all ranks raise when the first one is through.

        Raises:
            RuntimeError: by a plan of parameters.
        """
        settings = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self.joinable], enable, throw_on_early_termination, **settings)

    @property
    def joinable(self) -> Joinable:
        """Stands for the model in `torch.distributed.algorithms.Join([...])`, beside other models.

        Raises:
            RuntimeError: by a plan of parameters.
        """
        joinable = self._switch.present.joinable()
        if joinable is None:
            raise RuntimeError(NO_JOIN)
        return joinable

    def detach(self) -> None:
        """Takes gradsync off the model on this rank; gradients and parameters stay. A second call does nothing."""
        for module in self._modules:
            if _attachments.get(module) is self:
                del _attachments[module]
        self._release()


def _release(modules: weakref.WeakSet[nn.Module], switch: FrontendSwitch) -> None:
    forget(modules, switch.present.engine.parameters.values())
    switch.close()


def attach(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    plan: Plan | Planner | AveragingPlanner | Literal["auto"] | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT_S,
    exclude: Sequence[str] = (),
    broadcast_buffers: bool = True,
    grad_scaler: torch.amp.GradScaler | None = None,
    init_sync: bool = True,
    static_graph: bool = False,
    find_unused_parameters: bool = True,
    verify_every: int = VERIFY_EVERY,
    verify_tolerance: float | None = None,
) -> Attachment:
    """Makes `loss.backward()` return with gradients averaged over the ranks; nothing else of a training loop changes.

    Or, by a plan of parameters, `optimizer.step()` with parameters averaged within a group of them.

    Works in place, on every rank alike. Parameters and buffers are broadcast from rank 0. A model wrapped in
    DistributedDataParallel gets gradsync as its communication hook.

    Args:
        optimizer: the optimiser of the parameters, if it is known already: momentum that a compressor has too is then
            refused here, not only before each step.
        plan: what to synchronise how. None: all-reduce for dense and a sparse scheme for sparse gradients, decided from
            what all ranks see in the first step, and logged; models with some MiB of dense gradients, or sparse ones,
            then try bucket sizes, orders and schemes for 20 to 90 steps (not if `torch.use_deterministic_algorithms` is
            on now: timing decides, and bucket sizes change rounding). Or a function of (profiles, world size) that
            returns a plan, or several to be tried; `gradsync.planner.CompressingPlanner` is one, for a compressor.
            "auto": the first steps are measured, a search finds a plan, and the best ones are tried (see `AutoPlanner`,
            which also takes what gradients may lose). By a plan of parameters (`what`) gradients stay each rank's own,
            and parameters are averaged after each step of `optimizer`, which it needs; `planner.AveragingPlanner` makes
            such plans for the links it finds.
        process_group: the ranks that share the model; None: all.
        timeout: seconds (or a timedelta) after which a rank that waits for the others raises.
        exclude: names or shell patterns (`"encoder.*"`) of parameters and buffers that are left alone. So are those
            that DDP is told to ignore (`_set_params_and_buffers_to_ignore_for_model`).
        broadcast_buffers: rank 0's buffers go to all now and before each training forward, as DDP does. False: each
            rank keeps its own from the start.
        grad_scaler: what scales the loss, if anything does: what compressors left of earlier gradients follows when the
            scale changes. Overflows need no help: a step in which some rank saw one is skipped on all.
        init_sync: False: parameters and buffers are not broadcast, as they are alike on all ranks already.
        static_graph: each parameter's gradient is added to as often in each backward as in the first synchronised one,
            as with DDP's argument of this name. Gradients may then become ready in nested backwards, of re-entrant
            activation checkpointing.
        find_unused_parameters: False: a forward raises where the backward before it brought some parameter nothing, as
            with DDP's argument of this name.
        verify_every: steps from one comparison of the ranks' parameters to the next (the first one comes soon after the
            plan has settled); 0: never. Each takes 24 bytes and two reads of the parameters. Where these differ, as
            after a write on one rank only, all ranks warn or raise, naming parameter and ranks. They may differ after
            optimiser steps that followed no synchronised backward, as in local SGD by hand.
        verify_tolerance: the difference, relative to the parameter's largest magnitude, up to which that is a warning,
            as processors that are not alike differ in last bits. None: 0.001, or 4 units in the last place of types of
            16 bits.

    Raises:
        RuntimeError: without a process group, when attached already, inside a backward, for FSDP, or when another rank
            failed to attach.
        ValueError: for a plan that does not fit the model or the optimiser, complex parameters, or models or plans that
            differ between the ranks; on every rank, naming both digests and the first difference.

    Example:
        >>> handle = gradsync.attach(model)  # doctest: +SKIP
        >>> loss.backward()                  # doctest: +SKIP
    """
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    exclude = exclusions(model, exclude, has_buffers=broadcast_buffers)
    verification = Verification(verify_every, verify_tolerance)
    attached = Attached(model, optimizer, process_group, timeout_s, exclude, verification)
    if isinstance(plan, AveragingPlanner) or (isinstance(plan, Plan) and plan.what is not What.GRADIENT):
        return Attachment(_averaging_switch(attached, plan, grad_scaler), model)
    plan = planner_of(plan)
    averaging: AveragingPlanner | None = getattr(plan, "averaging", None)  # of an `AutoPlanner`
    refusal = "" if averaging is None else why_not_parameters(model, optimizer, grad_scaler)
    if has_reducer(model) and refusal:
        raise ValueError(refusal)
    if has_reducer(model):
        state = DDPState(
            model,
            plan=plan,
            timeout_s=timeout_s,
            exclude=exclude,
            optimizer=optimizer,
            grad_scaler=grad_scaler,
            verify_every=verify_every,
            verify_tolerance=verify_tolerance,
        )
        _register(model, state)
        return Attachment(
            FrontendSwitch(Frontend(state.engine, state.no_sync, state.detach, joinable=lambda: state.model)), model
        )
    if isinstance(model, DistributedDataParallel):
        refusal = DROP_IN
    settings = f"broadcast_buffers={broadcast_buffers}, grad_scaler={grad_scaler is not None}"
    settings += f", init_sync={init_sync}, static_graph={static_graph}, "
    settings += f"find_unused_parameters={find_unused_parameters}"
    engine, parameters = agreed_engine(
        model, plan, process_group, timeout_s, exclude, settings, optimizer, refusal, verification=verification
    )
    if grad_scaler is not None:
        engine.loss_scale = grad_scaler.get_scale
    initial = [p for name, p in model.named_parameters() if not matches(name, exclude)]
    try:
        if init_sync:
            level(engine, [*initial, *buffers_of(model, exclude).values()])
        hooks = AutogradHooks(
            model,
            parameters,
            engine,
            optimizer=optimizer,
            broadcast_buffers=broadcast_buffers,
            exclude=exclude,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
    except BaseException:
        forget(model.modules(), parameters.values())
        engine.close()
        raise
    uneven = UnevenInputs(model, hooks, engine, process_group)
    hooks.uneven = uneven
    switch = FrontendSwitch(Frontend(engine, hooks.no_sync, hooks.remove, joinable=lambda: uneven))
    if averaging is not None and optimizer is not None:
        other = ParametersBeside(switch, hooks, averaging, attached)
        switch.choice = GradientsOrParameters(engine, model, optimizer, other)
    return Attachment(switch, model)


def _averaging_switch(
    attached: Attached, plan: Plan | AveragingPlanner, grad_scaler: torch.amp.GradScaler | None
) -> FrontendSwitch:
    """Makes the frontend of a plan of parameters."""
    switch = FrontendSwitch(averaging_frontend(attached, plan, grad_scaler))
    if isinstance(plan, AveragingPlanner):
        try:
            survive(switch, plan, attached)
        except BaseException:
            forget(attached.model.modules(), switch.present.engine.parameters.values())
            switch.close()
            raise
    return switch


@contextmanager
def consensus(model: nn.Module) -> Iterator[None]:
    """Inside, and from there on, the ranks' models are one, see `Attachment.consensus`: to evaluate and to save.

    Raises:
        RuntimeError: where gradsync is not attached to the model.

    Example:
        >>> with gradsync.consensus(model):  # doctest: +SKIP
        ...     evaluate(model)
    """
    attachment = _attachments.get(model)
    if attachment is None:
        raise RuntimeError("gradsync is not attached to this model")
    attachment.consensus()
    yield


def _register(model: DistributedDataParallel, state: DDPState) -> None:
    """Makes `state` the one that DDP's hook follows; raises, and takes it back, where DDP has a hook of its own."""
    if model in _registered:
        _registered[model].successor = state
        return
    try:
        model.register_comm_hook(state, ddp_hook)
    except BaseException:
        state.detach()
        raise
    _registered[model] = state
