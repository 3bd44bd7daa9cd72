"""What a plan is made by, measured: latency and rate of the network, and what schemes' kernels take here.

The same on every rank: of each cost the highest that some rank measured, as the slowest one is waited for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm import Group
from ..comm.network_cost import network_cost
from ..costs.cost_model import KernelCost
from ..planner.network import INSIDE_NODES, PLANNED, Network
from ..schemes import Scheme
from .rehearsal import Sample, rehearse


def measured_network(group: Group, timeout_s: float) -> Network | None:
    """What all ranks of `group` agree on; None where its links were not measured. Collective."""
    links = network_cost(group)
    if links is None:
        return None
    rehearsed = (*PLANNED, *INSIDE_NODES) if group.placement.is_hierarchy else PLANNED
    kernels = agreed(kernel_costs(rehearsed), lambda mine: group.all_gather(mine).wait(timeout_s))
    return Network(replace(links, kernels=kernels), group.placement)


@functools.cache
def kernel_costs(schemes: tuple[Scheme[Any], ...]) -> Mapping[str, KernelCost]:
    """What the kernels of these schemes take in this process; measured once.

    Where ranks share cores, all of them rehearse at once: then a second of work takes longer than a second here, as it
    will when they exchange gradients.
    """
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    samples = rehearse(schemes)
    sharing = max((time.perf_counter() - began_s) / (time.thread_time() - began_cpu_s), 1.0)
    fitted = fit_kernels(samples)
    return {name: KernelCost(sharing * cost.call_s, sharing * cost.byte_s) for name, cost in fitted.items()}


def fit_kernels(samples: Sequence[Sample]) -> dict[str, KernelCost]:
    """The cost of each kernel, from what was computed and how long it took; none is negative.

    Least squares over relative errors.
    """
    from scipy.optimize import nnls

    names = sorted({step.kernel for steps, _ in samples for step in steps})
    table = np.zeros((len(samples), 2 * len(names)))
    for row, (steps, seconds) in zip(table, samples, strict=True):
        for step in steps:
            place = 2 * names.index(step.kernel)
            row[place : place + 2] += np.array([step.calls, step.nbytes]) / seconds
    unit = np.maximum(table.max(axis=0, initial=0.0), np.finfo(float).tiny)  # a call and a byte are far apart
    costs = nnls(table / unit, np.ones(len(samples)))[0] / unit
    return {name: KernelCost(float(costs[2 * i]), float(costs[2 * i + 1])) for i, name in enumerate(names)}


def agreed(kernels: Mapping[str, KernelCost], gather: Callable[[Tensor], Sequence[Tensor]]) -> dict[str, KernelCost]:
    """Of each cost the highest over the ranks; `gather` hands a tensor to all and returns everybody's."""
    names = sorted(kernels)
    mine = torch.tensor([[kernels[name].call_s, kernels[name].byte_s] for name in names], dtype=torch.float64)
    highest = torch.stack(list(gather(mine.flatten()))).amax(dim=0).view(mine.shape)
    return {name: KernelCost(*costs) for name, costs in zip(names, highest.tolist(), strict=True)}
