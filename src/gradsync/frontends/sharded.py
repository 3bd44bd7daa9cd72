"""The frontend for models in shards: gradients, reduced within each replica by FSDP, are averaged between replicas.

FSDP calls a hook with the reduced gradients of each module, laid end to end. The engine gets them parameter by
parameter, over the ranks that have the same shard, and exchanges complete buckets while backward goes on. FSDP makes
`.grad` of its own values, which is taken away at once, so that their memory is free. At the end of backward, behind
FSDP's own callback, `.grad` gets the means: where it can, in the buckets' memory, which each step takes anew. So there
is one copy of the gradients, and gradients of an earlier step that a user holds stay as they are.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..devices import host
from ..devices.streams import Event, HostCopy, streams_of
from ..engine.engine import Engine
from ..engine.engine_state import LOADING
from ..engine.step_listener import RecordingDone, active
from ..optim.momentum import MomentumCheck
from ..plans.plan import Plan
from ..state import Shard
from ..tensors.bucket import Layout, TensorSpec, matches, model_digest
from .fsdp_internals import Mesh, ParameterGroup, ShardedParameter, at_end_of_reduction, groups_of, names_of
from .model_changes import Structure
from .shard_ranks import ShardRanks
from .torch_hooks import (
    REENTRANT,
    Hook,
    ModelHook,
    OptimizerRounds,
    OptimizerStep,
    after_optimizer_steps,
    at_end_of_backward,
    before_optimizer_steps,
    is_backward,
    is_inside_forward,
    is_nested_backward,
    uncompiled,
)

FREEZES = (
    "a plan with a scheme that freezes what did not arrive (CoarseGrained(freeze=True)) is not supported yet for a "
    "model in shards: leave freeze=False"
)
STATE_LATER = (
    "the planner has revised a plan without compression into one that keeps residuals, which is not supported for a "
    "model in shards: let its first plan keep some, or leave compression out"
)
FURTHER = (
    "fully_shard() was applied to a further module after attach(), {name!r}: attach when all modules have it, or "
    "detach() first, then attach again"
)
ADDED = (
    "the parameter {name!r} came to the model after gradsync was attached, and nobody averages its gradient: apply "
    "fully_shard() to its module, detach() first, then attach again, or let exclude name it"
)
TWICE = (
    "{group!r} got gradients twice in one backward (of {name!r}), as its forward ran twice before it and unused "
    "parameters get zeros, which is not supported yet: leave out set_reduce_scatter_unused_params(True), or put both "
    "calls into one forward of an FSDP module around it"
)
SUMS_ARE_LOST = (
    "gradsync was detached while sums of gradients waited for a backward that exchanges them "
    "(set_requires_all_reduce(False)); they are lost"
)
AFTER_ACCUMULATION = (
    "{name!r} has a hook by register_post_accumulate_grad_hook, which FSDP calls before gradients are averaged between "
    "replicas (an optimiser in backward?): remove it, and let the optimiser step when backward has ended"
)

logger = logging.getLogger(__name__)


class ShardedGradients:
    """The hooks that connect an engine with the gradients of one model in shards, until `remove`.

    Args:
        groups: all groups of the model's parameters in shards.
        shards: the parameters to average between replicas, by name; some may have an empty shard here.
        guarded: the shards' tensors as the engine's guard compares them, by name; follows memory that torch replaces.
        ranks: all ranks of the model.

    Attributes:
        shard: this rank's shard, as state names it.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParameterGroup],
        shards: Mapping[str, ShardedParameter],
        engine: Engine,
        guarded: dict[str, Tensor],
        ranks: ShardRanks,
        *,
        exclude: Sequence[str] = (),
    ) -> None:
        self._model = weakref.ref(model)
        self._groups, self._shards, self._engine, self._guarded = groups, dict(shards), engine, guarded
        self._exclude = exclude
        self._names = {id(parameter): name for name, parameter in self._shards.items()}
        named = names_of(model, groups)
        self._frozen = {id(p) for n, (_, p) in named.items() if not (p.parameter.requires_grad or matches(n, exclude))}
        self._group_of = {name: named[name][0] for name in self._shards}
        dtypes = {name: spec.dtype for name, spec in engine.specs.items()}
        self._factors = {name: group.post_divide_factor(dtypes[name]) for name, group in self._group_of.items()}
        self._reduced: list[ShardedParameter] = []  # whose gradients the next call of a hook brings
        self._partial: dict[str, Tensor] = {}  # sums of backwards that were not to be exchanged yet
        self._aside: list[tuple[Any, Tensor | None]] = []  # parameters that FSDP gives a new `.grad`, and the old one
        self._given: set[str] = set()  # whose gradients came in this backward
        self._task = -1  # autograd's id of the backward under way
        self._streams = streams_of(engine.device)
        self._ranks = ranks
        self._tells = True  # whether shards tell each other how each step ended; the same on all
        self._told: HostCopy | None = None  # so of the last step, until it is read
        self._all_settled = False  # whether the plans of all shards had settled then, or when state was loaded
        self._loaded: Event | None = None  # behind all that FSDP's hooks have done, on a stream of FSDP's
        self._has_local = False  # whether a backward without synchronisation came after the synchronised one
        self._rounds = OptimizerRounds()
        self._plan: Plan | None = None
        self._structure = Structure(model)
        self._ids: set[int] = set()
        self._momentum = MomentumCheck({})
        self._look_at_parameters()
        dtypes_on_wire = {name: group.wire_dtype for name, group in self._group_of.items()}
        self.shard = _shard_of(groups[0].mesh, self._shards, dtypes_on_wire)
        for number, group in enumerate(groups):
            before = Hook(self, lambda owner, number=number: owner._on_post_backward(number))
            reduced = Hook(self, lambda owner, flat, number=number: owner._on_reduced(number, flat))
            reset = Hook(self, lambda owner, number=number: owner._on_reset(number))
            group.connect(before, reduced, Hook(self, ShardedGradients._after_post_backward), reset)
        self._stop_waiting = at_end_of_reduction(model, Hook(self, ShardedGradients._after_reduction))
        self._handles = [
            nn.Module.register_forward_pre_hook(model, uncompiled(ModelHook)(self, ShardedGradients._before_forward)),
            before_optimizer_steps(self, ShardedGradients._before_optimizer_step),
            after_optimizer_steps(self, ShardedGradients._after_optimizer_step),
        ]

    def remove(self) -> None:
        """Removes the hooks, and lets torch reduce as before; gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        for group in self._groups:
            group.disconnect()
        self._stop_waiting()
        self._handles.clear()
        if self._partial:
            logger.warning(SUMS_ARE_LOST)
            self._partial.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Lets whole gradients accumulate in the block, as `set_requires_gradient_sync(False)` does."""
        before = [group.reduces for group in self._groups]
        for group in self._groups:
            group.reduces = False
        try:
            yield
        finally:
            for group, value in zip(self._groups, before, strict=True):
                group.reduces = value

    def check_momentum(self, optimizer: Optimizer) -> None:
        """Raises ValueError where both the optimiser and a compressor of the plan have momentum."""
        self._momentum.check(self._engine.plan, optimizer)

    def name_of(self, parameter: Tensor) -> str | None:
        """Returns the name of one of the model's parameters, a DTensor of any shape and dtype; None for others."""
        return next((name for name, shard in self._shards.items() if shard.parameter is parameter), None)

    @property
    def settled(self) -> bool:
        """Whether the plans of all shards had settled when ranks last told each other; the same on all ranks."""
        self._read_told()
        return self._all_settled

    def met(self, what: str) -> AbstractContextManager[ShardRanks]:
        """Lets all ranks of the model come together for `what`, see `ShardRanks.met`. Collective."""
        return self._ranks.met(what)

    def require_own(self, state: object, ranks: ShardRanks, *, strict: bool) -> None:
        """Checks that the state that this rank is to load is its own; raises on all ranks if one was given another.

        Args:
            state: what `Attachment.state_dict` returned.
            ranks: all ranks of the model, which call this.
            strict: whether the state must be of the same model. It must be this rank's whatever `strict` is.

        Raises:
            ValueError: for the state of another shard, replica, number of either, or, if `strict`, model.
            RuntimeError: where another rank raised.
        """
        problem: Exception | None = None
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"expected the dict that state_dict() gave, got {type(state).__name__}")
            saved = Shard.of(state)
            if strict:
                self.require_model(saved)
            group = self._engine.group
            found = {"rank": state.get("rank"), "world": state.get("world"), "shard": saved.place}
            here = {"rank": group.rank, "world": group.size, "shard": self.shard.place}
            if found != here:
                raise ValueError(
                    f"the state was saved by {found}, this is {here}: each rank loads its own state, on the same mesh; "
                    "on another mesh save and load handle.checkpoint()"
                )
        except Exception as error:  # told to all, then raised
            problem = error
        ranks.agree(LOADING, problem)
        assert isinstance(state, Mapping)
        steps = ranks.tell(LOADING, repr(state.get("step")))
        if len(set(steps)) > 1:
            raise ValueError(f"{LOADING}: the ranks were given states of different steps, {', '.join(steps)} by rank")

    def loaded(self, ranks: ShardRanks) -> None:
        """Tells the other shards, when all ranks have loaded state, whether plans may change here. Collective."""
        engine = self._engine
        told = ranks.tell(LOADING, [not engine.settled, engine.may_keep_state])
        self._know(*map(sum, zip(*told, strict=True)))

    def require_model(self, saved: Shard) -> None:
        """Checks that saved state is of this model.

        Raises:
            ValueError: for a model whose parameters have other names, whole shapes or element types.
        """
        if saved.model != self.shard.model:
            raise ValueError(
                "the state is of a model with other parameters: their names, whole shapes and element types have the "
                f"digest {saved.model[:12]}, here {self.shard.model[:12]}; load the state of this model"
            )

    def _tell_shards(self) -> None:
        """Tells the other shards whether plans may change here, and whether this step is to be thrown away. Collective.

        A step is thrown away as a whole: where one shard's gradients are not finite, no shard counts residuals as sent.
        The ranks go on telling until nobody has, or may get, anything to tell. The host does not wait for a device.
        """
        engine = self._engine
        mine = host.numbers([not engine.settled, engine.may_keep_state], engine.device, torch.float32)
        told = self._ranks.summed(torch.cat([mine, engine.saw_non_finite.float()]))
        engine.judge(told[2:] > 0)
        self._told = self._streams.to_host(told)

    def _read_told(self) -> None:
        if self._told is not None:
            unsettled, may_keep, _ = self._told.tolist()
            self._know(unsettled, may_keep)

    def _know(self, unsettled: float, may_keep: float) -> None:
        """Takes over what all shards have told: whether plans of some may change, or some may keep state."""
        self._told, self._all_settled, self._tells = None, not unsettled, bool(unsettled or may_keep)

    # Callbacks of FSDP, autograd, the model and optimisers.

    def _before_forward(self, model: nn.Module) -> None:
        if not torch.is_grad_enabled() or is_backward() or is_inside_forward(model):
            return
        self._engine.peers.require_working()  # FSDP may reduce nothing any more, so that no backward would say it
        if self._structure.has_changed():
            self._follow_modules(model)
        self._engine.forward_begins()
        if (listener := active()) is not None:
            listener.forward_began(self._engine)

    def _on_post_backward(self, number: int) -> None:
        group = self._groups[number]
        if why := group.why_not_reduced():
            self._engine.peers.stop(f"{group.name!r}: {why}")
        self._reduced = group.reduced()
        self._has_local |= not group.reduces
        ours = [each.parameter for each in self._reduced if id(each) in self._names]
        self._aside = [(parameter, parameter.grad) for parameter in ours]
        for parameter in ours:
            parameter.grad = None

    def _after_post_backward(self) -> None:
        """Replaces each `.grad` that FSDP has made, of this replica's gradients alone, by what was there before."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()

    @torch.no_grad()
    def _on_reduced(self, number: int, flat: Tensor) -> None:
        """Loads the gradients of one group, which FSDP has reduced within the replica, into the engine."""
        self._streams.share(flat)
        group = self._groups[number]
        slices = self._slices(group, flat)
        if not group.exchanges:
            self._keep(slices)
            return
        if not self._engine.in_step or torch._C._current_graph_task_id() != self._task:
            self._begin()
        for name, values in slices:
            if name in self._given:
                self._engine.peers.stop(TWICE.format(group=group.name, name=name))
            self._given.add(name)
            if (kept := self._partial.pop(name, None)) is not None:
                values.add_(kept)
            self._engine.load(name, self._lasting(name, values) if self._by_rows(name) else values)
        self._loaded = self._streams.record()

    def _slices(self, group: ParameterGroup, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Returns names and views of the gradients to be averaged that lie in `flat`, (elements,), padded by FSDP."""
        reduced, self._reduced = self._reduced, []
        lengths = [parameter.padded_numel for parameter in reduced]
        if sum(lengths) != flat.numel():
            self._engine.peers.stop(
                f"FSDP reduced {flat.numel()} elements for {group.name!r}, and {sum(lengths)} were expected: torch "
                f"{torch.__version__} lays gradients out in another way than gradsync knows"
            )
        found = []
        for parameter, part in zip(reduced, flat.split(lengths), strict=True):
            name, local = self._names.get(id(parameter)), parameter.local
            if name is None and id(parameter) in self._frozen:
                self._engine.peers.stop(
                    f"a parameter of {group.name!r} was frozen when gradsync was attached, and is not averaged between "
                    "replicas; detach() first, then attach again"
                )
            if name is not None and parameter.parameter._post_accumulate_grad_hooks:
                self._engine.peers.stop(AFTER_ACCUMULATION.format(name=name))
            if name is not None:
                found.append((name, part[: local.numel()].view(local.shape)))
        return found

    def _keep(self, slices: Sequence[tuple[str, Tensor]]) -> None:
        """Adds gradients up for the backward that will exchange them (`set_requires_all_reduce(False)`)."""
        for name, values in slices:
            kept = self._partial.get(name)
            self._partial[name] = self._lasting(name, values) if kept is None else kept.add_(values)

    def _lasting(self, name: str, values: Tensor) -> Tensor:
        """Returns reduced gradients that stay as they are: FSDP divides its own after the hook, if by anything."""
        return values if self._factors[name] == 1 else values.clone()

    def _begin(self) -> None:
        if is_nested_backward():
            self._engine.peers.stop(REENTRANT)
        if self._plan is None and (model := self._model()) is not None:
            self._follow_modules(model)
        self._look_at_parameters()
        self._task = torch._C._current_graph_task_id()
        self._read_told()
        self._engine.awaits_judgement = self._tells
        self._engine.begin(rounds=self._rounds.number)
        if self._plan is not self._engine.plan:
            self._plan = self._engine.plan
            if why := why_not_plan(self._plan) or self._why_not_now():
                self._engine.peers.stop(why)
        self._given.clear()
        if is_backward():
            at_end_of_backward(self._end, self._engine)  # behind FSDP's own callback, which reduces what is left

    def _after_reduction(self) -> None:
        """Ends a step that began outside of a backward, as pipeline schedules reduce gradients."""
        if self._engine.in_step and not is_backward():
            self._end()

    def _on_reset(self, number: int) -> None:
        """Forgets sums that wait to be exchanged, as FSDP does, when the user begins anew after an error."""
        for name in [name for name in self._partial if self._group_of[name] is self._groups[number]]:
            del self._partial[name]

    def _follow_modules(self, model: nn.Module) -> None:
        """Raises where the model got modules with parameters that are not averaged since `attach`."""
        for group in groups_of(model):
            if not group.is_of(self._groups):
                self._engine.peers.stop(FURTHER.format(name=group.name))
        known = {id(form) for group in self._groups for each in group.parameters for form in each.forms}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known and not matches(name, self._exclude):
                self._engine.peers.stop(ADDED.format(name=name))
        self._structure = Structure(model)

    def _why_not_now(self) -> str:
        """Returns why a plan that has come into force cannot be followed at this time, or ""."""
        return "" if self._tells or not self._engine.bucket_runs.have_state else STATE_LATER

    @torch.no_grad()
    def _end(self) -> None:
        try:
            self._finish()
        except RecordingDone:  # which all ranks raise in the same step
            raise
        except BaseException as error:  # ranks with other shards wait for this one
            self._ranks.fail(error)
            raise

    def _finish(self) -> None:
        engine = self._engine
        if self._loaded is not None:  # FSDP's callback waits only in the last backward (set_is_last_backward)
            self._loaded.wait()
        for name in engine.missing():
            kept = self._partial.pop(name, None) if self._group_of[name].exchanges else None
            engine.load(name, kept, used=kept is not None)
        engine.finish()
        if self._tells:
            self._tell_shards()
        self._rounds.synchronized()
        self._has_local = False
        for name, shard in self._shards.items():
            if engine.used(name):
                self._deliver(name, shard)
        engine.release()

    def _deliver(self, name: str, shard: ShardedParameter) -> None:
        """Puts the mean over replicas into the parameter's `.grad`, or adds it to what was there before backward."""
        mean = self._engine.unload(name, None, sparse=False)
        if self._factors[name] != 1:
            mean = mean / self._factors[name]
        parameter = shard.parameter
        mean = mean.to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = shard.as_gradient(mean)
        else:
            parameter.grad._local_tensor.add_(mean)

    def _by_rows(self, name: str) -> bool:
        """Whether the parameter's bucket keeps the tensors that it is given until they are exchanged."""
        return any(run.bucket.layout is Layout.ROWS for run in self._engine.bucket_runs.of(name))

    def _before_optimizer_step(self, step: OptimizerStep) -> None:
        if not step.concerns(self._ids):
            return
        if is_backward() and self._engine.in_step:
            self._engine.peers.stop(
                "an optimiser stepped inside backward (in a hook?), by gradients that were not averaged yet: let it "
                "step when backward has ended"
            )
        try:
            self.check_momentum(step.optimizer)
        except ValueError as error:
            self._engine.peers.fail(error)  # settings may differ by rank: the other ranks would wait for this one
            raise
        if not step.has_closure:  # whose backward is yet to come
            self._count_round(step)

    def _after_optimizer_step(self, step: OptimizerStep) -> None:
        if step.concerns(self._ids):
            if step.has_closure:
                self._count_round(step)
            self._engine.stepped()

    def _count_round(self, step: OptimizerStep) -> None:
        self._rounds.stepped(step, has_local_gradients=self._has_local)
        self._engine.stepped_alone |= self._rounds.alone

    def _look_at_parameters(self) -> None:
        """Follows parameters and memory that torch has replaced, as `load_state_dict(assign=True)` and `to` make it."""
        parameters = {name: shard.parameter for name, shard in self._shards.items()}
        ids = {id(p) for p in parameters.values()}
        if ids != self._ids:
            self._ids, self._momentum = ids, MomentumCheck(parameters)
        for name, shard in self._shards.items():
            local = shard.local
            if local.shape != self._engine.specs[name].shape:
                self._engine.peers.stop(
                    f"the shard of {name!r} has another shape than when gradsync was attached: attach again"
                )
            if local.data_ptr() != self._guarded[name].data_ptr():
                self._guarded[name] = local


