"""The command line: parse, call, print. All work is the library's."""

from __future__ import annotations

import logging

import typer

from . import bench, characterize, demo, lab, measure, plan, simulate

app = typer.Typer(
    help="Synchronise gradients of distributed PyTorch training by the cheapest way for every tensor.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo.demo)
app.command("simulate")(simulate.simulate)
app.command("characterize")(characterize.characterize)
app.command("measure")(measure.measure)
app.command("plan")(plan.plan)
app.command("explain")(plan.explain)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")


def main() -> None:
    """Entry point of the `gradsync` command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    app()
