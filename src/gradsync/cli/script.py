"""Arguments that name the training a command runs (a script or a workload), and a function that runs scripts."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from ..inputs.settings import shown
from .results import prints_apart

Script = Annotated[
    list[str] | None,
    typer.Argument(
        help="Your script and its arguments, after --; start it by torchrun --no-python; it ends after the steps."
    ),
]
NamedWorkload = Annotated[
    str | None,
    typer.Option(
        "--workload", help="A workload of gradsync-lab, like deepfm: `gradsync bench train --help` lists them."
    ),
]
WorkloadOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="Option of the workload; repeatable. A wrong one lists all."),
]


def run_as_main(script: Sequence[str], json: str | None = None) -> None:
    """Runs the script as `python SCRIPT ARGUMENTS` does, with its `sys.argv` and `sys.path`, and restores both.

    An exception of the script is shown as Python shows it, with the script's own traceback. What the script prints goes
    to stderr where the command prints its result as JSON (`json` is "-").

    Raises:
        ValueError: if there is no such script.
        SystemExit: with 1 after an exception, and with the script's own code where it exits.
    """
    path = Path(script[0])
    try:
        is_there = path.is_file() or (path / "__main__.py").is_file()
    except (OSError, ValueError):  # as for a name that is too long
        is_there = False
    if not is_there:
        raise ValueError(f"there is no script {shown(script[0])}")
    before = sys.argv, sys.path
    sys.argv, sys.path = list(script), [str(path.resolve().parent), *sys.path]
    try:
        with prints_apart(json):
            runpy.run_path(script[0], run_name="__main__")
    except Exception as error:
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        sys.argv, sys.path = before


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the script's first frame on; None if it has none, as for a wrong syntax."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.run_path.__code__.co_filename):
        trace = trace.tb_next
    return trace
