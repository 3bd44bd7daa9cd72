"""Parts of the command line that other distributions add, found by their entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

COMMANDS = "gradsync.commands"  # group of entry points: a Typer app or a function, by the name of the command
WORKLOADS = "gradsync.workloads"  # group of entry points: how `measure` and `characterize` run a named workload


def extension(group: str, name: str, wanted: str) -> Any:
    """Imports and returns the object of the entry point `name` of `group`.

    Raises:
        ImportError: no installed distribution has such an entry point; the message calls it `wanted`.
    """
    for point in entry_points(group=group, name=name):
        return point.load()
    raise ImportError(f"{wanted} belongs to gradsync-lab, which is not installed: pip install gradsync-lab")
