"""Consoles that commands print to, and the handling of errors that a user can fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDE = 130  # columns of a terminal that shows whole tables


class LiteralConsole(Console):
    """A console that shows names and errors as they are: without markup, emoji codes and sequences for terminals."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of a renderable, such as a table, with text as `printable` returns it."""
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


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turns errors inside a `with` into messages: exits with 2 for wrong arguments, and with 1 for a failed run."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(printable(str(error))) from None
    except RuntimeError as error:
        beside.print(f"The run failed: {error}", style="red")
        raise typer.Exit(1) from None
