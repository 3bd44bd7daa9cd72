"""`attach`: checks a model, makes all ranks agree on the settings, and installs hooks that synchronise the model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..comm import finalizer
from ..costs.timeline import Task
from ..engine.bucket_run import BucketStatistics
from ..engine.engine import Engine
from ..engine.engine_state import LOADING
from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..engine.totals import Totals
from ..inputs.settings import shown
from ..planner import AveragingPlanner, default_plan
from ..plans.plan import Plan, What
from ..plans.profile import Profile
from ..tensors.arrivals import Sections
from ..tensors.bucket import matches
from .agreement import agreed_engine, buffers_of, exclusions, forget, why_not_replicas
from .arguments import DEFAULT_TIMEOUT_S, Arguments, planner_of, require_module
from .attach_sharded import sharded_switch
from .autograd import AutogradHooks
from .averaging import Averaging, check_saved
from .checkpoint import Checkpoint, Find, Ranks, Source
from .choosing import GradientsOrParameters
from .ddp import DDPState, ddp_hook, has_reducer
from .fsdp_internals import root_in_shards
from .regrouping import Regrouping
from .shard_ranks import ShardRanks
from .switching import (
    Attached,
    Frontend,
    FrontendSwitch,
    ParametersOnTrial,
    averaging_frontend,
    level,
    survive,
    why_not_parameters,
)
from .uneven import UnevenInputs

logger = logging.getLogger(__name__)

DROP_IN = (
    "gradsync.DistributedDataParallel synchronises its model itself: there is nothing to attach; after "
    "model.attachment.detach(), attach to model.module"
)
APART = (
    "detach() ended a trial of averaging parameters: parameters, buffers and optimiser state are each rank's own. "
    "Before training goes on with averaged gradients, load the optimiser's state_dict() of one rank on all ranks "
    "(attach() sends rank 0's parameters and buffers); or detach only when handle.settled is True"
)
NEEDS_GRADIENTS = "join() needs them"
NO_JOIN = "join() needs averaged gradients, but this plan averages parameters after optimizer.step(): use another plan"

NOT_IN_SHARDS = (
    "replicate_group is for models that fully_shard() was applied to, up to the root; for this model process_group "
    "names the ranks that share it"
)

# A caller need not keep the Attachment: it lives as long as any module of the model, as a wrapper (of
# torch.compile, say) may be dropped while the model inside goes on.
_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()
# DDP takes one hook for life: the state registered first points to the state of a later `attach`.
_registered: weakref.WeakKeyDictionary[nn.Module, DDPState] = weakref.WeakKeyDictionary()


class Attachment:
    """The synchronisation of one model's gradients, or parameters, until `detach`; `attach` returns one.

    Copies and pickles of an object that refers to it, as a model may, have None in its place.
    """

    def __init__(self, switch: FrontendSwitch, model: nn.Module) -> None:
        self._switch = switch
        self._modules = modules = weakref.WeakSet(model.modules())
        # A deleted model takes its thread and communicator along; at exit the end of the process does.
        self._release = finalizer(self, _release, modules, switch)
        self._release.atexit = False
        for module in modules:
            _attachments[module] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

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
        """Whether the trials of several plans are over, so that the plan in force stays; the same on all ranks.

        Of a model in shards: the plans of all shards, as the ranks last told each other in a backward or load. They
        stop telling where nobody keeps state and all trials are over.
        """
        if (sharded := self._switch.present.sharded) is not None:  # whose ranks plan for each shard apart
            return sharded.settled
        return self._engine.settled and (self._switch.choice is None or self._switch.choice.made)

    @property
    def rank(self) -> int:
        """This process's rank in the process group, from 0."""
        return self._engine.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the process group."""
        return self._engine.group.size

    @property
    def profile(self) -> Profile | None:
        """The measurements (times, densities, links) from which `plan="auto"` made its plans; None: no such plans."""
        return self._engine.profile

    def explain(self) -> list[str]:
        """Returns a description of the plan in words, one line per bucket."""
        return self._engine.running_plan.words()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchanges nothing in the block: gradients accumulate; forward *and* backward belong inside, as with DDP."""
        with self._switch.no_sync():
            yield

    def wait(self) -> None:
        """Waits until the exchange of parameters under way, if any, has ended and averages are in the model.

        If a plan averages parameters, an exchange goes on after `optimizer.step()`. Modules wait for their own
        parameters when their forward begins; evaluation waits for all, as do `state_dict()` and `load_state_dict()` of
        the model, of its parts and of the optimiser. Call `wait` before any other reads or writes of parameters.
        """
        if self._averaging is not None:
            self._averaging.wait()

    @torch.inference_mode(False)  # tensors made here take part in training
    def consensus(self) -> None:
        """Sets all ranks' parameters to their mean over the ranks, bit for bit alike. Collective.

        Variances of normalisation are pooled. Call it on all ranks, between two steps, if the plan averages parameters;
        with averaged gradients the models are equal already. Training goes on from the mean. An `AveragingPlanner` may
        now change the groups of ranks: if links have changed, or to keep models closer together (`most_apart`).
        """
        self._switch.consensus()

    def state_dict(self) -> dict[str, Any]:
        """Returns plan, step and, by parameter, what schemes keep (residuals, momenta), for this rank's checkpoint.

        A residual is what compression left out, to be sent later. The dict also has `rank`, `world` and a digest of the
        parameters' names, shapes and dtypes. It holds tensors, numbers and text only, so `torch.load(...,
        weights_only=True)` reads it; for safetensors there is `gradsync.state.save_file`.

        Raises:
            RuntimeError: after `detach`, when residuals are gone, and after a load that failed midway.
        """
        self.wait()
        state = self._engine.state_dict()
        if (sharded := self._switch.present.sharded) is not None:
            state.update(sharded.shard.entry())
        if self._regrouping is not None:
            state["groups"] = self._regrouping.state_dict()
        return state if self._averaging is None else {**state, **self._averaging.state_dict()}

    def checkpoint(self, *, gather: bool = False) -> Checkpoint:
        """Returns all ranks' state as one object with `state_dict` and `load_state_dict`, for checkpointing libraries.

        Each rank's part is an entry of its own, so no library takes it for a copy of another rank's. On another number
        of ranks, residuals are redistributed at loading, see `gradsync.state.redistribute`.

        Args:
            gather: True: `state_dict()` returns all ranks' parts on each rank, for libraries in which only rank 0
                writes (Accelerate, Lightning); it is collective, and takes that much more memory. False: each rank has
                its own part, for `torch.distributed.checkpoint`, where all ranks write.

        A model in shards may be loaded in another number of shards, too: residuals go to the ranks that have their
        elements.

        Example:
            >>> dcp.save({"model": model.state_dict(), "gradsync": handle.checkpoint()}, ...)  # doctest: +SKIP
            >>> dcp.load({"model": model.state_dict(), "gradsync": handle.checkpoint()}, ...)  # doctest: +SKIP
        """
        source = Source(
            lambda: self._engine, lambda: self._switch.present.sharded, self.state_dict, self._met, self._load
        )
        return Checkpoint(source, gather=gather)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads what this rank's `state_dict` returned; call it on all ranks, between two steps.

        State is matched by parameter, whatever plan is in force. With `plan="auto"` the plan is loaded, too, if it had
        settled under the same constraints and for the same job: model, ranks, their nodes, torch. An `AveragingPlanner`
        that may change groups of ranks gets its plan back if its settings and the ranks' nodes are the same. State that
        was not saved begins anew. Residuals of gradients that are no longer compressed are sent with the next
        gradients, where gradients are averaged. Other state without a place is refused, as it would be lost: of unknown
        parameters, or the momentum of a compressor that the plan does not have. State of a whole matrix, such as
        PowerSGD's factors, begins anew if the present plan cuts the matrix at other places.

        Where ranks keep state of their own, each loads its own, on as many ranks as saved; else any rank's will do.

        Args:
            strict: False drops state that has no place here, was saved by another rank, or is of a parameter of another
                size, and accepts other dtypes. A model in shards refuses the state of another rank or mesh even so.

        Raises:
            TypeError, ValueError: on all ranks, before anything has changed, for state of another format version, rank,
                number of ranks or model; if ranks load different steps or plans; for values that are not finite, of
                another dtype, twice for one element of a parameter, or without a place. Also for the state of a rank
                whose model differed from the others', if the number of ranks has changed or gradients are averaged now:
                save at a consensus.
            RuntimeError: if another rank raises, inside a step, and after `detach`.
            GroupError: on all ranks, if only some load and the others train, gather, or have left.
        """

        def find(ranks: Ranks) -> Mapping[str, Any]:
            if (sharded := self._switch.present.sharded) is not None:
                assert isinstance(ranks, ShardRanks)
                sharded.require_own(state, ranks, strict=strict)
            return state

        self._load(find, strict=strict)

    @contextmanager
    def _met(self, what: str) -> Iterator[Ranks]:
        """Lets all ranks come together for the purpose `what`, and yields them for the `with` block.

        What is under way, such as an average, ends first, so that ranks come between two steps.
        """
        self.wait()
        sharded, engine = self._switch.present.sharded, self._engine
        with engine.at_barrier(what) if sharded is None else sharded.met(what) as ranks:
            yield engine.peers if ranks is None else ranks

    @torch.inference_mode(False)  # tensors made here take part in training
    def _load(self, find: Find, *, strict: bool = True, what: str = LOADING) -> None:
        """Loads the state that `find` returns, after a barrier at which all ranks must give the same purpose `what`."""
        with self._met(what) as ranks:
            engine, averaging = self._engine, self._averaging
            found = find(ranks)
            state = check_saved(engine, found, None if averaging is None else averaging.specs, strict=strict)
            groups = None if self._regrouping is None else self._regrouping.saved(state)
            ready = None if ranks is engine.peers else lambda: ranks.agree(what, None)
            engine.load_state_dict(state, strict=strict, ready=ready)
            with engine.state.all_or_none(f"{LOADING}, step {engine.step}"):
                if self._regrouping is not None:
                    self._regrouping.go_on(groups)
                if averaging is not None:
                    averaging.load_state_dict(state)
                if (sharded := self._switch.present.sharded) is not None:
                    assert isinstance(ranks, ShardRanks)
                    sharded.loaded(ranks)

    def arrived(self, parameter: Tensor) -> Sections | None:
        """Returns which elements of the parameter's gradient the last step synchronised; None: all of them.

        Returns:
            Sections [start, stop) of indices into `parameter.reshape(-1)`, ascending. The gradient is 0 elsewhere, as a
            scheme such as `CoarseGrained` sent other chunks in that step. None also for parameters that are not
            synchronised here. For a parameter in shards: indices into this rank's shard.
        """
        sharded = self._switch.present.sharded
        for name, ours in self._engine.parameters.items():
            if ours is parameter or (sharded is not None and sharded.name_of(parameter) == name):
                return self._engine.arrivals.of(name)
        return None

    def statistics(self) -> list[BucketStatistics]:
        """Returns each bucket's sent bytes and seconds of communication since attach, or since the plan changed."""
        return self._engine.running_plan.statistics()

    def totals(self) -> Totals:
        """Returns the bytes sent, the seconds and the steps since attach, and how often parameters were compared.

        The sums are over all plans that were in force. They begin anew if parameters are averaged instead of gradients
        from some step on, or ranks are lost.
        """
        return self._engine.totals()

    def timeline(self) -> list[Task]:
        """Returns the tasks of the last step (backward, kernels, operations in flight) with their times in seconds."""
        return self._engine.running_plan.timeline()

    def predicted_timeline(self) -> list[Task]:
        """Returns the last step as predicted from plan and measured network; empty if the network was not measured."""
        return self._engine.running_plan.predicted_timeline(max(self._engine.step - 1, 0))

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Returns a context manager for training with uneven inputs: ranks may have different numbers of steps.

        As with DDP's `join`, a rank without further inputs contributes zeros to the others' gradients until no rank has
        inputs; then all get the model of a rank that was last. Each forward with gradients on must be followed by its
        backward before the next one.

        Args:
            divide_by_initial_world_size: True divides sums of gradients by the number of all ranks, False by the number
                of ranks that still have inputs.
            enable: False makes the context manager do nothing.
            throw_on_early_termination: True makes all ranks raise when the first one has no further inputs.

        Raises:
            RuntimeError: if the plan averages parameters instead of gradients.
        """
        settings = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self.joinable], enable, throw_on_early_termination, **settings)

    @property
    def joinable(self) -> Joinable:
        """The object to give to `torch.distributed.algorithms.Join([...])`, beside other models.

        Asked for on all ranks between two steps, it ends a trial of averaged parameters (`AutoPlanner.averaging`), or
        keeps it from beginning: gradients are averaged from then on.

        Raises:
            RuntimeError: if the plan averages parameters instead of gradients.
        """
        if self._switch.choice is not None:
            self._switch.choice.decline(NEEDS_GRADIENTS)
        joinable = self._switch.present.joinable()
        if joinable is None:
            raise RuntimeError(NO_JOIN)
        return joinable

    def detach(self) -> None:
        """Removes gradsync from the model on this rank; gradients and parameters stay. A second call does nothing.

        It logs a warning where `AutoPlanner` tries averaged parameters at this time, as the optimisers' states differ.
        """
        if self._release.alive and self._switch.paused is not None:
            logger.warning(APART)
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
    communicator: Literal["own", "shared"] = "own",
    replicate_group: dist.ProcessGroup | None = None,
) -> Attachment:
    """Makes `loss.backward()` return with gradients averaged over the ranks; nothing else of the loop changes.

    With a plan that averages parameters, `optimizer.step()` averages them within a group of ranks instead.

    Call it on every rank; it works in place and broadcasts parameters and buffers from rank 0. A model wrapped in
    DistributedDataParallel gets gradsync as its communication hook.

    Args:
        model: the model whose gradients are averaged, plain or wrapped in DistributedDataParallel.
        optimizer: the optimiser of the parameters, if it exists already: momentum in both the optimiser and a
            compressor is then refused at once, not only before a step.
        plan: what is sent, and how. None: all-reduce for dense and a sparse scheme for sparse gradients, decided from
            the first step's gradients on all ranks, and logged; models with some MiB of dense gradients, or sparse
            ones, then try bucket sizes, orders and schemes for 10 to 100 steps, and 40 more if the best are close (not
            under `torch.use_deterministic_algorithms`: timing decides, and bucket sizes change rounding). A function of
            (profiles, world size) that returns a plan, or several to try; `gradsync.planner.CompressingPlanner` is one,
            for a compressor. "auto": begins as None does, measures steps, searches for plans, and tries the best ones
            (see `AutoPlanner`, which also takes limits on lossy gradients). If the plan averages parameters
            (`Plan.what`), gradients stay each rank's own, and parameters are averaged after each step of `optimizer`,
            which is then required; `planner.AveragingPlanner` makes such plans for the links it finds.
        process_group: the ranks that share the model; None: all.
        timeout: seconds (or a timedelta) after which a rank that waits for the others raises.
        exclude: names or shell patterns (`"encoder.*"`) of parameters and buffers to leave alone, beside those that DDP
            is told to ignore (`_set_params_and_buffers_to_ignore_for_model`).
        broadcast_buffers: broadcast rank 0's buffers now and before each training forward, as DDP does. False: each
            rank keeps its own from the start.
        grad_scaler: the scaler of the loss, if there is one: residuals of compressors are rescaled with it, and
            schemes and compressors are refused whose result does not follow its scale. Overflows need no help: if any
            rank has one, all skip the step.
        init_sync: False: parameters and buffers are not broadcast, as they are alike on all ranks already.
        static_graph: each backward adds to each parameter's gradient as often as the first synchronised one did, as
            with DDP's argument of this name. Gradients may then become ready in nested backwards, as of re-entrant
            activation checkpointing.
        find_unused_parameters: False: a forward raises if the backward before it gave some parameter no gradient, as
            with DDP's argument of this name.
        verify_every: steps between two comparisons of the ranks' parameters (the first comes soon after the plan has
            settled); 0: never. Each takes 24 bytes and two reads of the parameters. If parameters differ, as after a
            write on one rank only, all ranks warn or raise, naming parameter and ranks. They may differ after optimiser
            steps without a synchronised backward, as in hand-written local SGD.
        verify_tolerance: the difference, relative to the parameter's largest magnitude, up to which ranks only warn, as
            different processors differ in last bits. None: 0.001, or 4 units in the last place for 16-bit dtypes.
        communicator: "own": a thread of gradsync's exchanges gradients during backward, on a communicator of its own.
            "shared": the thread of backward issues all operations itself, in the order in which gradients get ready,
            and on NCCL on the communicator of `process_group`, those of groups within or across nodes apart. For jobs
            that call collectives of their own inside forward or backward on NCCL (SyncBatchNorm, tensor parallelism),
            which wants one order on all ranks: so all ranks must use the same parameters, and
            `find_unused_parameters` be False. With gloo backward then waits for exchanges of several stages.
        replicate_group: for a model in shards on a mesh of the shards alone: the ranks with the same shard, one of each
            replica. A mesh of (replicas, shards), and that of `replicate`, name them. See docs/tutorials/fsdp.md, also
            for which arguments are not for models in shards.

    Returns:
        The attachment: plan, statistics, state for checkpoints, `no_sync`, `detach`. It need not be kept.

    Raises:
        TypeError: for a model or process group that is none.
        RuntimeError: without a process group, if attached already, inside a backward, for FSDP's first version, or if
            another rank failed to attach.
        ValueError: for another argument of a wrong type or out of its range, a plan that does not fit the model, the
            optimiser or the scaler, complex parameters, parameters that Megatron-LM or DeepSpeed marked as parts
            (without a `process_group`), or models or plans that differ between ranks; on every rank, naming digests of
            both and the first difference.

    Example:
        >>> handle = gradsync.attach(model)  # doctest: +SKIP
        >>> loss.backward()                  # doctest: +SKIP
    """
    require_module(model)
    if not isinstance(process_group, dist.ProcessGroup | None) and process_group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, got {shown(process_group)}")
    given = Arguments.read(
        timeout,
        exclude=exclude,
        broadcast_buffers=broadcast_buffers,
        init_sync=init_sync,
        static_graph=static_graph,
        find_unused_parameters=find_unused_parameters,
        verify_every=verify_every,
        verify_tolerance=verify_tolerance,
        communicator=communicator,
        optimizer=optimizer,
        grad_scaler=grad_scaler,
    )
    root = root_in_shards(model)
    model = model if root is None else root
    exclude = exclusions(model, given.exclude, has_buffers=given.broadcast_buffers)
    if root is None and process_group is None and not has_reducer(model):
        given = replace(given, refusal=given.refusal or why_not_replicas(model, exclude))
    attached = Attached(
        model,
        given.optimizer,
        process_group,
        given.timeout,
        exclude,
        given.verification,
        given.refusal,
        given.communicator,
    )
    if root is not None:
        chosen = default_plan if plan is None else plan if isinstance(plan, AveragingPlanner) else planner_of(plan)
        return Attachment(sharded_switch(attached, chosen, replicate_group, given), model)
    if replicate_group is not None:
        given = replace(given, refusal=given.refusal or NOT_IN_SHARDS)
    if isinstance(plan, AveragingPlanner) or (isinstance(plan, Plan) and plan.what is not What.GRADIENT):
        return Attachment(_averaging_switch(attached, plan, given.grad_scaler), model)
    return Attachment(_gradient_switch(attached, planner_of(plan), given), model)


def _gradient_switch(attached: Attached, plan: Plan | Planner, given: Arguments) -> FrontendSwitch:
    """Installs hooks that average gradients, and returns the object that holds them. Collective.

    If `plan` is an `AutoPlanner` with `averaging`, that object may replace them by hooks that average parameters.
    """
    model, optimizer = attached.model, given.optimizer
    averaging: AveragingPlanner | None = getattr(plan, "averaging", None)
    refusal = given.refusal
    if not has_reducer(model):
        refusal = given.why_not(finds_unused=given.find_unused_parameters and not given.static_graph)
    if averaging is not None:
        refusal = refusal or why_not_parameters(model, optimizer, given.grad_scaler, attached.exclude)
    if has_reducer(model):
        return _behind_reducer(model, plan, replace(given, refusal=refusal))
    with agreed_engine(
        model,
        plan,
        attached.process_group,
        attached.timeout_s,
        attached.exclude,
        str(given),
        optimizer,
        DROP_IN if isinstance(model, DistributedDataParallel) else refusal,
        verification=attached.verification,
        communicator=attached.communicator,
        grad_scaler=given.grad_scaler,
    ) as (engine, parameters):
        hooks = _hooked(attached, engine, parameters, given)
        hooks.uneven = uneven = UnevenInputs(model, hooks, engine, attached.process_group)
        switch = FrontendSwitch(Frontend(engine, hooks.no_sync, hooks.remove, joinable=lambda: uneven))
        if averaging is not None and optimizer is not None:
            other = ParametersOnTrial(switch, hooks, averaging, attached)
            switch.choice = GradientsOrParameters(engine, model, optimizer, other)
        return switch


def _hooked(attached: Attached, engine: Engine, parameters: dict[str, nn.Parameter], given: Arguments) -> AutogradHooks:
    """Installs our hooks on the model, whose values become rank 0's, and returns the object that holds them."""
    model, exclude = attached.model, attached.exclude
    if given.init_sync:
        initial = [p for name, p in model.named_parameters() if not matches(name, exclude)]
        level(engine, [*initial, *buffers_of(model, exclude).values()])
    return AutogradHooks(
        model,
        parameters,
        engine,
        broadcast_buffers=given.broadcast_buffers,
        exclude=exclude,
        static_graph=given.static_graph,
        find_unused_parameters=given.find_unused_parameters,
    )


