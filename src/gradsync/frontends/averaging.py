"""The frontend for plans of parameters: after each optimiser step parameters are averaged within groups of ranks.

Each rank steps by its own gradients; then parameters are exchanged as the plan says, by `Shuffled` with other ranks in
each exchange (DS-Sync). So the ranks' models differ a little: `consensus` sets them to their mean, for evaluation,
checkpoints, and the end of training.

The exchange goes on while later code runs: a module waits for its own parameters when its forward begins, and for all
averages if gradients are disabled. With a plan of early parameters each bucket is stepped and sent within backward, as
soon as it has gradients. A plan may also name floating-point buffers, which are averaged, too (variances of
normalisation are pooled), and an optimiser's state of a parameter, such as its momentum, by `plan.state_name`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import Group, GroupError, broadcast_tensors
from ..engine.engine import Engine
from ..engine.engine_state import LOADING
from ..engine.peers import said
from ..engine.step_listener import RecordingDone
from ..optim.early_steps import EarlyExchange, EarlySteps, begin_state
from ..plans.plan import OF, Plan, What
from ..tensors.bucket import TensorSpec, trainable_parameters
from ..tensors.stamp import Stamp, Writes
from .mean_model import statistics_of, take_mean
from .model_changes import Changes
from .torch_hooks import (
    REENTRANT,
    AccumulationHook,
    Hook,
    ModelHook,
    OptimizerStep,
    after_optimizer_steps,
    at_end_of_backward,
    before_optimizer_steps,
    is_backward,
    is_checkpointed,
    is_nested_backward,
    outside_of_transforms,
    uncompiled,
)

logger = logging.getLogger(__name__)

CONSENSUS = "consensus"
APART = "apart"  # key of a checkpoint: the number of ranks whose models differ
SECOND_MOMENT = "exp_avg_sq"  # the state of Adam and its kin that must not be negative
CLOSURE = (
    "optimizer.step(closure) computes gradients itself; by a plan of early parameters they were stepped in backward: "
    "call step() without a closure, or let the plan say what='parameter'"
)
SCALED = (
    "a GradScaler decides on each rank by itself to skip a step, and skipped steps must not be averaged with others: "
    "train in bfloat16 or float32 with a plan of parameters"
)
SECOND_BACKWARD = (
    "a second backward began before optimizer.step(), by a plan of early parameters, which were stepped in the first: "
    "let all backwards but the last be within no_sync(), or the plan say what='parameter'"
)


def check_saved(
    engine: Engine, state: object, references: Mapping[str, TensorSpec] | None, *, strict: bool
) -> Mapping[str, Any]:
    """Checks a saved state that this rank is about to load, and returns it; if one is wrong, all raise. Collective.

    Args:
        engine: by which the ranks tell each other.
        state: what `state_dict` returned when it was saved.
        references: shapes and dtypes of the reference tensors, which are subtracted from parameters before these are
            sent; None: gradients are averaged.
        strict: False accepts a state of models that differed between ranks, and goes on from the models that are here.

    Raises:
        TypeError, ValueError, RuntimeError: on all ranks, if it is no state or its reference tensors do not fit; or
            with `strict`, if the saved models differed between ranks, and either the number of ranks has changed or
            gradients are averaged now.
    """
    problem: Exception | None = None
    try:
        _check_saved(engine.group, state, references, strict=strict)
    except Exception as error:  # told to all, then raised
        problem = error
    engine.peers.agree(LOADING, problem)
    assert isinstance(state, Mapping)
    return state


def _check_saved(group: Group, state: object, references: Mapping[str, TensorSpec] | None, *, strict: bool) -> None:
    size, rank = group.size, group.rank
    if not isinstance(state, Mapping):
        raise TypeError(f"expected the dict that state_dict() gave, got {type(state).__name__}")
    before = state.get(APART, 0)
    if type(before) is not int or before < 0:
        raise ValueError(f"the state's {APART!r} must be a number of ranks, got {before!r}")
    if strict and before and not (references is not None and before == size):
        now = f"there are {size}" if references is not None else "gradients are averaged"
        raise ValueError(
            f"this checkpoint is one rank's, of {before} whose models were apart, and now {now}: save inside "
            "gradsync.consensus(model), which fits any number of ranks; load_state_dict(..., strict=False) goes on "
            "from the models that are here"
        )
    if strict and before and state.get("rank") != rank:
        raise ValueError(
            f"this checkpoint is rank {state.get('rank')}'s, of {before} whose models were apart, and here is rank "
            f"{rank}: load each rank's own, model and optimiser too, or save inside gradsync.consensus(model), for all"
        )
    saved = state.get("references", {})
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state's references must be a dict of tensors, got {type(saved).__name__}")
    for name, spec in (references or {}).items():
        if name not in saved:
            continue
        tensor = saved[name]
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            raise ValueError(f"the state's reference of {name!r} must be a dense tensor of {spec}, got {tensor!r:.80}")
        if TensorSpec.of(tensor) != spec:
            raise ValueError(f"the state's reference of {name!r} is {TensorSpec.of(tensor)}, here it is {spec}")
        if not tensor.detach().isfinite().all():
            raise ValueError(f"the state's reference of {name!r} holds values that are not finite")


def tensors_beside_parameters(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """Returns the tensors that the plan averages besides parameters, by name: buffers, and optimiser state.

    A buffer stands for itself; for optimiser state, which may not exist yet, the parameter that it belongs to stands,
    which has its shape and dtype. They are sorted by name, as the plan's digest depends on the order.
    """
    parameters = trainable_parameters(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for bucket in plan.buckets for name in bucket.names):
        owner = name.rpartition(OF)[0]
        if name not in parameters and (tensor := buffers.get(name, parameters.get(owner))) is not None:
            found[name] = tensor
    return dict(sorted(found.items()))


class Averaging:
    """Averages a model's parameters over groups of ranks after each step of their optimiser, by hooks.

    Args:
        model: the model, held weakly.
        engine: exchanges the parameters, as its plan says.
        optimizer: the optimiser of the parameters, held weakly.
        exclude: names or shell patterns of parameters and buffers that are left alone.
    """

    def __init__(self, model: nn.Module, engine: Engine, optimizer: Optimizer, exclude: Sequence[str] = ()) -> None:
        self._model = weakref.ref(model)
        self._exclude = exclude
        self._engine = engine
        self._optimizer = weakref.ref(optimizer)
        self._sync = True
        self.steps = 0  # optimiser steps since attach; must be equal on all ranks
        self.are_apart = False  # whether the ranks' models differ
        is_exact = all(run.scheme.traits.exact for run in engine.bucket_runs)
        self._go_apart = engine.group.size > 1 and not is_exact  # whether models differ after a step with averages
        self._has_stepped = False  # whether the optimiser has stepped since the last training forward
        self._parameters = {n: p for n, p in trainable_parameters(model).items() if n in engine.specs}
        self._changes = Changes(model, self._parameters.values(), exclude)
        buffers = {n: b for n, b in model.named_buffers() if n in engine.specs}
        self._buffers = {  # the dicts, not the buffers: a module may replace those
            name: (module._buffers, key)
            for within, module in model.named_modules()
            for key in module._buffers
            if (name := f"{within}.{key}" if within else key) in buffers
        }
        names = engine.specs.keys() - self._parameters.keys() - self._buffers.keys()
        self._states = {n: (n.rpartition(OF)[0], n.rpartition(OF)[2]) for n in engine.specs if n in names}
        self._states_of: dict[str, list[str]] = {}
        for name, (parameter, _) in self._states.items():
            self._states_of.setdefault(parameter, []).append(name)
        self._means = _means_of_variances(model, buffers)
        self._references = self._taken_references()
        self._sent: dict[str, Stamp | None] = {}  # tensors being averaged, by name; None: these may change meanwhile
        self._writes = Writes()  # to these tensors
        self._is_open = False  # whether a round has begun of which not all tensors are sent
        self._fired: set[str] = set()  # tensors whose module has begun a forward
        self._waits: bool | None = None  # whether `optimizer.step()` waits for averages; None before the first forward
        readers = _readers(model, {id(t): n for n, t in (self._parameters | buffers).items()})
        self._moving = {name for m, names in readers if isinstance(m, nn.RNNBase) for name in names}
        hook, model_hook = uncompiled(Hook), uncompiled(ModelHook)
        landing = hook(self, Averaging._before_states)
        # Before other code's hooks, which may prepare weights for a forward, as spectral_norm's do.
        self._handles = [
            after_optimizer_steps(self, Averaging._after_optimizer_step, optimizer),
            before_optimizer_steps(self, Averaging._before_optimizer_step, optimizer),
            optimizer.register_state_dict_pre_hook(landing),
            optimizer.register_load_state_dict_pre_hook(landing),
            *(m.register_state_dict_pre_hook(landing) for m in model.modules()),
            *(m.register_load_state_dict_pre_hook(landing) for m in model.modules()),
            *(m.register_forward_pre_hook(hook(self, _ForModule(names)), prepend=True) for m, names in readers),
            model.register_forward_pre_hook(model_hook(self, Averaging._before_forward), prepend=True),
        ]
        self.watch: Callable[[Tensor, Tensor], None] | None = None  # gets each parameter, and its average before a copy
        # Called after steps, before the next forward. If it is set, errors of the exchange do not raise: see `give_up`.
        self.recover: Callable[[], None] | None = None
        self.gave_up = False
        self._early: EarlyExchange | None = None
        self._accumulations: list[AccumulationHook] = []
        if engine.plan.what is What.EARLY_PARAMETER:
            self._early = EarlyExchange(EarlySteps(optimizer), engine.plan, self._parameters)
            self._accumulations = [
                AccumulationHook(p, hook(self, _ForGradient(name))) for name, p in self._parameters.items()
            ]

    def remove(self) -> None:
        """Ends the averaging: removes the hooks from model and optimiser, and copies averages under way into the model.

        The ranks' parameters may differ afterwards.
        """
        for handle in (*self._handles, *self._accumulations):
            handle.remove()
        self._handles.clear()
        self._accumulations.clear()
        if self._early is not None:
            self._early.give_up()
        if self._engine.in_step and not self._is_open:
            self.land()
        self._refuse_all_writes()

    def wait(self) -> None:
        """Waits until the exchange under way, if any, has ended and its averages are in the model.

        On an accelerator it also waits for the answer whether somebody wrote to parameters during an exchange.

        Raises:
            RuntimeError: on all ranks, if somebody wrote to what was being averaged.
        """
        self.land()
        self._refuse_all_writes()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Averages nothing after optimiser steps in the `with` block; the next step outside averages parameters."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.inference_mode(False)
    @torch.no_grad()
    def land(self) -> None:
        """Waits for the exchange under way, if there is one, and copies its averages into the model."""
        if self._is_under_way:
            with self._giving_up(), outside_of_transforms():
                if self._engine.in_step:
                    self._engine.finish()
                else:  # it has ended, and an interruption left averages to be copied; or it has failed
                    self._engine.peers.require_working()
                for name in list(self._sent):
                    self._put(name)

    def give_up(self) -> None:
        """Stops averaging for good, as when ranks were lost; averages that are in the model already stay."""
        self._sent.clear()
        self.gave_up = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def consensus(self) -> None:
        """Sets all ranks' parameters to their mean, bit for bit alike, and their buffers as well. Collective.

        Variances are pooled, as if of the samples of all ranks together. Counters and other integer buffers become the
        maximum over ranks.

        Raises:
            GroupError: on all ranks, where some of them make a step instead, have left, or do not come in time.
        """
        self.wait()
        model, parameters = self._model(), list(self._parameters.values())
        timeout_s = self._engine.timeout_s
        with self._engine.at_barrier(CONSENSUS):
            self._engine.peers.call(
                CONSENSUS, lambda group: take_mean(group, model, parameters, timeout_s, self._exclude)
            )
        self._engine.verify(self._parameters)
        self._references = self._taken_references()
        self.are_apart = False

    def state_dict(self) -> dict[str, Any]:
        """Returns what this rank needs to go on: its reference tensors, and whether the ranks' models differ.

        "references" has, by name, the tensors that are subtracted from parameters before these are sent; "apart" is the
        number of ranks if their models differ, else 0.
        """
        self.wait()
        references = {name: reference.clone() for name, reference in self._references.items()}
        return {"references": references, APART: self._engine.group.size if self.are_apart else 0}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The shapes and dtypes of the reference tensors, by name.

        Reference tensors are subtracted from parameters before these are sent.
        """
        return {name: TensorSpec.of(reference) for name, reference in self._references.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned; load the model's own state first. Collective.

        Reference tensors, which are subtracted from parameters before these are sent, are copied from the model where
        `state` lacks them. All ranks then get rank 0's reference tensors.
        """
        self.land()
        references = state.get("references", {})
        self.are_apart = bool(state.get(APART))
        self._references = self._taken_references()
        for name, reference in self._references.items():
            if name in references:
                reference.copy_(references[name])
        timeout_s, taken = self._engine.timeout_s, list(self._references.values())
        if taken:
            self._engine.peers.call("references", lambda group: broadcast_tensors(group, taken, timeout_s))

    # Callbacks of modules and the optimiser.

    def _before_forward(self, model: nn.Module) -> None:
        # Checkpointing repeats a forward in backward; an export runs one with fake parameters, maybe on one rank alone.
        if is_backward() or torch.compiler.is_exporting():
            return
        if not torch.is_grad_enabled():  # evaluation may bypass modules' hooks, as fused layers do
            self.wait()
            return
        if why := self._changes.check(model):
            self._refuse(why)
        if self._accumulations:
            with outside_of_transforms():
                for accumulation in self._accumulations:
                    accumulation.follow()
        if self._waits is None:
            self._waits = False
        elif self._is_under_way:
            self._deliver(self._sent.keys() - self._fired - self._states.keys())
        if self.recover is not None and self._has_stepped and self._sync:
            self.recover()
        self._has_stepped = False

    def _before_forward_of(self, names: tuple[str, ...]) -> None:
        if torch.compiler.is_exporting():
            return
        if self._is_open and is_backward():  # checkpointing repeats a forward of parameters not stepped yet
            return
        self._fired.update(names)
        if not torch.is_grad_enabled() and self._is_under_way and not is_checkpointed():
            self.wait()  # evaluation of a part of the model, which may read what belongs to others
        elif self._sent:
            self._deliver(names)

    def _before_states(self, *_: Any) -> None:
        """Waits for averages under way before the state of model or optimiser is saved or loaded."""
        self.wait()

    def _before_optimizer_step(self, step: OptimizerStep) -> None:
        if step.is_inner:
            return
        if step.is_scaled:
            self._refuse(SCALED)
        early = self._early
        if early is None:
            used = (name for name in self._undelivered() if _has_come(self._parameters[name].grad))
            if not step.has_closure and (name := next(used, None)) is not None:  # else of the last step
                self._found_unseen_use(name)
            self.land()
            return
        if step.has_closure:
            self._refuse(CLOSURE)
        early.steps.put_back()  # after a step that has failed
        if not early.is_open:
            self.land()
            if self._exchanges:  # other ranks may wait for this one, whose backward reached no parameter
                with self._telling_errors():
                    self._begin_early()
                    self._end_of_backward()
        if why := early.steps.check({p: name for name, p in self._parameters.items()}):
            self._refuse(why)
        early.steps.take_out()

    @torch.no_grad()
    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        if step.is_inner:
            return
        self.steps += 1
        self._has_stepped = True
        self.are_apart = self._go_apart or (self._engine.group.size > 1 and not self._exchanges)
        if self._early is not None:
            self._early.steps.end()
            self._early.is_open = False
        elif self._exchanges and self._engine.specs:
            with self._telling_errors():
                self._begin()
                for name in self._parameters:
                    self._send(name)
                self._end()

    @torch.no_grad()
    def _on_gradient(self, name: str) -> None:
        """Runs the optimiser's step for a bucket's parameters, and sends them, when its last gradient is ready."""
        if not self._exchanges:
            return
        early = self._early
        assert early is not None
        if early.task != torch._C._current_graph_task_id():
            if is_nested_backward():
                self._refuse(REENTRANT)
            if early.is_open and not self._is_open:  # else the backward before has failed, which the engine reports
                self._refuse(SECOND_BACKWARD)
            early.task = torch._C._current_graph_task_id()
            at_end_of_backward(self._end_of_backward, self._engine)
            early.unseen = set(self._undelivered())
            self.land()
            if self.gave_up:
                return
            self._begin_early()
        if name in early.unseen:
            self._found_unseen_use(name)
        for complete in early.arrived(name):
            self._step_and_send(complete)

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        assert self._early is not None
        if self.gave_up:
            return
        for left in self._early.left():
            self._step_and_send(left)
        self._end()

    def _step_and_send(self, names: Sequence[str]) -> None:
        assert self._early is not None
        self._early.steps.step(self._parameters[name] for name in names)
        for name in names:
            self._send(name)

    # Implementation.

    @property
    def _exchanges(self) -> bool:
        return self._sync and not self.gave_up

    @property
    def _is_under_way(self) -> bool:
        """Whether an exchange was begun and not ended; in a step of rest, this rank may send nothing in it."""
        return bool(self._sent) or (self._engine.in_step and not self._is_open)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Runs a block; if the exchange fails in it, gives up averaging where `recover` is set, else raises."""
        try:
            yield
        except GroupError:
            if self.recover is None:
                raise
            self.give_up()

    @contextmanager
    def _telling_errors(self) -> Iterator[None]:
        """Abandons the exchange if the block raises, also if the keyboard interrupts it, and tells the other ranks."""
        try:
            yield
        except RecordingDone:  # all ranks end a recording in the same step
            raise
        except BaseException as error:
            why = f"averages of step {self._engine.step}: {said(error)}"
            self._is_open = False
            self._engine.abandon(why)
            self._engine.peers.fail(why)
            raise

    def _undelivered(self) -> list[str]:
        """Returns the names of parameters whose averages are under way and not yet copied into the model."""
        return [name for name in self._sent if name in self._parameters]

    def _found_unseen_use(self, name: str) -> None:
        """Makes `optimizer.step()` wait from now on, after a forward has used a parameter while it was averaged."""
        if not self._waits:
            logger.warning(
                "%r was used while it was averaged, in no forward of the model or of its own module: from now on "
                "optimizer.step() waits for averages",
                name,
            )
            self._waits = True

    def _begin_early(self) -> None:
        assert self._early is not None
        self._early.is_open = True
        self._begin()
        self._early.begin()

    def _begin(self) -> None:
        """Begins an exchange, and loads buffers into it, which change in forwards only (checkpointing repeats them)."""
        self._refuse_written(self._writes.found_before())
        self._engine.begin(rounds=self.steps)
        self._is_open = True
        for name in self._buffers:
            if self._engine.rests(name):
                continue
            buffer = self._buffer(name)
            # In a backward with early parameters, checkpointing repeats forwards, which change running statistics.
            self._sent[name] = Stamp.of(buffer, self._goes_on_behind) if self._early is None else None
            self._engine.load(name, self._outgoing(name, buffer))

    def _send(self, name: str) -> None:
        """Loads a parameter that was stepped, and its optimiser state if that is averaged, into the exchange.

        What this rank averages with nobody in this step is not touched.
        """
        if not self._engine.rests(name):
            parameter = self._parameters[name]
            # RNN modules move their parameters.
            self._sent[name] = Stamp.of(parameter.detach(), self._goes_on_behind, moves=name in self._moving)
            self._engine.load(name, self._outgoing(name, parameter.detach()))
        for state in self._states_of.get(name, ()):
            if self._engine.rests(state):
                continue
            kept = self._state(state)
            self._sent[state] = None
            self._engine.load(state, kept, used=kept is not None)

    def _end(self) -> None:
        """Ends the loading of tensors into the exchange; waits for averages unless it can go on in the background."""
        self._is_open = False
        if not self._goes_on_behind:
            self.land()
        elif self._sent:
            self._engine.go_on()

    @property
    def _goes_on_behind(self) -> bool:
        """Whether the exchange goes on while the user's code runs, until the next forward."""
        return self._waits is False and self._engine.goes_on_alone

    def _buffer(self, name: str) -> Tensor:
        """Returns the module's present buffer; raises if it is gone or has another shape or dtype than at attach."""
        table, key = self._buffers[name]
        buffer: Tensor | None = table.get(key)
        before = self._engine.specs[name]
        if buffer is None or not before.is_of(buffer):
            now = "gone" if buffer is None else TensorSpec.of(buffer)
            self._refuse(
                f"the buffer {name!r} is {now}, it was {before} when gradsync was attached, so it cannot be averaged: "
                "detach() first, then attach again"
            )
        return buffer

    def _outgoing(self, name: str, tensor: Tensor) -> Tensor:
        if (reference := self._references.get(name)) is not None:
            return tensor - reference
        mean = self._means.get(name)
        return tensor if mean is None else tensor + (self._buffer(mean) - self._references[mean]).square()

    def _incoming(self, name: str) -> Tensor:
        result = self._engine.unload(name, None, sparse=False)
        if (reference := self._references.get(name)) is not None:
            return result + reference
        if (mean := self._means.get(name)) is not None:
            if self._engine.in_step:
                self._engine.collect(mean)
            return (result - self._engine.unload(mean, None, sparse=False).square()).clamp_(min=0)
        return result

    @torch.inference_mode(False)
    @torch.no_grad()
    def _deliver(self, names: Sequence[str] | set[str]) -> None:
        """Waits for the averages of these tensors, if under way, and copies them into the model."""
        with self._giving_up(), outside_of_transforms():
            for name in names:
                if name in self._sent:
                    if not self._engine.in_step:  # as in `land`
                        self._engine.peers.require_working()
                    else:
                        self._engine.collect(name)
                    self._put(name)
            if not self._sent and self._engine.in_step:
                self._engine.finish()

    def _put(self, name: str) -> None:
        """Copies a tensor's average into the model; if that raises, the average is still to be copied."""
        sent = self._sent[name]
        if name in self._states:
            if self._engine.used(name):
                self._put_state(name, self._incoming(name))
        elif name in self._buffers:
            buffer = self._buffer(name)
            average = self._unless_written(name, buffer, sent)
            # Masks contain infinities, whose sums with other signs are NaN.
            buffer.copy_(torch.where(buffer.isfinite(), average, buffer))
        else:
            parameter = self._parameters[name]
            average = self._unless_written(name, parameter.detach(), sent)
            if self.watch is not None:
                self.watch(parameter, average)
            parameter.copy_(average)
        self._sent.pop(name, None)

    def _unless_written(self, name: str, tensor: Tensor, sent: Stamp | None) -> Tensor:
        """Returns a tensor's average, but its own elements where somebody has written to it while it was averaged.

        Such a write raises, in the next step where an accelerator's answer has not come yet.
        """
        if sent is None:
            return self._incoming(name)
        written = self._writes.look(name, sent, tensor)
        if isinstance(written, Tensor):
            return torch.where(written.view(()), tensor, self._incoming(name))
        if written:
            self._refuse_written(name)
        return self._incoming(name)

    def _state(self, name: str) -> Tensor | None:
        """Returns the optimiser's state tensor of this name, such as a momentum, or None if there is none yet."""
        parameter, key = self._states[name]
        optimizer = self._optimizer()
        kept = None if optimizer is None else optimizer.state.get(self._parameters[parameter], {}).get(key)
        if kept is not None and (not isinstance(kept, Tensor) or kept.shape != self._parameters[parameter].shape):
            self._refuse(
                f"the plan averages {name!r}, and there the optimiser has {type(kept).__name__}, no tensor of its shape"
            )
        return kept

    def _put_state(self, name: str, mean: Tensor) -> None:
        """Copies an average into the optimiser's state; initialises all state of the parameter if there is none yet."""
        optimizer, parameter = self._optimizer(), self._parameters[self._states[name][0]]
        if optimizer is not None and self._state(name) is None:
            begin_state(optimizer, parameter)
        if (kept := self._state(name)) is not None:
            if self._states[name][1] == SECOND_MOMENT:  # rounding may take a mean below
                mean = mean.clamp(min=0)
            kept.copy_(mean)

    def _taken_references(self) -> dict[str, Tensor]:
        """Returns copies of tensors, to be alike on all ranks; later exchanges send differences from these copies.

        Copied are parameters that lossy schemes send, and running means: the square of a mean's difference is added to
        the running variance that is sent, and should be small beside it.
        """
        rounded = {name for run in self._engine.bucket_runs if run.scheme.traits.lossy for name in run.bucket.names}
        taken = {name: p.detach().clone() for name, p in self._parameters.items() if name in rounded}
        return taken | {name: self._buffer(name).clone() for name in self._means.values()}

    def _refuse_written(self, name: str | None) -> None:
        """Raises for the name of a tensor that was written to while it was averaged; None: there was none."""
        if name is not None:
            self._refuse(
                f"{name!r} was changed between optimizer.step() and the forward after it, while it was averaged with "
                "other ranks: change it before the step, after handle.wait(), or after gradsync.consensus(model)"
            )

    def _refuse_all_writes(self) -> None:
        """Raises if somebody has written to what was averaged, or to a gradient that was used; waits for answers."""
        self._refuse_written(self._writes.found())
        if self._early is not None and (why := self._early.steps.changed_before()):
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        """Abandons the exchange under way, tells the other ranks why, and raises."""
        self._engine.abandon(why)
        self._engine.peers.fail(why)
        raise RuntimeError(why)


class _ForGradient:
    """A callback for the hook on one parameter's gradient: tells `Averaging` that the gradient is ready."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, averaging: Averaging, _: object, produced: tuple[Tensor | None, ...]) -> None:
        if produced[0] is not None:  # an undefined gradient comes as None
            averaging._on_gradient(self._name)


class _ForModule:
    """A callback for one module's forward: makes `Averaging` deliver the averages of the tensors that it reads."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, averaging: Averaging, *_: Any) -> None:
        averaging._before_forward_of(self._names)


def _has_come(gradient: Tensor | None) -> bool:
    """Whether a backward brought the gradient; zeros do not count, as zero_grad(set_to_none=False) leaves them.

    The check makes the host wait for the device, but is rarely needed.
    """
    return gradient is not None and (gradient.layout is not torch.strided or bool(gradient.any()))


def _readers(model: nn.Module, names: Mapping[int, str]) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Returns each module that has, or whose parts have, tensors of `names` (by id), with the names of its own ones.

    A tied tensor belongs to several modules. `nn.MultiheadAttention` reads its parts' tensors itself: they count as its
    own. A root without tensors of its own is left out.
    """
    found = []
    for module in model.modules():
        parts = [module, *module.children()] if isinstance(module, nn.MultiheadAttention) else [module]
        own = dict.fromkeys(names[id(t)] for part in parts for t in _tensors(part, recurse=False) if id(t) in names)
        if own or (module is not model and any(id(tensor) in names for tensor in _tensors(module))):
            found.append((module, tuple(own)))
    return found


def _tensors(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    """Returns the parameters and buffers of a module, of any shape; with `recurse` those of its parts, too."""
    return [*module.parameters(recurse), *module.buffers(recurse)]


def _means_of_variances(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns, for each running variance among the buffers, the running mean beside it, by name."""
    names = {id(buffer): name for name, buffer in buffers.items()}
    pairs = [found for m in model.modules() if (found := statistics_of(m)) is not None]
    return {names[id(v)]: names[id(m)] for m, v in pairs if id(v) in names and id(m) in names}
