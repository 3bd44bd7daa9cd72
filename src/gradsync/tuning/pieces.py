"""Measurements in pieces, which run between training steps, so that no step waits long for a measurement.

Such a measurement is a generator: each `next` runs a piece of some milliseconds, the same one on all ranks, and the
result is the generator's return value. `at_once` runs all pieces; `after_steps` runs a few after each training step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TypeVar

from ..comm.links import Highest

SHARE_OF_A_STEP = 0.3  # of the time of the steps between pieces, which all pieces together take
STEPS_COMPARED = 5  # the quickest of these counts: others may hold an evaluation or a checkpoint

T = TypeVar("T")
Pieces = Generator[None, None, T]


def at_once(pieces: Pieces[T]) -> T:
    """Runs all pieces, one after the other, and returns the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as ended:
            found: T = ended.value
            return found


def within(pieces: Pieces[T], around: Callable[[], AbstractContextManager[object]]) -> Pieces[T]:
    """Runs each of the pieces inside a new context `around()`, which the time between two pieces is outside of."""
    while True:
        with around():
            try:
                next(pieces)
            except StopIteration as ended:
                found: T = ended.value
                return found
        yield


def after_steps(pieces: Pieces[T], highest: Highest) -> Pieces[T]:
    """Runs a slice of the pieces at each `next`, which all ranks call when a training step has ended. Collective.

    A slice has as many pieces as fit into `SHARE_OF_A_STEP` of the steps since the slice before. It has one piece at
    least; if that one took longer, the next steps go without a slice. The first slice has one piece. The slowest rank's
    figures decide, so all ranks run the same pieces.

    Args:
        pieces: the measurement; the same pieces on all ranks.
        highest: returns the maximum of numbers over all ranks; collective.
    """
    recent_s: deque[float] = deque([0.0], maxlen=STEPS_COMPARED)
    while True:
        began_s, ran, fits = time.perf_counter(), 0, True
        while fits:
            try:
                next(pieces)
            except StopIteration as ended:
                found: T = ended.value
                return found
            ran += 1
            taken_s, step_s = highest([time.perf_counter() - began_s, min(recent_s)])
            fits = taken_s * (1 + 1 / ran) < SHARE_OF_A_STEP * step_s
        if not any(recent_s):
            recent_s.clear()
        for _ in range(max(math.ceil(taken_s / (SHARE_OF_A_STEP * step_s)), 1) if step_s else 1):
            resumed_s = time.perf_counter()
            yield
            recent_s.append(time.perf_counter() - resumed_s)
