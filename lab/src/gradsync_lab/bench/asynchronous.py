"""Simulates the learning of asynchronous training with a parameter server, in one process, without times.

Each worker computes a gradient at the parameters that it pulled after its own last push; it has not seen later pushes
of other workers. One optimiser steps once for each push.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from ..workloads import Workload
from .parameter_server import divide_steps

ASP = "asp"


class Asynchronous:
    """Equally fast workers of one parameter server, one worker per rank; in a step each worker pushes once.

    The workers push in another random order in each step. So a gradient is 0 to 2 (ranks - 1) pushes old, and ranks - 1
    on average, and no worker is more than a step ahead of others: a bound on staleness of a step or more changes
    nothing, so ASP and SSP learn the same.
    """

    def __init__(self, workload: Workload, *, seed: int, ranks: int) -> None:
        self._workload = workload
        self._served = workload.model(sparse=False, seed=seed)
        self._optimizer = workload.optimizer(self._served)
        self._scale = divide_steps(type(self._optimizer), self._optimizer.param_groups, ranks)
        self._workers = [workload.model(sparse=False, seed=seed) for _ in range(ranks)]
        self._batches = [workload.batches(rank, ranks, seed) for rank in range(ranks)]
        self._order = np.random.default_rng(seed)

    def train(self) -> Iterator[nn.Module]:
        """Yields the server's model after each step; the next step overwrites it.

        Float buffers are the workers' mean.
        """
        while True:
            for worker in self._order.permutation(len(self._workers)):
                self._push(int(worker))
            self._take_buffers()
            yield self._served

    def _push(self, rank: int) -> None:
        worker = self._workers[rank].train()
        worker.zero_grad()
        self._workload.loss(worker, next(self._batches[rank])).backward()
        for served, own in zip(self._served.parameters(), worker.parameters(), strict=True):
            served.grad = None if own.grad is None else own.grad * self._scale
        self._optimizer.step()
        with torch.no_grad():  # the server's answer: its parameters
            for served, own in zip(self._served.parameters(), worker.parameters(), strict=True):
                own.copy_(served)

    @torch.no_grad()
    def _take_buffers(self) -> None:
        for served, *own in zip(self._served.buffers(), *(worker.buffers() for worker in self._workers), strict=True):
            served.copy_(torch.stack(own).double().mean(dim=0) if served.is_floating_point() else own[0])
