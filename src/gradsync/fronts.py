"""Front-ends of a model: what averages its gradients or its parameters, and how another one takes its place."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .agreement import agreed_engine, forget, gather_texts, group_of
from .averaging import SCALED, Averaging, companions
from .bucket import matches
from .choosing import Choice
from .cluster import Cluster
from .comm import Group, GroupError
from .comm.shuffle import together
from .engine import Engine
from .hooks import AutogradHooks, broadcast_tensors
from .plan import Plan, What
from .planner import AveragingPlanner
from .planner.averaging import schedule_of
from .planner.rates import measured_cluster
from .regrouping import Regrouping
from .stepping import why_not_in_parts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Front:
    """What synchronises a model: gradients before the optimiser's step, or parameters after it.

    Refers to the model weakly, as everything here: the model's modules keep it alive.
    """

    engine: Engine
    no_sync: Callable[[], Any]
    remove: Callable[[], None]
    averaging: Averaging | None = None
    regrouping: Regrouping | None = None

    def close(self) -> None:
        try:
            self.remove()
        finally:
            self.engine.close()


@dataclass
class Fronts:
    """The one in force; of two that are tried the other one beside it; and how it is chosen, if it is."""

    present: Front
    resting: Front | None = None
    choice: Choice | None = None

    def close(self) -> None:
        if self.choice is not None:
            self.choice.remove()
        for front in (self.present, self.resting):
            if front is not None:
                front.close()


class ParametersBeside:
    """The other way of a model whose gradients are averaged by these hooks, see `choosing.Parameters`."""

    def __init__(
        self,
        fronts: Fronts,
        hooks: AutogradHooks,
        planner: AveragingPlanner,
        model: nn.Module,
        optimizer: Optimizer,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        exclude: Sequence[str],
    ) -> None:
        self._fronts, self._hooks, self._planner = fronts, hooks, planner
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._process_group, self._timeout_s, self._exclude = process_group, timeout_s, exclude
        self._made: tuple[Plan, Cluster | None] | None = None

    def prepare(self, most_s: float) -> int:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None
        engine = self._fronts.present.engine
        made, cluster, refusal = _planned(
            self._planner, model, optimizer, self._process_group, self._timeout_s, self._exclude, ""
        )
        if refusal:
            logger.info("parameters are not averaged: %s", refusal)
        cycle = 0
        if made is not None and (schedule := schedule_of(made)) != together(schedule.size):
            expected_s = 0.0
            if cluster is not None:
                expected_s = self._planner.expected_s(schedule, model, cluster, self._exclude)
            cycle = self._planner.cycle(schedule) if expected_s <= most_s else 0
            self._made = made, cluster
        mine = torch.tensor([cycle], device=engine.device)
        parts = engine.call("whether to average parameters", lambda group: group.all_gather(mine).wait(self._timeout_s))
        return min(int(part) for part in parts)

    def begin(self) -> None:
        model, optimizer = self._model(), self._optimizer()
        assert model is not None and self._made is not None
        present = self._fronts.present
        forget(model.modules(), present.engine.parameters.values())
        plan, cluster = self._made
        front = averaging_front(
            model,
            optimizer,
            plan,
            self._process_group,
            self._timeout_s,
            self._exclude,
            None,
            regroups=None if cluster is None else (self._planner, cluster),
        )
        self._hooks.rest()
        self._fronts.present, self._fronts.resting = front, present

    def wait(self) -> None:
        averaging = self._fronts.present.averaging
        assert averaging is not None
        averaging.land()

    def end(self) -> None:
        averaging, resting = self._fronts.present.averaging, self._fronts.resting
        assert averaging is not None and resting is not None
        averaging.consensus()
        self._fronts.present.close()
        self._fronts.present, self._fronts.resting = resting, None
        self._hooks.go_on()

    def keep(self) -> None:
        assert self._fronts.resting is not None
        self._fronts.resting.close()
        self._fronts.resting = None


def why_not_parameters(model: nn.Module, optimizer: Optimizer | None, grad_scaler: torch.amp.GradScaler | None) -> str:
    """Why parameters cannot be averaged, or nothing."""
    if optimizer is None:
        return "a plan of parameters averages them after the optimiser's step: attach(..., optimizer=...) must name it"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel averages gradients; a plan of parameters is for the model inside of it"
    if grad_scaler is not None:
        return SCALED
    return ""


def averaging_front(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: Plan | AveragingPlanner,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    exclude: Sequence[str],
    grad_scaler: torch.amp.GradScaler | None,
    regroups: tuple[AveragingPlanner, Cluster] | None = None,
) -> Front:
    """`regroups`: who made the plan for which links, if the groups may change."""
    refusal = why_not_parameters(model, optimizer, grad_scaler)
    made: Plan | None
    by = "" if regroups is None else f" by {regroups[0]}"
    if isinstance(plan, AveragingPlanner):
        by = f" by {plan}"
        made, cluster, refusal = _planned(plan, model, optimizer, process_group, timeout_s, exclude, refusal)
        regroups = None if cluster is None else (plan, cluster)
    else:
        made = plan
    if made is not None and made.what is What.EARLY_PARAMETER and optimizer is not None:
        refusal = refusal or why_not_in_parts(optimizer)
    also = None if made is None else companions(model, made)
    engine, parameters = agreed_engine(
        model, made, process_group, timeout_s, exclude, f"averages parameters{by}", optimizer, refusal, also
    )
    assert optimizer is not None
    regrouping: Regrouping | None = None
    try:
        level(engine, [*(p for n, p in model.named_parameters() if not matches(n, exclude)), *model.buffers()])
        averaging = Averaging(model, engine, optimizer, exclude)
        if regroups is not None and regroups[0].regroups(engine.group.placement):
            planner, links = regroups
            regrouping = Regrouping(planner, engine, averaging, model, optimizer, links, exclude)
    except BaseException:
        forget(model.modules(), parameters.values())
        engine.close()
        raise

    def remove() -> None:
        if regrouping is not None:
            regrouping.remove()
        averaging.remove()

    return Front(engine, averaging.no_sync, remove, averaging, regrouping)


def _planned(
    planner: AveragingPlanner,
    model: nn.Module,
    optimizer: Optimizer | None,
    process_group: dist.ProcessGroup | None,
    timeout_s: float,
    exclude: Sequence[str],
    refusal: str,
) -> tuple[Plan | None, Cluster | None, str]:
    """The plan and the links it is for, or none and what is wrong here, if anything is; measured if all can go on."""
    group = group_of(process_group, timeout_s)
    try:
        if any(text.strip() for text in gather_texts(group, refusal, timeout_s)):
            return None, None, refusal
        assert optimizer is not None
        placement, cluster = group.placement, planner.cluster
        if planner.measures(placement):
            cluster = measured_cluster(group, timeout_s)
        return planner.plan(model, optimizer, placement, cluster, exclude), cluster, ""
    except ValueError as error:
        return None, None, str(error)
    finally:
        group.close()


def level(engine: Engine, tensors: list[Tensor]) -> None:
    """Gives rank 0's tensors to all, or raises on all."""
    what = "broadcast of the model"

    def broadcast(group: Group) -> Exception | None:
        try:
            broadcast_tensors(group, tensors, engine.timeout_s)
        except GroupError:
            raise
        except Exception as error:  # of this rank alone: the others learn of it below
            return error
        return None

    problem = engine.call(what, broadcast)
    engine.agree(what, problem)