def _shard_of(mesh: Mesh, averaged: Mapping[str, ShardedParameter], dtypes: Mapping[str, torch.dtype | None]) -> Shard:
    """Returns what state says of the shard that this rank has of these parameters.

    `dtypes`: those in which FSDP reduces gradients, by parameter; None: the parameter's.
    """
    specs = {
        name: TensorSpec(tuple(shard.parameter.shape), dtypes[name] or shard.local.dtype)
        for name, shard in sorted(averaged.items())
    }
    ranges = {name: shard.range_of(mesh) for name, shard in averaged.items()}
    return Shard(mesh.shard, mesh.shards, model_digest(specs), ranges)


def stand_ins(shards: Mapping[str, ShardedParameter], groups: Sequence[ParameterGroup]) -> dict[str, nn.Parameter]:
    """Returns tensors for an engine: shapes of shards, in the element types in which FSDP reduces their gradients.

    They have one element of memory each.
    """
    group_of = {id(p): group for group in groups for p in group.parameters}
    found = {}
    for name, shard in shards.items():
        local = shard.local
        one = local.new_empty((), dtype=group_of[id(shard)].wire_dtype or local.dtype)
        found[name] = nn.Parameter(one.expand(local.shape), requires_grad=False)
    return found


def why_not_plan(plan: Plan) -> str:
    """Returns why the plan cannot be followed for a model in shards, or ""."""
    return FREEZES if any(bucket.scheme.traits.freezes for bucket in plan.buckets) else ""
