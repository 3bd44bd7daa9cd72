"""Frontends of a model, which average its gradients or its parameters, and the switch from one to another."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..comm import Group, GroupError, Survival, Survivors, backend_for, broadcast_tensors, gather_bytes
from ..comm.shuffle import together
from ..costs.cluster import Cluster
from ..engine.engine import Engine
from ..engine.guard import Verification
from ..optim.early_steps import why_not_in_parts
from ..planner import AveragingPlanner, default_plan
from ..planner.averaging.plan import schedule_of
from ..plans.plan import Plan, What
from ..tensors.bucket import matches
from ..tuning.rates import measured_cluster
from .agreement import (
    PARAMETERS,
    PLANNING,
    agreed_engine,
    announcing,
    buffers_of,
    device_of,
    forget,
    gather_texts,
    group_of,
)
from .arguments import Communicator
from .autograd import AutogradHooks
from .averaging import SCALED, Averaging, tensors_beside_parameters
from .buffers import why_not_averaged
from .choosing import GradientsOrParameters
from .mean_model import take_mean_state
from .regrouping import Regrouping
from .sharded import ShardedGradients
from .torch_hooks import Hook

logger = logging.getLogger(__name__)

TORCHSCRIPT = (
    "a plan of parameters needs hooks on the model's modules, which TorchScript does not have: average gradients "
    "(no plan, or one of gradients), or attach to the model before it is scripted or traced"
)
STATE_APART = (
    "after a trial of averaging parameters, the optimiser's state of %r (of %d parameters in all) is each rank's own, "
    "as %s keeps it in a form without a mean: averaged gradients will not keep the ranks' parameters equal; leave "
    "averaging out of AutoPlanner"
)
NOT_OPTIMIZED = (
    "attach(..., optimizer=...) names an optimiser without %r: averages are taken after the steps of that optimiser, "
    "and another one's state of it would stay apart"
)
FROZEN_NOW = "%r is frozen at present, and could not be averaged once it is trained again"
SURVIVES_NOT = (
    "survives=True needs gloo, as other backends end a job that lost a rank themselves: use gloo, or leave it out"
)


@dataclass(frozen=True)
class Frontend:
    """The object that synchronises a model: its gradients in backward, or its parameters after an optimiser step.

    All references to the model are weak: the model's modules keep this object alive.

    Attributes:
        engine: exchanges tensors as the plan says.
        no_sync: returns a context manager in which nothing is exchanged.
        remove: removes the hooks.
        averaging: averages parameters; None if gradients are averaged.
        regrouping: changes which ranks average parameters together; None: nothing does.
        joinable: returns what stands for the model in torch's `Join`, or None.
        sharded: averages gradients between replicas of a model in shards; None for other models.
    """

    engine: Engine
    no_sync: Callable[[], Any]
    remove: Callable[[], None]
    averaging: Averaging | None = None
    regrouping: Regrouping | None = None
    joinable: Callable[[], Joinable | None] = lambda: None  # stands for the model in torch's `Join`
    sharded: ShardedGradients | None = None  # of a model in shards

    def consensus(self) -> None:
        """Sets all ranks' parameters to their mean, and may change which ranks average together. Collective.

        It does nothing if gradients are averaged, as the ranks' models are equal then.
        """
        if self.averaging is not None:
            self.averaging.consensus()
        if self.regrouping is not None:
            self.regrouping.consider()

    def close(self) -> None:
        try:
            self.remove()
        finally:
            self.engine.close()


@dataclass
class FrontendSwitch:
    """Holds the object that synchronises a model (its frontend), and what may replace it during training.

    Attributes:
        present: the frontend in force.
        paused: the frontend that pauses while another one is tried, if there is one.
        choice: the trial of averaged gradients against averaged parameters, if there is one.
        surviving: builds a new frontend when ranks are lost; only if `AveragingPlanner.survives` is set.
    """

    present: Frontend
    paused: Frontend | None = None
    choice: GradientsOrParameters | None = None
    surviving: Surviving | None = None
    _local: ExitStack | None = None  # of the outermost `no_sync` under way

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchanges nothing in the `with` block, neither by the present frontend nor by one that replaces it there."""
        with ExitStack() as stack:
            for frontend in (self.present, self.paused):
                if frontend is not None:
                    stack.enter_context(frontend.no_sync())
            before, self._local = self._local, self._local or stack
            try:
                yield
            finally:
                self._local = before

    def pause_for(self, frontend: Frontend) -> None:
        """Puts `frontend` in the place of the present one, which pauses."""
        self.present, self.paused = frontend, self.present
        if self._local is not None:
            self._local.enter_context(frontend.no_sync())

    def consensus(self) -> None:
        """Sets the parameters of all ranks that are left to their mean, if parameters are averaged. Collective."""
        if self.surviving is None:
            self.present.consensus()
        else:
            self.surviving.consensus()

    def close(self) -> None:
        if self.choice is not None:
            self.choice.remove()
        if self.surviving is not None:
            self.surviving.close()
        for frontend in (self.present, self.paused):
            if frontend is not None:
                frontend.close()


