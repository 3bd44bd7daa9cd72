"""Measures the start of a job: attach, the first steps, the longest one, and when the plan has settled.

Each job is a set of new processes. The jobs of a repeat run one after another, DDP's first and last: the ratio of these
two (A/A) is the noise of the run. gradsync's jobs are the first one on the machine, whose cache directory is empty, and
a later one, which finds what the first one left there. Steps are timed from the end of attach, which is DDP's
constructor for DDP; models with tables have sparse gradients, also behind DDP.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from .. import workloads
from ..cluster import Scenario
from ..report.record import Record, Spread
from .launch import LOOPBACK, Launcher, Loopback, cluster, once_more_after_crash, run_ranks
from .provenance import code, machine
from .start_models import kind_of

CACHE_VARIABLE = "GRADSYNC_CACHE_DIR"
DDP = "ddp"
AGAIN, FIRST, LATER = "again", "first", "later"
JOBS = {  # of a repeat, in their order, with their methods
    DDP: DDP,
    **{f"{method}:{job}": method for method in ("gradsync", "auto") for job in (FIRST, LATER)},
    f"{DDP}:{AGAIN}": DDP,
}
EARLY = 50  # steps that count as the first ones
ALL, LONGEST = "all steps", "longest step"
FIGURES = ("attach", "first step", f"first {EARLY} steps", ALL, LONGEST, "steady step")


class StartSpec(BaseModel):
    """The settings of the measurement of starts."""

    model: str = "tables"
    nodes: int = 4
    ranks_per_node: int = 1
    link: str = "1gbit"
    steps: int = Field(default=500, ge=2 * EARLY)
    repeats: int = Field(default=5, ge=1)
    loopback: bool = False
    seed: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def jobs(self) -> int:
        """Returns how many jobs run, each of which is an event of progress."""
        return self.repeats * len(JOBS)


class JobSpec(BaseModel):
    """The settings of one job: the program of its ranks reads them."""

    model: str
    method: str
    steps: int
    seed: int


@dataclass(frozen=True)
class Start:
    """The start of one job, by its slowest rank: seconds by the names of `FIGURES`, and the number of the longest step.

    `settled` is after how many steps and seconds the plan was the one that stays; None if it was not.
    """

    seconds: dict[str, float]
    longest: int
    settled: tuple[int, float] | None

    @classmethod
    def of(cls, ranks: list[dict[str, Any]]) -> Start:
        """Returns the start of a job, from each rank's `attach_s`, `ends_s` of steps after it, and `settled` step."""
        ends_s = [max(ends) for ends in zip(*(rank["ends_s"] for rank in ranks), strict=True)]
        steps_s = [end - begin for begin, end in zip([0.0, *ends_s], ends_s, strict=False)]
        longest, last = max(range(len(steps_s)), key=steps_s.__getitem__), len(steps_s) - EARLY
        settled = max((rank["settled"] for rank in ranks), key=lambda step: len(steps_s) if step is None else step)
        attach_s = max(rank["attach_s"] for rank in ranks)
        early_s, steady_s = ends_s[EARLY - 1], (ends_s[-1] - ends_s[last - 1]) / EARLY
        figures = (attach_s, steps_s[0], early_s, ends_s[-1], steps_s[longest], steady_s)
        at_s = None if settled is None else (settled, ends_s[settled - 1] if settled else 0.0)
        return cls(dict(zip(FIGURES, figures, strict=True)), longest + 1, at_s)


def run_starts(spec: StartSpec, on_event: Callable[[dict[str, Any]], None]) -> tuple[list[Record], list[str]]:
    """Runs all jobs; returns a record for each figure of each of gradsync's jobs against DDP's, and notes.

    Raises:
        ValueError: the model is unknown.
        RuntimeError: a rank failed.
    """
    workload = workloads.open_workload(kind_of(spec.model))  # fetched here: ranks in a lab reach no registry
    scenario = Scenario(nodes=spec.nodes, link=spec.link, ranks_per_node=spec.ranks_per_node)
    notes: list[str] = []
    starts: dict[str, list[Start]] = {}
    with cluster(scenario, notes, loopback=spec.loopback) as where:
        environment = {**machine(), **where.describe()}
        for _ in range(spec.repeats):
            with tempfile.TemporaryDirectory(prefix="gradsync-start-") as caches:
                for job, method in JOBS.items():
                    ranks = _run_job(where, spec, method, Path(caches, method), notes, on_event)
                    starts.setdefault(job, []).append(Start.of(ranks))
    params = {"model": spec.model, "nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node, "steps": spec.steps}
    params["link"] = LOOPBACK if isinstance(where, Loopback) else spec.link
    about = {"environment": environment, "options": workload.options, "seeds": [spec.seed], **code()}
    return start_records(starts, params, about), notes


def _run_job(
    where: Launcher,
    spec: StartSpec,
    method: str,
    cache: Path,
    notes: list[str],
    on_event: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Returns each rank's result of one job; `cache` is made if it is not there."""
    cache.mkdir(exist_ok=True)
    job = JobSpec(model=spec.model, method=method, steps=spec.steps, seed=spec.seed)

    def run() -> list[dict[str, Any]]:
        module, env = "gradsync_lab.bench.start_rank", {CACHE_VARIABLE: str(cache)}
        return run_ranks(where, spec.world_size, module, job.model_dump_json(), on_event, env)

    return once_more_after_crash(run, notes, on_event) if method == DDP else run()


def start_records(starts: dict[str, list[Start]], params: dict[str, Any], about: dict[str, Any]) -> list[Record]:
    """Returns a record for each figure of each job of gradsync's, against DDP's in the same repeats.

    Args:
        starts: by the names of `JOBS`, one for each repeat.
        params: settings, for all records.
        about: further fields of all records.
    """
    records = []
    for job in (job for job, method in JOBS.items() if method != DDP):
        for figure in FIGURES:
            mine, base, again = (
                [start.seconds[figure] for start in starts[name]] for name in (job, DDP, f"{DDP}:{AGAIN}")
            )
            own = {**params, "job": job.partition(":")[2], "figure": figure}
            if figure == LONGEST:
                own["at_step"] = int(statistics.median_low(start.longest for start in starts[job]))
            if figure == ALL:
                own |= _settled(starts[job])
            record = Record(
                case="start",
                metric="start_s",
                subject=JOBS[job],
                baseline=DDP,
                params=own,
                repeats=len(mine),
                subject_s=Spread.of(mine),
                baseline_s=Spread.of(base),
                ratio=Spread.of([one / other for one, other in zip(mine, base, strict=True)]),
                aa=Spread.of([one / other for one, other in zip(again, base, strict=True)]),
                **about,
            )
            records.append(record)
    return records


def _settled(starts: list[Start]) -> dict[str, Any]:
    """Returns in how many repeats the plan has settled, and the medians of the steps and seconds until then."""
    found = [start.settled for start in starts if start.settled is not None]
    if not found:
        return {"settled": f"0 of {len(starts)}"}
    steps, seconds = zip(*found, strict=True)
    said = {"settled": f"{len(found)} of {len(starts)}"} if len(found) < len(starts) else {}
    return {**said, "settled_step": int(statistics.median_low(steps)), "settled_s": statistics.median(seconds)}
