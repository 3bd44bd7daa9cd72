"""Measures a workload's profile while this process trains the workload as one of its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gradsync.frontends.attach import attach
from gradsync.plans.profile import Profile
from gradsync.schemes import SchemeOrCompressor
from gradsync.tuning.measurement import Measurement

from .. import workloads


def measure_workload(
    name: str,
    options: dict[str, Any],
    *,
    steps: int,
    warmup: int,
    candidates: Sequence[SchemeOrCompressor],
    problem: Exception | None = None,
) -> Profile:
    """Trains a workload by the default plan; returns the measured ready times of gradients, and link and kernel costs.

    Kernels of the compressors and schemes in `candidates` are timed, too. Embeddings give sparse gradients where the
    model has some. Without torchrun's environment variables, this process is the only rank. A `problem` of one rank
    alone is raised on all ranks in the first step.
    """
    task = workloads.load(name, **options)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = task.model(sparse=True, seed=0)
        optimizer, batches = task.optimizer(model), task.batches(dist.get_rank(), dist.get_world_size(), 0)
        handle = attach(model)

        def step() -> None:
            loss = task.loss(model, next(batches))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        measurement = Measurement(steps, warmup, candidates=candidates, problem=problem)
        with measurement.active():
            while measurement.profile is None:
                step()
        handle.detach()
        return measurement.profile
    finally:
        dist.destroy_process_group()
