"""The command line: parse, call, print. All work is the library's, which is imported once a command is called."""

from __future__ import annotations

import importlib
import logging
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from .extensions import COMMANDS as GROUP
from .extensions import extension


class Command(NamedTuple):
    """A command of the core by its place, `module:object` with a Typer app or a function, and its line of help."""

    place: str | None  # None: gradsync-lab names it by an entry point
    line: str


COMMANDS = {
    "demo": Command(None, "Trains with DDP and with gradsync in turns, and shows what each gradient cost on the wire."),
    "simulate": Command(
        None,
        "A paper's evaluation beside the published values: of communication (zen), or of whole steps, up to a minute.",
    ),
    "characterize": Command(
        ".characterize:characterize",
        "How sparse gradients are, how much the ranks overlap, how their sum fills up, how skewed they are.",
    ),
    "measure": Command(
        ".measure:measure",
        "Measure training: ready times of gradients, costs of kernels and links, and what overlap costs.",
    ),
    "plan": Command(
        ".plan:plan",
        "The best plan that is found for a measured job: what to merge, what to compress, and by which exchange.",
    ),
    "explain": Command(
        ".plan:explain", "Why a plan is as it is: each bucket's best alternatives, and whether plain DDP would do."
    ),
    "bench": Command(None, "Measure methods beside each other and keep the records."),
    "lab": Command(None, "An emulated cluster on this machine: namespaces joined by shaped links."),
}


class Commands(TyperGroup):
    """A group whose commands are imported when they are called: help for all of them imports none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, command in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=command.line)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, None, rest
        try:
            return name, loaded(name), rest
        except ImportError as error:
            ctx.fail(str(error))


def loaded(name: str) -> Any:
    """Imports a command and returns it as the group calls it.

    Raises:
        ImportError: the command belongs to gradsync-lab, which is not installed.
    """
    place = COMMANDS[name].place
    if place is None:
        found = extension(GROUP, name, f"`gradsync {name}`")
    else:
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module, __name__), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
        found.command(name)(function)
    return typer.main.get_command(found)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"gradsync {__version__}")
        raise typer.Exit


@app.callback()
def gradsync(
    version: Annotated[  # its callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Synchronise gradients of distributed PyTorch training by the cheapest way for every tensor."""


def main() -> None:
    """Entry point of the `gradsync` command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    app()
