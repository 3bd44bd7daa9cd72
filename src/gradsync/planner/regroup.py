"""When groups are chosen anew, and which: numbers in, decisions out, for all ranks to come to the same ones.

What rounds take is known for nothing, so it comes first: only where some rank's rounds take clearly longer, or shorter,
than they did when the plan was young are links worth measuring again. And only what is then expected to be clearly
better is gone over to: else what noise decides in one direction it would soon decide in the other.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from ..costs.timeline import MORE_OR_LESS
from .grouping import Grouping

LEAST_ROUNDS = 10  # of a figure, which is of whole cycles: rounds of a cycle differ
FIGURES = 3  # whose median counts: a stall makes one of them wrong
LEAST_CHANGE_S = 1e-3  # of a round: less is not worth a measurement
CLEARLY = 0.9  # times as much, or less, is clearly less: more than chance makes it, and than more steps cost
ROOM = 0.7  # of what ranks may be apart, that they are expected to be at most when they are let go further apart


class Rounds:
    """What the rounds of one rank take: when the plan was young, and now."""

    def __init__(self, cycle: int, young_s: float | None = None) -> None:
        self._length = cycle * -(-LEAST_ROUNDS // cycle)
        self._under_way: list[float] = []
        self._figures: deque[float] = deque(maxlen=FIGURES)
        self.young_s = young_s  # None: it is too early to say

    def add(self, seconds: float) -> None:
        """One more round took so long."""
        self._under_way.append(seconds)
        if len(self._under_way) < self._length:
            return
        self._figures.append(statistics.fmean(self._under_way))
        self._under_way.clear()
        if self.young_s is None and len(self._figures) == FIGURES:
            self.young_s = self.now_s

    @property
    def now_s(self) -> float | None:
        """None while it is too early to say."""
        return statistics.median(self._figures) if len(self._figures) == FIGURES else None

    def plan_stays(self) -> None:
        """What rounds take now is what they take by this plan."""
        self.young_s = self.now_s


def links_changed(young_s: Sequence[float], now_s: Sequence[float]) -> bool:
    """Whether what rounds take, by rank, says so: a link that few ranks use shows on these alone."""
    return any(
        abs(now - young) >= LEAST_CHANGE_S and not young / MORE_OR_LESS <= now <= young * MORE_OR_LESS
        for young, now in zip(young_s, now_s, strict=True)
    )


def is_better(found: Grouping, present: Grouping, budget: int | None) -> bool:
    """Whether to go over, both as they are expected to be on the links of now.

    If it is clearly quicker, or keeps nodes clearly closer together and takes about as long, as where a slow node that
    sat out is slow no more; or if the present one's groups crowd an uplink beyond the budget.
    """
    if budget is not None and present.crossing > budget:
        return True
    quicker = found.step_s <= CLEARLY * present.step_s
    closer = found.spread <= CLEARLY * present.spread and CLEARLY * found.step_s <= present.step_s
    return quicker or closer


def share_removed(distance: float, norm: float, relaxation: float = 1.0) -> float:
    """What a round removes of a rank's squared distance to the mean of all, as a share of its values' squared norm.

    `distance` is what the round changed of its values, `norm` theirs, both squared. A round projects, so as a mean over
    the ranks it takes away just as much as it changes; where it goes a share of the way only, or beyond, accordingly.
    """
    return distance / norm * (2 - relaxation) / relaxation


def spread_for(most_apart: float, removed: float, nodes: int, per_node: int) -> float:
    """What a schedule may have as its spread, per node, for ranks to be `most_apart` behind a round.

    In the long run rounds remove what steps bring, whoever averages with whom. So what they `removed` as a mean over
    ranks and cycles (`share_removed`) says how noisy steps are, and a schedule's spread is in units of that: of the
    noise of a node's mean. Momenta of the ranks' own (0.9) make the distance 0.9 to 1.1 times that of grids, twice that
    of racks that are crossed, and 0.7 to 0.8 times that of all nodes that rest and then meet.
    """
    return most_apart**2 * (per_node - 1 / nodes) / removed if removed else math.inf
