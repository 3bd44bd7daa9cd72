"""The engine behind DDP's communication hook: DDP's buckets only tell which gradients are ready.

DDP hands over a bucket when its gradients are ready. They are loaded into the plan's buckets, which may cut across
DDP's; the returned future completes when all of the bucket's parameters are synchronised. State is kept by parameter
name, so DDP may rebuild its buckets after the first step.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..comm import finalizer
from ..engine.engine import Engine
from ..engine.guard import VERIFY_EVERY
from ..engine.plan_control import Planner
from ..inputs.settings import shown
from ..optim.freezing import Freezing
from ..optim.momentum import MomentumCheck
from ..plans.plan import Plan
from .agreement import HOOK, agreed_engine, exclusions, forget, unwrapped
from .arguments import DEFAULT_TIMEOUT_S, Arguments, Communicator, planner_of
from .model_changes import Additions
from .torch_hooks import (
    AccumulationHook,
    Hook,
    OptimizerStep,
    StepArguments,
    after_optimizer_steps,
    at_end_of_backward,
    before_optimizer_steps,
    is_backward,
    never_compiled,
)

# By model inside DistributedDataParallel: it may be wrapped again, and the newest wrapper synchronises it.
_exchanges: weakref.WeakKeyDictionary[nn.Module, weakref.ref["_Exchange"]] = weakref.WeakKeyDictionary()


class DDPState:
    """The state of gradsync as a communication hook of one DDP model.

    `ddp_model.register_comm_hook(gradsync.DDPState(), gradsync.ddp_hook)` is all there is to do; frameworks that make
    the DDP model themselves take the two arguments (Lightning: `DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)`).
    Ranks agree on the model in the first backward, or at once if `model` is given. `gradsync.attach(ddp_model)` makes
    such a state, with the model, and registers the hook. The other arguments, and errors, are those of `attach`. A
    parameter that `exclude` names stays unsynchronised, as DDP does not average behind a hook. Copies of a DDP model,
    by `copy.deepcopy` or pickle, have no hooks: attach to them again.
    """

    def __init__(
        self,
        model: DistributedDataParallel | None = None,
        *,
        plan: Plan | Planner | Literal["auto"] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        exclude: Sequence[str] = (),
        optimizer: Optimizer | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        verify_every: int = VERIFY_EVERY,
        verify_tolerance: float | None = None,
        communicator: Communicator = "own",
    ) -> None:
        if not isinstance(model, DistributedDataParallel | None):
            raise TypeError(f"model must be a DistributedDataParallel or None, got {shown(model)}")
        self._plan = plan
        self._arguments = Arguments.read(
            timeout_s,
            exclude=exclude,
            optimizer=optimizer,
            grad_scaler=grad_scaler,
            verify_every=verify_every,
            verify_tolerance=verify_tolerance,
            communicator=communicator,
        )
        self._exchange: _Exchange | None = None
        self.successor: DDPState | None = None  # the state attached after this one: DDP takes only one hook
        if model is not None:
            self._bind(model)
        elif self._arguments.refusal:  # at once: no other rank waits yet
            raise ValueError(self._arguments.refusal)

    @classmethod
    def of(cls, model: DistributedDataParallel, plan: Plan | Planner, given: Arguments) -> "DDPState":
        """Returns the hook's state for a DDP model, a plan or planner, and the other arguments of `attach`, checked.

        The ranks agree on the model at once: collective.
        """
        state = cls(plan=plan)
        state._arguments = given
        state._bind(model)
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Returns the settings, without anything of one model on one rank, and without optimiser and grad_scaler."""
        given = self._arguments
        guard = {"verify_every": given.verify_every, "verify_tolerance": given.verify_tolerance}
        other = {"exclude": given.exclude, "communicator": given.communicator}
        return {"plan": self._plan, "timeout_s": given.timeout, **other, **guard}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        DDPState.__init__(self, **settings)

    @property
    def engine(self) -> Engine:
        """The engine that exchanges the DDP model's gradients.

        Raises:
            RuntimeError: before the first backward, if no model was given.
        """
        if self._exchange is None:
            raise RuntimeError("this DDPState has no model yet: it gets one in the first backward of a DDP model")
        return self._exchange.engine

    def detach(self) -> None:
        """Makes the hook do DDP's own all-reduce from now on, as torch cannot remove a hook."""
        if self._exchange is not None:
            self._exchange.detach()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns the DDP model's own `no_sync()`, or a context that does nothing while no model is known."""
        return nullcontext() if self.model is None else self.model.no_sync()

    @property
    def model(self) -> DistributedDataParallel | None:
        """The DDP model; None before it is known and after it was deleted."""
        return None if self._exchange is None else self._exchange.model

    def synchronize(self, bucket: GradBucket) -> Future[Tensor]:
        """Loads the gradients of one DDP bucket; returns a future of its buffer, (numel,), with averaged gradients."""
        if self._exchange is None:
            model = _model_with(self)
            if _is_nested(model):  # the other DDP model has gradsync; the mean of equal values is itself
                return allreduce_hook(model.process_group, bucket)
            self._bind(model)
        assert self._exchange is not None
        return self._exchange.synchronize(bucket)

    def _bind(self, model: DistributedDataParallel) -> None:
        self._exchange = _Exchange(model, self._plan, self._arguments)


