"""Compares the learning of lossy methods with dense gradients after equally many steps: held-out losses over seeds.

No times are measured. The ranks are simulated in one process. Ranks that synchronise gradients share one model, as
their models would be equal: each rank computes the gradients of its own batch, the schemes of the method's plan average
them in one thread, and one optimiser takes the step. Tables with sparse gradients are summed exactly.
In methods that average parameters each rank has its own model and optimiser (`replicas.py`), and the mean model is
evaluated.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.comm import LocalGroup, drive_in_turns
from gradsync.compressors import names as compressors
from gradsync.optim.freezing import Freezing
from gradsync.optim.lars import LARS
from gradsync.planner import default_plan
from gradsync.planner.default.named import (
    DENSE_SCHEMES,
    SCHEMES_IN_WORDS,
    PlanMaker,
    fit_optimizer,
    is_lossy,
    lossy_planner,
)
from gradsync.plans.plan import Plan
from gradsync.schemes import Scheme
from gradsync.schemes import coarse_names as coarse
from gradsync.state import arrived as arrived_of
from gradsync.tensors.arrivals import Arrival, Arrivals
from gradsync.tensors.bucket import Layout, TensorSpec
from gradsync.tensors.density import ParameterProfile

from ..report.record import Losses, Record, Spread
from ..workloads import Workload, load
from .asynchronous import ASP, Asynchronous
from .averaging import ABLATIONS_IN_WORDS, averaging_method
from .averaging import NAMES_IN_WORDS as AVERAGES_IN_WORDS
from .provenance import code, machine
from .rank import end_with
from .replicas import Replicas

Measures = Mapping[tuple[str, str, int], Mapping[str, float]]  # (workload, method, seed) -> measures

BASELINE = "dense"  # all-reduce of gradients in float32


def usual_methods() -> tuple[str, ...]:
    """Returns the names of the usual lossy schemes and compressors; those that need error feedback also without it."""
    names = compressors.usual_names()
    bare = [f"{name}{compressors.WITHOUT}" for name in names if compressors.named(name).family.feedback]
    return tuple(dict.fromkeys((*DENSE_SCHEMES, *coarse.USUAL, *names, *bare)))


@dataclass(frozen=True)
class ConvergeSpec:
    """The settings of a run: workloads and methods to train, and the numbers of steps, ranks and seeds."""

    workloads: tuple[str, ...] = ("gpt", "lstm")
    methods: tuple[str, ...] = field(default_factory=usual_methods)
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 100
    epochs: float | None = None  # in place of steps: passes over the data, rounded to steps
    ranks: int = 2
    seeds: int = 3  # 0, 1, ...
    jobs: int = 2  # processes at once, each with one thread

    def __post_init__(self) -> None:
        for name in self.methods:
            if name != ASP and averaging_method(name) is None:
                planner_of(name)
        for what, number in (("steps", self.steps), ("ranks", self.ranks), ("seeds", self.seeds), ("jobs", self.jobs)):
            if number < 1:
                raise ValueError(f"{what} must be at least 1, got {number}")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs must be positive and finite, got {self.epochs}")

    def steps_of(self, task: Workload) -> int:
        """Returns the number of steps to train on this workload."""
        return self.steps if self.epochs is None else max(round(self.epochs * task.steps_per_epoch(self.ranks)), 1)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Returns (workload, method) of every record."""
        return [(workload, name) for workload in self.workloads for name in self.methods if name != BASELINE]

    @property
    def runs(self) -> list[tuple[str, str, int]]:
        """Returns (workload, method, seed) of every run, the baseline's first."""
        names = dict.fromkeys((BASELINE, *self.methods))
        return [(workload, name, seed) for workload in self.workloads for name in names for seed in range(self.seeds)]


def planner_of(name: str, momentum: float = 0.0) -> PlanMaker:
    """Returns the planner of this method's gradients; `momentum` is what `fit_optimizer` took from the optimiser.

    Raises:
        ValueError: the name is unknown, and the message lists the names; or its method averages parameters.
    """
    if averaging_method(name) is not None:
        raise ValueError(f"{name} averages parameters, and has no plan of gradients")
    if name != BASELINE and not is_lossy(name):
        raise ValueError(
            f"unknown method {name!r}; there are {BASELINE}, {SCHEMES_IN_WORDS}; averages of parameters: "
            f"{AVERAGES_IN_WORDS}; {ASP}, a parameter server; their ablations: {ABLATIONS_IN_WORDS}; and compressors: "
            f"{compressors.NAMES_IN_WORDS}"
        )
    return default_plan if name == BASELINE else lossy_planner(name, momentum)


