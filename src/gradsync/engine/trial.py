"""A trial runs several plans on real training steps, as no formula says how an exchange shares cores with backward.

Candidates take turns, there and back, so that a drift of the machine's speed meets all of them alike. The best two, if
they are close, take more turns: a run-off. Every rank times its own steps; decisions use the times of all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from ..devices.streams import Moment

T = TypeVar("T")

TURN_STEPS = 5  # the first of them is not counted: it takes new memory
ROUNDS = 2  # turns of each candidate
RUN_OFF_ROUNDS = 4  # more of each of the best two
CLOSE = 1.1  # of the best one's time: up to there the second may be the best
MOST_OF_FIRST = 0.99  # of the first one's time; medians of 24 steps of one plan differ by about 1 % on shared cores


class Trial(Generic[T]):
    """Says which of several plans, `candidates`, to run until all have been timed, and which was the fastest.

    Candidates, the best guess first, run alternately, each for a few steps in a row: its turn. `current` is the one to
    run.
    """

    def __init__(self, candidates: Sequence[T]) -> None:
        self.candidates = list(candidates)
        self._turns = _there_and_back(range(len(self.candidates)), ROUNDS)
        self._ends: list[Moment] = []
        self._times_s: list[list[float]] = [[] for _ in self.candidates]
        self._finalists: list[int] = []  # of a run-off: the others were not timed when these were

    @property
    def current(self) -> T:
        """The candidate (plan) to run in the coming step."""
        return self.candidates[self._turns[0]]

    @property
    def done(self) -> bool:
        """Whether all candidates (plans) have been run as often as needed, so that their times can be compared."""
        return not self._turns

    @property
    def medians_s(self) -> list[float]:
        """This rank's median step time with each candidate (plan), in seconds."""
        return [statistics.median(times) for times in self._times_s]

    def run_off(self, times_s: Sequence[float]) -> bool:
        """Starts more turns of the two fastest candidates if their times are close; returns whether it did.

        `times_s`: each candidate's step time. There is one run-off at most.
        """
        best, second = sorted(range(len(times_s)), key=times_s.__getitem__)[:2]
        if self._finalists or times_s[second] > CLOSE * times_s[best]:
            return False
        self._finalists = sorted((best, second))
        self._turns = _there_and_back(self._finalists, RUN_OFF_ROUNDS)
        return True

    def fastest(self, times_s: Sequence[float]) -> int:
        """Returns the index of the candidate to keep; after a run-off, that of one of its two.

        The first candidate is kept unless another is faster by more than 1 %, or the run-off was between others.
        `times_s`: each candidate's step time.
        """
        left = self._finalists or range(len(self.candidates))
        best = min(left, key=times_s.__getitem__)
        return 0 if 0 in left and times_s[best] >= MOST_OF_FIRST * times_s[0] else best

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


def _there_and_back(numbers: Iterable[int], rounds: int) -> list[int]:
    there = list(numbers)
    return [number for turn in range(rounds) for number in (there if turn % 2 == 0 else there[::-1])]
