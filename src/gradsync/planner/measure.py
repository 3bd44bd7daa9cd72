"""What a plan is made by, measured: latency and rate of the network, and what schemes' kernels take here.

The same on every rank: of each cost the highest that some rank measured, as the slowest one is waited for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm import Group
from ..costs import CostModel, KernelCost
from ..schemes import (
    DOUBLING_OF_ROWS,
    AGSparse,
    BalancedElements,
    BalancedParallelism,
    Scheme,
)
from ..schemes.rehearsal import Sample, rehearse

PLANNED: tuple[Scheme[Any], ...] = (
    BalancedParallelism(),
    AGSparse(),
    DOUBLING_OF_ROWS,
    BalancedElements(),
)  # what default plans are made of


def measured_cost(group: Group, timeout_s: float) -> CostModel | None:
    """The cost model that all ranks of `group` agree on; None where its network was not measured. Collective."""
    if group.alpha_s is None or group.bytes_per_s is None:
        return None
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as torchrun tells it
    kernels = agreed(kernel_costs(PLANNED), lambda mine: group.all_gather(mine).wait(timeout_s))
    return CostModel(group.alpha_s, group.bytes_per_s, kernels=contended(kernels, ranks_per_core(ranks_here)))


@functools.cache
def kernel_costs(schemes: tuple[Scheme[Any], ...]) -> Mapping[str, KernelCost]:
    """What the kernels of these schemes take in this process, on a core of its own; measured once."""
    return fit_kernels(rehearse(schemes))


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


def ranks_per_core(ranks_here: int) -> float:
    """How many of the ranks on this machine share a core, at least 1."""
    return max(1.0, ranks_here * torch.get_num_threads() / len(os.sched_getaffinity(0)))


def contended(kernels: Mapping[str, KernelCost], ranks: float) -> dict[str, KernelCost]:
    """The costs when so many ranks share a core: all ranks of a step compute at about the same time."""
    return {name: replace(c, call_s=c.call_s * ranks, byte_s=c.byte_s * ranks) for name, c in kernels.items()}
