"""Hooks on models, optimisers and the end of backward, which hold their owners weakly and stay out of copies."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame as _eval_frame
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..comm import inert_in_children
from ..engine.engine import Engine

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones and those by name, of `Optimizer.step`
REENTRANT = (
    "gradients became ready inside a nested backward (re-entrant activation checkpointing?), whose end cannot be told "
    "from the end of the outer one; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def before_optimizer_steps(
    owner: T, function: Callable[[T, OptimizerStep], StepArguments | None], optimizer: Optimizer | None = None
) -> RemovableHandle:
    """Registers `function(owner, step)` to run before each step of `optimizer`; None: of any optimiser.

    `step` is the call of `Optimizer.step`, as an `OptimizerStep`; the function returns other arguments for the call, or
    None. `owner` is held weakly: when it is gone, nothing runs. Returns a handle whose `remove()` ends it.
    """
    hook = uncompiled(Hook)(owner, lambda alive, *step: function(alive, OptimizerStep(*step)))
    return register_optimizer_step_pre_hook(hook) if optimizer is None else optimizer.register_step_pre_hook(hook)


def after_optimizer_steps(
    owner: T, function: Callable[[T, OptimizerStep], None], optimizer: Optimizer | None = None
) -> RemovableHandle:
    """Registers `function(owner, step)` to run after each step of `optimizer`; None: of any optimiser.

    `step` is the call of `Optimizer.step`, as an `OptimizerStep`. `owner` is held weakly: when it is gone, nothing
    runs. Returns a handle whose `remove()` ends it.
    """
    hook = uncompiled(Hook)(owner, lambda alive, *step: function(alive, OptimizerStep(*step)))
    return register_optimizer_step_post_hook(hook) if optimizer is None else optimizer.register_step_post_hook(hook)


class OptimizerStep(NamedTuple):
    """A call of an optimiser's `step`, with the arguments that torch gives to step hooks."""

    optimizer: Optimizer
    args: tuple[Any, ...]  # the first one is the optimiser
    kwargs: Mapping[str, Any]

    @property
    def closure(self) -> Callable[..., Any] | None:
        """The closure by which the step computes gradients itself; None: it has none."""
        given: Callable[..., Any] | None = self.kwargs.get("closure", self.args[1] if len(self.args) > 1 else None)
        return given

    @property
    def has_closure(self) -> bool:
        """Whether the step computes gradients itself, by a closure."""
        return self.closure is not None

    def after_closure(self, then: Callable[[], None]) -> StepArguments:
        """Returns the arguments with a closure that calls `then` at the end of its first call, before the update."""
        closure, is_first = self.closure, True
        assert closure is not None

        def followed(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            result = closure(*args, **kwargs)
            if is_first:
                is_first = False
                then()
            return result

        if "closure" in self.kwargs:
            return self.args, {**self.kwargs, "closure": followed}
        return (self.args[0], followed, *self.args[2:]), dict(self.kwargs)

    def concerns(self, parameters: Container[int]) -> bool:
        """Whether the optimiser has any of these parameters; `parameters` contains their ids (`id(p)`)."""
        return any(id(p) in parameters for group in self.optimizer.param_groups for p in group["params"])

    def concerns_model(self, model: nn.Module) -> bool:
        """Whether the optimiser has any parameter that the model has now."""
        return self.concerns(set(map(id, model.parameters())))

    @property
    def has_gradients(self) -> bool:
        """Whether any of the optimiser's parameters has a gradient."""
        return any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])

    @property
    def is_watched(self) -> bool:
        """Whether the optimiser has step hooks other than gradsync's."""
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        return any(not isinstance(hook, Hook) for each in hooks for hook in each.values())

    @property
    def is_inner(self) -> bool:
        """Whether the call is made inside another `step` of this optimiser, as by a subclass for its base class."""
        return [f.f_locals.get("self") is self.optimizer for f in _frames_of(_step_code())].count(True) > 1

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler made the call, which may skip steps."""
        return any(f.f_locals["self"].is_enabled() for f in _frames_of(torch.amp.GradScaler.step.__code__))


class OptimizerRounds:
    """A counter of this rank's rounds of optimiser steps, by which ranks find out that they are out of step.

    A round begins with the first step after a synchronised backward, or when an optimiser steps that has stepped in the
    round already. Several optimisers share a round, as do the outer and the inner step of a sharded one. A step by
    gradients that hold more than what was synchronised counts as an additional round. A rank that left `no_sync` too
    early or too late makes such steps.
    """

    def __init__(self) -> None:
        self.number = 0
        self.alone = False  # whether the last round used more than synchronised gradients
        self._is_synchronized = False
        # Optimisers have numbers in the order of their first steps, the same on all ranks, as addresses are not.
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._known = 0
        self._stepped: set[int] = set()  # optimisers that made a step in this round

    def synchronized(self) -> None:
        """Records that a backward has exchanged gradients: the next call of an optimiser's `step` begins a round."""
        self._is_synchronized = True
        self._stepped.clear()

    def stepped(self, step: OptimizerStep, *, has_local_gradients: bool) -> None:
        """Counts one call of an optimiser's `step`; if it has a closure, after the closure has made the gradients.

        Args:
            step: the call.
            has_local_gradients: whether a backward that exchanged nothing (`no_sync`) came after the synchronised one.
        """
        optimizer = self._numbers.get(step.optimizer, self._known)
        if optimizer == self._known:
            self._numbers[step.optimizer] = optimizer
            self._known += 1
        if optimizer in self._stepped and step.is_inner:
            return
        if not self._is_synchronized and not step.has_gradients:  # the step changes nothing
            return
        if not self._stepped or optimizer in self._stepped:
            self.number += 1 + (self._is_synchronized and has_local_gradients)
            self.alone, self._is_synchronized = has_local_gradients or not self._is_synchronized, False
            self._stepped.clear()
        self._stepped.add(optimizer)


