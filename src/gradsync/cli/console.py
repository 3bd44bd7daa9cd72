"""Consoles that commands print to, and the handling of errors that a user can fix."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDE = 130  # columns of a terminal that shows whole tables


class LiteralConsole(Console):
    """A console that shows names and errors as they are: without markup, emoji codes and sequences for terminals."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments to print of a renderable, as a table, with characters that steer terminals escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def printable(text: str) -> str:
    """Returns the text with Python's escapes in place of characters that would steer a terminal or that have no glyph.

    Line breaks stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


console = LiteralConsole()
beside = LiteralConsole(stderr=True)  # for everything but results, so that results can be piped

P = TypeVar("P", Path, str, Path | None, str | None)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors inside a `with` into messages: exits with 2 for wrong arguments, and with 1 for a failed run."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(printable(str(error))) from None
    except (RuntimeError, OSError, MemoryError) as error:
        beside.print(f"The run failed: {str(error) or type(error).__name__}", style="red")
        raise typer.Exit(1) from None


def folder(path: Path) -> Path:
    """Returns the path if it is a folder to write into, or can be made one; a Typer callback that checks an option.

    Raises:
        typer.BadParameter: before a command begins its work, if it is none and cannot be made, or cannot be written.
    """
    there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{path} cannot be a folder: {there} is a file")
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: {there} does not allow it")
    return path


def writable(path: P) -> P:
    """Returns the path if a file can be written there; a Typer callback that checks an option.

    None and "-" (standard output) are returned as they are.

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
