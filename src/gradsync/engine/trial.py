"""A trial runs several plans on real training steps, as no formula says how an exchange shares cores with backward.

Candidates take turns, there and back, so that a drift of the machine's speed meets all of them alike. Clearly slower
ones take the first turn only, but for the best guess, whose first turn comes soon after measurements. The best two, if
they are close, take more turns: a run-off. Every rank times its own steps; decisions use the times of all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from ..devices.streams import Moment

T = TypeVar("T")

TURN_STEPS = 5  # the first of them is not counted: it takes new memory
FAR = 1.4  # times the best one's time in the first turn: candidates above it take no second turn
CLOSE = 1.1  # of the best one's time: up to there the second may be the best
RUN_OFF_ROUNDS = 4  # more turns of each of the best two
MOST_OF_FIRST = 0.99  # of the first one's time; medians of 24 steps of one plan differ by about 1 % on shared cores


class Trial(Generic[T]):
    """Says which of several plans, `candidates`, to run until all have been timed, and which was the fastest.

    Candidates, the best guess first, run alternately, each for a few steps in a row: its turn. `current` is the one to
    run.
    """

    def __init__(self, candidates: Sequence[T]) -> None:
        self.candidates = list(candidates)
        self._left = list(range(len(self.candidates)))  # those that may still be kept
        self._stage = 0  # 0: turns of all; 1: second turns of those not far behind; 2: a run-off
        self._turns = list(self._left)
        self._ends: list[Moment] = []
        self._times_s: list[list[float]] = [[] for _ in self.candidates]

    @property
    def current(self) -> T:
        """The candidate (plan) to run in the coming step."""
        return self.candidates[self._turns[0]]

    @property
    def waits(self) -> bool:
        """Whether the turns of this stage are over: ranks compare times, and `go_on` may start more turns."""
        return not self._turns

    @property
    def medians_s(self) -> list[float]:
        """This rank's median step time with each candidate (plan), in seconds."""
        return [statistics.median(times) for times in self._times_s]

    def go_on(self, times_s: Sequence[float]) -> bool:
        """Starts more turns where times do not decide yet; returns whether it did.

        After the first turns of all there are second ones of the first candidate, and of those that are not far behind
        the best; after these a run-off of the two fastest, if they are close. `times_s`: each candidate's step time,
        equal on all ranks.
        """
        if self._stage == 2:
            return False
        best, *others = sorted(self._left, key=times_s.__getitem__)
        if self._stage == 0:
            rivals = [number for number in others if number == 0 or times_s[number] <= FAR * times_s[best]]
        else:
            rivals = [number for number in others[:1] if times_s[number] <= CLOSE * times_s[best]]
        if not rivals:
            return False
        self._left = sorted([best, *rivals])
        self._turns = self._left[::-1] if self._stage == 0 else [*self._left, *self._left[::-1]] * (RUN_OFF_ROUNDS // 2)
        self._stage += 1
        return True

    def fastest(self, times_s: Sequence[float]) -> int:
        """Returns the index of the candidate to keep, of those in the last stage.

        The first candidate is kept if it is one of them, unless another is faster by more than 1 %. `times_s`: each
        candidate's step time.
        """
        best = min(self._left, key=times_s.__getitem__)
        return 0 if 0 in self._left and times_s[best] >= MOST_OF_FIRST * times_s[0] else best

    def interrupt(self) -> None:
        """Begins the current candidate's steps in a row again, after a step that must not be timed."""
        self._ends.clear()

    def step_ended(self, now: Moment) -> bool:
        """Records that a step of the current candidate has ended now; returns whether its turn is over.

        At the end of a turn the host waits until the device has ended the step. The next candidate is then `current`.
        """
        self._ends.append(now)
        if len(self._ends) < TURN_STEPS:
            return False
        self._times_s[self._turns.pop(0)] += [after.since(before) for before, after in pairwise(self._ends)]
        self._ends.clear()
        return True


def slowest(medians_s: Sequence[Sequence[float]]) -> list[float]:
    """Returns each candidate plan's step time on its slowest rank, from `medians_s[rank][candidate]`."""
    return [max(column) for column in zip(*medians_s, strict=True)]
