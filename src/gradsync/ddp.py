"""The same engine behind DDP's communication hook: DDP's buckets are readiness events, nothing more.

DDP hands over a bucket when its gradients are ready. They are loaded into the plan's buckets, which may cut across
DDP's; the future given back completes when all of its parameters are synchronised, however late. State is keyed by
parameter name, so DDP may re-bucket after its first step.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .agreement import DEFAULT_TIMEOUT_S, agreed_engine, forget, unwrapped
from .auto import planner_of
from .freezing import Freezing
from .guard import VERIFY_EVERY, Verification
from .model_changes import Additions
from .optim import OneMomentum
from .plan import Plan
from .planning import Planner
from .torch_hooks import OptimizerStep, after_optimizer_steps, at_end_of_backward, before_optimizer_steps

UNEVEN_INPUTS = (
    "uneven inputs (join) are not supported: give every rank the same number of steps, for example with "
    "DistributedSampler(drop_last=True)"
)


class DDPState:
    """State for `ddp_model.register_comm_hook(gradsync.DDPState(ddp_model), gradsync.ddp_hook)`.

    `gradsync.attach(ddp_model)` does both. Arguments and errors are those of `attach`; a parameter that `exclude` names
    stays unsynchronised, as DDP does not average behind a hook.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        plan: Plan | Planner | Literal["auto"] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        exclude: Sequence[str] = (),
        optimizer: Optimizer | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        verify_every: int = VERIFY_EVERY,
        verify_tolerance: float | None = None,
    ) -> None:
        self.engine, parameters = agreed_engine(
            model,
            planner_of(plan),
            model.process_group,
            timeout_s,
            exclude,
            f"grad_scaler={grad_scaler is not None}",
            optimizer,
            verification=Verification(verify_every, verify_tolerance),
        )
        if grad_scaler is not None:
            self.engine.loss_scale = grad_scaler.get_scale
        self._model = weakref.ref(model)
        self._process_group = model.process_group
        self.detached = False
        self.successor: DDPState | None = None  # attached after this one was detached: a hook is registered only once
        self._names = {id(p): name for name, p in parameters.items()}
        self._synchronizations = 0  # backwards since attach
        self._used: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # that when it stepped last
        self._given: list[tuple[GradBucket, Future[Tensor]]] = []
        self._modules = weakref.WeakSet(model.modules())
        self._additions = Additions(unwrapped(model), exclude)
        self._momentum = OneMomentum(parameters)
        engine = self.engine
        self._freezing = Freezing(parameters, lambda: engine.arrivals)
        self._handles = [
            before_optimizer_steps(self, DDPState._before_optimizer_step, optimizer),
            after_optimizer_steps(self, DDPState._after_optimizer_step, optimizer),
        ]
        # DDP holds its state: a model that is dropped takes thread and communicator along.
        for end in (self.engine.close, *(handle.remove for handle in self._handles)):
            weakref.finalize(self, end).atexit = False

    def detach(self) -> None:
        """From now on the hook is DDP's own all-reduce: torch cannot take a hook off."""
        self.detached = True
        self._given.clear()
        for handle in self._handles:
            handle.remove()
        self._freezing.give_up()
        self.engine.close()
        forget(self._modules, self.engine.parameters.values())

    def no_sync(self) -> AbstractContextManager[None]:
        """The model's own."""
        model = self._model()
        return nullcontext() if model is None else model.no_sync()

    def fallback(self, bucket: GradBucket) -> Future[Tensor]:
        """What DDP does without a hook."""
        return allreduce_hook(self._process_group, bucket)

    def load(self, bucket: GradBucket) -> Future[Tensor]:
        if not self.engine.in_step:
            self._require_even_inputs()
            self._require_no_additions()
            self._given.clear()
            self.engine.begin()
            at_end_of_backward(_nothing, self.engine)
        for name, gradient in self._named(bucket):
            self.engine.load(name, gradient)
        future: Future[Tensor] = Future()
        self._given.append((bucket, future))
        return future

    def finish(self) -> None:
        """All buckets were given: waits, and completes their futures."""
        for name in self.engine.missing():
            self.engine.load(name, None, used=False)
        self.engine.finish()
        self._synchronizations += 1
        for bucket, future in self._given:
            future.set_result(self._result(bucket))
        self._given.clear()

    def _before_optimizer_step(self, step: OptimizerStep) -> None:
        try:
            self._momentum.check(self.engine.plan, step.optimizer)
            self._freezing.before(step.optimizer, has_closure=step.has_closure, is_watched=step.is_watched)
        except ValueError as error:
            self.engine.fail(str(error))  # settings may differ by rank: the others would wait for this one
            raise

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        self._freezing.after(step.optimizer)
        self._note_step(step)

    def _note_step(self, step: OptimizerStep) -> None:
        """Tells the engine of a step that followed no synchronised backward."""
        groups = step.optimizer.param_groups
        if not any(id(p) in self._names for group in groups for p in group["params"]) or step.is_inner:
            return
        if self._used.get(step.optimizer, 0) == self._synchronizations:
            self.engine.stepped_alone = True
        self._used[step.optimizer] = self._synchronizations

    def _require_even_inputs(self) -> None:
        model = self._model()
        if model is not None and model._join_config.enable:
            raise RuntimeError(UNEVEN_INPUTS)

    def _require_no_additions(self) -> None:
        model = self._model()
        if model is not None and (why := self._additions.check(unwrapped(model))):
            self.engine.fail(why)
            raise RuntimeError(why)

    def _result(self, bucket: GradBucket) -> Tensor:
        buffer = bucket.buffer()
        for name, gradient in self._named(bucket):
            if buffer.layout is torch.sparse_coo:
                return self.engine.unload(name, None, sparse=True)
            result = self.engine.unload(name, gradient, sparse=False)
            if result.data_ptr() != gradient.data_ptr():
                gradient.copy_(result)
        return buffer

    def _named(self, bucket: GradBucket) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) of the parameters to synchronise; DDP gives a sparse gradient a bucket of its own."""
        buffer: Any = bucket.buffer()
        gradients = [buffer] if buffer.layout is torch.sparse_coo else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            if id(parameter) in self._names:
                yield self._names[id(parameter)], gradient


def _nothing() -> None:
    """DDP's own callback ends its backward; ours is there to be dropped when backward raises."""


def ddp_hook(state: DDPState, bucket: GradBucket) -> Future[Tensor]:
    """gradsync as a DDP communication hook: `ddp_model.register_comm_hook(state, gradsync.ddp_hook)`."""
    state = state.successor or state
    if state.detached:
        return state.fallback(bucket)
    future = state.load(bucket)
    if bucket.is_last():
        state.finish()
    return future
