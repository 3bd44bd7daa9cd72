"""The training that a command looks at: a user's own script, run in this process, or a named workload."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Script = Annotated[
    list[str] | None,
    typer.Argument(
        help="Your script and its arguments, after --; started by torchrun --no-python, and ended after the steps."
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


def run_as_main(script: Sequence[str]) -> None:
    """As `python SCRIPT ARGUMENTS` runs it, `sys.argv` and `sys.path` included."""
    before = sys.argv, sys.path
    sys.argv, sys.path = list(script), [str(Path(script[0]).resolve().parent), *sys.path]
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before
