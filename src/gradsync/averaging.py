"""The front-end for plans of parameters: after `optimizer.step()` parameters are averaged over this round's groups.

Each rank steps by its own gradients; then parameters travel as the plan says, by `Shuffled` with others in each round
(DS-Sync). So the ranks' models differ a little: `consensus` makes them one, for evaluation, checkpoints, and the end.

The exchange goes on behind what comes after the step: a module waits for its own parameters when its forward begins.
By a plan of early parameters it begins in backward, bucket by bucket, as each is stepped as soon as it has gradients.
A plan may name more than parameters: buffers of floats, which are averaged alike (variances of normalisation are
pooled), and what the optimiser keeps of a parameter, as its momentum, by `plan.state_name`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from .bucket import trainable_parameters
from .comm import Group
from .engine import Engine
from .hooks import (
    Hook,
    ModelHook,
    OptimizerStep,
    after_optimizer_steps,
    at_end_of_backward,
    before_optimizer_steps,
    uncompiled,
)
from .plan import OF, Plan, What
from .stepping import EarlySteps

MESSAGE_BYTES = 25 << 20  # of a consensus: large enough for line rate, small beside the model
CLOSURE = (
    "optimizer.step(closure) computes gradients itself; by a plan of early parameters they were stepped in backward: "
    "call step() without a closure, or let the plan say what='parameter'"
)


def companions(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """What the plan names beside parameters: buffers, and of states of the optimiser what has their shape."""
    parameters = trainable_parameters(model)
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for bucket in plan.buckets for name in bucket.names):
        owner = name.rpartition(OF)[0]
        if name not in parameters and (tensor := buffers.get(name, parameters.get(owner))) is not None:
            found[name] = tensor
    return found


class Averaging:
    """Runs an engine on parameters after each step of their optimiser."""

    def __init__(self, model: nn.Module, engine: Engine, optimizer: Optimizer) -> None:
        self._model = weakref.ref(model)
        self._engine = engine
        self._optimizer = weakref.ref(optimizer)
        self._sync = True
        self._rounds = 0  # ranks that count differently are out of step
        self._parameters = {n: p for n, p in trainable_parameters(model).items() if n in engine.specs}
        self._buffers = {n: b for n, b in model.named_buffers() if n in engine.specs}
        names = engine.specs.keys() - self._parameters.keys() - self._buffers.keys()
        self._states = {n: (n.rpartition(OF)[0], n.rpartition(OF)[2]) for n in engine.specs if n in names}
        self._states_of: dict[str, list[str]] = {}
        for name, (parameter, _) in self._states.items():
            self._states_of.setdefault(parameter, []).append(name)
        self._means = _means_of_variances(model, self._buffers)
        self._references = self._taken_references()
        self._versions: dict[str, int] = {}  # of what is under way, by name, as it was sent
        self._fired: set[str] = set()  # names whose module's forward was seen to begin
        self._waits: bool | None = None  # whether exchanges end in `optimizer.step()`; None before the first forward
        owners = _owners(model, {id(t): n for n, t in (self._parameters | self._buffers).items()})
        hook, of_module = uncompiled(ModelHook), uncompiled(Hook)
        self._handles = [
            after_optimizer_steps(self, Averaging._after_optimizer_step, optimizer),
            before_optimizer_steps(self, Averaging._before_optimizer_step, optimizer),
            model.register_forward_pre_hook(hook(self, Averaging._before_forward)),
            model.register_state_dict_pre_hook(hook(self, Averaging._before_state_dict)),
            *(m.register_forward_pre_hook(of_module(self, _ForModule(names))) for m, names in owners),
        ]
        self._early: _EarlyExchange | None = None
        if engine.plan.what is What.EARLY_PARAMETER:
            self._early = _EarlyExchange(EarlySteps(optimizer), engine.plan, self._parameters)
            self._handles += [
                p.register_post_accumulate_grad_hook(of_module(self, _ForGradient(name)))
                for name, p in self._parameters.items()
            ]

    def remove(self) -> None:
        """Takes the hooks off; parameters stay as they are, and differ between the ranks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._engine.in_step and self._versions:
            self.land()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps inside are each rank's own; the next one outside averages what came of them."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @torch.no_grad()
    def land(self) -> None:
        """Waits for the end of the exchange under way, if there is one."""
        if self._versions:
            self._engine.finish()
            for name in list(self._versions):
                self._put(name)

    @torch.no_grad()
    def consensus(self) -> None:
        """All ranks have the mean of their parameters, the same bits, and of what normalisation saw. Collective.

        Variances are pooled: of the samples of all ranks together. Counters, and other buffers of whole numbers, are
        the largest of any rank's.
        """
        self.land()
        model = self._model()
        statistics = [] if model is None else [found for m in model.modules() if (found := _statistics(m)) is not None]
        variances = {id(variance) for _, variance in statistics}
        buffers = [] if model is None else [buffer for buffer in model.buffers() if id(buffer) not in variances]
        averaged = [*self._parameters.values(), *(buffer for buffer in buffers if buffer.is_floating_point())]
        counters = [buffer for buffer in buffers if not buffer.is_floating_point() and not buffer.is_complex()]
        squares = [variance.double() + mean.double().square() for mean, variance in statistics]
        timeout_s = self._engine.timeout_s

        def agree(group: Group) -> None:
            _average(group, averaged, timeout_s)
            _average(group, squares, timeout_s)
            _take_largest(group, counters, timeout_s)

        self._engine.call("consensus", agree)
        for (mean, variance), square in zip(statistics, squares, strict=True):
            variance.copy_(square - mean.double().square())
        self._references = self._taken_references()

    def state_dict(self) -> dict[str, Tensor]:
        """What rounded differences are taken from, by parameter."""
        self.land()
        return {name: reference.clone() for name, reference in self._references.items()}

    def load_state_dict(self, references: Mapping[str, Tensor]) -> None:
        """Parameters for which there is none have the one of now: load the model first."""
        self.land()
        self._references = self._taken_references()
        for name, reference in self._references.items():
            if name in references:
                reference.copy_(references[name])

    # What modules and the optimiser call.

    def _before_forward(self, model: nn.Module) -> None:
        if self._waits is None and torch.is_grad_enabled():
            self._waits = False
        elif self._versions:
            self._deliver(self._versions.keys() - self._fired - self._states.keys())

    def _before_forward_of(self, names: tuple[str, ...]) -> None:
        self._fired.update(names)
        if self._versions:
            self._deliver(names)

    def _before_state_dict(self, *_: Any) -> None:
        self.land()

    def _before_optimizer_step(self, step: OptimizerStep) -> None:
        if self._early is None:
            self.land()
            return
        names = {p: name for name, p in self._parameters.items()}
        why = CLOSURE if step.has_closure else self._early.steps.check(names)
        if why:
            self._engine.fail(why)
            raise RuntimeError(why)
        self._early.put_back = self._early.steps.take_out()

    @torch.no_grad()
    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        if self._early is not None:
            self._early.put_back()
            self._early.is_open = False
        elif self._sync:
            self._begin()
            for name in self._parameters:
                self._send(name)
            self._end()

    @torch.no_grad()
    def _on_gradient(self, name: str) -> None:
        """Of a plan of early parameters: the bucket is stepped and sent when its last gradient has come."""
        if not self._sync:
            return
        early = self._early
        assert early is not None
        if early.task != torch._C._current_graph_task_id():
            if early.is_open:
                why = (
                    "a second backward began before optimizer.step(), by a plan of early parameters, which were "
                    "stepped in the first: let all backwards but the last be within no_sync(), or the plan say "
                    "what='parameter'"
                )
                self._engine.fail(why)
                raise RuntimeError(why)
            early.task = torch._C._current_graph_task_id()
            early.is_open = True
            self.land()
            self._begin()
            early.begin()
            at_end_of_backward(self._end_of_backward, self._engine)
        for complete in early.arrived(name):
            self._step_and_send(complete)

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        assert self._early is not None
        for left in self._early.left():
            self._step_and_send(left)
        self._end()

    def _step_and_send(self, names: Sequence[str]) -> None:
        assert self._early is not None
        self._early.steps.step(self._parameters[name] for name in names)
        for name in names:
            self._send(name)

    # Below here: how.

    def _begin(self) -> None:
        """A round; buffers are what they will be until the next forward."""
        self._engine.begin(rounds=self._rounds)
        self._rounds += 1
        for name, buffer in self._buffers.items():
            self._versions[name] = buffer._version
            self._engine.load(name, self._outgoing(name, buffer))

    def _send(self, name: str) -> None:
        """A parameter that was stepped, and what the optimiser keeps of it."""
        parameter = self._parameters[name]
        self._versions[name] = parameter._version
        self._engine.load(name, self._outgoing(name, parameter.detach()))
        for state in self._states_of.get(name, ()):
            kept = self._state(state)
            self._versions[state] = 0 if kept is None else kept._version
            self._engine.load(state, kept, used=kept is not None)

    def _end(self) -> None:
        """All is sent."""
        if self._waits is not False or not self._engine.goes_on_alone:
            self.land()
        else:
            self._engine.go_on()

    def _outgoing(self, name: str, tensor: Tensor) -> Tensor:
        if (reference := self._references.get(name)) is not None:
            return tensor - reference
        mean = self._means.get(name)
        return tensor if mean is None else tensor + self._buffers[mean].square()

    def _incoming(self, name: str) -> Tensor:
        result = self._engine.unload(name, None, sparse=False)
        if (reference := self._references.get(name)) is not None:
            return result + reference
        if (mean := self._means.get(name)) is not None:
            if self._engine.in_step:
                self._engine.collect(mean)
            return result - self._engine.unload(mean, None, sparse=False).square()
        return result

    @torch.no_grad()
    def _deliver(self, names: Sequence[str] | set[str]) -> None:
        """Waits for these, as far as they are under way, and puts the averages in their places."""
        for name in names:
            if name in self._versions:
                self._engine.collect(name)
                self._put(name)

    def _put(self, name: str) -> None:
        version = self._versions.pop(name)
        if name in self._states:
            if self._engine.used(name):
                self._put_state(name, self._incoming(name))
        else:
            tensor = self._parameters[name] if name in self._parameters else self._buffers[name]
            if tensor._version != version and name in self._parameters:
                why = (
                    f"{name!r} was changed between optimizer.step() and the forward after it, while it was averaged "
                    "with other ranks: change parameters before the step, or after gradsync.consensus(model)"
                )
                self._engine.fail(why)
                raise RuntimeError(why)
            tensor.copy_(self._incoming(name))
        if not self._versions and self._engine.in_step:
            self._engine.finish()

    def _state(self, name: str) -> Tensor | None:
        """The optimiser's, None where it has none yet."""
        parameter, key = self._states[name]
        optimizer = self._optimizer()
        kept = None if optimizer is None else optimizer.state.get(self._parameters[parameter], {}).get(key)
        if kept is not None and (not isinstance(kept, Tensor) or kept.shape != self._parameters[parameter].shape):
            why = (
                f"the plan averages {name!r}, and there the optimiser has {type(kept).__name__}, no tensor of its shape"
            )
            self._engine.fail(why)
            raise ValueError(why)
        return kept

    def _put_state(self, name: str, mean: Tensor) -> None:
        parameter, key = self._states[name]
        if (kept := self._state(name)) is not None:
            kept.copy_(mean)
        elif (optimizer := self._optimizer()) is not None:
            optimizer.state[self._parameters[parameter]][key] = mean.clone()

    def _taken_references(self) -> dict[str, Tensor]:
        """Of parameters that travel rounded: from where their differences are counted, the same bits on all ranks."""
        rounded = {name for lane in self._engine.lanes if lane.scheme.is_lossy for name in lane.bucket.names}
        return {name: p.detach().clone() for name, p in self._parameters.items() if name in rounded}


