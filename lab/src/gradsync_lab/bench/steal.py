"""Steal: time for which the host of a virtual machine gives its processors to somebody else.

While it takes them, ranks that wait for each other take several times as long, and what was measured before is not what
steps take now. So what was measured then is measured again, as far as somebody is patient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
STEAL = 7  # its place among the figures of proc(5)
FIGURES = 8  # that add up to all time; guests' time is in them
MOST_STOLEN = 0.03  # of the processors' time in what counts
WINDOW_S = 1.0  # of a look whether it is over

Agreed = Callable[[float], float]  # rank 0's figure on all ranks; collective


class Steal:
    """What is stolen from when it is made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._stolen, self._total = _ticks()

    @property
    def seconds(self) -> float:
        """Since then, by the clock."""
        return time.monotonic() - self._began_s

    @property
    def share(self) -> float:
        """Of the time of all processors; 0 where there is no such figure."""
        stolen, total = _ticks()
        return (stolen - self._stolen) / max(total - self._total, 1)


class Patience:
    """Seconds to be spent on waiting for the processors, and on measuring again."""

    def __init__(self, seconds: float, agreed: Agreed = float) -> None:
        self._left_s = seconds
        self._agreed = agreed

    def is_lost(self, since: Steal) -> bool:
        """Whether what was measured since is to be measured again. If so, it is over as far as can be waited for."""
        if not self._spend(since):
            return False
        while self._spend_a_window():
            pass
        return True

    def _spend_a_window(self) -> bool:
        window = Steal()
        if self._left_s > 0:
            time.sleep(WINDOW_S)
        return self._spend(window)

    def _spend(self, since: Steal) -> bool:
        """On what went on since, if too much was stolen of it, and there is something left to spend."""
        if self._left_s <= 0 or self._agreed(since.share) <= MOST_STOLEN:
            return False
        self._left_s -= self._agreed(since.seconds)
        return True


def _ticks() -> tuple[int, int]:
    """Stolen, and of all kinds; of all processors together."""
    if not STAT.exists():
        return 0, 0
    _, *figures = STAT.read_text(encoding="utf-8").partition("\n")[0].split()
    ticks = [int(figure) for figure in figures[:FIGURES]]
    return ticks[STEAL] if len(ticks) > STEAL else 0, sum(ticks)