class Attached:
    """The arguments of `attach` that are needed to attach anew: a model, its optimiser, and how its ranks communicate.

    References to model and optimiser are weak.

    Args:
        model: the model.
        optimizer: its optimiser; None if it was not given.
        process_group: the ranks that share the model; None: all.
        timeout_s: seconds after which a rank that waits for the others raises.
        exclude: names or shell patterns of parameters and buffers that are left alone.
        verification: how ranks compare their parameters.
        refusal: what is wrong with the arguments on this rank, or "".
        communicator: as in `gradsync.attach`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        exclude: Sequence[str],
        verification: Verification,
        refusal: str = "",
        communicator: Communicator = "own",
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self.process_group, self.timeout_s, self.exclude = process_group, timeout_s, exclude
        self.verification, self.refusal, self.communicator = verification, refusal, communicator

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self._optimizer is None else self._optimizer()

    def within(self, process_group: dist.ProcessGroup) -> Attached:
        """Returns these arguments for the ranks of another process group, with a communicator of their own."""
        return Attached(self.model, self.optimizer, process_group, self.timeout_s, self.exclude, self.verification)


class ParametersOnTrial:
    """Replaces averaging of a model's gradients by averaging of its parameters, on trial.

    It has the methods of `choosing.Parameters`.
    """

    def __init__(
        self, switch: FrontendSwitch, hooks: AutogradHooks, planner: AveragingPlanner, attached: Attached
    ) -> None:
        self._switch, self._hooks, self._planner, self._attached = switch, hooks, planner, attached
        self._made: tuple[Plan, Cluster | None] | None = None

    def prepare(self, most_s: float) -> int:
        attached, engine = self._attached, self._switch.present.engine
        if engine.profile is not None and not self._planner.compute_s:
            parts = engine.profile.parts
            self._planner = replace(self._planner, compute_s=parts.backward.median_s + parts.beside.median_s)
        made, cluster, refusal = _planned(self._planner, attached, self._why_not())
        if refusal:
            logger.info("parameters are not averaged: %s", refusal)
        cycle = 0
        if made is not None and (schedule := schedule_of(made)) != together(schedule.size):
            expected_s = 0.0
            if cluster is not None:
                expected_s = self._planner.expected_s(
                    schedule, attached.model, engine.group.placement, cluster, attached.exclude
                )
            cycle = self._planner.cycle(schedule) if expected_s <= most_s else 0
            self._made = made, cluster
        mine = torch.tensor([cycle], device=engine.device)
        parts = engine.peers.call(
            "whether to average parameters", lambda group: group.all_gather(mine).wait(attached.timeout_s)
        )
        return min(int(part) for part in parts)

    def begin(self) -> bool:
        assert self._made is not None
        present = self._switch.present
        if why := next(filter(None, present.engine.peers.tell("whether to average parameters", self._why_not())), ""):
            logger.info("parameters are not averaged: %s", why)
            return False
        forget(self._attached.model.modules(), present.engine.parameters.values())
        plan, cluster = self._made
        frontend = averaging_frontend(
            self._attached, plan, regroups=None if cluster is None else (self._planner, cluster)
        )
        self._hooks.rest()
        self._switch.pause_for(frontend)
        return True

    def wait(self) -> None:
        averaging = self._switch.present.averaging
        assert averaging is not None
        averaging.land()

    def end(self) -> None:
        averaging, paused = self._switch.present.averaging, self._switch.paused
        assert averaging is not None and paused is not None
        averaging.consensus()
        self._take_mean_state(paused.engine)
        self._switch.present.close()
        self._switch.present, self._switch.paused = paused, None
        self._hooks.go_on()

    def keep(self) -> None:
        assert self._switch.paused is not None
        self._switch.paused.close()
        self._switch.paused = None
        survive(self._switch, self._planner, self._attached)

    def _why_not(self) -> str:
        """Returns why this rank cannot average parameters now, or could not go back from it; "" if it can."""
        attached, optimizer = self._attached, self._attached.optimizer
        why = why_not_parameters(attached.model, optimizer, None, attached.exclude)  # of new buffers
        if why or optimizer is None:
            return why
        if self._planner.early and (why := why_not_in_parts(optimizer)):
            return why
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = self._switch.present.engine.parameters
        others = (NOT_OPTIMIZED % name for name, p in parameters.items() if id(p) not in owned)
        frozen = (FROZEN_NOW % name for name, p in parameters.items() if not p.requires_grad)
        return next(others, "") or next(frozen, "")

    def _take_mean_state(self, gradients: Engine) -> None:
        """Makes the optimiser's state alike on all ranks for `gradients`, which averages gradients from now on."""
        optimizer, timeout_s = self._attached.optimizer, self._attached.timeout_s
        assert optimizer is not None
        parameters = {name: p for name, p in gradients.parameters.items() if isinstance(p, nn.Parameter)}
        apart = self._switch.present.engine.peers.call(
            "state of the optimiser", lambda group: take_mean_state(group, optimizer, parameters, timeout_s)
        )
        if apart:
            logger.warning(STATE_APART, apart[0], len(apart), type(optimizer).__name__)


