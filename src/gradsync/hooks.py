"""Our own autograd front-end: `loss.backward()` returns with synchronised gradients.

Every parameter's gradient-accumulation hook tells the engine that the gradient is ready; a callback that autograd runs
at the end of backward waits for the rest and puts the results into `param.grad`. Semantics are DDP's with
`find_unused_parameters=True`: a gradient that no rank produced is left as it is, one that only this rank lacks counts
as zero here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .bucket import Layout, TensorSpec, matches
from .comm import Group
from .engine import Engine
from .freezing import Freezing
from .lane import Lane
from .optim import OneMomentum
from .plan import Plan
from .recording import active

T = TypeVar("T")

MOST_LENT_BYTES = 64 << 10  # autograd adding into zeroed memory saves a call; for more, copying passes over less memory
BROADCAST_BYTES = 25 << 20  # a message of initial parameters: large enough for line rate, small beside the model

REENTRANT = (
    "gradients became ready inside a nested backward (re-entrant activation checkpointing?), whose end cannot be told "
    "from the end of the outer one; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Additions:
    """Finds parameters that came to a model after `attach`: each rank would keep its own gradients of them."""

    def __init__(self, model: nn.Module, exclude: Sequence[str]) -> None:
        self._exclude = exclude
        self._known = WeakIdKeyDictionary({parameter: True for parameter in model.parameters()})
        self._remember(model)

    def check(self, model: nn.Module) -> str:
        """What is wrong, or nothing; costs next to nothing while no module has changed."""
        if list(map(len, self._tables)) == self._lengths and all(_children(m()) == ids for m, ids in self._parents):
            return ""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter not in self._known and not matches(name, self._exclude):
                return (
                    f"the parameter {name!r} came to the model after gradsync was attached, and nobody synchronises "
                    "it; detach() first, then attach again, or let exclude name it"
                )
        self._remember(model)
        return ""

    def _remember(self, model: nn.Module) -> None:
        """No module, which would live on, and with it what is attached to it."""
        modules = list(model.modules())
        self._tables: list[Sized] = [m._parameters for m in modules]
        self._tables += [m._modules for m in modules if not m._modules]
        self._lengths = list(map(len, self._tables))
        self._parents = [(weakref.ref(m), _children(m)) for m in modules if m._modules]


class Changes:
    """Finds what came to a model, or went from it, after `attach`."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], exclude: Sequence[str]) -> None:
        self._additions = Additions(model, exclude)
        ours = {id(p) for p in parameters}
        self._places = [
            (module._parameters, key, p)
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in ours
        ]

    def check(self, model: nn.Module) -> str:
        """What is wrong, or nothing."""
        if any(parameters.get(key) is not p for parameters, key, p in self._places):
            return (
                "a parameter of the model was replaced after gradsync was attached; detach() first, then attach again"
            )
        return self._additions.check(model)


def _children(module: nn.Module | None) -> list[int]:
    return [] if module is None else list(map(id, module._modules.values()))


