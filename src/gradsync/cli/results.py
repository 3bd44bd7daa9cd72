"""The option `--json`, the same of every command: where a result goes as JSON, and where words go then."""

from __future__ import annotations

import json as encoder
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Annotated, Any

import typer

from ..inputs.files import replace_text
from .console import LiteralConsole, beside, console, plain_errors, writable

PRINTED = "-"


def _named(name: str | None) -> str | None:
    """Returns the file to write, or "-"; refuses what looks like the next option."""
    if name is not None and name != PRINTED and name.startswith("-"):
        raise typer.BadParameter(f"expected a file, or - for stdout, got {name!r}: write --json - {name}")
    return name


def _option(callback: Callable[[str | None], str | None]) -> Any:
    words = "File for the result as JSON; - prints it, and all words go to stderr."
    return typer.Option("--json", metavar="FILE", callback=callback, help=words)


Json = Annotated[str | None, _option(lambda name: writable(_named(name)))]
JsonOfRank0 = Annotated[str | None, _option(_named)]  # the other ranks' machines need not have the folder


def words(json: str | None) -> LiteralConsole:
    """Returns the console for a command's words and tables: stderr if its result is printed as JSON, else stdout."""
    return beside if json == PRINTED else console


def prints_apart(json: str | None) -> AbstractContextManager[object]:
    """Returns a context in which other code's `print` goes to stderr if the command's result is printed as JSON."""
    return redirect_stdout(sys.stderr) if json == PRINTED else nullcontext()


def put(json: str | None, result: Any, noun: str = "Result") -> None:
    """Prints a command's result as JSON if `json` is "-", writes it to the file that it names, or ignores it for None.

    Args:
        result: text that is JSON already, or numbers, texts, lists and dictionaries.
        noun: the result in a word, for the line on stderr that names the file.

    Raises:
        typer.Exit: with code 1, the file cannot be written.
    """
    if json is None:
        return
    text = result if isinstance(result, str) else encoder.dumps(result, indent=1)
    if json == PRINTED:
        typer.echo(text.rstrip())
        return
    with plain_errors():
        replace_text(json, f"{text.rstrip()}\n")
    beside.print(f"{noun}: {json}", highlight=False, soft_wrap=True)
