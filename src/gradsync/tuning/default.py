"""The planner that `attach` takes when the user gives none: it measures, plans, and revises while training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..comm import Group
from ..costs.cost_model import CostModel
from ..engine.plan_control import Planner
from ..planner.default import default_plan, default_plans
from ..planner.network import Network
from ..planner.revise import revised
from ..plans.plan import Plan
from ..tensors.density import ParameterProfile
from .network_costs import measured_network


@dataclass
class MeasuringPlanner:
    """`default_plans` by what was measured of the network and the kernels; by bytes before that and where it cannot."""

    network: Network | None = None

    @property
    def cost(self) -> CostModel | None:
        """Once measured."""
        return self.network.cost if self.network is not None else None

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> list[Plan]:
        return default_plans(profiles, world_size, self.network)

    def measure(self, group: Group, timeout_s: float) -> None:
        """Learns what plans are made by; collective."""
        self.network = measured_network(group, timeout_s)

    def revise(self, plan: Plan, before: Sequence[ParameterProfile], now: Sequence[ParameterProfile]) -> Plan:
        """The plan to go on with; `before` is what was known when it was made."""
        return plan if self.network is None else revised(plan, before, now, self.network)


def default_planner() -> Planner:
    """Returns the planner that `attach` takes when the user gives no plan.

    Under `torch.use_deterministic_algorithms` it measures nothing: timing would decide on the order of sums.
    """
    return default_plan if torch.are_deterministic_algorithms_enabled() else MeasuringPlanner()
