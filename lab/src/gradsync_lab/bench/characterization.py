"""Measures in one process the cost of examining gradients, as `gradsync characterize` does, relative to a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsync.characterization.footprint import DEFAULT_SAMPLE, Footprint, Footprints, Shape

from ..report.record import Record, Spread
from ..workloads import load
from .provenance import code, machine

WARM_UP = 3
SUBJECT = "look"


@dataclass(frozen=True)
class LookSpec:
    """The settings of a run: workloads, gradient rows to search for non-zeros, steps per search, and repeats."""

    workloads: tuple[str, ...] = ("deepfm", "lstm")
    options: dict[str, Any] = field(default_factory=dict)
    sample: int | None = DEFAULT_SAMPLE
    every: int = 16  # one step in so many is examined: the time is divided by this number
    repeats: int = 30
    seed: int = 0


def run_looks(spec: LookSpec, on_event: Callable[[dict[str, Any]], None]) -> list[Record]:
    """Returns a record per workload: time per step to find non-zeros in gradients, over forward's and backward's."""
    records = []
    for name in spec.workloads:
        records.append(_record(name, spec))
        on_event({"workload": name})
    return records


def _record(name: str, spec: LookSpec) -> Record:
    task = load(name, **spec.options)
    model = task.model(sparse=True, seed=spec.seed)
    batches = task.batches(0, 1, spec.seed)

    def step() -> float:
        began_s = time.perf_counter()
        model.zero_grad()
        task.loss(model, next(batches)).backward()
        return time.perf_counter() - began_s

    def look() -> float:
        began_s = time.perf_counter()
        seen: Footprints = {
            n: Footprint.of(p.grad, Shape(tuple(p.shape)), spec.sample) for n, p in model.named_parameters()
        }
        assert seen
        return (time.perf_counter() - began_s) / spec.every

    turns = [(step(), look(), step()) for _ in range(WARM_UP + spec.repeats)][WARM_UP:]
    steps_s, looks_s, again_s = (list(column) for column in zip(*turns, strict=True))
    return Record(
        case="characterize",
        metric="step_s",
        subject=SUBJECT,
        baseline="step",
        params={"workload": name, "sample": spec.sample or "all", "every": spec.every},
        options=task.options,
        repeats=spec.repeats,
        subject_s=Spread.of(looks_s),
        baseline_s=Spread.of(steps_s),
        ratio=Spread.of(_ratios(looks_s, steps_s)),
        aa=Spread.of(_ratios(again_s, steps_s)),
        seeds=[spec.seed],
        **code(),
        environment=machine(),
    )


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]
