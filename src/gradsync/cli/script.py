"""Arguments that name the training a command runs (a script or a workload), and a function that runs scripts."""

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


def run_as_main(script: Sequence[str]) -> None:
    """Runs the script as `python SCRIPT ARGUMENTS` does, with its `sys.argv` and `sys.path`, and restores both."""
    before = sys.argv, sys.path
    sys.argv, sys.path = list(script), [str(Path(script[0]).resolve().parent), *sys.path]
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before
