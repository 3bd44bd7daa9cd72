"""Drift detection: whether training steps still take as long as when the plan was made."""

from __future__ import annotations

import statistics
from collections import deque

from ..costs.timeline import MORE_OR_LESS
from ..devices.streams import Moment

WINDOW_STEPS = 50  # whose median is looked at
LOOK_STEPS = 499  # between two looks; a prime: what alternates from step to step is not always met in the same state


class Drift:
    """Detects a lasting change: training steps take clearly more or less time than when the plan was made.

    All ranks pass the same time to `judge`, so they decide alike. `usual_s`: seconds that a step usually takes; None:
    the first call of `judge` tells.
    """

    def __init__(self, usual_s: float | None = None) -> None:
        self.usual_s = usual_s  # what steps took when they were looked at first, here or before a checkpoint
        self._recent: deque[tuple[Moment, Moment]] = deque(maxlen=WINDOW_STEPS)
        self._steps_to_look = WINDOW_STEPS
        self._suspected = False

    def step_ended(self, began: Moment, ended: Moment) -> bool:
        """Records when a training step began and ended; returns whether ranks must now compare median step times.

        `judge` then gets the highest of these medians.
        """
        self._recent.append((began, ended))
        self._steps_to_look -= 1
        return self._steps_to_look <= 0

    @property
    def median_s(self) -> float:
        """The median time of this rank's last 50 training steps, in seconds; waits until the device has ended them."""
        return statistics.median(ended.since(began) for began, ended in self._recent)

    def judge(self, slowest_s: float) -> bool:
        """Returns whether step times have changed for good; `slowest_s` is the highest median step time of all ranks.

        The first call sets the usual time, unless one was given. A change counts only if the next call, 50 steps later,
        finds it again.
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