class _Exchange:
    """The engine and the hooks of a `DDPState` for one DDP model on this rank."""

    def __init__(
        self,
        model: DistributedDataParallel,
        plan: Plan | Planner | Literal["auto"] | None,
        given: Arguments,
    ) -> None:
        inner, exclude = unwrapped(model), exclusions(model, given.exclude)
        earlier = _exchanges.get(inner, lambda: None)()
        if earlier is not None and earlier.model is not model:  # this model is wrapped anew, the old wrapper may go
            earlier.detach()
        with agreed_engine(
            model,
            planner_of(plan),
            model.process_group,
            given.timeout,
            exclude,
            f"grad_scaler={given.grad_scaler is not None}, communicator={given.communicator}",
            given.optimizer,
            given.why_not(finds_unused=model.find_unused_parameters and not model.static_graph),
            what=HOOK,
            verification=given.verification,
            in_backward=is_backward(),
            communicator=given.communicator,
            grad_scaler=given.grad_scaler,
        ) as (engine, parameters):
            self._follow(model, engine, parameters, given, exclude)

    def _follow(
        self,
        model: DistributedDataParallel,
        engine: Engine,
        parameters: dict[str, nn.Parameter],
        given: Arguments,
        exclude: tuple[str, ...],
    ) -> None:
        """Installs the hooks that call the engine, which is closed where the model goes."""
        inner, self.engine = unwrapped(model), engine
        self._model = weakref.ref(model)
        self._process_group = model.process_group
        self._detached = False
        self._names = {id(p): name for name, p in parameters.items()}
        self._usage = _Usage(model, parameters)
        self._left_alone = {id(p) for p in inner.parameters()} - self._names.keys()
        self._synchronizations = 0  # number of backwards since attach
        # The value of `_synchronizations` at each optimiser's last step.
        self._used: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._given: list[tuple[GradBucket, Future[Tensor]]] = []
        self._factor = 1.0  # scales the mean over all ranks, where only some still have inputs
        self._modules = weakref.WeakSet(model.modules())
        self._additions = Additions(inner, exclude)
        self._looked = False  # for additions, in a backward since the last step
        self._momentum = MomentumCheck(parameters)
        self._freezing = Freezing(parameters, lambda: engine.arrivals)
        self._handles = [
            before_optimizer_steps(self, _Exchange._before_optimizer_step),
            after_optimizer_steps(self, _Exchange._after_optimizer_step),
        ]
        # DDP holds its state, so a deleted model takes thread and communicator along.
        for end in (engine.close, self._usage.remove, *(handle.remove for handle in self._handles)):
            finalizer(self, end).atexit = False
        finalizer(self, forget, self._modules, list(parameters.values())).atexit = False
        _exchanges[inner] = weakref.ref(self)

    @property
    def model(self) -> DistributedDataParallel | None:
        """The DDP model; None after it was deleted."""
        return self._model()

    def detach(self) -> None:
        """Closes the engine; DDP's hook does DDP's own all-reduce from now on."""
        self._detached = True
        self._given.clear()
        for handle in self._handles:
            handle.remove()
        self._usage.remove()
        self._freezing.give_up()
        self.engine.close()
        forget(self._modules, self.engine.parameters.values())

    def synchronize(self, bucket: GradBucket) -> Future[Tensor]:
        """Loads a bucket's gradients; returns a future of the result, set after DDP's last bucket (detached: DDP's)."""
        if self._detached:
            return allreduce_hook(self._process_group, bucket)
        if not self.engine.in_step:
            self._begin()
        for name, gradient in self._named(bucket):
            self.engine.load(name, gradient, used=self._usage.counts(name, gradient))
        future: Future[Tensor] = Future()
        self._given.append((bucket, future))
        if bucket.is_last():
            self._finish()
        return future

    def _begin(self) -> None:
        self._require_no_additions()
        self._looked = True
        self._given.clear()
        self._factor = self._factor_of_uneven_inputs()
        has_inputs = is_backward()  # else DDP brings zeros, as this rank has no further inputs and others have
        self.engine.stepped_alone |= not has_inputs
        if not has_inputs:
            self._usage.repeat(self.engine)
        self.engine.begin()
        if has_inputs:
            at_end_of_backward(_nothing, self.engine)

    def _finish(self) -> None:
        """Waits for the exchange after DDP's last bucket, and completes the futures of all buckets."""
        for name in self.engine.missing():
            self.engine.load(name, None, used=False)
        self.engine.finish()
        self._synchronizations += 1
        for bucket, future in self._given:
            future.set_result(self._result(bucket))
        self._given.clear()
        self._usage.end_step()

    def _factor_of_uneven_inputs(self) -> float:
        """Returns number of ranks / number with inputs, inside `join(divide_by_initial_world_size=False)`; else 1."""
        model = self.model
        if model is None or not model._join_config.enable or model._divide_by_initial_world_size:
            return 1.0
        told = self.engine.peers.gather("who still has inputs", bytes([is_backward()]))
        return len(told) / sum(theirs[0] for theirs in told)

    def _before_optimizer_step(self, step: OptimizerStep) -> StepArguments | None:
        if not self._looked:  # new parameters get no backward of DDP's
            self._require_no_additions(step)
        with self.engine.peers.told_of_refusals():
            self._momentum.check(self.engine.plan, step.optimizer)
        if step.has_closure:  # which makes the gradients
            return step.after_closure(partial(self._before_update, step))
        self._before_update(step)
        return None

    def _before_update(self, step: OptimizerStep) -> None:
        if not self._is_local(step):  # which changes elements by gradients of this rank alone
            self._freezing.before(step.optimizer, is_watched=step.is_watched)

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        with self.engine.peers.told_of_refusals():
            self._freezing.after(step.optimizer)
        if step.concerns(self._names):
            self._looked = False
            self.engine.stepped()
            self._note_step(step)

    def _note_step(self, step: OptimizerStep) -> None:
        """Tells the engine of an optimiser step without a synchronised backward before it."""
        if step.is_inner:
            return
        self.engine.stepped_alone |= self._is_local(step)
        self._used[step.optimizer] = self._synchronizations

    def _is_local(self, step: OptimizerStep) -> bool:
        """Whether there was no synchronised backward since the optimiser's last step."""
        return not step.is_inner and self._used.get(step.optimizer, 0) == self._synchronizations

    def _require_no_additions(self, step: OptimizerStep | None = None) -> None:
        """Raises if the model got parameters that nobody synchronises; given a step: if it concerns the model."""
        model = self.model
        if model is None or not (why := self._additions.check(unwrapped(model))):
            return
        if step is None or step.concerns_model(unwrapped(model)):
            self.engine.peers.fail(why)
            raise RuntimeError(why)

    def _result(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        for name, gradient in self._named(bucket):
            if buffer.layout is torch.sparse_coo:
                return self.engine.unload(name, None, sparse=True) * self._factor
            result = self.engine.unload(name, gradient, sparse=False)
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
            if self._factor != 1:
                gradient.mul_(self._factor)
        return buffer

    def _named(self, bucket: GradBucket) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, gradient) of the parameters to synchronise; a sparse gradient has a DDP bucket of its own."""
        buffer: Any = bucket.buffer()
        gradients = [buffer] if buffer.layout is torch.sparse_coo else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            if id(parameter) in self._names:
                yield self._names[id(parameter)], _in_format_of(parameter, gradient)
            elif id(parameter) not in self._left_alone:
                why = "this DDPState got a bucket of another model than its own; give each DDP model its own DDPState"
                self.engine.peers.fail(why)
                raise RuntimeError(why)


class _Usage:
    """The parameters that count as used by this rank's backwards, as DDP's Reducer counts them.

    With `find_unused_parameters` or a static graph, DDP leaves `.grad` as it is where no rank used the parameter, so
    what schemes keep for it must stay as it is, too. A parameter is used once a backward has accumulated its gradient:
    any backward since the last synchronised one, also inside `no_sync`; with a static graph, the first synchronised
    one, for good. Without either, DDP takes all parameters for used.
    """

    def __init__(self, model: DistributedDataParallel, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._is_static, self._lives_in_buckets = model.static_graph, model.gradient_as_bucket_view
        self._counts_all = not (model.find_unused_parameters or model.static_graph)
        # Gradients tell of backwards before this: of the one under way when a `DDPState` finds its model, or of those
        # inside `no_sync`. If the last forward was for a synchronised backward, gradients are of steps that have ended.
        tell = is_backward() or not (self._is_static or model.require_forward_param_sync)
        self._used = {name for name, p in parameters.items() if tell and p.grad is not None}
        self._hooks = [
            AccumulationHook(parameter, _UsageHook(self, name), early=True)
            for name, parameter in parameters.items()
            if not self._counts_all
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def counts(self, name: str, gradient: Tensor) -> bool:
        """Whether DDP will give the parameter the result for this gradient, which it has in a bucket, on our account.

        It always does where `.grad` lies in DDP's bucket, and where it is sparse, and so is the bucket itself.
        """
        lies_in_bucket = self._lives_in_buckets and self._parameters[name].grad is not None
        return self._counts_all or name in self._used or lies_in_bucket or gradient.layout is torch.sparse_coo

    def repeat(self, engine: Engine) -> None:
        """Counts what any rank used in the last step, as DDP does for a rank without further inputs."""
        self._used.update(name for name in self._parameters if engine.used(name))

    def end_step(self) -> None:
        """Ends a synchronised backward, or one of other ranks that this rank took part in."""
        if self._is_static:
            self.remove()
        else:
            self._used.clear()

    def _accumulates(self, name: str, produced: Tensor | None) -> None:
        if produced is not None or self._parameters[name].grad is not None:
            self._used.add(name)


class _UsageHook(Hook):
    """The hook that tells `_Usage` that backward is about to accumulate one parameter's gradient."""

    def __init__(self, owner: _Usage, name: str) -> None:
        super().__init__(owner, _Usage._accumulates)
        self._name = name

    @never_compiled
    def __call__(self, produced: tuple[Tensor | None, ...]) -> None:
        owner = self._owner()
        if owner is not None:
            owner._accumulates(self._name, produced[0])


