"""`replay` runs one case again, as scripts of failures do."""

from __future__ import annotations

from .case import Case
from .workers import MOST_RANKS, Workers


def problems_of(text: str) -> list[str]:
    """Returns the problems of the case that a JSON text describes, run once in processes of its own.

    Raises:
        ValueError: for a text that describes no case.
    """
    case = Case.from_json(text)
    with Workers(1 if case.world == "threads" else MOST_RANKS) as workers:
        return workers.judged(case)


def replay(text: str) -> None:
    """Runs a case once and ends the script: with its problems, if it has any, and the code 1.

    Raises:
        SystemExit: with the problems, or the text that there are none.
    """
    if found := problems_of(text):
        raise SystemExit("\n".join(found))
    print("the case has no problems")
