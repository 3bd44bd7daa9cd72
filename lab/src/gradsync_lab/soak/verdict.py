"""The verdict on a soak: the same bits as without faults, no growth of memory, and nothing left over."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

from pydantic import BaseModel, ConfigDict

from .journal import Line
from .settings import Settings

MOST_GROWTH = 0.01  # of memory
FEWEST = 10  # counts of a life by which growth is told
FIRST, LAST = slice(2, 5), slice(8, 10)  # tenths of a life that are compared: it warms up in the first fifth
AGENT = -1
COUNTED = ("tasks", "fds", "keys", "own_keys")


@dataclass(frozen=True)
class Growth:
    """Growth in one process' longest life: of memory as a share, and of what it holds as numbers.

    `counts` are the number of censuses, `steps` the training steps between the first and the last of them.
    """

    rank: int
    steps: int
    counts: int
    memory: float
    more: dict[str, int]


@dataclass(frozen=True)
class SoakVerdict:
    """The verdict on a soak.

    Attributes:
        same_bits: None while one of the two runs has not ended.
        as_it_should: faults by which the job restarted, or went on, as it should.
        names_victim: errors of other ranks that name the victim, and all such errors.
        growths: by process; ranks without enough counts are left out.
    """

    same_bits: bool | None
    planned: int
    struck: int
    as_it_should: int
    restarts: int
    slowest_s: float
    names_victim: tuple[int, int]
    growths: list[Growth]

    @property
    def memory_growth(self) -> float | None:
        """The largest growth of a rank's memory, as a share; None where no life was long enough."""
        return max((growth.memory for growth in self.growths if growth.rank != AGENT), default=None)

    @property
    def left(self) -> dict[str, int]:
        """Counts that some rank has more of at the end of its longest life than at its beginning: how many more."""
        found = {
            what: max((growth.more.get(what, 0) for growth in self.growths if growth.rank != AGENT), default=0)
            for what in COUNTED
        }
        return {what: more for what, more in found.items() if more > 0}

    @property
    def good(self) -> bool:
        """Whether all faults came and all aims hold, as far as lives were long enough to tell."""
        grew = self.memory_growth is not None and self.memory_growth >= MOST_GROWTH
        all_came = self.struck == self.planned == self.as_it_should
        return self.same_bits is True and all_came and not grew and not self.left


class Summary(BaseModel):
    """The verdict on a soak, as `gradsync soak --json` gives it.

    Attributes:
        good: whether all faults came and all aims hold; the other figures are those of `SoakVerdict`.
        seconds: training and restarts together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    good: bool
    same_bits: bool | None
    planned: int
    struck: int
    as_it_should: int
    restarts: int
    slowest_s: float
    names_victim: tuple[int, int]
    growths: list[Growth]
    memory_growth: float | None
    left: dict[str, int]
    seconds: float
    settings: Settings

    @classmethod
    def of(cls, found: SoakVerdict, settings: Settings, seconds: float) -> Summary:
        """Returns the summary of a soak with these settings that took so many seconds."""
        return cls(
            **{field.name: getattr(found, field.name) for field in fields(found)},
            good=found.good,
            memory_growth=found.memory_growth,
            left=found.left,
            seconds=round(seconds, 1),
            settings=settings,
        )


def verdict(lines: Sequence[Line], planned: int) -> SoakVerdict:
    """Returns the verdict on a soak by the lines of its record.

    Args:
        planned: the number of faults that were to come.
    """
    clean = next((line.digest for line in lines if line.kind == "clean"), None)
    final = next((line.digest for line in lines if line.kind == "final"), None)
    struck = [line for line in lines if line.kind == "struck"]
    outcomes = [(line.strike, line.outcome) for line in struck if line.strike is not None and line.outcome is not None]
    errors = [
        (strike.victim, text)
        for strike, outcome in outcomes
        for rank, text in outcome.errors.items()
        if rank != strike.victim
    ]
    return SoakVerdict(
        same_bits=None if clean is None or final is None else clean == final,
        planned=planned,
        struck=len(struck),
        as_it_should=sum(outcome.is_as_it_should(strike) for strike, outcome in outcomes),
        restarts=sum(outcome.restarted for _, outcome in outcomes),
        slowest_s=max((outcome.seconds for _, outcome in outcomes), default=0.0),
        names_victim=(sum(f"rank {victim}" in text for victim, text in errors), len(errors)),
        growths=growths(lines),
    )


def growths(lines: Sequence[Line]) -> list[Growth]:
    """Returns the growth in the longest life of the agent and of each rank."""
    lives: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for line in lines:
        if line.kind == "census" and line.counts:
            lives[line.rank, line.life].append(line)
    longest: dict[int, list[Line]] = {}
    for (rank, _), own in lives.items():
        if len(own) >= max(FEWEST, len(longest.get(rank, ()))):
            longest[rank] = own
    return [_growth(rank, own) for rank, own in sorted(longest.items())]


def _growth(rank: int, own: Sequence[Line]) -> Growth:
    first, last = ([line.counts for line in _tenths(own, which)] for which in (FIRST, LAST))
    memory = _median(last, "rss_kib") / _median(first, "rss_kib") - 1.0
    names = [what for what in COUNTED if what in own[0].counts]
    more = {what: round(_median(last, what) - _median(first, what)) for what in names}
    return Growth(rank, own[-1].step - own[0].step, len(own), memory, more)


def _tenths(own: Sequence[Line], which: slice) -> Sequence[Line]:
    tenth = len(own) / 10
    return own[int(which.start * tenth) : max(int(which.stop * tenth), int(which.start * tenth) + 1)]


def _median(counts: Sequence[dict[str, int]], what: str) -> float:
    return statistics.median(each[what] for each in counts)
