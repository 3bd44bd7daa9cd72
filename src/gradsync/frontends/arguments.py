"""The settings that `attach`, the class in DDP's place and DDP's hook take from users, held to their types."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..engine.guard import VERIFY_EVERY, Verification
from ..engine.plan_control import Planner
from ..inputs.settings import NonNegativeFloat, NonNegativeInt, TimeLimit, checked, shown
from ..plans.plan import Plan
from ..tuning.default import default_planner

DEFAULT_TIMEOUT_S = 600.0
Communicator = Literal["own", "shared"]


def require_module(given: object) -> None:
    """Raises TypeError for an object that is no model."""
    if not isinstance(given, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {shown(given)}")


def planner_of(plan: Plan | Planner | Literal["auto"] | None) -> Plan | Planner:
    """Returns the planner that a `plan` argument stands for: None and "auto" for one each, others for themselves."""
    if plan is None:
        return default_planner()
    if isinstance(plan, str) and plan == "auto":
        from ..tuning.auto import AutoPlanner  # with which all searches are imported

        return AutoPlanner()
    return plan


@dataclass(frozen=True)
class Arguments:
    """The arguments of `attach` by their names, checked, with `timeout` in seconds, and why this rank refuses them.

    A rank that raised alone would keep the others waiting, so `read` raises nothing: if an argument is wrong, all have
    their defaults, and `refusal` says why. The ranks tell each other, and then raise together.
    """

    timeout: TimeLimit = DEFAULT_TIMEOUT_S
    exclude: tuple[str, ...] = ()
    broadcast_buffers: bool = True
    init_sync: bool = True
    static_graph: bool = False
    find_unused_parameters: bool = True
    communicator: Communicator = "own"
    verify_every: NonNegativeInt = VERIFY_EVERY
    verify_tolerance: NonNegativeFloat | None = None
    optimizer: Optimizer | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    refusal: str = ""

    @classmethod
    def read(cls, timeout: timedelta | float, **given: Any) -> Arguments:
        """Returns the arguments that a user gave, checked; it raises nothing. `timeout`: seconds, or a timedelta."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        try:
            return cls(**checked(cls, {"timeout": seconds, **given}, whose=""))
        except ValueError as error:
            return cls(refusal=str(error))

    def why_not(self, *, finds_unused: bool) -> str:
        """Returns why this rank refuses the arguments, or "" if it does not.

        `finds_unused`: whether a rank may leave out parameters in a backward, which communicator="shared" forbids.
        """
        if not self.refusal and self.communicator == "shared" and finds_unused:
            return (
                "communicator='shared' needs find_unused_parameters=False, or a static graph: a rank that leaves out a "
                "parameter would issue its operations in another order than the others"
            )
        return self.refusal

    @property
    def verification(self) -> Verification:
        """The settings by which ranks compare parameters: how often they do, and what difference is allowed."""
        return Verification(self.verify_every, self.verify_tolerance)

    def __str__(self) -> str:
        """Returns the settings that must be alike on all ranks, beside those that `agreed_engine` compares itself."""
        return (
            f"broadcast_buffers={self.broadcast_buffers}, grad_scaler={self.grad_scaler is not None}, "
            f"init_sync={self.init_sync}, static_graph={self.static_graph}, "
            f"find_unused_parameters={self.find_unused_parameters}, communicator={self.communicator}"
        )
