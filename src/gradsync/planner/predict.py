"""How long a step takes by a plan: its turns played as the engine takes them, backward stretched by what it shares.

Beside the machine of `problem`, which a search plays thousands of times, this knows the engine's one issuing thread,
the order of turns, and that cores and memory are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bucket import Bucket, Layout, Segment
from ..density import DensityProfile, joined
from ..forecast import forecast
from ..plan import BucketPlan, Plan
from ..schemes import Scheme
from ..steps import Compute, Step
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
    plan.check({p.name: p.tensor for p in job.profiles}, job.world_size)
    return played(plan, job, {bucket.id: steps_of(bucket, bucket.make_scheme(), job) for bucket in plan.buckets})


def played(plan: Plan, job: Job, steps: Mapping[str, Sequence[Step]]) -> Prediction:
    """What is predicted of a plan that fits the job; `steps` of each bucket."""
    exchange: list[Task] = []
    for _ in range(ROUNDS if job.slowdown.matters else 1):
        reached_s = {at_s: _stretched(at_s, exchange, job) for at_s in set(job.ready_s.values())}
        ready_s = {b.id: max(reached_s[job.ready_s[name]] for name in b.names) for b in plan.buckets}
        exchange = forecast(plan.order, steps, ready_s, job.network.cost, job.network.placement)
    backward_s = _stretched(job.backward_s, exchange, job)
    return Prediction((Task("backward", "compute", 0.0, backward_s), *exchange), backward_s)


def _stretched(at_s: float, exchange: list[Task], job: Job) -> float:
    """When backward reaches what it would reach `at_s` if it were alone."""
    slowdown, reached_s = job.slowdown, at_s
    if not slowdown.matters:
        return at_s
    links, kernels = ([task for task in exchange if task.stream == stream] for stream in ("link", "kernel"))
    for _ in range(ROUNDS):
        by_link, by_kernel = covered_s(links, 0.0, reached_s), covered_s(kernels, 0.0, reached_s)
        lost_s = by_link * (1 - 1 / slowdown.backward_by_transfer) + by_kernel * (1 - 1 / slowdown.backward_by_kernel)
        reached_s = at_s + lost_s
    return reached_s


def kernels_of(plan: Plan, job: Job) -> set[str]:
    """By the names under which a cost model knows them.

    Raises:
        ValueError: for a plan that does not fit the job.
    """
    plan.check({p.name: p.tensor for p in job.profiles}, job.world_size)
    steps = (step for bucket in plan.buckets for step in steps_of(bucket, bucket.make_scheme(), job))
    return {step.kernel for step in steps if isinstance(step, Compute)}


def steps_of(bucket: BucketPlan, scheme: Scheme[Any], job: Job) -> list[Step]:
    """What the scheme does with the bucket.

    Raises:
        ValueError: for tables whose density is not known.
    """
    known = {p.name: p for p in job.profiles}
    segments = tuple(Segment(*segment) for segment in bucket.segments)
    members = [known[name] for name in bucket.names]
    seen = Bucket(bucket.id, segments, tuple(p.tensor for p in members), scheme.layout, scheme.carries_flags)
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
