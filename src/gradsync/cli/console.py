"""Consoles that commands print to, and the handling of errors that a user can fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

WIDE = 130  # columns of a terminal that shows whole tables

console = Console()
beside = Console(stderr=True)  # for everything but results, so that results can be piped


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors inside a `with` into messages: exits with 2 for wrong arguments, and with 1 for a failed run."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    except RuntimeError as error:
        beside.print(f"The run failed: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