class Surviving:
    """Lets training go on when ranks are lost, where parameters are averaged: it builds a new frontend over the others.

    The new frontend (the object that averages) begins between two steps, when all survivors have made the same number
    of steps; ranks that have made fewer catch up by steps without averaging while the others wait.
    """

    def __init__(self, switch: FrontendSwitch, planner: AveragingPlanner, attached: Attached) -> None:
        self._switch, self._planner, self._attached = switch, planner.for_other_ranks(), attached
        timeout_s = attached.timeout_s
        mine = secrets.token_hex(8).encode()
        name: list[bytes] = switch.present.engine.peers.call(
            "a name for survivors", lambda group: gather_bytes(group, mine, timeout_s)
        )
        self._survivors = Survivors(
            f"gradsync survivors {name[0].decode()}", attached.process_group, timeout_s=timeout_s
        )
        self._survival: Survival | None = None  # what the survivors agreed on; None while the present frontend goes on
        self._follow()

    def close(self) -> None:
        self._survivors.close()

    def consensus(self) -> None:
        """Sets the parameters of all ranks, or of the survivors if ranks were lost, to their mean. Collective."""
        averaging = self._present
        averaging.land()
        if not self._is_over:
            try:
                self._switch.present.consensus()
                return
            except GroupError:
                averaging.give_up()
        self._agree()
        self._go_on()

    @property
    def _present(self) -> Averaging:
        averaging = self._switch.present.averaging
        assert averaging is not None
        return averaging

    @property
    def _is_over(self) -> bool:
        """Whether this rank knows that ranks were lost, so that the present frontend must be replaced."""
        return self._present.gave_up or self._survivors.called

    def _follow(self) -> None:
        self._present.recover = Hook(self, Surviving._between_steps)

    def _between_steps(self) -> None:
        if self._is_over and self._present.steps >= self._agree().steps:
            self._go_on()

    def _agree(self) -> Survival:
        """Stops the present frontend; returns the surviving ranks and their most steps. Collective over these ranks."""
        if self._survival is None:
            self._present.land()
            self._switch.present.engine.peers.fail(
                GroupError("ranks were lost; the surviving ranks go on without them")
            )
            self._present.give_up()
            self._survival = self._survived(self._survivors.ranks)
        return self._survival

    def _survived(self, before: Sequence[int]) -> Survival:
        found = self._survivors.agree(self._present.steps)
        lost = ", ".join(str(rank) for rank in before if rank not in found.ranks)
        left = ", ".join(map(str, found.ranks))
        logger.warning("gradsync lost %s; ranks %s go on", f"ranks {lost}" if lost else "a round but no rank", left)
        return found

    @torch.inference_mode(False)
    def _go_on(self) -> None:
        """Replaces the frontend by a new one that averages over the surviving ranks only. Collective over these."""
        before = self._switch.present
        assert self._survival is not None
        before.engine.close()
        forget(self._attached.model.modules(), before.engine.parameters.values())
        made: Frontend | None = None
        while made is None:
            try:
                left = self._attached.within(self._survivors.new_group())
                made = averaging_frontend(left, self._planner, apart=True)
            except RuntimeError as error:  # another rank may have been lost
                ranks = self._survival.ranks
                self._survival = self._survived(ranks)
                if self._survival.ranks == ranks:
                    raise GroupError(f"ranks {ranks} are left, and could not go on: {error}") from error
        before.remove()
        self._switch.present, self._survival = made, None
        self._follow()


