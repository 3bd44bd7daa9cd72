"""The command line: parses arguments, calls the library, prints results. A command is imported when it is called."""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from .extensions import COMMANDS as GROUP
from .extensions import extension


class Command(NamedTuple):
    """A command of `gradsync`: the import path `module:object` of its Typer app or function, and its line of help."""

    place: str | None  # None: the command belongs to gradsync-lab and is found by an entry point
    line: str


COMMANDS = {
    "demo": Command(
        None, "Trains with DDP and with gradsync in turns, and shows the bytes that each gradient cost on the wire."
    ),
    "simulate": Command(
        None,
        "Simulates a paper's evaluation beside its published values: communication (zen), or whole steps.",
    ),
    "characterize": Command(
        ".characterize:characterize",
        "Show how sparse gradients are, how much ranks overlap, how their sum fills up, and how skewed it is.",
    ),
    "measure": Command(
        ".measure:measure",
        "Measure a job: when gradients are ready, what kernels and links cost, and how much overlap slows both.",
    ),
    "plan": Command(
        ".plan:plan",
        "Find a plan for a measured job: which gradients to merge, which to compress, and how to exchange them.",
    ),
    "explain": Command(
        ".plan:explain", "Explain a plan: the best other schemes for each bucket, and whether plain DDP is as fast."
    ),
    "doctor": Command(
        ".doctor:doctor",
        "Check an installation: versions, devices, backends, kernels, and two ranks; exits with 1 for a fault.",
    ),
    "bench": Command(None, "Compare methods in one run and keep the records."),
    "report": Command(
        None,
        "Writes an HTML page about the results of a demo, or about records of benchmarks, and prints its verdict.",
    ),
    "faults": Command(None, "Injects random faults into small jobs, and judges what surviving ranks say and do."),
    "fuzz": Command(
        None, "Draws random models, plans and worlds, and holds each against oracles; shrinks what fails to a script."
    ),
    "soak": Command(None, "Trains under torchrun while faults come at random, and compares with a run without faults."),
    "lab": Command(None, "An emulated cluster on this machine: namespaces joined by limited links."),
}


class Commands(TyperGroup):
    """A Typer group that imports a command's module when the command is called, but not to list all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, command in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=command.line)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, None, rest
        try:
            with _loading(name):
                return name, loaded(name), rest
        except ImportError as error:
            ctx.fail(str(error))


def _loading(name: str) -> AbstractContextManager[Any]:
    """Returns a context that shows, on a terminal, that the command's module and torch are imported."""
    from .progress import is_terminal, phase

    if os.environ.get("RANK", "0") != "0" or not is_terminal():
        return nullcontext()
    return phase(f"loading gradsync {name}", captures_stderr=False)


def loaded(name: str) -> Any:
    """Imports the module of the command `name`, and returns the command as a click command.

    Raises:
        ImportError: if the command belongs to gradsync-lab, which is not installed.
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
    """Runs the `gradsync` command line, with warnings logged to stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    app()
