"""The program of one rank of a job whose start is measured; `start.py` starts it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync.frontends.attach import Attachment

from .. import workloads
from .methods import SWEEPS, method
from .rank import event, run_rank
from .start import DDP, JobSpec
from .start_models import kind_of

TIMEOUT = timedelta(seconds=60)
LINE_OF_DDP = SWEEPS["ddp_sparse"][0]  # DDP by default, tables with sparse gradients


def measure(text: str) -> dict[str, Any]:
    """Trains a job's steps from its attach on; returns seconds on this rank. `text` is a `JobSpec`.

    `ends_s` are the ends of steps, from the end of attach on, and `settled` is after how many steps the plan is the one
    that stays, None if it never is.
    """
    spec = JobSpec.model_validate_json(text)
    workload = workloads.open_workload(kind_of(spec.model))
    way = method(LINE_OF_DDP if spec.method == DDP else spec.method)
    model = workload.model(sparse=way.sparse, seed=spec.seed)
    optimizer = workload.optimizer(model)
    batches = workload.batches(dist.get_rank(), dist.get_world_size(), spec.seed)
    dist.barrier()
    began_s = time.perf_counter()
    wrapped, attachment = way.wrap(model, optimizer, TIMEOUT)
    attached_s = time.perf_counter()
    ends_s: list[float] = []
    settled = None
    for step in range(spec.steps):
        if settled is None and (attachment is None or attachment.settled):
            settled = step
        loss = workload.loss(wrapped, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends_s.append(time.perf_counter() - attached_s)
    if isinstance(attachment, Attachment):
        attachment.detach()
    event(kind="start", method=spec.method, attach_s=attached_s - began_s, seconds=ends_s[-1])
    return {"attach_s": attached_s - began_s, "ends_s": ends_s, "settled": settled}


if __name__ == "__main__":
    run_rank(measure)
