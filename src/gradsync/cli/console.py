"""Consoles that commands print to, and the handling of errors that a user can fix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console

WIDE = 130  # columns of a terminal that shows whole tables

console = Console()
beside = Console(stderr=True)  # for everything but results, so that results can be piped

P = TypeVar("P", Path, str, Path | None, str | None)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors inside a `with` into messages: exits with 2 for wrong arguments, and with 1 for a failed run."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    except (RuntimeError, OSError, MemoryError) as error:
        beside.print(f"The run failed: {error or type(error).__name__}", style="red", markup=False)
        raise typer.Exit(1) from None


def folder(path: Path) -> Path:
    """Returns the path of a folder that is there or can be made; a callback of options.

    Raises:
        typer.BadParameter: before a command begins its work, if it cannot.
    """
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{path} cannot be a folder: {there} is a file")
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {there} does not allow it")
    return path


def writable(path: P) -> P:
    """Returns the path of a file to write, or None or "-" as they are; a callback of options.

    Raises:
        typer.BadParameter: before a command begins its work, if no such file can be written.
    """
    if path is None or str(path) == "-":
        return path
    place = Path(path)
    try:
        if place.is_dir():
            raise typer.BadParameter(f"{place} is a folder; expected the name of a file to write")
        if not place.parent.is_dir():
            raise typer.BadParameter(f"{place} cannot be written: there is no folder {place.parent}")
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            raise typer.BadParameter(f"{place} cannot be written: it is not allowed")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{place} cannot be written: {error}") from None
    return path
