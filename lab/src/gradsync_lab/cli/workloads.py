"""Runs named workloads for `gradsync measure --workload` and `gradsync characterize --workload`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gradsync.characterization.figures import footprints_of
from gradsync.characterization.footprint import Footprints
from gradsync.cli.progress import phase
from gradsync.plans.profile import Profile
from gradsync.schemes import SchemeOrCompressor

from ..bench.measurement import measure_workload
from ..bench.options import parse_options
from ..bench.rank import telling
from ..bench.topk import TopKWorkload, kind_of, load
from ..workloads import Batch, Workload
from .progress import event_bar

if TYPE_CHECKING:
    from torch import Tensor, nn


def measured(
    name: str,
    options: Sequence[str],
    *,
    steps: int,
    warmup: int,
    candidates: Sequence[SchemeOrCompressor],
    problem: Exception | None = None,
) -> Profile:
    """Trains a workload as this rank; returns its ready times, densities and costs.

    Args:
        options: texts `NAME=VALUE`.
        problem: an error of this rank alone, which all ranks raise in the first step; None: none.
    """
    run = partial(measure_workload, steps=steps, warmup=warmup, candidates=candidates, problem=problem)
    if os.environ.get("RANK", "0") != "0":
        return run(name, parse_options([name], options))
    with phase(f"measuring {name}", at_rest=True) as shown, telling(shown.say):
        return run(name, parse_options([name], options))


def footprints(
    name: str, options: Sequence[str], *, ranks: int, steps: int, seed: int, sample: int | None
) -> list[list[Footprints]]:
    """Computes all ranks' gradients at the initial weights, and returns the indices of their non-zeros, by step.

    Args:
        options: texts `NAME=VALUE`.
        sample: rows that are looked at in each tensor; None: all.
    """
    task = load(name, **parse_options([name], options, kind_of))
    model = task.model(sparse=True, seed=seed)
    batches = [task.batches(rank, ranks, seed) for rank in range(ranks)]
    found: list[list[Footprints]] = []
    with event_bar(f"{name}, {ranks} ranks", steps * ranks, "opening the data") as on_event:
        for step in range(steps):
            found.append([])
            for rank in range(ranks):
                found[-1] += footprints_of([_gradients(task, model, batches[rank])], sample)
                on_event({"step": step, "rank": rank})
    return found


def _gradients(task: Workload, model: nn.Module, batches: Iterator[Batch]) -> dict[str, Tensor | None]:
    """Returns the next step's gradients by parameter; of the workload `topk`, one sparsified tensor of all of them."""
    if isinstance(task, TopKWorkload):
        return {"all parameters": task.sparsified(model, batches)}
    model.zero_grad()
    task.loss(model, next(batches)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
