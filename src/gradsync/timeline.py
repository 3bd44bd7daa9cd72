"""Tasks on named streams with a start and an end: the one type for what was measured and what is predicted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One piece of work on one resource; times in seconds since the step began."""

    name: str
    stream: str  # "compute", "link", "wait", ...
    start_s: float
    end_s: float
    nbytes: float = 0.0  # sent by this rank, for tasks on a link

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def covered_s(tasks: list[Task], start_s: float, end_s: float) -> float:
    """Seconds of [start_s, end_s] in which at least one of `tasks` runs: what overlap figures are made of."""
    total, reached = 0.0, start_s
    for task in sorted(tasks, key=lambda t: t.start_s):
        begin, end = max(task.start_s, reached), min(task.end_s, end_s)
        if end > begin:
            total += end - begin
            reached = end
    return total
