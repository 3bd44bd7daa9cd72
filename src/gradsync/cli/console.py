"""Where commands print, and how what a user can mend is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

WIDE = 130  # columns of a terminal that shows whole tables

console = Console()
beside = Console(stderr=True)  # what is not the result, so that a result can be piped


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can mend is a message, not a traceback: wrong settings end with code 2, a failed run with 1."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        beside.print(f"The run failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