class Hook:
    """A hook that calls `function(owner, *args)` while its owner lives, which it holds weakly.

    It does nothing in copies of the model nor in forked processes, and never enters a pickle.
    """

    def __init__(self, owner: object, function: Callable[..., Any]) -> None:
        self._owner: Callable[[], Any] = weakref.ref(owner)
        self._function = function
        inert_in_children(self)

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return None if owner is None else self._function(owner, *args)

    def forked(self) -> None:
        """Makes the hook do nothing, as this process was forked from the rank's."""
        self._owner = _nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class AccumulationHook:
    """A hook on the autograd node that accumulates a parameter's gradient (`AccumulateGrad`).

    It runs after all hooks on the parameter, whenever these were registered, and so sees the gradient as they changed
    it. `hook` is called with an empty tuple, and a tuple of what autograd accumulates: a tensor, or None for an
    undefined gradient. With `early` it runs ahead of the accumulation, and so of DDP's own hooks; its only argument is
    then the tuple of what autograd accumulates.
    """

    def __init__(self, parameter: nn.Parameter, hook: Callable[..., None], *, early: bool = False) -> None:
        self._parameter, self._hook, self._early = weakref.ref(parameter), hook, early
        self._register(parameter)

    def follow(self) -> bool:
        """Moves the hook to the parameter's new accumulation node, if torch has made one; returns whether it has.

        Torch makes one when dtype or device change, on `resize_`, and on `set_`, which parametrisations call.
        """
        parameter = self._parameter()
        if parameter is None or not parameter.requires_grad:
            return False
        if torch.autograd.graph.get_gradient_edge(parameter).node is self._node:
            return False
        self.remove()
        self._register(parameter)
        return True

    def remove(self) -> None:
        self._handle.remove()

    def _register(self, parameter: nn.Parameter) -> None:
        # A parameter refers to its node weakly: the hook lives as long as some code holds the node.
        self._node = torch.autograd.graph.get_gradient_edge(parameter).node
        register = self._node.register_prehook if self._early else self._node.register_hook
        self._handle = register(self._hook)


