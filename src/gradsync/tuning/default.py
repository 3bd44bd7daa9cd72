"""The planner that `attach` takes when the user gives none: it measures, plans, and revises plans during training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..comm import Group
from ..comm.links import highest_over
from ..comm.network_cost import network_cost
from ..costs.cost_model import CostModel
from ..engine.plan_control import Planner
from ..planner.default.network import Network, planned_schemes
from ..planner.default.plan import default_plan, default_plans
from ..planner.default.revise import revised
from ..planner.pieces import Pieces
from ..plans.plan import Plan
from ..tensors.density import ParameterProfile
from .pieces import after_steps


@dataclass
class MeasuringPlanner:
    """The default planner: returns the plans worth a trial, best guess first, by measured costs of links and kernels.

    It compares schemes by bytes alone before `measure` was called, and on groups without measured links.

    Attributes:
        network: the measured costs of links and kernels, and the node of each rank; None before `measure`.
    """

    network: Network | None = None

    @property
    def cost(self) -> CostModel | None:
        """The cost model of the measured links and kernels; None before `measure`, or without measured links."""
        return self.network.cost if self.network is not None else None

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> list[Plan]:
        return default_plans(profiles, world_size, self.network)

    def measure(self, group: Group, timeout_s: float) -> Iterator[None]:
        """Measures the costs of links and kernels, by which later plans are made. Collective.

        It is a generator that runs a few pieces of the measurement at each `next`, which all ranks call after a
        training step. `timeout_s`: seconds to wait for the other ranks.
        """
        self.network = yield from after_steps(measured_network(group, timeout_s), highest_over(group, timeout_s))

    def revise(self, plan: Plan, before: Sequence[ParameterProfile], now: Sequence[ParameterProfile]) -> Plan:
        """Returns `plan` with other schemes where the gradients' densities `now` make these clearly faster.

        Messages get more room for rows where they need it. `before`: the densities that `plan` was made from. Before
        `measure` was called, `plan` stays as it is.
        """
        return plan if self.network is None else revised(plan, before, now, self.network)


def measured_network(group: Group, timeout_s: float) -> Pieces[Network | None]:
    """Measures kernels, and returns their costs with those of the group's links; None if links are not measured.

    It is a generator that measures a piece at each `next`, on all ranks at once. The group measured its links when it
    opened (`comm.links.measured_link`); kernels that an earlier job on this machine has measured are not measured
    again. All ranks get the same bits.

    Raises:
        GroupError: when another rank died or stopped answering.
    """
    links = network_cost(group)
    if links is None:
        return None
    from .earlier import EarlierTimes
    from .kernels import kernel_costs  # with which all compressors are imported

    planned, device = planned_schemes(group.placement), group.payload_device
    kernels = yield from kernel_costs(planned, highest_over(group, timeout_s), device, EarlierTimes.of(group))
    return Network(replace(links, kernels=kernels), group.placement)


def default_planner() -> Planner:
    """Returns the planner that `attach` takes when the user gives no plan.

    Under `torch.use_deterministic_algorithms` it measures nothing, as timing would decide the order of sums.
    """
    return default_plan if torch.are_deterministic_algorithms_enabled() else MeasuringPlanner()
