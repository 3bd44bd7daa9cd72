"""Measurements and searches in pieces (`planner/pieces.py`): `after_steps` runs a few pieces after each step."""

from __future__ import annotations

import math
import time
from collections import deque

from ..comm.links import Highest
from ..planner.pieces import Pieces, T

SHARE_OF_A_STEP = 0.2  # of the time of the steps between pieces, which all pieces together take
STEPS_COMPARED = 5  # the quickest of these counts: others may hold an evaluation or a checkpoint


def after_steps(pieces: Pieces[T], highest: Highest) -> Pieces[T]:
    """Runs a slice of a measurement at each `next`, which all ranks call when a training step has ended. Collective.

    A slice has as many pieces as fit into `SHARE_OF_A_STEP` of the steps since the slice before. It has one piece at
    least; if that one took longer, the next steps go without a slice. The first slice has one piece. The slowest rank's
    figures decide, so all ranks run the same pieces.

    Args:
        pieces: a generator that measures a piece at each `next`; the same pieces on all ranks.
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