def survive(switch: FrontendSwitch, planner: AveragingPlanner, attached: Attached) -> None:
    """Lets the ranks go on when others are lost, if `planner.survives`: sets `switch.surviving`. Collective.

    Without `survives`, or with one rank, it does nothing.
    """
    if planner.survives and switch.present.engine.group.size > 1:
        switch.surviving = Surviving(switch, planner, attached)


def why_not_parameters(
    model: nn.Module,
    optimizer: Optimizer | None,
    grad_scaler: torch.amp.GradScaler | None,
    exclude: Sequence[str] = (),
) -> str:
    """Returns why gradsync cannot average this model's parameters after its optimiser's steps, or "" if it can.

    `exclude`: names or shell patterns of parameters and buffers that are left alone.
    """
    if optimizer is None:
        return "a plan of parameters averages them after the optimiser's step: attach(..., optimizer=...) must name it"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel averages gradients; a plan of parameters is for the model inside of it"
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return TORCHSCRIPT
    if grad_scaler is not None:
        return SCALED
    found = (why_not_averaged(name, buffer) for name, buffer in buffers_of(model, exclude).items())
    return next(filter(None, found), "")


def averaging_frontend(
    attached: Attached,
    plan: Plan | AveragingPlanner,
    grad_scaler: torch.amp.GradScaler | None = None,
    regroups: tuple[AveragingPlanner, Cluster] | None = None,
    *,
    apart: bool = False,
) -> Frontend:
    """Returns an object that averages the model's parameters over groups of ranks, by hooks. Collective.

    Args:
        attached: the model and the arguments of `attach`.
        plan: a plan that averages parameters, or the planner that makes one.
        grad_scaler: refused if it is not None, as parameters are not scaled.
        regroups: the planner that made the plan, and the links between nodes that it was made for, so that the ranks'
            groups may change; needed only if `plan` is no planner.
        apart: True: the ranks' models differ, and become their mean; False: they become rank 0's.

    Raises:
        RuntimeError, ValueError, GroupError: on all ranks, as `gradsync.attach`.
    """
    model, optimizer, exclude = attached.model, attached.optimizer, attached.exclude
    refusal = attached.refusal or why_not_parameters(model, optimizer, grad_scaler, exclude)
    made: Plan | None
    by = "" if regroups is None else f" by {regroups[0]}"
    if isinstance(plan, AveragingPlanner):
        by = f" by {plan}"
        made, cluster, refusal = _planned(plan, attached, refusal)
        regroups = None if cluster is None else (plan, cluster)
    else:
        made = plan
    if made is not None and made.what is What.EARLY_PARAMETER and optimizer is not None:
        refusal = refusal or why_not_in_parts(optimizer)
    also = None if made is None else tensors_beside_parameters(model, made)
    with agreed_engine(
        model,
        default_plan if made is None else made,  # never used: without a plan, `refusal` raises first
        attached.process_group,
        attached.timeout_s,
        exclude,
        f"averages parameters{by}",
        optimizer,
        refusal,
        also,
        what=PARAMETERS,
        verification=attached.verification,
        communicator=attached.communicator,
    ) as (engine, _):
        return _frontend_of(engine, attached, regroups, apart=apart)