def _in_format_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient in DDP's bucket with the parameter's strides, in which its elements lie there.

    `GradBucket.gradients` has the parameter's shape, but always contiguous strides. Parameters whose elements overlap
    or have gaps do have contiguous gradients.
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    if gradient.layout is not torch.strided or strides != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.shape, strides, gradient.storage_offset())


def has_reducer(model: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Whether the model is torch's DistributedDataParallel with a Reducer, which gradsync's class does not have."""
    return isinstance(model, DistributedDataParallel) and "reducer" in vars(model)


def _is_nested(model: DistributedDataParallel) -> bool:
    """Whether another DDP model around this one, or inside it, has gradsync already."""
    synchronised = [exchange.model for known in _exchanges.values() if (exchange := known()) is not None]
    return any(
        other is not None and other is not model and (other in set(model.modules()) or model in set(other.modules()))
        for other in synchronised
    )


def _model_with(state: DDPState) -> DistributedDataParallel:
    """Returns the DDP model that the state is registered with; a hook only gets buckets, without parameter names.

    Raises:
        RuntimeError: if there is none, or more than one.
    """
    found: list[DistributedDataParallel] = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), DistributedDataParallel)
        and any(kept is state for _, kept in vars(each).get("_comm_hooks", ()))
    ]
    if len(found) != 1:
        raise RuntimeError(
            f"{len(found) or 'no'} DDP models were found that this DDPState is registered with, expected one; name it: "
            "ddp_model.register_comm_hook(gradsync.DDPState(ddp_model), gradsync.ddp_hook)"
        )
    return found[0]


def _nothing() -> None:
    """Does nothing; `at_end_of_backward` is called with it only because that abandons the step if backward raises."""


@never_compiled
def ddp_hook(state: DDPState, bucket: GradBucket) -> Future[Tensor]:
    """Averages a bucket of DDP's over the ranks through gradsync; `DDPState` shows how to register the hook.

    Returns:
        A future of the bucket's buffer, (numel,) in its dtype, with averaged gradients.

    Raises:
        TypeError: if the state is not a DDPState.
    """
    if not isinstance(state, DDPState):
        raise TypeError(
            f"gradsync.ddp_hook needs a gradsync.DDPState as its state, got {state!r}: "
            "ddp_model.register_comm_hook(gradsync.DDPState(), gradsync.ddp_hook)"
        )
    return (state.successor or state).synchronize(bucket)
