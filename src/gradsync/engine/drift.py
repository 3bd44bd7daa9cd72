"""Whether a job is still what it was planned for: its steps take as long as they did, or clearly not."""

from __future__ import annotations

import statistics
from collections import deque

from ..costs.timeline import MORE_OR_LESS

WINDOW_STEPS = 50  # whose median is looked at
LOOK_STEPS = 499  # between two looks; a prime: what alternates from step to step is not always met in the same state


class Drift:
    """Watches one rank's steps. At a look all ranks hand `judge` the same figure, and so come to the same verdict."""

    def __init__(self, usual_s: float | None = None) -> None:
        self.usual_s = usual_s  # what steps took when they were looked at first, here or before a checkpoint
        self._recent_s: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._steps_to_look = WINDOW_STEPS
        self._suspected = False

    def step_ended(self, seconds: float) -> bool:
        """Counts a step; whether it is time for a look."""
        self._recent_s.append(seconds)
        self._steps_to_look -= 1
        return self._steps_to_look <= 0

    @property
    def median_s(self) -> float:
        """Of this rank's recent steps."""
        return statistics.median(self._recent_s)

    def judge(self, slowest_s: float) -> bool:
        """Whether the job has changed; `slowest_s` is the highest median of all ranks.

        The first look says what is usual. One that finds a change is followed by another soon: what passes is none.
        """
        self._steps_to_look = LOOK_STEPS
        if self.usual_s is None:
            self.usual_s = slowest_s
            return False
        changed = not self.usual_s / MORE_OR_LESS <= slowest_s <= self.usual_s * MORE_OR_LESS
        verdict, self._suspected = changed and self._suspected, changed
        if changed and not verdict:
            self._steps_to_look = WINDOW_STEPS
        return verdict
