"""A user's own script, run in this process."""

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


def run_as_main(script: Sequence[str]) -> None:
    """As `python SCRIPT ARGUMENTS` runs it, `sys.argv` and `sys.path` included."""
    before = sys.argv, sys.path
    sys.argv, sys.path = list(script), [str(Path(script[0]).resolve().parent), *sys.path]
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before