def run_converge(spec: ConvergeSpec, on_event: Callable[[dict[str, Any]], None]) -> tuple[list[Record], list[str]]:
    """Returns a record for each workload and method, compared with dense gradients, and notes.

    When interrupted, it returns the records of finished methods.

    Raises:
        KeyboardInterrupt: no method is finished.
        ValueError: a workload is unknown.
    """
    options = {name: opened(name, **spec.options).options for name in spec.workloads}  # data are fetched here
    steps = {name: spec.steps_of(opened(name, **spec.options)) for name in spec.workloads}
    measures: dict[tuple[str, str, int], dict[str, float]] = {}
    notes: list[str] = []
    try:
        with processes(spec.jobs) as executor:
            futures: dict[Future[dict[str, float]], tuple[str, str, int]] = {}
            for workload, name, seed in spec.runs:
                started = executor.submit(final, workload, spec.options, name, seed, steps[workload], spec.ranks)
                futures[started] = workload, name, seed
            for ended in as_completed(futures):
                measures[futures[ended]] = ended.result()
                workload, name, seed = futures[ended]
                on_event({"workload": workload, "method": name, "seed": seed, "loss": ended.result()["loss"]})
    except KeyboardInterrupt:
        if not any(_finished(measures, spec, *case) for case in spec.cases):
            raise
        notes = [
            f"interrupted: {len(measures)} of {len(spec.runs)} runs are done; methods that miss one have no record"
        ]
    about = {**code(), "environment": machine()}
    records = [
        _record(workload, name, measures, spec, steps[workload], options[workload])
        for workload, name in spec.cases
        if _finished(measures, spec, workload, name)
    ]
    return [record.model_copy(update=about) for record in records], notes


