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

    Attributes:
        began: the first gradient was ready.
        backward_ended: gradients of all parameters were ready, and somebody waited for results.
        ended: all results were there.
        ready: when each bucket was ready, by its id.
        spans: the work of the exchange.
        runs: the buckets.
    """

    began: Moment
    backward_ended: Moment
    ended: Moment
    ready: Mapping[str, Moment]
    spans: Sequence[Span]
    runs: BucketRuns


class TimedSteps:
    """The times of training steps, which are read when somebody asks for them, and otherwise many at a time.

    Attributes:
        timeline: the tasks of the last step that was read, in seconds from its begin.
        ready_s: when each bucket was ready in that step, by its id.
    """

    def __init__(self) -> None:
        self.timeline: list[Task] = []
        self.ready_s: dict[str, float] = {}
        self._unread: deque[Step] = deque()

    def step_ended(self, step: Step) -> None:
        """Adds a step; reads those that the device has ended once many are unread."""
        self._unread.append(step)
        if len(self._unread) >= MOST_UNREAD:
            self.read_ended()

    def read_ended(self) -> None:
        """Reads the steps that the device has ended, without waiting for it."""
        while self._unread and self._unread[0].ended.has_passed:
            self._read(self._unread.popleft())

    def read(self) -> None:
        """Reads all steps; waits until the device has ended them."""
        while self._unread:
            self._read(self._unread.popleft())

    def _read(self, step: Step) -> None:
        backward_ended_s, ended_s = step.backward_ended.since(step.began), step.ended.since(step.began)
        tasks = [span.task(step.began) for span in step.spans]
        for run in step.runs:
            run.count_times(tasks, backward_ended_s, ended_s)
        self.timeline = [Task("backward", "compute", 0.0, backward_ended_s), *tasks]
        self.timeline.append(Task("wait", "wait", backward_ended_s, ended_s))
        self.ready_s = {bucket: ready.since(step.began) for bucket, ready in step.ready.items()}
