"""A trial: what no formula decides, how well an exchange shares the cores with backward, is tried out on real steps.

Candidates take turns, there and back, so that a drift of the machine's speed meets all of them alike. Every rank times
its own steps; a decision is made from all ranks' figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

TURN_STEPS = 5  # the first of them is not counted: it takes new memory
ROUNDS = 2  # turns of each candidate
MOST_OF_FIRST = 0.97  # of the first one's time; medians of eight steps of one plan differ by 1-2 % on shared cores


class Trial(Generic[T]):
    """`candidates`, the best guess first, in turns; `current` is the one to run, until `done`."""

    def __init__(self, candidates: Sequence[T]) -> None:
        self.candidates = list(candidates)
        there = list(range(len(self.candidates)))
        self._turns = [number for turn in range(ROUNDS) for number in (there if turn % 2 == 0 else there[::-1])]
        self._ends_s: list[float] = []
        self._times_s: list[list[float]] = [[] for _ in there]

    @property
    def current(self) -> T:
        """The candidate whose turn it is."""
        return self.candidates[self._turns[0]]

    @property
    def done(self) -> bool:
        """Whether all turns are over."""
        return not self._turns

    @property
    def medians_s(self) -> list[float]:
        """This rank's median step time of each candidate."""
        return [statistics.median(times) for times in self._times_s]

    def interrupt(self) -> None:
        """A step was not the current candidate's: its turn begins anew."""
        self._ends_s.clear()

    def step_ended(self, now_s: float) -> bool:
        """A step of the current candidate is over, and whether its turn is; a step's time lies between two ends."""
        self._ends_s.append(now_s)
        if len(self._ends_s) < TURN_STEPS:
            return False
        self._times_s[self._turns.pop(0)] += [after - before for before, after in pairwise(self._ends_s)]
        self._ends_s.clear()
        return True


def fastest(medians_s: Sequence[Sequence[float]]) -> tuple[int, list[float]]:
    """The candidate to keep, and each one's step time: that of the rank on which it is slowest.

    `medians_s[rank][candidate]`. The first candidate stays unless another one is clearly faster.
    """
    slowest_s = [max(column) for column in zip(*medians_s, strict=True)]
    best = slowest_s.index(min(slowest_s))
    return (best if slowest_s[best] < MOST_OF_FIRST * slowest_s[0] else 0), slowest_s
