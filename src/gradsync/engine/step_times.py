"""Reads the times of training steps, which an accelerator runs later than the host submits them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comm import Span
from ..costs.timeline import Task
from ..devices.streams import Moment
from .bucket_run import BucketRuns

MOST_UNREAD = 64  # steps that the device has ended: their spans take memory


@dataclass(frozen=True)
class Step:
    """The moments of a training step, from its first gradient to the end of its exchange.

    A device may reach them later than the host; `TimedSteps` reads them then.

    Attributes:
        began: when the first gradient was ready.
        backward_ended: when all gradients were ready, and somebody waited for results.
        ended: when all results were there.
        ready: when each bucket had all of its gradients, by its id.
        spans: begin and end of each task of the exchange.
    """

    began: Moment
    backward_ended: Moment
    ended: Moment
    ready: Mapping[str, Moment]
    spans: Sequence[Span]


class TimedSteps:
    """Collects the times of training steps, and reads them from the device when somebody asks, or when many are unread.

    Times add up in the buckets. Tasks are made of the last step that was read, when somebody asks for them.
    """

    def __init__(self) -> None:
        self._unread: deque[tuple[Step, BucketRuns]] = deque()
        self._last: Step | None = None  # that was read

    @property
    def timeline(self) -> list[Task]:
        """The tasks of the last step that was read, in seconds since its first gradient was ready."""
        step = self._last
        if step is None:
            return []
        backward_ended_s, ended_s = step.backward_ended.since(step.began), step.ended.since(step.began)
        return [
            Task("backward", "compute", 0.0, backward_ended_s),
            *(span.task(step.began) for span in step.spans),
            Task("wait", "wait", backward_ended_s, ended_s),
        ]

    @property
    def ready_s(self) -> dict[str, float]:
        """When each bucket had all of its gradients in the last step that was read, by the bucket's id."""
        step = self._last
        return {} if step is None else {bucket: ready.since(step.began) for bucket, ready in step.ready.items()}

    def step_ended(self, step: Step, runs: BucketRuns) -> None:
        """Adds a step of the buckets `runs`; once 64 steps are unread, reads those that the device has ended."""
        self._unread.append((step, runs))
        if len(self._unread) >= MOST_UNREAD:
            self.read_ended()

    def read_ended(self) -> None:
        """Adds the times of steps that the device has ended to their buckets' statistics; does not wait for others."""
        while self._unread and self._unread[0][0].ended.has_passed:
            self._read(*self._unread.popleft())

    def read(self) -> None:
        """Adds the times of all steps to their buckets' statistics; waits until the device has ended them."""
        while self._unread:
            self._read(*self._unread.popleft())

    def _read(self, step: Step, runs: BucketRuns) -> None:
        backward_ended_s, ended_s = step.backward_ended.since(step.began), step.ended.since(step.began)
        flights: dict[str, list[tuple[float, float]]] = {}
        for span in step.spans:
            if span.stream == "link":
                times = span.began.since(step.began), span.ended.since(step.began)
                flights.setdefault(span.bucket, []).append(times)
        for run in runs:
            run.count_times(flights.get(run.bucket.id, ()), backward_ended_s, ended_s)
        self._last = step