def _frontend_of(
    engine: Engine, attached: Attached, regroups: tuple[AveragingPlanner, Cluster] | None, *, apart: bool
) -> Frontend:
    """Returns an object that averages the model's parameters by `engine`; `regroups` lets it change the ranks' groups.

    With `apart` the ranks' models differ, and become their mean; else they become rank 0's.
    """
    model, optimizer, exclude = attached.model, attached.optimizer, attached.exclude
    assert optimizer is not None
    if not apart:
        initial = [p for n, p in model.named_parameters() if not matches(n, exclude)]
        level(engine, [*initial, *buffers_of(model, exclude).values()])
    with ExitStack() as on_error:
        averaging = Averaging(model, engine, optimizer, exclude)
        on_error.callback(averaging.remove)
        regrouping: Regrouping | None = None
        if regroups is not None and regroups[0].regroups(engine.group.placement):
            planner, links = regroups
            regrouping = Regrouping(planner, engine, averaging, model, optimizer, links, exclude)
        if apart:
            averaging.consensus()
        on_error.pop_all()

    def remove() -> None:
        if regrouping is not None:
            regrouping.remove()
        averaging.remove()

    return Frontend(engine, averaging.no_sync, remove, averaging, regrouping)


def _planned(planner: AveragingPlanner, attached: Attached, refusal: str) -> tuple[Plan | None, Cluster | None, str]:
    """Returns (plan that averages parameters, links between nodes, ""), or (None, None, why this rank cannot, or "").

    `refusal`: why this rank cannot average parameters, or "". If any rank refuses, none plans or measures links. The
    links are None also if none were given and the planner needs none.
    """
    timeout_s, optimizer = attached.timeout_s, attached.optimizer
    device = device_of(attached.model)
    group = group_of(attached.process_group, timeout_s, PLANNING, device, attached.communicator)
    try:
        if planner.survives and device.type != "cpu" and backend_for(attached.process_group, device) != "gloo":
            refusal = refusal or SURVIVES_NOT
        with announcing(group, PLANNING):
            if any(text.strip() for text in gather_texts(group, refusal, timeout_s)):
                return None, None, refusal
            assert optimizer is not None
            placement, cluster = group.placement, planner.cluster
            if planner.measures(placement):
                cluster = measured_cluster(group, timeout_s)
        return planner.plan(attached.model, optimizer, placement, cluster, attached.exclude), cluster, ""
    except ValueError as error:
        return None, None, str(error)
    finally:
        group.close()


def level(engine: Engine, tensors: list[Tensor]) -> None:
    """Overwrites `tensors`, of any shape, with rank 0's; if that fails on one rank, all raise. Collective."""
    what = "broadcast of the model"

    def broadcast(group: Group) -> Exception | None:
        try:
            broadcast_tensors(group, tensors, engine.timeout_s)
        except GroupError:
            raise
        except Exception as error:  # raised on this rank only: the other ranks hear of it below
            return error
        return None

    problem = engine.peers.call(what, broadcast)
    engine.peers.agree(what, problem)