def _behind_reducer(model: DistributedDataParallel, plan: Plan | Planner, given: Arguments) -> FrontendSwitch:
    """Registers gradsync as DDP's communication hook; returns an object that holds the hook's engine and closes it."""
    state = DDPState.of(model, plan, given)
    _register(model, state)
    return FrontendSwitch(Frontend(state.engine, state.no_sync, state.detach, joinable=lambda: state.model))


def _averaging_switch(
    attached: Attached, plan: Plan | AveragingPlanner, grad_scaler: torch.amp.GradScaler | None
) -> FrontendSwitch:
    """Installs hooks that average parameters, and returns the object that holds them. Collective.

    If `plan` is a planner with `survives`, that object replaces the hooks when ranks are lost.
    """
    switch = FrontendSwitch(averaging_frontend(attached, plan, grad_scaler))
    if isinstance(plan, AveragingPlanner):
        try:
            survive(switch, plan, attached)
        except BaseException:
            forget(attached.model.modules(), switch.present.engine.parameters.values())
            switch.close()
            raise
    return switch


def attachment_of(model: nn.Module) -> Attachment | None:
    """Returns the attachment of a model, of the model in a wrapper such as DDP, or of the model's one attached part.

    Raises:
        TypeError: if `model` is no module.
        ValueError: if several parts of the model have attachments of their own.
    """
    require_module(model)
    if (found := _attachments.get(model)) is not None:
        return found
    parts = {id(part): part for module in model.modules() if (part := _attachments.get(module)) is not None}
    if len(parts) > 1:
        raise ValueError(f"{len(parts)} parts of the model have attachments of their own: ask for that of one part")
    return next(iter(parts.values()), None)


@contextmanager
def consensus(model: nn.Module) -> Iterator[None]:
    """Sets all ranks' parameters to their mean, to evaluate or save the model in the `with` block. Collective.

    The mean stays after the block, see `Attachment.consensus`. `model` may be a wrapper, as for `attachment_of`.

    Raises:
        RuntimeError: if gradsync is not attached to the model.
        TypeError, ValueError: as of `attachment_of`.

    Example:
        >>> with gradsync.consensus(model):  # doctest: +SKIP
        ...     evaluate(model)
    """
    attachment = attachment_of(model)
    if attachment is None:
        raise RuntimeError("gradsync is not attached to this model")
    attachment.consensus()
    yield


def _register(model: DistributedDataParallel, state: DDPState) -> None:
    """Makes DDP's communication hook use `state`; detaches `state` and raises if DDP has another hook."""
    if model in _registered:
        _registered[model].successor = state
        return
    try:
        model.register_comm_hook(state, ddp_hook)
    except BaseException:
        state.detach()
        raise
    _registered[model] = state
