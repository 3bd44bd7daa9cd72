"""The journal of a soak: lines of its record behind the header, and what the ranks wrote of a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ..faults.cases import Fault
from .settings import Folder, Strike


class Line(BaseModel):
    """A line of the record of a soak.

    - `clean`: the run without faults has ended; its digest.
    - `struck`: a fault and what came of it.
    - `census`: memory, tasks, descriptors and keys of a process in one life: rank -1 is the agent.
    - `life`: the ranks began, from the step of a checkpoint.
    - `final`: the run with faults has ended; its digest, or why there is none.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["clean", "struck", "census", "life", "final"]
    elapsed_s: float = 0.0  # of the run with faults, in all of its attempts
    life: str = ""  # which processes: attempt and restart
    rank: int = -1
    step: int = 0
    digest: str = ""
    counts: dict[str, int] = {}
    strike: Strike | None = None
    outcome: Outcome | None = None
    text: str = ""


class Outcome(BaseModel):
    """The outcome of a fault: whether the job restarted, the seconds until it trained on, and the ranks' errors."""

    model_config = ConfigDict(extra="forbid")

    restarted: bool
    seconds: float
    errors: dict[int, str] = {}

    def is_as_it_should(self, strike: Strike) -> bool:
        """Whether the job went on without a restart exactly where it can."""
        may_go_on = strike.fault in (Fault.PAUSE, Fault.SLOW, Fault.LINK_PAUSE, Fault.LINK_RATE)
        if strike.fault is Fault.LINK_LOSS:  # both are right
            return True
        return self.restarted != may_go_on


class Told:
    """The events that ranks append to their files, each read once."""

    def __init__(self, folder: Folder, ranks: int) -> None:
        self._paths = {rank: folder.events(rank) for rank in range(ranks)}
        self._read = {rank: path.stat().st_size if path.exists() else 0 for rank, path in self._paths.items()}

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields events since the last call, of each rank in its order."""
        for rank, path in self._paths.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read[rank])
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]  # the rank may be writing, or was killed doing so
            self._read[rank] += len(whole)
            for line in whole.splitlines():
                with suppress(json.JSONDecodeError):
                    yield json.loads(line)


def statuses(folder: Folder, ranks: int) -> list[dict[str, Any]]:
    """Returns how far each rank is, of those that have said so."""
    found = []
    for rank in range(ranks):
        with suppress(OSError, json.JSONDecodeError):
            found.append(json.loads(folder.status(rank).read_text(encoding="utf-8")))
    return found
