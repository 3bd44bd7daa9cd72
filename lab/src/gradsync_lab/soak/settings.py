"""The settings of a soak, and its faults, which a seed draws; pure data."""

from __future__ import annotations

import math
import random
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from ..faults.cases import LINK_FAULTS, Fault, Phase

FAULTS_PER_HOUR, FEWEST_PER_HOUR = 24.0, 20.0
KINDS = (Fault.KILL, Fault.STOP, Fault.PAUSE, Fault.SLOW, Fault.EXCEPTION, Fault.MEMORY, *LINK_FAULTS)
POINTS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
LAST_SHARE = 0.95  # of the steps, after which no fault comes: the job must go on from each


class Strike(BaseModel):
    """A fault of a soak: it comes once the job has reached `step`.

    `point` is where in a step the victim raises, or is slow; signals and links strike at any time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    step: int
    fault: Fault
    victim: int
    point: Phase


class Settings(BaseModel):
    """The settings of a soak.

    Attributes:
        steps: training steps, of `step_s` seconds each without a fault.
        every: steps between two checkpoints.
        faults: the number of faults.
        links: whether faults of links come too, for which ranks run in nodes of an emulated cluster.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(gt=0)
    step_s: float = Field(gt=0)
    every: int = Field(gt=0)
    ranks: int = Field(ge=2)
    faults: int = Field(ge=0)
    seed: int
    links: bool
    timeout_s: float = 8.0

    @classmethod
    def of(
        cls, hours: float, *, ranks: int, step_s: float, every: int, seed: int, links: bool, faults: int | None = None
    ) -> Settings:
        """Returns the settings of a soak of so many hours; faults come as a Poisson process unless their number is set.

        There are at least `FEWEST_PER_HOUR`.
        """
        if faults is None:
            drawn = _poisson(random.Random(f"{seed} number"), hours * FAULTS_PER_HOUR)
            faults = max(drawn, math.ceil(hours * FEWEST_PER_HOUR))
        steps = max(round(hours * 3600 / step_s), 1)
        return cls(steps=steps, step_s=step_s, every=every, ranks=ranks, faults=faults, seed=seed, links=links)

    @property
    def strikes(self) -> list[Strike]:
        """The faults, by step. Given their number, the times of a Poisson process are uniform and independent."""
        of = random.Random(f"{self.seed} strikes")
        steps = sorted(of.randrange(1, max(int(LAST_SHARE * self.steps), 2)) for _ in range(self.faults))
        kinds = [kind for kind in KINDS if self.links or kind not in LINK_FAULTS]
        return [
            Strike(
                number=number,
                step=step,
                fault=of.choice(kinds),
                victim=of.randrange(self.ranks),
                point=of.choice(POINTS),
            )
            for number, step in enumerate(steps)
        ]


def _poisson(of: random.Random, mean: float) -> int:
    """Draws from a Poisson distribution by the exponential times between events."""
    count, at = 0, of.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + of.expovariate(1.0)
    return count


class Folder:
    """The files by which supervisor and ranks of a soak talk, all in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.doors = path / "settings.json", path / "doors.json"

    def events(self, rank: int) -> Path:
        """Returns the file to which a rank appends events, JSON lines."""
        return self.path / f"events.{rank}.jsonl"

    def status(self, rank: int) -> Path:
        """Returns the file that says how far a rank is: its pid, life and step."""
        return self.path / f"status.{rank}.json"

    def order(self, rank: int) -> Path:
        """Returns the file by which a rank is told to strike itself in its next step."""
        return self.path / f"order.{rank}.json"

    def checkpoint(self, step: int, rank: int) -> Path:
        return self.path / f"checkpoint.{step:09d}.{rank}.safetensors"

    def complete(self, ranks: int) -> list[int]:
        """Returns the steps of which all ranks have written their checkpoint, ascending."""
        found: dict[int, int] = {}
        for path in self.path.glob("checkpoint.*.safetensors"):
            step = int(path.name.split(".")[1])
            found[step] = found.get(step, 0) + 1
        return sorted(step for step, count in found.items() if count == ranks)


def replaced(path: Path, text: str) -> None:
    """Writes a file so that readers see the old text or the new one, also where the writer is killed."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
