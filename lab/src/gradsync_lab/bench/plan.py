"""Measures planning: how long a search takes, how good its plan is, and how far from the best it can be at most.

Problems are planning tasks: those of the papers' models with the costs of the reference tables (`papers.reference`),
where ByteComp's two algorithms are the baseline, and random ones with some hundred gradients. For random problems with
few gradients all plans are tried, so the gap to the best one is exact there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradsync.planner.solver.joint import certify, search
from gradsync.planner.solver.problem import Problem, Solution

from ..papers.models import PAPER_MODELS
from ..papers.reference import CASES, bytecomp_problem
from ..report.record import PlanningRun, Record, Spread
from ..rivals.greedy import bytecomp, bytecomp_device
from ..rivals.trials import gap_cases, random_problem
from .provenance import code, machine

SUBJECT, BASELINE, BEST = "gradsync", "bytecomp", "best of all"
DEVICE, HOST = 1, 2  # options of the reference problems
DRAWN_ITEMS = (314, 1000)
DRAWN_OPTIONS = 7

Search = Callable[[], Solution]


@dataclass(frozen=True)
class PlanSpec:
    """The settings of a run: published models to plan for, gradients per random model, count of small ones, repeats."""

    models: tuple[str, ...] = tuple(PAPER_MODELS)
    drawn: tuple[int, ...] = DRAWN_ITEMS
    small: int = 1000
    repeats: int = 15

    def __post_init__(self) -> None:
        for name in self.models:
            if name not in PAPER_MODELS:
                raise ValueError(f"unknown model {name!r}; there are {', '.join(PAPER_MODELS)}")
        if self.repeats < 1 or self.small < 0 or min(self.drawn, default=1) < 1:
            raise ValueError("repeats and numbers of items must be at least 1, and small at least 0")

    @property
    def turns(self) -> int:
        """Returns the number of progress events of a run."""
        return len(self.models) * len(CASES) + len(self.drawn) + bool(self.small)


def run_planning(spec: PlanSpec, on_event: Callable[[dict[str, Any]], None]) -> list[Record]:
    """Times searches for the fastest plan to exchange a model's gradients, gradsync's and ByteComp's in turns.

    Returns a record for each problem (model and costs), and one of gaps to the best plan for all small problems.
    """
    records = []
    for params, problem, rival in _problems(spec):
        records.append(_timed(params, problem, rival, spec.repeats))
        on_event({"problem": ", ".join(map(str, params.values()))})
    if spec.small:
        records.append(_of_small(spec.small))
        on_event({"problem": f"{spec.small} small ones"})
    about = {**code(), "environment": machine()}
    return [record.model_copy(update=about) for record in records]


def _problems(spec: PlanSpec) -> Iterator[tuple[dict[str, Any], Problem, Search]]:
    for model in spec.models:
        for case in CASES:
            problem = bytecomp_problem(model, case)
            params = {"model": model, "case": case, "items": problem.size, "options": len(problem.options)}
            yield params, problem, partial(bytecomp, problem, {DEVICE: HOST})
    for items in spec.drawn:
        problem = random_problem(0, items=items, options=DRAWN_OPTIONS)
        params = {"model": "drawn", "items": items, "options": len(problem.options)}
        yield params, problem, partial(bytecomp_device, problem)


def _timed(params: dict[str, Any], problem: Problem, rival: Search, repeats: int) -> Record:
    """Times gradsync's search and a rival search on one problem in turns, and returns the record."""
    mine_s, rival_s, again_s = [], [], []
    for _ in range(repeats):
        found, took_s = _clocked(lambda: search(problem))
        mine_s.append(took_s)
        other, took_s = _clocked(rival)
        rival_s.append(took_s)
        again_s.append(_clocked(rival)[1])
    certificate, certify_s = _clocked(lambda: certify(problem, found))
    return Record(
        case="plan",
        metric="plan_s",
        subject=SUBJECT,
        baseline=BASELINE,
        params=params,
        repeats=repeats,
        subject_s=Spread.of(mine_s),
        baseline_s=Spread.of(rival_s),
        ratio=Spread.of([a / b for a, b in zip(mine_s, rival_s, strict=True)]),
        aa=Spread.of([a / b for a, b in zip(again_s, rival_s, strict=True)]),
        planning=PlanningRun(
            step_s=found.seconds,
            baseline_step_s=other.seconds,
            bound_s=certificate.bound_s,
            certificate_s=certify_s,
            buckets=len(found.parts),
        ),
        seeds=[0],
    )


def _clocked(function: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began_s


def _of_small(count: int) -> Record:
    """Returns the record of step times by the search's plans over those by the best plans, for small problems."""
    seen = list(gap_cases(range(count)))
    gaps = [trial.gap for trial in seen]
    return Record(
        case="plan",
        metric="gap",
        subject=SUBJECT,
        baseline=BEST,
        params={
            "model": "drawn",
            "items": f"2 to {max(trial.items for trial in seen)}",
            "problems": count,
            "mean_gap": statistics.fmean(gaps),
            "worst_gap": max(gaps),
            "optimal": sum(gap <= 0 for gap in gaps) / count,
            "worst_certified_gap": max(trial.certified_gap for trial in seen),
        },
        repeats=count,
        subject_s=None,
        baseline_s=None,
        ratio=Spread.of([1 + gap for gap in gaps]),
        aa=None,
        seeds=[0, count - 1],
    )
