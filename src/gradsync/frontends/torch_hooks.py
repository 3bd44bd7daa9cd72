"""Hooks on models, optimisers and the end of backward: they know their owner weakly, and stay out of copies."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as _eval_frame
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..engine.engine import Engine

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
REENTRANT = (
    "gradients became ready inside a nested backward (re-entrant activation checkpointing?), whose end cannot be told "
    "from the end of the outer one; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def before_optimizer_steps(
    owner: T, function: Callable[[T, OptimizerStep], None], optimizer: Optimizer | None = None
) -> RemovableHandle:
    """Runs `function(owner, step)` before each step of the optimiser, or of any, while the owner lives."""
    hook = uncompiled(Hook)(owner, lambda alive, *step: function(alive, OptimizerStep(*step)))
    return register_optimizer_step_pre_hook(hook) if optimizer is None else optimizer.register_step_pre_hook(hook)


def after_optimizer_steps(
    owner: T, function: Callable[[T, OptimizerStep], None], optimizer: Optimizer | None = None
) -> RemovableHandle:
    """As `before_optimizer_steps`, after each step."""
    hook = uncompiled(Hook)(owner, lambda alive, *step: function(alive, OptimizerStep(*step)))
    return register_optimizer_step_post_hook(hook) if optimizer is None else optimizer.register_step_post_hook(hook)


class OptimizerStep(NamedTuple):
    """A call of an optimiser's `step`, as its hooks get it."""

    optimizer: Optimizer
    args: tuple[Any, ...]  # the first one is the optimiser
    kwargs: Mapping[str, Any]

    @property
    def has_closure(self) -> bool:
        """Whether it computes its gradients itself."""
        return self.kwargs.get("closure", self.args[1] if len(self.args) > 1 else None) is not None

    def concerns(self, parameters: Container[int]) -> bool:
        """Returns whether some of these parameters, by their ids, are the optimiser's."""
        return any(id(p) in parameters for group in self.optimizer.param_groups for p in group["params"])

    @property
    def has_gradients(self) -> bool:
        """Whether any of the optimiser's parameters has a gradient."""
        return any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"])

    @property
    def is_watched(self) -> bool:
        """Whether hooks of others are to see what it steps."""
        hooks = (self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks)
        return any(not isinstance(hook, Hook) for each in hooks for hook in each.values())

    @property
    def is_inner(self) -> bool:
        """Whether it is part of another step of this optimiser, whose class calls the step of the class above."""
        within = (f for f in _frames() if f.f_code is _step_code() and f.f_locals.get("self") is self.optimizer)
        return sum(1 for _ in within) > 1

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler called it, which leaves steps out as it sees fit."""
        by = (f.f_locals["self"] for f in _frames() if f.f_code is torch.amp.GradScaler.step.__code__)
        return any(scaler.is_enabled() for scaler in by)


class OptimizerRounds:
    """Counts the rounds of optimiser steps that a rank makes; ranks that are in step make as many.

    A round begins with the first step behind a synchronised backward, and with each further step of an optimiser that
    has stepped in the round already. Several optimisers share a round, as do the outer and the inner step of a sharded
    one. A step by gradients that hold more than what was synchronised counts as one round more: a rank that closed its
    window of `no_sync` too early or too late makes such steps.
    """

    def __init__(self) -> None:
        self.number = 0
        self.alone = False  # the last round was not by synchronised gradients alone
        self._is_synchronized = False
        # Optimisers have numbers in the order of their first steps, the same on all ranks, as addresses are not.
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._known = 0
        self._stepped: set[int] = set()  # optimisers that made a step in this round

    def synchronized(self) -> None:
        """A backward has synchronised gradients: the next step begins a round."""
        self._is_synchronized = True
        self._stepped.clear()

    def stepped(self, step: OptimizerStep, *, has_local_gradients: bool) -> None:
        """An optimiser is about to step. `has_local_gradients`: a local backward came since the synchronised one."""
        optimizer = self._numbers.get(step.optimizer, self._known)
        if optimizer == self._known:
            self._numbers[step.optimizer] = optimizer
            self._known += 1
        if optimizer in self._stepped and step.is_inner:
            return
        if not self._is_synchronized and not step.has_gradients:  # it changes nothing
            return
        if not self._stepped or optimizer in self._stepped:
            self.number += 1 + (self._is_synchronized and has_local_gradients)
            self.alone, self._is_synchronized = has_local_gradients or not self._is_synchronized, False
            self._stepped.clear()
        self._stepped.add(optimizer)


class Hook:
    """A hook that knows its owner weakly, does nothing in copies of the model, and never enters a pickle."""

    def __init__(self, owner: object, function: Callable[..., Any]) -> None:
        self._owner: weakref.ref[Any] = weakref.ref(owner)
        self._function = function

    def __call__(self, *args: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._function(owner, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_nothing, ()


class AccumulationHook:
    """A hook on the node that accumulates a parameter's gradient.

    It runs behind all hooks on the parameter, whenever these were registered, and so sees what they made of the
    gradient. It is called with nothing, and with a tuple of what autograd accumulates: a tensor, or None for an
    undefined gradient.
    """

    def __init__(self, parameter: nn.Parameter, hook: Callable[[Any, tuple[Tensor | None, ...]], None]) -> None:
        self._parameter, self._hook = weakref.ref(parameter), hook
        self._register(parameter)

    def follow(self) -> None:
        """Moves to the parameter's new node, where torch has made one.

        It does where the element type or the device changes, and by `set_` and `resize_`, as parametrisations are
        registered by.
        """
        parameter = self._parameter()
        if parameter is None or not parameter.requires_grad:
            return
        if torch.autograd.graph.get_gradient_edge(parameter).node is not self._node:
            self.remove()
            self._register(parameter)

    def remove(self) -> None:
        self._handle.remove()

    def _register(self, parameter: nn.Parameter) -> None:
        # A parameter refers to its node weakly: what is registered lives as long as somebody holds the node.
        self._node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._handle = self._node.register_hook(self._hook)


class ModelHook(Hook):
    """A forward hook of the attached model itself."""

    def __call__(self, model: nn.Module, *args: Any) -> None:
        owner = self._owner()
        if owner is not None and owner._model() is model:
            self._function(owner, model, *args[1:])


@cache
def _step_code() -> CodeType:
    """Of what calls the hooks around a step, whatever the optimiser."""
    return Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _frames() -> Iterator[FrameType]:
    """From here outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


