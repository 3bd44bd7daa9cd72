"""Predicts a training step: simulates a plan's turns as the engine takes them, with backward slowed by the exchange.

Beside the machine model of `problem`, which a search simulates thousands of times, the prediction contains the
engine's one communication thread, the order of turns, and shared cores and memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from ...costs.forecast import forecast
from ...costs.steps import COMPUTE, OFFLOAD, Compute, Step
from ...costs.timeline import Task
from ...plans.plan import BucketPlan, Plan
from ...schemes import Scheme
from ...tensors.bucket import Bucket, Layout, Segment
from ...tensors.density import DensityProfile, joined
from ..default.compressing import LATE
from .job import Job

ITERATIONS = 4  # until ready times and exchanges, which delay each other, have settled


@dataclass(frozen=True)
class Prediction:
    """The predicted timeline of one training step's backward and exchange, in seconds from the begin of backward.

    The `stream` of a task names what it keeps busy: "compute" is backward's thread (backward, and work of the exchange
    that interrupts it). The rest of the exchange is on "kernel", "offload" and "link".
    """

    tasks: tuple[Task, ...]
    backward_s: float  # seconds of backward, slowdown by the exchange included

    @property
    def seconds(self) -> float:
        """The seconds from the begin of backward until backward has ended and all gradients are synchronised."""
        return max((task.end_s for task in self.tasks), default=0.0)


def predict(plan: Plan, job: Job) -> Prediction:
    """Returns the predicted timeline of one training step's backward and exchange with this plan.

    Raises:
        ValueError: for a plan that does not fit the job's parameters or number of ranks.
    """
    plan.check({p.name: p.tensor for p in job.profiles}, job.world_size)
    return predict_steps(plan, job, {bucket.id: steps_of(bucket, bucket.scheme, job) for bucket in plan.buckets})


def predict_steps(plan: Plan, job: Job, steps: Mapping[str, Sequence[Step]]) -> Prediction:
    """Returns the predicted timeline of one training step with this plan, which must fit the job.

    `steps`: the computations and transfers of each bucket's scheme (`steps_of`), by bucket id.
    """
    exchange: list[Task] = []
    busy = _when_busy(exchange, job)
    reached_s: dict[float, float] = {}
    own_s = {bucket.id: max(job.ready_s[name] for name in bucket.names) for bucket in plan.buckets}
    delayed = any(_delays(step) for todo in steps.values() for step in todo)
    for _ in range(ITERATIONS if job.slowdown.matters or delayed else 1):
        delays = _delays_of(exchange, own_s, reached_s)
        reached_s = {at_s: _stretched(at_s, busy, delays, job) for at_s in {*job.ready_s.values(), job.backward_s}}
        backward_s = reached_s[job.backward_s]
        ready_s = {bucket: reached_s[at_s] for bucket, at_s in own_s.items()}
        lasting = partial(_lasting, job, backward_s, busy)
        network = job.network
        exchange = forecast(plan.order, steps, ready_s, network.cost, network.placement, lasting, backward_s=backward_s)
        busy = _when_busy(exchange, job)
    backward_s = _stretched(job.backward_s, busy, _delays_of(exchange, own_s, reached_s), job)
    return Prediction((Task("backward", "compute", 0.0, backward_s), *exchange), backward_s)


def _delays(step: Step) -> bool:
    return isinstance(step, Compute) and step.awaited and step.device == COMPUTE


def _delays_of(
    exchange: Sequence[Task], ready_s: Mapping[str, float], reached_s: Mapping[float, float]
) -> list[tuple[float, float]]:
    """Returns the interruptions of backward by the exchange's work on its thread: (backward's own time, seconds).

    A bucket's first work is done when it is ready, other work when another bucket is, or after backward.

    Args:
        ready_s: ready time of each bucket, in backward's own time, that is, without interruptions.
        reached_s: backward's own time -> the time at which it was reached in the simulated exchange.
    """
    own_s = sorted(reached_s)
    at_s = [reached_s[own] for own in own_s]
    found, seen = [], set()
    for task in exchange:
        bucket = task.name.rpartition(":")[0]
        if task.stream == COMPUTE:
            place = max(bisect_right(at_s, task.start_s) - 1, 0)
            found.append((own_s[place] if bucket in seen else ready_s[bucket], task.end_s - task.start_s))
        seen.add(bucket)
    return found


def _stretched(at_s: float, busy: _Busy, delays: Sequence[tuple[float, float]], job: Job) -> float:
    """Returns the time when backward, slowed by the exchange, reaches the point that it would reach at `at_s` alone.

    Args:
        busy: when the exchange keeps its link and other threads than backward's busy.
        delays: the interruptions of backward that `_delays_of` returns: (backward's own time, seconds).
    """
    slowdown, reached_s = job.slowdown, at_s
    delayed_s = sum(seconds for own_s, seconds in delays if own_s < at_s)
    if not slowdown.matters:
        return at_s + delayed_s
    lost_by_link, lost_by_kernel = 1 - 1 / slowdown.backward_by_transfer, 1 - 1 / slowdown.backward_by_kernel
    for _ in range(ITERATIONS):
        by_link, by_kernel = busy.link.before(reached_s), busy.kernels.before(reached_s)
        by_both = by_link + by_kernel - busy.either.before(reached_s)
        lost_s = by_link * lost_by_link + by_kernel * lost_by_kernel - by_both * lost_by_link * lost_by_kernel
        reached_s = at_s + delayed_s + lost_s
    return reached_s


@dataclass(frozen=True)
class _Spans:
    """The times at which a link or thread is busy: idle before the first edge, then busy and idle alternately.

    `before_s`: the busy seconds before each edge.
    """

    edges_s: tuple[float, ...]
    before_s: tuple[float, ...]

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> _Spans:
        edges_s: list[float] = []
        for task in sorted(tasks, key=lambda task: task.start_s):
            if edges_s and task.start_s <= edges_s[-1]:
                edges_s[-1] = max(edges_s[-1], task.end_s)
            elif task.end_s > task.start_s:
                edges_s += [task.start_s, task.end_s]
        spans_s = [end - start for start, end in zip(edges_s[::2], edges_s[1::2], strict=True)]
        ends_s = list(accumulate(spans_s, initial=0.0))
        return cls(tuple(edges_s), tuple(s for pair in pairwise(ends_s) for s in pair))

    def at(self, now_s: float) -> tuple[bool, float]:
        """Returns whether the link or thread is busy at `now_s`, and the time until which this stays so."""
        place = bisect_right(self.edges_s, now_s)
        return place % 2 == 1, self.edges_s[place] if place < len(self.edges_s) else inf

    def before(self, now_s: float) -> float:
        """Returns the seconds before `now_s` during which the link or thread is busy."""
        last = bisect_right(self.edges_s, now_s) - 1
        if last < 0:
            return 0.0
        return self.before_s[last] + (now_s - self.edges_s[last] if last % 2 == 0 else 0.0)


class _Busy(NamedTuple):
    """The times at which an exchange keeps its link busy, threads other than backward's, and either of the two."""

    link: _Spans
    kernels: _Spans
    either: _Spans


def _beside_backward(job: Job) -> tuple[str, ...]:
    """Returns the streams of computations that slow backward and transfers down: those of the same processor."""
    return ("kernel",) if job.network.cost.host is not None else ("kernel", OFFLOAD)


def _when_busy(exchange: Sequence[Task], job: Job) -> _Busy:
    """Returns the times at which the link is busy, and at which threads other than backward's compute."""
    links = [task for task in exchange if task.stream == "link"]
    beside = _beside_backward(job)
    kernels = [task for task in exchange if task.stream in beside]
    return _Busy(_Spans.of(links), _Spans.of(kernels), _Spans.of([*links, *kernels]))


def _lasting(job: Job, backward_s: float, busy: _Busy, stream: str, began_s: float, seconds: float) -> float:
    """Returns how long work of `seconds` takes from `began_s` on, slowed by backward and the rest of the exchange.

    Work on backward's own thread is not slowed, nor work that is offloaded to another processor.
    """
    slowdown = job.slowdown
    if stream not in ("link", *_beside_backward(job)):
        return seconds
    if stream == "link":
        by_backward, by_other, other = slowdown.transfer_by_backward, slowdown.transfer_by_kernel, busy.kernels
    else:
        by_backward, by_other, other = slowdown.kernel_by_backward, slowdown.kernel_by_transfer, busy.link
    now_s, left_s = began_s, seconds
    while True:
        beside_other, until_s = other.at(now_s)
        beside_backward = now_s < backward_s
        if beside_backward:
            until_s = min(until_s, backward_s)
        factor = (by_backward if beside_backward else 1.0) * (by_other if beside_other else 1.0)
        if left_s * factor <= until_s - now_s:
            return now_s + left_s * factor - began_s
        left_s -= (until_s - now_s) / factor
        now_s = until_s


def unmeasured(plan: Plan, job: Job) -> list[str]:
    """Returns the names of kernels that the plan's schemes run but whose time was not measured on this job.

    Raises:
        ValueError: for a plan that does not fit the job's parameters or number of ranks.
    """
    plan.check({p.name: p.tensor for p in job.profiles}, job.world_size)
    steps = (step for bucket in plan.buckets for step in steps_of(bucket, bucket.scheme, job))
    return job.network.cost.unmeasured(steps)


def steps_of(bucket: BucketPlan, scheme: Scheme[Any], job: Job) -> list[Step]:
    """Returns the computations and transfers of `scheme` for this bucket, given the densities measured in the job.

    Raises:
        ValueError: for a scheme of tables (sparse gradients), if the density of one is not known.
    """
    known = {p.name: p for p in job.profiles}
    segments = tuple(Segment(*segment) for segment in bucket.segments)
    members = [known[name] for name in bucket.names]
    seen = Bucket(
        bucket.id, segments, tuple(p.tensor for p in members), scheme.traits.layout, scheme.traits.carries_flags
    )
    of_rows = scheme.traits.layout is Layout.ROWS
    densities = [p.density if of_rows else p.elements for p in members]
    found: tuple[DensityProfile, ...] = tuple(density for density in densities if density is not None)
    if len(found) < len(members):
        if of_rows:
            unknown = next(p.name for p in members if p.density is None)
            raise ValueError(f"the density of {unknown!r} is not known: measure the job with its sparse gradients")
        found = ()
    profiles = found if of_rows or not found else (joined(found),)
    return list(scheme.steps(seen.specs, profiles, job.network.placement, LATE))