class AutogradHooks:
    """Ties an engine to the parameters of one model, until `remove`."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        engine: Engine,
        *,
        optimizer: Optimizer | None = None,
        broadcast_buffers: bool = True,
        exclude: Sequence[str] = (),
    ) -> None:
        self._model = weakref.ref(model)
        self._changes = Changes(model, parameters.values(), exclude)
        self._parameters = dict(parameters)
        self._engine = engine
        # The dicts, not the buffers: a module may replace those. Walking the modules would cost more than a small step.
        synchronised = model.named_modules() if broadcast_buffers and engine.group.size > 1 else ()
        self._buffers = [(name, module._buffers) for name, module in synchronised]
        self._buffer_specs = {name: TensorSpec.of(buffer) for name, buffer in self._present_buffers().items()}
        self._sync = True
        self._armed: bool | None = None  # the last forward's wish to synchronise; None once it was fulfilled
        self._synchronizations = 0  # since attach
        self._used: dict[int, int] = {}  # optimiser -> that when it stepped last
        self._rounds = 0  # of backward and optimiser step since attach; ranks that count differently must not average
        self._round_counted = True  # a round is a synchronization and a step after it
        self._momentum = OneMomentum(self._parameters)
        self._freezing = Freezing(self._parameters, lambda: engine.arrivals)
        self._versions: dict[str, int] | None = None  # of the gradients, when they must not be changed before the step
        self._lendable: set[str] = set()  # whose gradients autograd makes dense, and small: it may add into their homes
        self._task = -1  # autograd's number of the backward under way
        self._lent: set[str] = set()  # parameters whose grad was None before the step
        self._stale: dict[str, Tensor] = {}  # gradients in their homes that must survive if nobody renews them
        self._accumulated: set[str] = set()  # parameters that local backwards used since the last synchronised one
        self._settled: set[str] = set()  # parameters whose grad is their home already
        self._plan: Plan | None = None  # the plan by which gradients live where they do
        self._homes: dict[str, Tensor] = {}
        # Parameters in buckets of tables: a dense gradient stays where autograd made it.
        self._staying: set[str] = set()
        self._tenants: list[tuple[Lane, list[tuple[str, nn.Parameter, Tensor]], _ToldTogether]] = []
        self._told_together: dict[str, _ToldTogether] = {}  # of gradients that need nothing but to be told of
        self._beside: dict[str, list[_ToldTogether]] = {}  # of each parameter's buckets
        self._due: Sized = ()  # work of schemes that waits for the next gradient to be told of
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_GradientHook(self, name))
            for name, parameter in self._parameters.items()
        ]
        model_hook = uncompiled(ModelHook)
        self._handles.append(model.register_forward_pre_hook(model_hook(self, AutogradHooks._before_forward)))
        self._handles.append(before_optimizer_steps(self, AutogradHooks._before_optimizer_step, optimizer))
        self._handles.append(after_optimizer_steps(self, AutogradHooks._after_optimizer_step, optimizer))

    def remove(self) -> None:
        """Takes the hooks off; gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._freezing.give_up()
        self._homes, self._tenants, self._due = {}, [], ()  # what `attach` returned may live on, their memory need not

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside accumulate locally, as with DDP; the next one outside synchronises the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync, self._armed = before, None

    def rest(self) -> None:
        """Until `go_on`: gradients are each rank's own, whatever it is told to synchronise."""
        self._sync, self._armed = False, None

    def go_on(self) -> None:
        """From the next forward on; what gradients have gathered meanwhile was used."""
        self._sync, self._armed = True, None
        self._accumulated.clear()

    # What autograd and the model call.

    def _before_forward(self, model: nn.Module) -> None:
        if not torch.is_grad_enabled() or is_backward():  # inside backward, checkpointing repeats a forward
            return
        if why := self._changes.check(model):
            self._engine.fail(why)
            raise RuntimeError(why)
        if (witness := active()) is not None:
            witness.forward_began(self._engine)
        self._armed = self._sync
        if self._sync and model.training:
            self._broadcast_buffers()

    def _present_buffers(self) -> dict[str, Tensor]:
        """By name, each once."""
        found = {
            id(buffer): (f"{module}.{key}" if module else key, buffer)
            for module, buffers in self._buffers
            if buffers
            for key, buffer in buffers.items()
            if buffer is not None
        }
        return dict(found.values())

    def _broadcast_buffers(self) -> None:
        buffers = self._present_buffers()
        if not buffers:
            return
        for name, buffer in buffers.items():
            before = self._buffer_specs.get(name)
            if before is None or not before.is_of(buffer):
                why = (
                    f"the buffer {name!r} is {TensorSpec.of(buffer)}, it was {before or 'not there'} when gradsync was "
                    "attached, so rank 0's cannot be given to all; use broadcast_buffers=False"
                )
                self._engine.fail(why)
                raise ValueError(why)
        timeout_s, tensors = self._engine.timeout_s, list(buffers.values())
        self._engine.call("broadcast of buffers", lambda group: broadcast_tensors(group, tensors, timeout_s))

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        # Between kernels of backward the caches hold nothing of ours: what is done here for every gradient costs five
        # times what it does in a loop. So little is.
        if torch._C._current_graph_task_id() == self._task:
            together = self._told_together.get(name)
            if together is not None and not self._due:
                together.ready.append(name)
                if together.complete:
                    self._tell(together)
                return
            if self._engine.in_step:
                self._take(name, parameter)
                for together in self._beside[name]:
                    if together.complete:
                        self._tell(together)
                return
        if not self._syncing:
            self._accumulated.add(name)
            return
        self._begin_in_backward()
        self._on_gradient(name, parameter)

    def _tell(self, together: _ToldTogether) -> None:
        ready, together.ready = together.ready, []
        for name in ready:
            self._take(name, self._parameters[name])

    def _take(self, name: str, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(
                f"the gradient of {name!r} was taken away by another hook before it was exchanged (an optimiser step "
                "inside backward?); let the optimiser step when backward has ended"
            )
        if name in self._staying and gradient.layout is torch.strided and _is_part(gradient):
            parameter.grad = gradient = gradient.detach().clone()  # of an earlier plan's bucket, which can go now
        # create_graph=True: the values are averaged, their graph is not (as with DDP)
        self._engine.load(name, gradient.detach() if gradient.requires_grad else gradient)
        home = self._homes.get(name)
        if gradient is not home and gradient.layout is torch.strided and name not in self._staying:
            if gradient.nbytes <= MOST_LENT_BYTES:
                self._lendable.add(name)
            # Of a parameter that the plan cut it stays, to be overwritten, if it is what autograd made and no more.
            if home is not None or gradient.requires_grad or _is_part(gradient):
                parameter.grad = gradient = home
        if gradient is home and home is not None:
            self._settled.add(name)

    def _before_optimizer_step(self, step: OptimizerStep) -> None:
        """The other ranks may wait for a rank whose backward reached no parameter."""
        optimizer = step.optimizer
        ours = {id(p) for p in self._parameters.values()}
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        # An optimiser whose gradients are newer than its last step owes nothing, whatever forwards came after them.
        nothing_new = self._used.get(id(optimizer), 0) == self._synchronizations
        if self._armed and nothing_new and not self._engine.in_step:
            self._begin(late=True)
            self._end()
        elif self._versions is not None:
            self._require_untouched(self._versions)
        self._versions = None
        try:
            self._momentum.check(self._engine.plan, optimizer)
            self._freezing.before(optimizer, has_closure=step.has_closure, is_watched=step.is_watched)
        except ValueError as error:
            self._engine.fail(str(error))  # settings may differ by rank: the others would wait for this one
            raise
        self._used[id(optimizer)] = self._synchronizations
        if not self._round_counted:  # several optimisers may step, and a sharded one in an outer and an inner step
            self._rounds += 1
            self._round_counted = True

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        self._freezing.after(step.optimizer)

    def _require_untouched(self, versions: Mapping[str, int]) -> None:
        """A rank that came late has not clipped or unscaled, so no rank may have."""
        changed = [n for n, p in self._parameters.items() if p.grad is not None and p.grad._version != versions.get(n)]
        if changed:
            why = (
                "on some rank backward reached no parameter of the model, so that it took part at optimizer.step() "
                f"only; but gradients were changed before the step (clipping, unscale_), as that of {changed[0]!r}, "
                "which that rank cannot have done: let every rank's loss use the output, for example + 0 * output.sum()"
            )
            self._engine.fail(why)
            raise RuntimeError(why)

    @property
    def _syncing(self) -> bool:
        return self._sync if self._armed is None else self._armed

    def _begin_in_backward(self) -> None:
        if is_nested_backward():
            raise RuntimeError(REENTRANT)
        self._task = torch._C._current_graph_task_id()
        self._begin()
        at_end_of_backward(self._end, self._engine)

    @torch.no_grad()
    def _begin(self, *, late: bool = False) -> None:
        engine = self._engine
        if engine.replanning:
            self._homes, self._tenants = {}, []
        engine.begin(late=late, rounds=self._rounds)
        if self._plan is not engine.plan:
            self._move_in()
        self._lent.clear()
        self._stale.clear()
        self._settled.clear()
        self._told_together.clear()
        self._due = engine.due
        one_by_one = engine.one_by_one
        for lane, tenants, together in self._tenants:
            together.begin(lane.waiting)
            lend = [t for t in tenants if t[0] in self._lendable and t[1].grad is None and t[1].requires_grad]
            if len(lend) == len(tenants) == len(lane.bucket.segments):
                lane.gradients.clear()
            elif lend:
                torch._foreach_zero_([home for _, _, home in lend])
            for name, parameter, home in lend:
                parameter.grad = home
                self._lent.add(name)
            if not one_by_one:
                self._told_together |= dict.fromkeys((name for name, _, _ in lend), together)
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:  # frozen since attach: nothing will come
                self._load_leftover(name)

    def _move_in(self) -> None:
        """Under a new plan: which gradients live in which bucket's memory."""
        engine = self._engine
        self._plan = engine.plan
        self._homes = {}
        self._staying = set()
        self._tenants = []
        self._beside = {name: [] for name in self._parameters}
        for lane in engine.lanes:
            homes = ((name, self._parameters[name], lane.gradients.home(name)) for name in lane.bucket.names)
            tenants = [(name, parameter, home) for name, parameter, home in homes if home is not None]
            self._homes |= {name: home for name, _, home in tenants}
            if lane.bucket.layout is Layout.ROWS:
                self._staying.update(lane.bucket.names)
            together = _ToldTogether()
            for name in dict.fromkeys(lane.bucket.names):
                self._beside[name].append(together)
            self._tenants.append((lane, tenants, together))

    def _load_leftover(self, name: str) -> None:
        """This backward brings the parameter no gradient; what local ones accumulated counts nevertheless."""
        gradient = self._parameters[name].grad
        used = gradient is not None and name in self._accumulated
        if not used and gradient is not None and gradient is self._homes.get(name) and name not in self._lent:
            self._stale[name] = gradient.clone()
        self._engine.load(name, gradient, used=used)

    @torch.no_grad()
    def _end(self) -> None:
        engine = self._engine
        self._armed = None
        self._synchronizations += 1
        self._round_counted = False
        if engine.missing():
            for _, _, together in self._tenants:
                self._tell(together)
            for name in engine.missing():
                self._load_leftover(name)
        engine.finish()
        self._accumulated.clear()
        if len(self._settled) < len(self._parameters):
            for name, parameter in self._parameters.items():
                if name not in self._settled:
                    self._deliver(name, parameter)
        if engine.late:
            self._versions = {n: p.grad._version for n, p in self._parameters.items() if p.grad is not None}

    def _deliver(self, name: str, parameter: nn.Parameter) -> None:
        engine = self._engine
        home = self._homes.get(name)
        if not engine.used(name):
            if name in self._lent:
                parameter.grad = None
            elif name in self._stale and home is not None:
                home.copy_(self._stale[name])
            return
        sparse = engine.layout_is_sparse(name)
        if parameter.grad is None or sparse or parameter.grad is not home:
            parameter.grad = engine.unload(name, parameter.grad, sparse=sparse)


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


def broadcast_tensors(group: Group, tensors: list[Tensor], timeout_s: float) -> None:
    """Overwrites the tensors with member 0's, in few messages; same shapes everywhere."""
    if group.size == 1:
        return
    piece: list[Tensor] = []
    filled_bytes = 0
    for tensor in tensors:
        piece.append(tensor)
        filled_bytes += tensor.numel() * tensor.element_size()
        if filled_bytes >= BROADCAST_BYTES:
            _broadcast_piece(group, piece, timeout_s)
            piece, filled_bytes = [], 0
    if piece:
        _broadcast_piece(group, piece, timeout_s)


def _broadcast_piece(group: Group, tensors: list[Tensor], timeout_s: float) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    with torch.no_grad():
        # Bytes, so that all element types share the message: wide ones first, as each must start at a multiple of its
        # size.
        kinds = sorted(by_dtype.items(), key=lambda kind: -kind[0].itemsize)
        message = torch.cat([_flatten_dense_tensors(alike).view(torch.uint8) for _, alike in kinds])
        group.broadcast(message).wait(timeout_s)
        if group.rank == 0:
            return
        lengths = [dtype.itemsize * sum(tensor.numel() for tensor in alike) for dtype, alike in kinds]
        for (dtype, alike), part in zip(kinds, message.split(lengths), strict=True):
            torch._foreach_copy_(alike, _unflatten_dense_tensors(part.view(dtype), alike))


class _ToldTogether:
    """Gradients of one bucket that live in it already: the engine is told of them when no other is missing."""

    __slots__ = ("ready", "waiting")

    ready: list[str]
    waiting: Set[str]  # the parameters that the bucket waits for, these included

    def begin(self, waiting: Set[str]) -> None:
        """A new step."""
        self.ready, self.waiting = [], waiting

    @property
    def complete(self) -> bool:
        return len(self.ready) == len(self.waiting)


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


class _GradientHook(Hook):
    """The hook of one parameter; runs for every gradient, so nothing lies between it and its owner."""

    def __init__(self, owner: AutogradHooks, name: str) -> None:
        super().__init__(owner, AutogradHooks._on_gradient)
        self._name = name

    def __call__(self, parameter: nn.Parameter) -> None:
        owner = self._owner()
        if owner is not None:
            owner._on_gradient(self._name, parameter)


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


def _is_part(tensor: Tensor) -> bool:
    """Whether it keeps more memory than its own."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def _nothing(*args: Any) -> None:
    """The hook in a copy of an attached model."""


def _get_nothing() -> Callable[..., None]:
    return _nothing


class _EndOfBackward:
    """Calls `finish` when backward ends. Autograd drops it uncalled when backward raises: then the step is given up."""

    def __init__(self, finish: Callable[[], None], engine: Engine) -> None:
        self._finish = finish
        self._engine: Engine | None = engine

    def __call__(self) -> None:
        self._engine = None
        self._finish()

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