class ModelHook(Hook):
    """A forward hook that runs for the attached model itself (`owner._model()`), not for copies of it.

    It calls `function(owner, model, *args)`, with the further arguments that torch gives to forward hooks.
    """

    def __call__(self, model: nn.Module, *args: Any) -> None:
        owner = self._owner()
        if owner is not None and owner._model() is model:
            self._function(owner, model, *args[1:])


def is_inside_forward(model: nn.Module) -> bool:
    """Whether the present forward of `model` runs inside another forward of the same model.

    Call it from a forward hook of `model`.
    """
    return [f.f_locals["self"] is model for f in _frames_of(nn.Module._call_impl.__code__)].count(True) > 1


@cache
def _step_code() -> CodeType:
    """Returns the code object of torch's wrapper around `Optimizer.step`, which calls hooks, for any optimiser."""
    return Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _frames_of(*codes: CodeType) -> list[FrameType]:
    """Returns the frames of this thread's stack that run a function with one of these codes, innermost first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            found.append(frame)
        frame = frame.f_back
    return found


@cache
def uncompiled(hook: type[Hook]) -> type[Hook]:
    """Returns a subclass of `hook` that `torch.compile` does not trace.

    Call it only when a hook is about to be made, as it imports the compiler.
    """
    return type(f"{hook.__name__}Uncompiled", (hook,), {"__call__": torch.compiler.disable(hook.__call__)})


def never_compiled(function: F) -> F:
    """Marks a function that autograd calls, such as a hook, so that `torch.compile` never compiles it.

    That holds for all that the function calls, too, and matters when a whole training step is compiled. Unlike
    `uncompiled` it costs nothing per call, and needs no compiler; use it for functions that compiled code does not call
    itself.
    """
    skip = _eval_frame._FrameAction.SKIP  # here, and further in
    code: CodeType = function.__code__
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def _nothing(*args: Any) -> None:
    """Does nothing: stands for the hook in a copy of an attached model."""


def _get_nothing() -> Callable[..., None]:
    return _nothing


class _EndOfBackward:
    """A callback for the end of backward; if backward raises, autograd drops it, and the step is abandoned."""

    def __init__(self, finish: Callable[[], None], engine: Engine) -> None:
        self._finish = finish
        self._engine: Engine | None = engine

    @never_compiled
    def __call__(self) -> None:
        self._engine = None
        self._finish()

    @never_compiled
    def __del__(self) -> None:
        if self._engine is not None:
            self._engine.abandon("backward ended with an error on this rank")


def at_end_of_backward(finish: Callable[[], None], engine: Engine) -> None:
    """Makes autograd call `finish` at the end of the present backward; if backward raises, abandons the engine's step.

    Call it inside backward, as from a gradient hook.
    """
    # Private, but the only way to run code when backward ends; FSDP2 uses it too.
    torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(finish, engine))


def is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_nested_backward() -> bool:
    """Whether this thread is in a backward inside another one, as re-entrant activation checkpointing makes them."""
    from torch.utils.checkpoint import CheckpointFunction

    run, checkpoint = torch.autograd.graph._engine_run_backward.__code__, CheckpointFunction.backward.__code__
    codes = [frame.f_code for frame in _frames_of(run, checkpoint)]
    return checkpoint in codes or codes.count(run) > 1


def is_checkpointed() -> bool:
    """Whether this thread is in a re-entrant checkpoint's forward, which disables gradients although it trains."""
    from torch.utils.checkpoint import CheckpointFunction

    return is_called_by(CheckpointFunction.forward.__code__)


@contextmanager
def outside_of_transforms() -> Iterator[bool]:
    """Suspends transforms of `torch.func` (vmap, grad, ...) in its `with` block; yields whether any was active."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield False
    else:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            yield True


def is_called_by(code: CodeType) -> bool:
    """Whether a function with this code object is running on the calling thread, further up its stack."""
    return bool(_frames_of(code))
