"""Decisions on new groups for averaging: pure functions of numbers, so that all ranks decide alike.

Times of rounds come for free, so they are looked at first: links are measured again only if some rank's rounds take
clearly longer or shorter than when the plan was new. Groups change only if others are expected to be clearly better;
otherwise noise would switch them to and fro.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from ...costs.timeline import MORE_OR_LESS
from .grouping import Grouping

LEAST_ROUNDS = 10  # rounds per figure; rounded up to whole cycles, as rounds of a cycle differ
FIGURES = 3  # figures of which the median counts, as a stall may spoil one
LEAST_CHANGE_S = 1e-3  # change of a round's time below which no measurement pays
CLEARLY = 0.9  # a ratio of at most this is clearly less: beyond chance, and beyond the cost of more steps
ROOM = 0.7  # groups get smaller only if ranks are then expected to use at most this share of the allowed distance


class Rounds:
    """The seconds of one rank's rounds of averaging: when the plan was new (`young_s`), and at present (`now_s`).

    `cycle`: the number of rounds after which the plan repeats; means are taken over whole cycles, as rounds differ.
    """

    def __init__(self, cycle: int, young_s: float | None = None) -> None:
        self._length = cycle * -(-LEAST_ROUNDS // cycle)
        self._under_way: list[float] = []
        self._figures: deque[float] = deque(maxlen=FIGURES)
        self.young_s = young_s  # None: it is too early to say

    def add(self, seconds: float) -> None:
        """Records the seconds that one round of averaging took on this rank."""
        self._under_way.append(seconds)
        if len(self._under_way) < self._length:
            return
        self._figures.append(statistics.fmean(self._under_way))
        self._under_way.clear()
        if self.young_s is None and len(self._figures) == FIGURES:
            self.young_s = self.now_s

    @property
    def now_s(self) -> float | None:
        """The present seconds of a round of averaging, a median of means over some rounds each; None: not known yet."""
        return statistics.median(self._figures) if len(self._figures) == FIGURES else None

    def keep_plan(self) -> None:
        """Sets the usual seconds of a round of averaging, `young_s`, to the present ones; the plan stays.

        Call it after links were measured again and no better groups were found. `links_changed` compares later rounds
        with these seconds.
        """
        self.young_s = self.now_s


def links_changed(young_s: Sequence[float], now_s: Sequence[float]) -> bool:
    """Whether some rank's rounds of averaging take so much more or less time than before that links must have changed.

    Args:
        young_s, now_s: seconds of a round by rank, when the plan was new and now.
    """
    return any(
        abs(now - young) >= LEAST_CHANGE_S and not young / MORE_OR_LESS <= now <= young * MORE_OR_LESS
        for young, now in zip(young_s, now_s, strict=True)
    )


def is_better(found: Grouping, present: Grouping, budget: int | None) -> bool:
    """Whether averaging should go over from the groups of nodes in `present` to those in `found`.

    True if `found` is clearly quicker; or keeps ranks' parameters clearly closer together in steps about as long, as
    where a slow node that sat out has recovered; or if more than `budget` groups of `present` cross one rack's uplink.
    """
    if budget is not None and present.crossing > budget:
        return True
    quicker = found.step_s <= CLEARLY * present.step_s
    closer = found.spread <= CLEARLY * present.spread and CLEARLY * found.step_s <= present.step_s
    return quicker or closer


def share_removed(distance: float, norm: float, relaxation: float = 1.0) -> float:
    """Returns how much a round of averaging cuts a rank's squared distance to all ranks' mean, as a share of `norm`.

    Averaging in groups is a projection: over all ranks, the squared distances to the mean shrink by the squared norms
    of the changes. With a relaxation r other than 1, they shrink by (2 - r) / r times as much.

    Args:
        distance: squared norm of the round's change of the rank's parameters.
        norm: squared norm of the rank's parameters.
        relaxation: the share of the way to the group's mean that the round goes; 1 is the mean itself.
    """
    return distance / norm * (2 - relaxation) / relaxation


def spread_for(most_apart: float, removed: float, ranks: int) -> float:
    """Returns the largest `Grouping.spread` with which ranks stay within the distance `most_apart` after a round.

    Distances are of a rank's parameters to the ranks' mean, over the parameters' norm. A spread is the ranks' mean
    squared distance, in units of the variance of a step's noise. In the long run rounds of averaging remove what steps
    add, so `removed` measures the unit. If each rank keeps its own momentum of 0.9, measured distances are 0.7 to 1.1
    times `most_apart`, and twice if groups cross racks.

    Args:
        most_apart: the allowed distance, root mean square over ranks.
        removed: the mean of `share_removed` over ranks and rounds; 0 gives infinity.
        ranks: the number of ranks.
    """
    return most_apart**2 * (1 - 1 / ranks) / removed if removed else math.inf
