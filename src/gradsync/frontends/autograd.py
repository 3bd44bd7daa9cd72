"""The autograd frontend: `loss.backward()` returns with synchronised gradients.

A hook on every parameter's accumulation node, which runs after all hooks of users on the parameter, tells the engine
that the gradient is ready; a callback that autograd runs at the end of backward waits for the exchange and puts results
into `param.grad`. Semantics are DDP's with `find_unused_parameters=True`: a gradient that no rank produced stays as it
is, and one that only this rank lacks counts as zero.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..engine.engine import Engine
from ..engine.step_listener import active
from ..optim.freezing import Freezing
from ..optim.momentum import MomentumCheck, without_means
from ..plans.plan import Plan
from ..tensors.arrivals import Arrivals
from ..tensors.bucket import Layout, matches
from ..tensors.gradient_views import GradientViews
from ..tensors.stamp import Stamp
from .buffers import Buffers
from .model_changes import Changes
from .torch_hooks import (
    REENTRANT,
    AccumulationHook,
    Hook,
    ModelHook,
    OptimizerRounds,
    OptimizerStep,
    StepArguments,
    after_optimizer_steps,
    at_end_of_backward,
    before_optimizer_steps,
    is_backward,
    is_inside_forward,
    is_nested_backward,
    never_compiled,
    outside_of_transforms,
    uncompiled,
)
from .uneven import UnevenInputs, broadcast_from

OwnGradients = tuple[dict[str, Tensor | None], set[str]]  # gradients by name, and names that local backwards used

NOT_CALLED = (
    "{optimizer}.step(closure) did not call its closure, and on this rank backward reached no parameter of the model: "
    "it can take part in the other ranks' step only before the update, at the end of the closure or at a step without "
    "one. Call step() without a closure, or let every rank's loss use the output, for example + 0 * output.sum()"
)

AVERAGED_AGAIN = (
    "{name!r} still has the gradient of an earlier exchange, which no optimiser step has used, and this backward added "
    "to it: by a plan with momentum or signs that result must not be averaged again. Call all backwards of a step but "
    "the last inside no_sync(), or zero_grad() between them"
)

UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one: the module has parameters "
    "that were not used in producing loss. Allow that by passing the keyword argument `find_unused_parameters=True`, "
    "and make sure that all `forward` function outputs participate in calculating loss."
)


class AutogradHooks:
    """The hooks on one model through which its forward, backward and optimiser steps drive an engine, until `remove`.

    Args:
        model: the model.
        parameters: the parameters to synchronise, by name.
        engine: exchanges their gradients.
        broadcast_buffers: whether buffers are broadcast before each training forward.
        exclude: names or shell patterns of parameters and buffers that are not synchronised.
        static_graph: whether each backward uses the same parameters, equally often, as with DDP.
        find_unused_parameters: False: raise as DDP does if a backward leaves out parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        engine: Engine,
        *,
        broadcast_buffers: bool = True,
        exclude: Sequence[str] = (),
        static_graph: bool = False,
        find_unused_parameters: bool = True,
    ) -> None:
        self._model = weakref.ref(model)
        self._exclude = exclude
        self.uneven: UnevenInputs | None = None  # tells each forward to ranks that have no more inputs
        self.factor = 1.0  # scales the mean over all ranks, where only some still have inputs
        # With a static graph: how often a backward adds to each gradient, and how often it still will in this one.
        self._additions: Counter[str] | None = Counter() if static_graph else None
        self._additions_left: Counter[str] = Counter()
        self._all_are_used = not find_unused_parameters
        self._reached: set[str] = set()  # parameters that got gradients in backwards since the last forward
        self._undefined: set[str] = set()  # parameters that got undefined gradients since the last synchronisation
        self._changes = Changes(model, parameters.values(), exclude)
        self._looked = False  # for changes, in a forward since the last step: parts of a model may be called alone
        self._parameters = dict(parameters)
        self._ids = {id(p) for p in self._parameters.values()}
        self._engine = engine
        self._buffers = Buffers(model, engine, exclude, is_active=broadcast_buffers)
        self.buffers_are_due = True  # the next training forward broadcasts buffers: the first one in an accumulation
        self._sync = True  # False in the user's `no_sync`
        self._rests = False  # from `rest` to `go_on`
        self._armed: bool | None = None  # whether the last forward's backward is to synchronise; None once it did
        self._synchronizations = 0  # number of synchronised backwards since attach
        # The value of `_synchronizations` at each optimiser's last step.
        self._used: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._awaiting: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose closure has not been called yet
        self._rounds = OptimizerRounds()  # since attach; ranks whose numbers differ must not average gradients
        self._momentum = MomentumCheck(self._parameters)
        self._without_means = frozenset[str]()  # parameters that the present plan averages with momentum, or by signs
        self._averaged = frozenset[str]()  # those whose `.grad` had the last exchange's result as this backward began
        self._freezing = Freezing(self._parameters, self._arrivals)
        # Versions of gradients that must not change before the step, if some rank was late.
        self._versions: dict[str, int] | None = None
        self._stamps: dict[str, Stamp] = {}  # with digests, if it was known by then that some rank was late
        self._task = -1  # autograd's id of the backward under way
        self._accumulated: set[str] = set()  # parameters used by local backwards since the last synchronised one
        self._arrived: set[str] = set()  # parameters that this backward gave gradients
        self._plan: Plan | None = None  # the plan that the present views belong to
        self._views = GradientViews()
        self._tables: set[str] = set()  # parameters in buckets of tables: dense gradients keep autograd's memory
        self._groups: list[_ReadyGroup] = []  # one per bucket
        self._groups_of: dict[str, list[_ReadyGroup]] = {}  # by parameter: the groups of its buckets
        self._ready_group: dict[str, _ReadyGroup] = {}  # by parameter, for gradients that need no copy into the bucket
        self._due: Sized = ()  # work of schemes that is done when the engine next gets a gradient
        self._accumulations = {
            name: AccumulationHook(parameter, _GradientHook(self, name)) for name, parameter in self._parameters.items()
        }
        self._addresses = list(map(Tensor.data_ptr, self._parameters.values()))
        self._followed = self._changes.generation  # the last one whose moves the hooks have followed
        self._handles = self._registered(model, static_graph=static_graph)

    def _registered(self, model: nn.Module, *, static_graph: bool) -> list[RemovableHandle]:
        """Registers the hooks of forwards and optimiser steps; returns their handles."""
        model_hook = uncompiled(ModelHook)
        before_forward = model_hook(self, AutogradHooks._before_forward)
        handles = [nn.Module.register_forward_pre_hook(model, before_forward)]  # of TorchScript, too
        if static_graph:
            after_forward = model_hook(self, AutogradHooks._after_forward)
            handles.append(nn.Module.register_forward_hook(model, after_forward))
        handles.append(before_optimizer_steps(self, AutogradHooks._before_optimizer_step))
        handles.append(after_optimizer_steps(self, AutogradHooks._after_optimizer_step))
        return handles

    def remove(self) -> None:
        """Removes the hooks from model, parameters and optimisers; gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        for accumulation in self._accumulations.values():
            accumulation.remove()
        self._handles.clear()
        self._accumulations.clear()
        self._freezing.give_up()
        # The attachment may live on, but the buckets' memory is released.
        self._views, self._groups, self._groups_of, self._due = GradientViews(), [], {}, ()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets gradients accumulate locally in the `with` block, as with DDP; the next step outside synchronises."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync, self._armed = before, None

    def rest(self) -> None:
        """Stops synchronising gradients until `go_on`: each rank keeps its own."""
        self._rests, self._armed, self.buffers_are_due = True, None, False

    def go_on(self) -> None:
        """Synchronises gradients again, after `rest`, from the next forward on.

        Gradients accumulated since `rest` do not make their parameters count as used: optimiser steps consumed them.
        """
        self._rests, self._armed, self.buffers_are_due = False, None, True
        self._accumulated.clear()

    # Callbacks of autograd and the model.

    def _before_forward(self, model: nn.Module) -> None:
        if not torch.is_grad_enabled() or is_backward():  # inside backward, checkpointing repeats a forward
            return
        if is_inside_forward(model):  # as DDP, whose own forward is called once a step
            return
        if torch.compiler.is_exporting():  # by fake parameters, maybe on one rank alone
            return
        self._looked = True
        if why := self._changes.check(model) or (self._why_unused() if self._is_on else ""):
            if self.uneven is not None:
                self.uneven.forward_fails()
            self._engine.peers.fail(why)
            raise RuntimeError(why)
        if self._is_on:
            self._reached.clear()
            self._engine.forward_begins()
        self._follow_moved_parameters()
        if (listener := active()) is not None:
            listener.forward_began(self._engine)
        broadcasts = self.buffers_are_due and (model.training or self._buffers.are_in_training())
        source = 0
        if self.uneven is not None:
            source = self.uneven.forward_begins(synchronizes=self._is_on, broadcasts=broadcasts)
        self._armed = self._is_on
        if broadcasts:
            self.broadcast_buffers(source)
        if broadcasts or self._is_on:
            self.buffers_are_due = self._is_on

    def _why_unused(self) -> str:
        """Returns DDP's error text if backwards left out parameters although all are to be used; else ""."""
        if not (self._all_are_used and self._reached):
            return ""
        places = enumerate(self._parameters.items())
        unused = [(name, i) for i, (name, p) in places if p.requires_grad and name not in self._reached]
        if not unused:
            return ""
        names = ", ".join(f"{name} (index {index})" for name, index in unused)
        return f"{UNUSED} Parameters which did not receive grad for rank {self._engine.group.rank}: {names}"

    def _after_forward(self, model: nn.Module, output: Any) -> None:
        """Makes a static graph's step begin when backward reaches the model's output, before any nested backward."""
        if torch.is_grad_enabled() and not is_backward() and not is_inside_forward(model):
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(uncompiled(Hook)(self, AutogradHooks._on_output))

    def _on_output(self, gradients: tuple[Tensor | None, ...]) -> None:
        if self._syncing and not self._engine.in_step:
            self._begin_in_backward()

    # Methods for ranks without further inputs, see `uneven.Shadowed`.

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward has run whose backward must synchronise gradients, and this backward has not run yet."""
        return bool(self._armed)

    @property
    def rounds(self) -> int:
        """The number of times that this rank's optimisers have stepped; all steps after one backward count once."""
        return self._rounds.number

    @rounds.setter
    def rounds(self, number: int) -> None:
        self._rounds.number = number

    def shared_tensors(self) -> list[Tensor]:
        """Returns the parameters and buffers that all ranks get from one rank when `join()` (uneven inputs) ends."""
        model = self._model()
        named = () if model is None else model.named_parameters()
        buffers = self._buffers.present(self._changes.generation).values()
        return [*(p for n, p in named if not matches(n, self._exclude)), *buffers]

    def take_gradients(self) -> OwnGradients:
        """Removes this rank's own gradients from the parameters and returns them, for `put_gradients`.

        A rank without further inputs sets them aside while it takes part in the other ranks' steps.
        """
        own = {name: parameter.grad for name, parameter in self._parameters.items()}, self._accumulated
        for parameter in self._parameters.values():
            parameter.grad = None
        self._accumulated = set()
        return own

    def put_gradients(self, own: OwnGradients) -> None:
        """Restores this rank's own gradients, `own`, which `take_gradients` removed from the parameters."""
        gradients, self._accumulated = own
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]

    @torch.no_grad()
    def zero_step(self) -> None:
        """Takes part in the other ranks' step with zero gradients, as this rank has no further inputs.

        The parameters get the synchronised gradients; their own must have been removed by `take_gradients`.
        """
        self._engine.stepped_alone = True  # the other ranks step their parameters, this one does not
        for parameter in self._parameters.values():
            parameter.grad = None
        self._begin()
        self._finish()

    def broadcast_buffers(self, source: int = 0) -> None:
        """Overwrites the model's buffers on all ranks with those of rank `source`. Collective."""
        if source == 0:
            self._buffers.broadcast(self._changes.generation)
        else:
            self._buffers.broadcast(self._changes.generation, partial(broadcast_from, source=source))

    def _follow_moved_parameters(self) -> None:
        """Moves hooks along, and marks views that no longer fit, when parameters' memory was replaced by `Module.to`.

        It does so, too, when the model's modules have changed.
        """
        addresses, generation = list(map(Tensor.data_ptr, self._parameters.values())), self._changes.generation
        if generation != self._followed or addresses != self._addresses:
            self._addresses, self._followed = addresses, generation
            with outside_of_transforms():
                for accumulation in self._accumulations.values():
                    accumulation.follow()
            self._views.refit()

    def _on_gradient(self, name: str, produced: Tensor) -> None:
        # Between kernels of backward the caches hold nothing of this code: work for every gradient costs five
        # times what it does in a loop. So there is little of it.
        if self._additions is not None and self._engine.in_step and not self._is_complete(name, self._additions):
            return
        if torch._C._current_graph_task_id() == self._task:
            group = self._ready_group.get(name)
            if group is not None and not self._due:
                group.ready.append(name)
                if len(group.ready) == len(group.waiting):
                    self._tell(group)
                return
            if self._engine.in_step:
                self._take(name, produced)
                for group in self._groups_of[name]:
                    if len(group.ready) == len(group.waiting):
                        self._tell(group)
                return
        if not self._syncing:
            self._accumulated.add(name)
            return
        self._begin_in_backward(name, produced)
        self._on_gradient(name, produced)

    def _on_undefined(self, name: str) -> None:
        """Handles a parameter for which backward produced no gradient, or that was frozen since forward.

        The function may have added to `.grad` itself. If `.grad` is there, the parameter counts as used, as with DDP.
        """
        parameter = self._parameters[name]
        may_have_added = parameter.requires_grad and parameter.grad is not None
        if self._syncing:
            self._undefined.add(name)
            if may_have_added and not self._engine.in_step:
                self._begin_in_backward()
        elif may_have_added:
            self._accumulated.add(name)

    def _is_complete(self, name: str, additions: Counter[str]) -> bool:
        """Returns, for a static graph, whether the gradient was added to as often now as in the first backward.

        Raises:
            RuntimeError: if it was added to more often.
        """
        self._additions_left[name] -= 1
        if additions and self._additions_left[name] < 0:
            why = (
                f"Your training graph has changed in this iteration: the gradient of {name!r} was added to "
                f"{additions[name]} times in the first backward, now more often; this is not compatible with "
                "static_graph=True"
            )
            self._engine.peers.fail(why)
            raise RuntimeError(why)
        self._task = torch._C._current_graph_task_id()  # may be the id of a nested backward
        return self._additions_left[name] == 0

    def _end_additions(self, additions: Counter[str]) -> None:
        """Loads into their buckets gradients that this backward added to less often than the first backward did.

        After the first backward itself: loads all that it added to, and records how often it added to each.
        """
        given = {name: additions[name] - left for name, left in self._additions_left.items() if left < additions[name]}
        for name in given.keys() & set(self._engine.missing()):
            self._take(name)
        if not additions:
            self._additions = Counter(given)

    def _tell(self, group: _ReadyGroup) -> None:
        ready, group.ready = group.ready, []
        if ready and self._views.hold_all(ready):
            self._arrived.update(ready)
            self._engine.load_views(ready)
            return
        for name in ready:
            self._take(name)

    def _take(self, name: str, produced: Tensor | None = None) -> None:
        """Loads a ready gradient into its buckets; `produced`: the tensor that autograd just accumulated, if known."""
        parameter = self._parameters[name]
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(
                f"the gradient of {name!r} was taken away by another hook before it was exchanged (an optimiser step "
                "inside backward?); let the optimiser step when backward has ended"
            )
        self._arrived.add(name)
        view = self._views.get(name)
        if view is not None and view.holds(gradient):
            self._engine.load(name, view.tensor)
            return
        is_dense = gradient.layout is torch.strided
        if name in self._tables and is_dense and self._views.may_move(name):
            parameter.grad = gradient = gradient.detach().clone()  # frees the memory of an earlier plan's bucket
        self._engine.load(name, gradient.detach() if gradient.requires_grad else gradient)
        if view is not None and is_dense:
            del gradient
            self._views.settle(view, produced)
        elif is_dense and name not in self._tables and gradient.requires_grad:
            parameter.grad = None  # the plan cuts the tensor: averaged values come without a graph

    def _before_optimizer_step(self, step: OptimizerStep) -> StepArguments | None:
        """Raises if an optimiser must not step now; prepares the update, where a closure makes gradients after it."""
        if not self._looked:
            self._require_no_additions(step)
        if not step.concerns(self._ids):
            return None
        self._looked = False
        if self.uneven is not None:
            self.uneven.end_step()
        nothing_new = not self._has_new_gradients(step)
        if is_backward() and (self._engine.in_step or self._armed or (self._is_on and nothing_new)):
            why = (
                "an optimiser stepped inside backward (in a hook?), by gradients that were not averaged yet: let it "
                "step when backward has ended"
            )
            self._engine.peers.fail(why)
            raise RuntimeError(why)
        with self._engine.peers.told_of_refusals():
            self._momentum.check(self._engine.plan, step.optimizer)
        if step.has_closure:
            self._awaiting.add(step.optimizer)
            return step.after_closure(partial(self._before_update, step))
        self._before_update(step)
        return None

    def _before_update(self, step: OptimizerStep) -> None:
        """Joins the ranks' exchange if backward reached no parameter here; lets the update change only what arrived."""
        if self._is_late(step):
            self._begin(late=True, rounds=self._rounds.number)
            self._end()
        self._count_round(step)
        self._freezing.before(step.optimizer, is_watched=step.is_watched)
        self._follow_moved_parameters()

    def _is_late(self, step: OptimizerStep) -> bool:
        """Whether other ranks may wait for gradients of a backward that reached no parameter here."""
        return bool(self._armed) and not self._has_new_gradients(step) and not self._engine.in_step

    def _has_new_gradients(self, step: OptimizerStep) -> bool:
        """Whether gradients are newer than the optimiser's last step: synchronised, whatever forwards came after."""
        return self._used.get(step.optimizer, 0) != self._synchronizations

    def _require_no_additions(self, step: OptimizerStep) -> None:
        model = self._model()
        if model is not None and (why := self._changes.check(model)) and step.concerns_model(model):
            self._engine.peers.fail(why)
            raise RuntimeError(why)

    def _arrivals(self) -> Arrivals:
        """Returns what arrived of the gradients of the coming step; all of them, where this rank steps by its own."""
        return Arrivals() if self._accumulated else self._engine.arrivals

    def _count_round(self, step: OptimizerStep) -> None:
        """Counts a step whose gradients are there; raises if they were changed and another rank was late."""
        self._awaiting.discard(step.optimizer)
        if self._versions is not None:
            self._require_untouched(self._versions)
        self._versions = None
        self._rounds.stepped(step, has_local_gradients=bool(self._accumulated))
        self._engine.stepped_alone |= self._rounds.alone

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        with self._engine.peers.told_of_refusals():
            self._freezing.after(step.optimizer)
        if step.concerns(self._ids):
            if step.optimizer in self._awaiting:
                if self._is_late(step):
                    self._engine.peers.stop(NOT_CALLED.format(optimizer=type(step.optimizer).__name__))
                self._count_round(step)
            self._used[step.optimizer] = self._synchronizations
            self._engine.stepped()

    def _require_untouched(self, versions: Mapping[str, int]) -> None:
        """Raises if a `.grad` was changed between the end of backward, when `versions` were recorded, and the step.

        That holds if some rank had no backward: it gets gradients only within `step()`, too late for the same change.
        Where the engine does not know yet, the next step raises.
        """
        grads = ((name, p.grad) for name, p in self._parameters.items())
        changed = next((n for n, grad in grads if grad is not None and self._is_changed(n, grad, versions)), None)
        if changed is not None:
            self._engine.forbid_late(
                f"in step {self._engine.step - 1} on some rank backward reached no parameter of the model, so that it "
                "took part at optimizer.step() only; but gradients were changed before the step (clipping, unscale_), "
                f"as that of {changed!r}, which that rank cannot have done: let every rank's loss use the output, for "
                "example + 0 * output.sum()"
            )

    def _is_changed(self, name: str, gradient: Tensor, versions: Mapping[str, int]) -> bool:
        if gradient._version != versions.get(name):
            return True
        stamp = self._stamps.get(name)  # finds writes through `.data`
        return stamp is not None and bool(stamp.differs(gradient.detach()))

    @property
    def _is_on(self) -> bool:
        """Whether gradients are synchronised: neither inside the user's `no_sync`, nor between `rest` and `go_on`."""
        return self._sync and not self._rests

    @property
    def _syncing(self) -> bool:
        return self._is_on if self._armed is None else self._armed

    def _begin_in_backward(self, first: str | None = None, produced: Tensor | None = None) -> None:
        """Begins the exchange of a backward that, so far, has added only `produced`, and only to `first`'s gradient."""
        if is_nested_backward():
            raise RuntimeError(REENTRANT)
        is_first = self._synchronizations in (0, *self._used.values()) if self._without_means else True
        self._averaged = frozenset() if is_first else self._already_averaged(first, produced)
        self._task = torch._C._current_graph_task_id()
        self._begin(rounds=self._rounds.number)
        at_end_of_backward(self._end, self._engine)

    @torch.no_grad()
    def _already_averaged(self, first: str | None, produced: Tensor | None) -> frozenset[str]:
        """Returns the parameters, of those without means, whose `.grad` has the last exchange's result, if not zeroed.

        Hooks on the parameter may have changed the gradient of `first`, to which backward added `produced`: then it is
        left out.
        """
        found = {}
        for name in self._without_means - self._accumulated:
            parameter = self._parameters[name]
            before = parameter.grad
            if before is not None and name == first:
                if produced is None or parameter._post_accumulate_grad_hooks or produced.layout is not before.layout:
                    continue
                before = before - produced
                if before.layout is torch.strided:
                    before = before.nan_to_num()
            if before is not None:
                found[name] = (before if before.layout is torch.strided else before.coalesce().values()).any()
        if not found:
            return frozenset()
        return frozenset(name for name, has in zip(found, torch.stack([*found.values()]).tolist(), strict=True) if has)

    def _require_averaged_once(self) -> None:
        """Raises if this backward added to a result of the last exchange that must not be averaged again."""
        again = next((name for name in self._parameters if name in self._averaged & self._arrived), None)
        if again is not None:
            why = AVERAGED_AGAIN.format(name=again)
            self._engine.abandon(why)
            self._engine.peers.stop(why)

    @torch.no_grad()
    def _begin(self, *, late: bool = False, rounds: int = 0) -> None:
        engine = self._engine
        if engine.running_plan.is_outdated or self._plan is not engine.plan:
            self._views.move_out()
        engine.begin(late=late, rounds=rounds)
        if self._plan is not engine.plan:
            self._move_in()
        self._additions_left = Counter(self._additions)
        self._arrived.clear()
        self._ready_group.clear()
        self._due = engine.due
        one_by_one = engine.one_by_one
        for group, run, small in zip(self._groups, engine.bucket_runs, self._views.begin(), strict=True):
            group.begin(run.waiting)
            if not one_by_one:
                self._ready_group |= dict.fromkeys(small, group)
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:  # frozen since attach: gets no gradient
                self._load_leftover(name)

    def _move_in(self) -> None:
        """Moves gradients into the memory of a new plan's buckets."""
        engine = self._engine
        self._plan, self._without_means = engine.plan, without_means(engine.plan)
        self._views.move_in((run.gradients for run in engine.bucket_runs), self._parameters)
        self._groups, self._groups_of = [], {name: [] for name in self._parameters}
        self._tables = set()
        for run in engine.bucket_runs:
            if run.bucket.layout is Layout.ROWS:
                self._tables.update(run.bucket.names)
            group = _ReadyGroup()
            self._groups.append(group)
            for name in dict.fromkeys(run.bucket.names):
                self._groups_of[name].append(group)

    def _load_leftover(self, name: str) -> None:
        """Loads a `.grad` that backward did not report into its bucket.

        It counts as used if backwards in `no_sync` added to it, or may have added to it without a call of its hook: an
        `autograd.Function` adds by itself, and `Module.to` gives a parameter another node, without the hook.
        """
        parameter = self._parameters[name]
        gradient = parameter.grad
        used = gradient is not None and name in self._accumulated
        if gradient is not None and parameter.requires_grad:
            if self._accumulations[name].follow():
                self._undefined.add(name)
            if name in self._undefined:
                used = used or not self._views.is_empty_loan(name)
        if not used:
            self._views.keep_values(name)
        view = self._views.get(name)
        if view is not None and gradient is not None and view.holds(gradient):
            gradient = view.tensor
        self._engine.load(name, gradient, used=used)

    def _end(self) -> None:
        self._armed = None
        self._synchronizations += 1
        self._rounds.synchronized()
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        engine = self._engine
        if engine.missing():
            for group in self._groups:
                self._tell(group)
            if self._additions is not None:
                self._end_additions(self._additions)
            for name in engine.missing():
                self._load_leftover(name)
        if self._averaged:
            self._require_averaged_once()
        engine.finish()
        if self._all_are_used:
            self._reached |= self._arrived | self._undefined
        self._undefined.clear()
        self._accumulated.clear()
        sparse = engine.sparse_names
        all_arrived = len(self._arrived) == len(self._views) == len(self._parameters)
        if sparse or not all_arrived or not self._views.hold_all():
            for name, parameter in self._parameters.items():
                view = self._views.get(name)
                if view is None or name in sparse or name not in self._arrived or not view.holds_gradient():
                    self._deliver(name, parameter)
        self._views.end()
        if self.factor != 1:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None and engine.used(name):
                    parameter.grad.mul_(self.factor)
        if engine.late is not False:  # some rank was late, or it is not known yet
            gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
            self._versions = {name: gradient._version for name, gradient in gradients.items()}
            self._stamps = {n: Stamp.of(grad, moves=True) for n, grad in gradients.items()} if engine.late else {}

    def _deliver(self, name: str, parameter: nn.Parameter) -> None:
        """Writes the synchronised gradient into `parameter.grad`, which stays the same if no rank used it."""
        engine = self._engine
        if not engine.used(name):
            self._views.restore(name)
            return
        sparse = name in engine.sparse_names
        view, before = self._views.get(name), parameter.grad
        if view is not None and not sparse:
            self._views.deliver(view)
            return
        if before is None or before.layout is not torch.strided or before.requires_grad:
            parameter.grad = engine.unload(name, before, sparse=sparse)
            return
        result = engine.unload(name, before, sparse=False)
        if result is not before:  # other code may hold the old gradient's memory
            before.copy_(result)
        if sparse:
            parameter.grad = engine.unload(name, None, sparse=True)


class _ReadyGroup:
    """The ready gradients of one bucket that lie in its memory already; the engine gets them when all are ready."""

    __slots__ = ("ready", "waiting")

    ready: list[str]
    waiting: Set[str]  # all parameters that the bucket waits for

    def begin(self, waiting: Set[str]) -> None:
        """Begins a new training step; `waiting`: all parameters whose gradients the bucket waits for."""
        self.ready, self.waiting = [], waiting


class _GradientHook(Hook):
    """The hook on the node that accumulates one parameter's gradient; tells `AutogradHooks` that it is ready."""

    def __init__(self, owner: AutogradHooks, name: str) -> None:
        super().__init__(owner, AutogradHooks._on_gradient)
        self._name = name

    @never_compiled
    def __call__(self, _: object, produced: tuple[Tensor | None, ...]) -> None:
        gradient, owner = produced[0], self._owner()
        if owner is None:
            return
        if gradient is not None and owner._parameters[self._name].requires_grad:
            owner._on_gradient(self._name, gradient)
        else:
            owner._on_undefined(self._name)