@cache
def uncompiled(hook: type[Hook]) -> type[Hook]:
    """The kind of hook as `torch.compile` does not look into it; made late, because it imports the compiler."""
    return type(f"{hook.__name__}Uncompiled", (hook,), {"__call__": torch.compiler.disable(hook.__call__)})


def never_compiled(function: F) -> F:
    """Has `torch.compile` leave alone what autograd calls, and what that calls, where a whole step was given to it.

    Unlike `uncompiled` it costs nothing a call, and needs no compiler; it is for what no compiled code calls itself.
    """
    skip = _eval_frame._FrameAction.SKIP  # here, and further in
    code: CodeType = function.__code__
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))
    return function


def _nothing(*args: Any) -> None:
    """The hook in a copy of an attached model."""


def _get_nothing() -> Callable[..., None]:
    return _nothing


class _EndOfBackward:
    """Calls `finish` when backward ends. Autograd drops it uncalled when backward raises: then the step is given up."""

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
    """Inside backward: runs `finish` at its end; if it ends with an error, abandons the engine's step."""
    # Private, but the only way to run code when backward ends; FSDP2 uses it too.
    torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(finish, engine))


def is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_nested_backward() -> bool:
    """Whether this thread is inside a backward that was started by a backward."""
    from torch.utils.checkpoint import CheckpointFunction

    run, checkpoint = torch.autograd.graph._engine_run_backward.__code__, CheckpointFunction.backward.__code__
    depth = 0
    for frame in _frames():
        if frame.f_code is checkpoint:
            return True
        depth += frame.f_code is run
    return depth > 1


@contextmanager
def outside_of_transforms() -> Iterator[bool]:
    """Runs plain operations, whatever transform of `torch.func` is under way; whether one is."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield False
    else:
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        with temporarily_clear_interpreter_stack():
            yield True


def is_called_by(code: CodeType) -> bool:
    """Whether a function with this code is on this thread's stack."""
    return any(frame.f_code is code for frame in _frames())