class _EarlyExchange:
    """A round of a plan of early parameters."""

    def __init__(self, steps: EarlySteps, plan: Plan, parameters: Mapping[str, Tensor]) -> None:
        self.steps = steps
        self.task = -1  # autograd's number of the backward that began it
        self.is_open = False  # until the optimiser's own step
        self.put_back: Callable[[], None] = lambda: None
        self._together: list[list[str]] = []  # what is stepped at once: of one bucket, and each in one only
        known: set[str] = set()
        for bucket in plan.buckets:
            names = [n for n in dict.fromkeys(bucket.names) if n in parameters and n not in known]
            known.update(names)
            if names:
                self._together.append(names)
        self._place = {name: place for place, names in enumerate(self._together) for name in names}
        self._waiting: list[set[str]] = []

    def begin(self) -> None:
        self._waiting = [set(names) for names in self._together]

    def arrived(self, name: str) -> list[list[str]]:
        """What is complete by this gradient."""
        place = self._place[name]
        self._waiting[place].discard(name)
        return [] if self._waiting[place] else [self._together[place]]

    def left(self) -> list[list[str]]:
        """What did not become complete in this backward."""
        return [names for names, waiting in zip(self._together, self._waiting, strict=True) if waiting]


class _ForGradient:
    """What the hook of one parameter calls."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, averaging: Averaging, *_: Any) -> None:
        averaging._on_gradient(self._name)


class _ForModule:
    """What the hook of one module calls."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def __call__(self, averaging: Averaging, *_: Any) -> None:
        averaging._before_forward_of(self._names)