def _finished(measures: Measures, spec: ConvergeSpec, workload: str, name: str) -> bool:
    """Whether the method and the baseline have been trained on the workload from all seeds."""
    return all((workload, method, seed) in measures for method in (BASELINE, name) for seed in range(spec.seeds))


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """Starts a pool of `jobs` spawned processes, which, unlike forked ones, are unaffected by torch's threads here.

    When the `with` block is left by an exception, an interrupt for example, the processes are ended amid their runs.
    """
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_end_with, initargs=(os.getpid(),)) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _end_with(parent: int) -> None:
    """Makes a process of the pool end with the process `parent`, which alone answers interrupts from the terminal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def _record(
    workload: str, name: str, measures: Measures, spec: ConvergeSpec, steps: int, options: dict[str, Any]
) -> Record:
    seeds = list(range(spec.seeds))

    def of(measure: str) -> list[list[float]]:
        found = ([measures[workload, method, seed].get(measure) for seed in seeds] for method in (name, BASELINE))
        return [[value for value in values if value is not None] for values in found]

    subject, baseline = of("loss")
    right, baseline_right = of("accuracy")
    finite = all(map(math.isfinite, (*subject, *baseline)))
    return Record(
        case="converge",
        metric="loss",
        subject=name,
        baseline=BASELINE,
        params={"workload": workload, "steps": steps, "ranks": spec.ranks},
        options=options,
        repeats=spec.seeds,
        subject_s=None,
        baseline_s=None,
        ratio=Spread.of([a / b for a, b in zip(subject, baseline, strict=True)]) if finite else None,
        aa=Spread.of([a / b for a, b in zip(baseline, [*baseline[1:], baseline[0]], strict=True)]) if finite else None,
        losses=Losses(subject=subject, baseline=baseline) if finite else None,
        accuracies=Losses(subject=right, baseline=baseline_right) if finite and right else None,
        seeds=seeds,
        failed=None if finite else "the loss is not finite",
    )


opened = cache(load)


def final(workload: str, options: dict[str, Any], name: str, seed: int, steps: int, ranks: int) -> dict[str, float]:
    """Trains a method for `steps` steps in one thread and returns held-out measures; the same numbers every time."""
    torch.set_num_threads(1)
    task = opened(workload, **options)
    return trained(task, name, seed=seed, steps=steps, ranks=ranks)


def trained(task: Workload, name: str, *, seed: int, steps: int, ranks: int) -> dict[str, float]:
    """Trains a fresh model by method `name` for `steps` steps and returns its measures on held-out samples."""
    return task.evaluate(next(islice(training(task, name, seed=seed, ranks=ranks), steps - 1, None)))


def training(
    task: Workload, name: str, *, seed: int, ranks: int, mixes_by: Scheme[Any] | None = None
) -> Iterator[nn.Module]:
    """Trains a fresh model and yields it after each step, without end; if ranks have different models, their mean.

    Args:
        mixes_by: the scheme by which a method averages parameters; None: the one it chooses for equal links.
    """
    if name == ASP:
        return Asynchronous(task, seed=seed, ranks=ranks).train()
    if (averages := averaging_method(name)) is not None:
        return Replicas.of(averages, task, seed=seed, ranks=ranks, scheme=mixes_by).train()
    return _together(task, name, seed=seed, ranks=ranks)


def _together(task: Workload, name: str, *, seed: int, ranks: int) -> Iterator[nn.Module]:
    """Trains one model with the averaged gradients of all ranks, and yields it after each step."""
    model = task.model(sparse=True, seed=seed)
    optimizer = task.optimizer(model)
    planner = planner_of(name, fit_optimizer(name, optimizer))
    batches = [task.batches(rank, ranks, seed) for rank in range(ranks)]
    parameters = dict(model.named_parameters())
    together: Ranks | None = None
    freezing = Freezing(parameters, lambda: Arrivals() if together is None else together.arrivals)
    if isinstance(optimizer, LARS):
        names = {id(parameter): each for each, parameter in parameters.items()}
        optimizer.arrived = lambda p: None if together is None else together.arrivals.of(names[id(p)])
    while True:
        gradients = []
        for mine in batches:
            optimizer.zero_grad()
            task.loss(model, next(mine)).backward()
            gradients.append({each: p.grad for each, p in parameters.items() if p.grad is not None})
        together = together or Ranks.of(gradients[0], planner, ranks)
        for parameter, gradient in together.mean(gradients).items():
            parameters[parameter].grad = gradient
        freezing.before(optimizer)
        optimizer.step()
        freezing.after(optimizer)
        yield model


class Ranks:
    """Simulated ranks that average gradients by a plan in one thread; keeps each rank's state of each scheme."""

    def __init__(self, plan: Plan, specs: Mapping[str, TensorSpec], size: int) -> None:
        self._groups = LocalGroup.world(size)
        self._buckets = [(bucket.bucket(specs), bucket.scheme) for bucket in plan.buckets]
        self._states = [[scheme.init(bucket, group) for group in self._groups] for bucket, scheme in self._buckets]
        self.arrivals = Arrivals()  # of the last step

    @classmethod
    def of(cls, gradients: Mapping[str, Tensor], planner: PlanMaker, size: int) -> Ranks:
        """Returns `size` simulated ranks with the plan that `planner` makes for the parameters of these gradients."""
        profiles = [
            ParameterProfile(name, TensorSpec.of(gradient), gradient.layout is torch.sparse_coo)
            for name, gradient in gradients.items()
        ]
        return cls(planner(profiles, size), {profile.name: profile.tensor for profile in profiles}, size)

    @torch.no_grad()
    def mean(self, gradients: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the ranks' mean gradients of a step by name: dense ones by the plan's schemes, sparse ones exact."""
        means: dict[str, Tensor] = {}
        arrived: list[Arrival] = []
        size = len(self._groups)
        for number, (bucket, scheme) in enumerate(self._buckets):
            if bucket.layout is Layout.ROWS:
                for name in bucket.names:
                    total = reduce(torch.add, (mine[name] for mine in gradients))
                    means[name] = (total / size).coalesce()
                continue
            flags = torch.zeros(bucket.num_flags if bucket.flags_ride else 0, dtype=bucket.dtype)
            flat = [torch.cat([*(mine[name].reshape(-1) for name in bucket.names), flags]) for mine in gradients]
            done, _ = drive_in_turns(
                [
                    scheme.synchronize(x, state, group, 1 / size)
                    for x, state, group in zip(flat, self._states[number], self._groups, strict=True)
                ]
            )
            self._states[number] = [state for _, state in done]
            arrived.append(Arrival(bucket, arrived_of(done[0][1], bucket), scheme.traits.freezes))
            parts = done[0][0][: bucket.numel].split([segment.numel for segment in bucket.segments])
            for name, part in zip(bucket.names, parts, strict=True):
                means[name] = part.view_as(gradients[0][name])
        self.arrivals = Arrivals(arrived)
        return means
