"""The times of a step that a test has run on the CPU."""

from __future__ import annotations

from gradsync.comm import Synchronization
from gradsync.costs.timeline import Task


def tasks_of(step: Synchronization) -> list[Task]:
    """Returns the step's work so far, in seconds from its begin."""
    return [span.task(step.began) for span in step.spans]
