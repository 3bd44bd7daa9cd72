"""Commands and workloads that other distributions add to the command line, found by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

COMMANDS = "gradsync.commands"  # group of entry points: command name -> Typer app or function
WORKLOADS = "gradsync.workloads"  # group of entry points: `measure` and `characterize` for named workloads


def extension(group: str, name: str, wanted: str) -> Any:
    """Imports and returns the object of the entry point `name` in the group `group`.

    Raises:
        ImportError: if no installed distribution has such an entry point; the message calls it `wanted`.
    """
    for point in entry_points(group=group, name=name):
        return point.load()
    raise ImportError(
        f"{wanted} belongs to gradsync-lab, which is not installed; in the folder of gradsync: pip install ./lab"
    )
