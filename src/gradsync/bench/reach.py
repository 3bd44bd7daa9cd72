"""How long methods take to a loss: steps, which do not depend on the network, times what a step takes on it.

A run of `gradsync bench train` has the times. Steps are counted as `converge` trains, with simulated ranks in one
process, from several seeds. Held-out losses are noisy: that of a step is the mean of the last few, and between two of
them it is a straight line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from ..report.record import Record, Spread
from .converge import BASELINE, opened, processes, training
from .methods import method
from .provenance import commit, machine, versions

SMOOTHED = 3  # evaluations that a loss is the mean of

# Methods of torch that lose what schemes of ours do.
SAME_AS = {"ddp_bf16": "bf16", "ddp_sparse_bf16": "bf16", "ddp_fp16": "fp16"}


@dataclass(frozen=True)
class ReachSpec:
    """To which loss, and how it is looked for."""

    loss: float
    baseline: str
    seeds: int = 3
    every: int = 10  # steps between evaluations
    most_steps: int = 500
    jobs: int = 2

    def __post_init__(self) -> None:
        for what in ("seeds", "every", "jobs"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")
        if self.most_steps < self.every:
            raise ValueError(f"most_steps must be at least {self.every}, a first evaluation, got {self.most_steps}")


def learner_of(name: str) -> str:
    """What `converge` calls that which learns the same as a method of `gradsync bench train`.

    Raises:
        ValueError: for a method of which nothing here learns the same.
    """
    if name in SAME_AS:
        return SAME_AS[name]
    if name == "ddp" or (known := method(name)).exact:
        return BASELINE
    if known.averages:
        return name
    if known.lossy is None:
        raise ValueError(f"what {name} loses is torch's alone, or depends on what it measures: none here learns alike")
    return known.lossy


def run_reach(
    timed: Sequence[Record], spec: ReachSpec, on_event: Callable[[dict[str, Any]], None]
) -> tuple[list[Record], list[str]]:
    """A record for each method of one workload's timed run, beside the baseline, and notes of those left out.

    Raises:
        ValueError: for records of several workloads or networks, or none of a baseline that reaches the loss.
    """
    steps_s, about = _times(timed)
    if spec.baseline not in steps_s:
        raise ValueError(f"there is no time of {spec.baseline!r}, but of {', '.join(steps_s)}")
    notes, learners = [], {}
    for name in steps_s:
        try:
            learners[name] = learner_of(name)
        except ValueError as error:
            if name == spec.baseline:
                raise
            notes.append(str(error))
    reached = _reached(str(about["workload"]), timed[0].options, set(learners.values()), about["ranks"], spec, on_event)
    if None in reached[learners[spec.baseline]]:
        raise ValueError(f"{spec.baseline} does not reach a loss of {spec.loss} within {spec.most_steps} steps")
    records = [
        _record(name, reached[learner], reached[learners[spec.baseline]], steps_s, about, spec, timed[0])
        for name, learner in learners.items()
        if name != spec.baseline
    ]
    return records, notes


def names_timed(timed: Sequence[Record]) -> list[str]:
    """The methods of a timed run."""
    return list(_times(timed)[0])


def _times(timed: Sequence[Record]) -> tuple[dict[str, Spread], dict[str, Any]]:
    """Seconds a step by method, and what the run was."""
    timed = [record for record in timed if record.metric == "step_s" and record.params.get("phase") != "pick"]
    keys = ("workload", "nodes", "ranks_per_node", "link")
    runs = {tuple(record.params.get(key) for key in keys) for record in timed}
    if len(runs) != 1:
        raise ValueError(f"expected training steps of one workload on one network, got {sorted(map(str, runs))}")
    (run,) = runs
    about: dict[str, Any] = dict(zip(keys, run, strict=True))
    about["ranks"] = about["nodes"] * (about["ranks_per_node"] or 1)
    found: dict[str, Spread] = {}
    for record in timed:
        for name, spread in ((record.subject, record.subject_s), (record.baseline, record.baseline_s)):
            if spread is not None:
                found.setdefault(name, spread)
    return found, about


def _reached(
    workload: str,
    options: dict[str, Any],
    learners: set[str],
    ranks: int,
    spec: ReachSpec,
    on_event: Callable[[dict[str, Any]], None],
) -> dict[str, list[float | None]]:
    """Steps to the loss, by learner and seed."""
    source = options.get("source")
    options = {name: value for name, value in options.items() if name != "source"}
    if (here := opened(workload, **options).options.get("source")) != source:
        raise ValueError(f"the timed run trained on {source}, here there is {here}")
    found: dict[str, list[float | None]] = {learner: [None] * spec.seeds for learner in learners}
    with processes(spec.jobs) as executor:
        futures: dict[Future[float | None], tuple[str, int]] = {}
        for learner in sorted(learners):
            for seed in range(spec.seeds):
                futures[executor.submit(steps_to, workload, options, learner, seed, ranks, spec)] = learner, seed
        for ended in as_completed(futures):
            learner, seed = futures[ended]
            found[learner][seed] = ended.result()
            on_event({"method": learner, "seed": seed, "steps": ended.result()})
    return found


def steps_to(
    workload: str, options: dict[str, Any], learner: str, seed: int, ranks: int, spec: ReachSpec
) -> float | None:
    """Steps until the loss is reached; None where it is not within `most_steps`."""
    torch.set_num_threads(1)
    task = opened(workload, **options)
    losses: list[float] = []
    steps = training(task, learner, seed=seed, ranks=ranks)
    for model in islice(steps, spec.every - 1, spec.most_steps, spec.every):
        losses.append(float(task.evaluate(model)["loss"]))
        if (place := crossing(losses, spec.loss)) is not None:
            return spec.every * (place + 1)
    return None


def crossing(losses: Sequence[float], target: float) -> float | None:
    """Where the smoothed losses first are at the target, on a line between two of them; 0: at the first."""
    smoothed = [
        sum(losses[max(0, place + 1 - SMOOTHED) : place + 1]) / min(place + 1, SMOOTHED) for place in range(len(losses))
    ]
    for place, loss in enumerate(smoothed):
        if loss <= target:
            return place - (target - loss) / (smoothed[place - 1] - loss) if place else 0.0
    return None


def _record(
    name: str,
    steps: list[float | None],
    baseline_steps: list[float | None],
    steps_s: dict[str, Spread],
    about: dict[str, Any],
    spec: ReachSpec,
    timed: Record,
) -> Record:
    got = [each for each in steps if each is not None]
    base = [each for each in baseline_steps if each is not None]
    reached = len(got) == len(steps)
    subject_s = [steps_s[name].median * each for each in got]
    baseline_s = [steps_s[spec.baseline].median * each for each in base]
    return Record(
        case="train",
        metric="time_to_loss_s",
        subject=name,
        baseline=spec.baseline,
        params={**about, "loss": spec.loss, "steps": steps, "baseline_steps": baseline_steps},
        options=timed.options,
        repeats=spec.seeds,
        subject_s=Spread.of(subject_s) if reached else None,
        baseline_s=Spread.of(baseline_s),
        ratio=Spread.of([a / b for a, b in zip(subject_s, baseline_s, strict=True)]) if reached else None,
        aa=Spread.of([a / b for a, b in zip(baseline_s, [*baseline_s[1:], baseline_s[0]], strict=True)]),
        seeds=list(range(spec.seeds)),
        versions=versions(),
        environment=machine() | {"timed": timed.environment, "timed_commit": timed.commit},
        commit=commit(),
        failed=None if reached else f"the loss is not reached within {spec.most_steps} steps from every seed",
    )
