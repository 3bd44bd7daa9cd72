"""How long a step takes by a plan: its turns played as the engine takes them, backward stretched by what it shares.

Beside the machine of `problem`, which a search plays thousands of times, this knows the engine's one issuing thread,
the order of turns, and that cores and memory are shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..bucket import Layout
from ..density import DensityProfile, ParameterProfile, joined
from ..forecast import forecast
from ..plan import BucketPlan, Plan
from ..steps import Step
from ..timeline import Task, covered_s
from .compressing import LATE
from .job import Job

ROUNDS = 4  # until times of readiness and of exchanges, which stretch each other, have settled


@dataclass(frozen=True)
class Prediction:
    """A step as it is expected, from backward's begin: "compute" is backward, "kernel" and "link" the exchange."""

    tasks: tuple[Task, ...]
    backward_s: float  # with what stretches it

    @property
    def seconds(self) -> float:
        """Until the last gradient is synchronised."""
        return max((task.end_s for task in self.tasks), default=0.0)


def predict(plan: Plan, job: Job) -> Prediction:
    """
    Raises:
        ValueError: for a plan that does not fit the job.
    """
    known = {p.name: p for p in job.profiles}
    plan.check({p.name: p.tensor for p in job.profiles}, job.world_size)
    steps = {bucket.id: _steps(bucket, known, job) for bucket in plan.buckets}
    exchange: list[Task] = []
    for _ in range(ROUNDS):
        ready_s = {name: _stretched(at_s, exchange, job) for name, at_s in job.ready_s.items()}
        of_buckets = {bucket.id: max(ready_s[name] for name in bucket.names) for bucket in plan.buckets}
        exchange = forecast(plan.order, steps, of_buckets, job.network.cost, job.network.placement)
    backward_s = _stretched(job.backward_s, exchange, job)
    return Prediction((Task("backward", "compute", 0.0, backward_s), *exchange), backward_s)


def _stretched(at_s: float, exchange: list[Task], job: Job) -> float:
    """When backward reaches what it would reach `at_s` if it were alone."""
    overlap, reached_s = job.overlap, at_s
    for _ in range(ROUNDS):
        by_link = covered_s([task for task in exchange if task.stream == "link"], 0.0, reached_s)
        by_kernel = covered_s([task for task in exchange if task.stream == "kernel"], 0.0, reached_s)
        lost_s = by_link * (1 - 1 / overlap.backward_by_transfer) + by_kernel * (1 - 1 / overlap.backward_by_kernel)
        reached_s = at_s + lost_s
    return reached_s


def _steps(bucket: BucketPlan, known: dict[str, ParameterProfile], job: Job) -> list[Step]:
    scheme = bucket.make_scheme()
    seen = bucket.bucket({name: p.tensor for name, p in known.items()})
    members = [known[name] for name in bucket.names]
    of_rows = scheme.layout is Layout.ROWS
    densities = [p.density if of_rows else p.elements for p in members]
    found: tuple[DensityProfile, ...] = tuple(density for density in densities if density is not None)
    if len(found) < len(members):
        if of_rows:
            unknown = next(p.name for p in members if p.density is None)
            raise ValueError(f"the density of {unknown!r} is not known: measure the job with its sparse gradients")
        found = ()
    profiles = found if of_rows or not found else (joined(found),)
    return list(scheme.steps(seen.specs, profiles, job.network.placement, LATE))
