"""Hand-made events of cases, for tests of the judge."""

from __future__ import annotations

from typing import Any

from gradsync_lab.faults.cases import Case, Fault, Frontend, Phase

Event = dict[str, Any]

STRUCK = 100.0
NOTHING = {"threads": [], "tasks": 1, "descriptors": 14}
TEXT = "bucket '0' (a and 5 more), stage 'all_reduce', step 4: no answer within 5 s: rank 1 did not come this far"


def case(**changes: Any) -> Case:
    """Returns a case in which rank 1 of 3 is killed in the backward of step 4, with changes."""
    usual = {"number": 0, "fault": Fault.KILL, "phase": Phase.BACKWARD, "frontend": Frontend.ATTACH, "plan": "exact"}
    return Case.model_validate({**usual, "size": 3, "victim": 1, "steps": 12, "step": 4, **changes})


def event(rank: int, what: str, after_s: float, **more: Any) -> Event:
    return {"t": STRUCK + after_s, "rank": rank, "what": what, **more}


def fault() -> Event:
    return event(1, "fault", 0.0)


def error(rank: int, after_s: float = 5.1, **changes: Any) -> Event:
    """Returns the event of an error in backward, with changes."""
    usual = {"type": "GroupError", "ours": True, "ddps": False, "text": TEXT, "where": "backward", "step": 4}
    return event(rank, "error", after_s, **{**usual, "began": STRUCK - 0.1, **changes})


def started_again(rank: int, *, ok: bool = True) -> Event:
    return event(rank, "again", 8.0, ok=ok, text="")


def ended(rank: int, **left: Any) -> Event:
    return event(rank, "end", 9.0, before=NOTHING, after={**NOTHING, **left})


def survivor(rank: int, **changes: Any) -> list[Event]:
    """Returns all events of a survivor that raises as it should, with changes to its error."""
    return [error(rank, **changes), started_again(rank), ended(rank)]


def went_on(rank: int, digest: str = "a") -> list[Event]:
    """Returns all events of a rank that trains to the end."""
    return [event(rank, "trained", 1.0, digest=digest), event(rank, "detached", 1.1), started_again(rank), ended(rank)]
