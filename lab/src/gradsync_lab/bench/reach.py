"""Estimates the time that methods take to a loss: steps, which do not depend on the network, times seconds per step.

Seconds per step come from records of `gradsync bench train`. Steps are counted by training as `converge` does, with
simulated ranks in one process, from several seeds. Held-out losses are noisy: the loss of a step is the mean of the
last few evaluations, interpolated linearly. For methods named in `whole` the product is compared with runs that train
to the loss on the emulated cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from gradsync.schemes import from_expression

from ..report.record import Record, Spread
from .asynchronous import ASP
from .converge import BASELINE, opened, processes, training
from .launch import LOOPBACK
from .methods import DDP, DDP_SPARSE, method
from .provenance import code, machine
from .rivals import POST_LOCAL_SGD, USUAL_PERIOD
from .scenarios import settings_of
from .whole import WholeRun, WholeSpec, run_whole

EARLY = "_early"
SMOOTHED = 3  # number of evaluations in a mean loss

# Methods of torch that learn as methods of `converge` do.
SAME_AS = {
    "ddp_bf16": "bf16",
    "ddp_sparse_bf16": "bf16",
    "ddp_fp16": "fp16",
    "asp": ASP,
    "ssp": ASP,  # workers that are equally fast never wait for each other
}


@dataclass(frozen=True)
class ReachSpec:
    """The settings of a run: the loss to reach, the baseline method, and how steps to the loss are counted."""

    loss: float
    baseline: str
    seeds: int = 3
    every: int = 10  # steps between evaluations
    most_steps: int = 500
    jobs: int = 2
    whole: tuple[str, ...] = ()  # methods that are trained on the cluster too, as the baseline is, from the first seed

    def __post_init__(self) -> None:
        for what in ("seeds", "every", "jobs"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")
        if self.most_steps < self.every:
            raise ValueError(f"most_steps must be at least {self.every}, a first evaluation, got {self.most_steps}")

    @property
    def trained_whole(self) -> tuple[str, ...]:
        """Returns the methods to train on the emulated cluster: the baseline and `whole`; empty if `whole` is."""
        return tuple(dict.fromkeys((self.baseline, *self.whole))) if self.whole else ()


@dataclass(frozen=True)
class Learner:
    """A method as `converge` simulates it to count its steps to the loss; `mixes_by`: its averaging scheme, if any."""

    name: str
    mixes_by: str | None = None  # as JSON

    @classmethod
    def of(cls, name: str, mixes_by: dict[str, Any] | None = None) -> Learner:
        """Returns the simulated method that learns as the method `name` of `gradsync bench train` does.

        Args:
            mixes_by: the expression of the scheme by which the method averages parameters, if records name it.

        Raises:
            ValueError: `converge` simulates no method that learns as this one does.
        """
        if name in SAME_AS:
            return cls(SAME_AS[name])
        if name in (DDP, DDP_SPARSE) or (known := method(name)).exact:
            return cls(BASELINE)
        if known.averages:
            learnt = name.replace(EARLY, "")  # steps inside backward learn the same
            return cls(learnt, None if mixes_by is None else json.dumps(mixes_by))
        if name.startswith(POST_LOCAL_SGD):  # the same except for its first steps
            return cls(f"local_sgd{name.removeprefix(POST_LOCAL_SGD) or USUAL_PERIOD}")
        if known.lossy is None:
            raise ValueError(
                f"no method of `gradsync bench converge` learns as {name} does: its errors are torch's own, or depend "
                "on its measurements; leave it out"
            )
        return cls(known.lossy)


Reached = dict[tuple[Learner, int], list[float | None]]  # (learner, number of ranks) -> steps of each seed


@dataclass(frozen=True)
class TimedRun:
    """The measured step times of several methods in one run of `gradsync bench train`, on one network."""

    steps_s: dict[str, Spread]
    about: dict[str, Any]  # the workload, nodes and links
    learners: dict[str, Learner]
    trains: dict[str, str]  # method -> method that trains for it: for `ddp`, the best of DDP's settings
    notes: tuple[str, ...]  # on methods left out
    record: Record

    @property
    def ranks(self) -> int:
        return int(self.about["nodes"]) * int(self.about["ranks_per_node"] or 1)

    @classmethod
    def of(cls, records: Sequence[Record], about: dict[str, Any]) -> TimedRun:
        steps_s: dict[str, Spread] = {}
        mixes_by: dict[str, dict[str, Any]] = {}
        trains: dict[str, str] = {}
        for record in records:
            sides = {"subject": (record.subject, record.subject_s), "baseline": (record.baseline, record.baseline_s)}
            for side, (name, spread) in sides.items():
                if spread is not None:
                    steps_s.setdefault(name, spread)
                    trains.setdefault(name, record.params.get(f"{side}_method") or name)
            if "mixes_by" in record.params:
                mixes_by[record.subject] = record.params["mixes_by"]
        learners, notes = {}, []
        for name in steps_s:
            try:
                learners[name] = Learner.of(name, mixes_by.get(name))
            except ValueError as error:
                notes.append(str(error))
        return cls(steps_s, about, learners, trains, tuple(notes), records[0])


def timed_runs(records: Sequence[Record]) -> list[TimedRun]:
    """Groups records of `gradsync bench train` into runs, each on one network.

    Raises:
        ValueError: the records are of several workloads, or of none.
    """
    steps = [record for record in records if record.metric == "step_s" and record.params.get("phase") != "pick"]
    workloads = sorted({str(record.params.get("workload")) for record in steps})
    if len(workloads) != 1:
        raise ValueError(f"expected training steps of one workload, got {workloads}")
    keys = ("workload", "nodes", "ranks_per_node", "link", "scenario")
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for record in steps:
        runs.setdefault(tuple(record.params.get(key) for key in keys), []).append(record)
    return [
        TimedRun.of(each, {key: value for key, value in zip(keys, run, strict=True) if value is not None})
        for run, each in runs.items()
    ]


def learners_of(runs: Sequence[TimedRun]) -> list[tuple[Learner, int]]:
    """Returns the distinct (simulated method, number of ranks) pairs of all runs, which are to be trained."""
    return list(dict.fromkeys((learner, run.ranks) for run in runs for learner in run.learners.values()))


def run_reach(
    runs: Sequence[TimedRun], spec: ReachSpec, on_event: Callable[[dict[str, Any]], None]
) -> tuple[list[Record], list[str]]:
    """Returns records of time to `spec.loss` for each run's methods against the baseline, and notes on omitted methods.

    Raises:
        ValueError: a run lacks the baseline, the baseline does not reach the loss, or methods of `spec.whole`
            cannot be trained on the emulated cluster.
    """
    for run in runs:
        if spec.baseline not in run.steps_s:
            raise ValueError(f"there is no time of {spec.baseline!r}, but of {', '.join(run.steps_s)}")
        if spec.baseline not in run.learners:
            raise ValueError(f"{spec.baseline} cannot be the baseline: {'; '.join(run.notes)}")
    whole = [_whole_spec(run, spec) for run in runs] if spec.whole else []
    reached = _reached(runs, spec, on_event)
    for run in runs:
        if None in reached[run.learners[spec.baseline], run.ranks]:
            raise ValueError(f"{spec.baseline} does not reach a loss of {spec.loss} within {spec.most_steps} steps")
    records = [
        _record(name, reached[learner, run.ranks], reached[run.learners[spec.baseline], run.ranks], run, spec)
        for run in runs
        for name, learner in run.learners.items()
        if name != spec.baseline
    ]
    notes = [note for run in runs for note in run.notes]
    for run, each in zip(runs, whole, strict=False):  # none where none is asked for
        found, said = _whole(run, each, reached, spec, on_event)
        records += found
        notes += said
    return records, list(dict.fromkeys(notes))


def _whole_spec(run: TimedRun, spec: ReachSpec) -> WholeSpec:
    """Returns the settings for training methods of a run on the emulated cluster until the loss is `spec.loss`.

    Raises:
        ValueError: a method is not in the run or is asynchronous, or the run only emulated computation.
    """
    if unknown := [name for name in spec.trained_whole if name not in run.steps_s]:
        raise ValueError(f"{', '.join(unknown)} cannot be trained whole: there are {', '.join(run.steps_s)}")
    trains = [run.trains[name] for name in spec.trained_whole]
    if apart := [name for name in trains if not method(name).in_step]:
        raise ValueError(f"whole runs are of ranks that make steps together, not of {', '.join(apart)}")
    if run.record.params.get("emulate_compute"):
        raise ValueError("where computation is emulated nothing is learnt, so there is nothing to train whole")
    about, where = run.about, dict[str, Any](loopback=True)
    if about["link"] != LOOPBACK:
        where = {"link": about["link"]}
        if (scene := about.get("scenario")) is not None:
            where |= {"scenario_name": scene, "scenario": settings_of(scene, int(about["nodes"]), about["link"])}
    return WholeSpec(
        workload=str(about["workload"]),
        options={name: value for name, value in run.record.options.items() if name != "source"},
        methods=tuple(trains),
        nodes=int(about["nodes"]),
        ranks_per_node=int(about["ranks_per_node"] or 1),
        loss=spec.loss,
        every=spec.every,
        most_steps=spec.most_steps,
        **where,
    )


def _whole(
    run: TimedRun, whole: WholeSpec, reached: Reached, spec: ReachSpec, on_event: Callable[[dict[str, Any]], None]
) -> tuple[list[Record], list[str]]:
    """Trains methods to `spec.loss` on the emulated cluster; returns records, and notes of real and estimated times."""
    where = ", ".join(str(run.about[key]) for key in ("link", "scenario") if key in run.about)
    try:
        found, described, notes = run_whole(whole, on_event)
    except RuntimeError as error:
        return [], [f"{where}: no whole runs: {error}"]
    base = found[run.trains[spec.baseline]]
    if base.seconds is None:
        why = base.failed or f"it does not reach a loss of {spec.loss} within {spec.most_steps} steps"
        return [], [*notes, f"{where}: no whole runs: {spec.baseline}: {why}"]
    records = []
    for name in spec.trained_whole:
        got = found[run.trains[name]]
        counted = reached[run.learners[name], run.ranks][0] if name in run.learners else None
        record = _whole_record(name, got, counted, base, run, spec, described)
        records.append(record)
        if got.seconds is not None:
            product = "" if record.predicted_s is None else f", by the product {record.predicted_s:.1f} s"
            steps = "" if counted is None else f", counted {counted:.1f}"
            notes.append(f"{where}: {name}: {got.seconds:.1f} s to the loss{product}; in {got.steps:.1f} steps{steps}")
    return records, notes


def _whole_record(
    name: str,
    got: WholeRun,
    steps: float | None,
    base: WholeRun,
    run: TimedRun,
    spec: ReachSpec,
    described: dict[str, Any],
) -> Record:
    assert base.seconds is not None
    return Record(
        case="train",
        metric="time_to_loss_s",
        subject=name,
        baseline=spec.baseline,
        params={
            **run.about,
            "ranks": run.ranks,
            "loss": spec.loss,
            "whole": True,
            "steps": [got.steps],
            "baseline_steps": [base.steps],
            "predicted_steps": [steps],
        },
        options=run.record.options,
        repeats=1,
        subject_s=None if got.seconds is None else Spread.of([got.seconds]),
        baseline_s=Spread.of([base.seconds]),
        ratio=None if got.seconds is None else Spread.of([got.seconds / base.seconds]),
        aa=None,
        predicted_s=None if steps is None else run.steps_s[name].median * steps,
        seeds=[0],
        **code(),
        environment=machine() | described,
        failed=got.failed or (f"the loss is not reached within {spec.most_steps} steps" if got.steps is None else None),
    )


def _reached(runs: Sequence[TimedRun], spec: ReachSpec, on_event: Callable[[dict[str, Any]], None]) -> Reached:
    """Trains every simulated method from every seed; returns steps to the loss by (method, ranks), one per seed."""
    workload, given = str(runs[0].about["workload"]), runs[0].record.options
    options = {name: value for name, value in given.items() if name != "source"}
    if (here := opened(workload, **options).options.get("source")) != given.get("source"):
        raise ValueError(f"the timed run trained on {given.get('source')}, here there is {here}")
    found: Reached = {each: [None] * spec.seeds for each in learners_of(runs)}
    with processes(spec.jobs) as executor:
        futures: dict[Future[float | None], tuple[tuple[Learner, int], int]] = {}
        for learner, ranks in found:
            for seed in range(spec.seeds):
                started = executor.submit(steps_to, workload, options, learner, seed, ranks, spec)
                futures[started] = (learner, ranks), seed
        for ended in as_completed(futures):
            learning, seed = futures[ended]
            found[learning][seed] = ended.result()
            on_event({"method": learning[0].name, "seed": seed, "steps": ended.result()})
    return found


def steps_to(
    workload: str, options: dict[str, Any], learner: Learner, seed: int, ranks: int, spec: ReachSpec
) -> float | None:
    """Trains a simulated method and returns its steps to the loss `spec.loss`; None if it takes over `most_steps`."""
    torch.set_num_threads(1)
    task = opened(workload, **options)
    losses: list[float] = []
    mixes_by = None if learner.mixes_by is None else from_expression(json.loads(learner.mixes_by))
    steps = training(task, learner.name, seed=seed, ranks=ranks, mixes_by=mixes_by)
    for model in islice(steps, spec.every - 1, spec.most_steps, spec.every):
        losses.append(float(task.evaluate(model)["loss"]))
        if (place := crossing(losses, spec.loss)) is not None:
            return spec.every * (place + 1)
    return None


def crossing(losses: Sequence[float], target: float) -> float | None:
    """Returns the interpolated index in `losses`, smoothed, where they first reach the target; None if they do not."""
    smoothed = [
        sum(losses[max(0, place + 1 - SMOOTHED) : place + 1]) / min(place + 1, SMOOTHED) for place in range(len(losses))
    ]
    for place, loss in enumerate(smoothed):
        if loss <= target:
            return place - (target - loss) / (smoothed[place - 1] - loss) if place else 0.0
    return None


def _record(
    name: str, steps: list[float | None], baseline_steps: list[float | None], run: TimedRun, spec: ReachSpec
) -> Record:
    got = [each for each in steps if each is not None]
    base = [each for each in baseline_steps if each is not None]
    reached = len(got) == len(steps)
    subject_s = [run.steps_s[name].median * each for each in got]
    baseline_s = [run.steps_s[spec.baseline].median * each for each in base]
    return Record(
        case="train",
        metric="time_to_loss_s",
        subject=name,
        baseline=spec.baseline,
        params={**run.about, "ranks": run.ranks, "loss": spec.loss, "steps": steps, "baseline_steps": baseline_steps},
        options=run.record.options,
        repeats=spec.seeds,
        subject_s=Spread.of(subject_s) if reached else None,
        baseline_s=Spread.of(baseline_s),
        ratio=Spread.of([a / b for a, b in zip(subject_s, baseline_s, strict=True)]) if reached else None,
        aa=Spread.of([a / b for a, b in zip(baseline_s, [*baseline_s[1:], baseline_s[0]], strict=True)]),
        seeds=list(range(spec.seeds)),
        **code(),
        environment=machine() | {"timed": run.record.environment, "timed_commit": run.record.commit},
        failed=None if reached else f"the loss is not reached within {spec.most_steps} steps from every seed",
    )