def _owners(model: nn.Module, names: Mapping[int, str]) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Modules with these tensors, by their id; tied ones belong to each that has them."""
    found = []
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        own = tuple(names[id(tensor)] for tensor in tensors if id(tensor) in names)
        if own:
            found.append((module, own))
    return found


def _means_of_variances(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """Of running variances among the buffers, by name: the running mean, if it is among them too."""
    names = {id(buffer): name for name, buffer in buffers.items()}
    pairs = [found for m in model.modules() if (found := _statistics(m)) is not None]
    return {names[id(v)]: names[id(m)] for m, v in pairs if id(v) in names and id(m) in names}


def _statistics(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Running means and variances, as normalisation over batches keeps them."""
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    return (mean, variance) if isinstance(mean, Tensor) and isinstance(variance, Tensor) else None


def _average(group: Group, tensors: Sequence[Tensor], timeout_s: float) -> None:
    """In few messages, in float32 at least."""
    wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in tensors]
    for dtype in dict.fromkeys(wide):
        alike = [tensor for tensor, kind in zip(tensors, wide, strict=True) if kind is dtype]
        for piece in _pieces(alike, dtype.itemsize):
            message = _flatten_dense_tensors([tensor.to(dtype) for tensor in piece]).div_(group.size)
            group.all_reduce(message).wait(timeout_s)
            torch._foreach_copy_(piece, list(_unflatten_dense_tensors(message, piece)))


def _take_largest(group: Group, tensors: Sequence[Tensor], timeout_s: float) -> None:
    if not tensors:
        return
    mine = _flatten_dense_tensors([tensor.to(torch.int64) for tensor in tensors])
    largest = torch.stack(list(group.all_gather(mine).wait(timeout_s))).amax(dim=0)
    torch._foreach_copy_(list(tensors), list(_unflatten_dense_tensors(largest, tensors)))


def _pieces(tensors: Sequence[Tensor], itemsize: int) -> Iterator[list[Tensor]]:
    """In order, of about so many bytes each."""
    piece: list[Tensor] = []
    filled_bytes = 0
    for tensor in tensors:
        piece.append(tensor)
        filled_bytes += tensor.numel() * itemsize
        if filled_bytes >= MESSAGE_BYTES:
            yield piece
            piece, filled_bytes = [], 0
    if piece:
        yield piece
