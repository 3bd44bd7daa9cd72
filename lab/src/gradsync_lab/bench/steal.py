"""Detects steal: time for which the host of a virtual machine gives its processors to other machines.

During steal, ranks that wait for each other take several times as long, and measurements cannot be compared. So
measurements with much steal are repeated, within a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
STEAL = 7  # position of steal among the figures of proc(5)
FIGURES = 8  # that add up to all time; guests' time is in them
MOST_STOLEN = 0.03  # stolen share of the processors' time in measurements that count
WINDOW_S = 1.0  # time over which it is checked whether the steal has ended

Agreed = Callable[[float], float]  # rank 0's figure on all ranks; collective


class Steal:
    """A meter of stolen processor time, from its creation on."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._stolen, self._total = _ticks()

    @property
    def seconds(self) -> float:
        """Returns the seconds since the meter was created."""
        return time.monotonic() - self._began_s

    @property
    def share(self) -> float:
        """Returns the stolen share of all processors' time so far; 0 where the OS kernel does not report steal."""
        stolen, total = _ticks()
        return (stolen - self._stolen) / max(total - self._total, 1)


class Patience:
    """A budget of seconds to repeat measurements in which the host stole processor time, and to wait until it stops."""

    def __init__(self, seconds: float, agreed: Agreed = float) -> None:
        self._left_s = seconds
        self._agreed = agreed

    def is_lost(self, since: Steal) -> bool:
        """Whether to repeat a measurement, as the host stole much processor time since `since` and budget is left.

        If so, first waits until the stealing stops or the budget is spent.
        """
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
        """Charges the meter's time if the host stole much of it and budget is left; returns whether it was charged."""
        if self._left_s <= 0 or self._agreed(since.share) <= MOST_STOLEN:
            return False
        self._left_s -= self._agreed(since.seconds)
        return True


def _ticks() -> tuple[int, int]:
    """Returns the stolen and all clock ticks of the OS kernel so far, each summed over the processors."""
    if not STAT.exists():
        return 0, 0
    _, *figures = STAT.read_text(encoding="utf-8").partition("\n")[0].split()
    ticks = [int(figure) for figure in figures[:FIGURES]]
    return ticks[STEAL] if len(ticks) > STEAL else 0, sum(ticks)
