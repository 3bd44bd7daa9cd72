"""The program of one rank that trains methods to a loss; `whole.py` starts it."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from gradsync.frontends.attach import Attachment

from .. import workloads
from ..workloads import Workload
from .methods import method
from .rank import event, run_rank
from .reach import crossing
from .rivals import average_
from .steal import Patience
from .train_rank import Contestant, agreed, attempt, ready, train_step
from .whole import WholeSpec


def held_out_loss(workload: Workload, who: Contestant, spec: WholeSpec) -> float:
    """Returns the held-out loss of the mean of the ranks' models, the same on all ranks. Collective.

    The models are not changed.
    """
    mean = {name: value.clone() for name, value in who.inner.state_dict().items()}
    average_([value for value in mean.values() if value.is_floating_point()])
    if dist.get_rank() != 0:
        return agreed(0.0)
    model = workload.model(sparse=method(who.name).sparse, seed=spec.seed)
    model.load_state_dict(mean)
    return agreed(float(workload.evaluate(model)["loss"]))


def part_s(workload: Workload, who: Contestant, steps: int) -> float:
    """Trains `steps` steps and returns their seconds, until all communication has ended."""
    dist.barrier()
    began_s = time.perf_counter()
    for _ in range(steps):
        train_step(workload, who)
    if isinstance(who.attachment, Attachment):
        who.attachment.wait()
    return time.perf_counter() - began_s


def to_loss(workload: Workload, name: str, spec: WholeSpec) -> dict[str, Any]:
    """Trains one method on this rank until the held-out loss is `spec.loss`, `most_steps` are made, or it fails.

    Returns the seconds from evaluation to evaluation (`parts_s`), the interpolated index of the evaluation with this
    loss (`place`, None if not reached), and the failure.
    """
    who = ready(workload, name, method(name), spec, Patience(0.0, agreed))
    losses: list[float] = []
    parts_s: list[float] = []
    place: float | None = None
    while not who.failed and place is None and len(parts_s) < spec.most_steps // spec.every:
        with attempt(who):
            parts_s.append(part_s(workload, who, spec.every))
        if not who.failed:
            losses.append(held_out_loss(workload, who, spec))
            place = crossing(losses, spec.loss)
    if who.attachment is not None and not who.failed:
        who.attachment.detach()
    event(kind="whole", method=name, steps=len(parts_s) * spec.every, loss=losses[-1] if losses else None)
    return {
        "failed": who.failed,
        "failed_s": who.failed_s,
        "parts_s": parts_s,
        "place": place,
        "every": spec.every,
    }


def measure(text: str) -> dict[str, Any]:
    """Trains each method of the settings in `text`, JSON, and returns this rank's results by method."""
    spec = WholeSpec.model_validate_json(text)
    workload = workloads.load(spec.workload, **spec.options)
    return {name: to_loss(workload, name, spec) for name in spec.methods}


if __name__ == "__main__":
    run_rank(measure)
