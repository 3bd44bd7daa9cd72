"""The command `gradsync demo`: trains a real model over an emulated cluster with DDP and with gradsync, in turns."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from gradsync.cli.console import WIDE, folder, plain_errors
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, put, words

from ..bench.train import TrainSpec, run_training
from ..report.page import SUBJECT, verdict, write_page
from ..report.record import TrainingRun
from ..report.tables import against_baseline, training_table
from ..report.trace import TRACE, write_trace
from ..workloads import names
from .progress import event_bar

BLOCK_STEPS = 8
QUICK_STEPS = 16
DEMO_ROW_LENGTH = 32  # elements of an embedding row


def demo(
    workload: Annotated[str, typer.Option(help=f"What to train: {', '.join(names())}.")] = "deepfm",
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the emulated cluster, one rank each.")] = 4,
    link: Annotated[str, typer.Option(help="Rate of every node's link, e.g. 200mbit, 1gbit, unshaped.")] = "1gbit",
    steps: Annotated[int, typer.Option(min=BLOCK_STEPS, help="Counted steps of each method.")] = 64,
    row_length: Annotated[int, typer.Option(help="Elements of an embedding row (deepfm).")] = DEMO_ROW_LENGTH,
    out: Annotated[
        Path, typer.Option(callback=folder, help="Where results.json, report.html and trace.json go.")
    ] = Path("demo-out"),
    loopback: Annotated[bool, typer.Option(help="No namespaces: plain loopback, without limits on rates.")] = False,
    quick: Annotated[bool, typer.Option(help="A short run, to see that everything works.")] = False,
    json: Json = None,
) -> None:
    """Trains with DDP and with gradsync in turns, and shows the bytes that each gradient cost on the wire."""
    spec = TrainSpec(
        workload=workload,
        options={"dim": row_length} if workload == "deepfm" else {},
        nodes=nodes,
        link=link,
        loopback=loopback,
        block_steps=BLOCK_STEPS,
        repeats=(QUICK_STEPS if quick else steps) // BLOCK_STEPS,
    )
    with plain_errors(), event_bar(f"{workload} on {nodes} nodes, {link}", spec.turns) as on_event:
        run = run_training(spec, on_event)
    run.command = repeat_command(spec)
    with plain_errors(), phase("writing the report"):
        out.mkdir(parents=True, exist_ok=True)
        results, page, trace = (out / name for name in ("results.json", "report.html", TRACE))
        results.write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
        write_trace(run, trace)
        write_page(run, page, results)
    show(run, json)
    words(json).print(f"\nReport: {page}   trace (ui.perfetto.dev): {trace}   {results}")
    put(json, run.model_dump_json(indent=1))
    if SUBJECT not in against_baseline(run):
        raise typer.Exit(1)


def repeat_command(spec: TrainSpec) -> str:
    """Returns the command line that runs `demo` with this specification."""
    command = ["gradsync", "demo", "--workload", spec.workload, "--nodes", str(spec.nodes), "--link", spec.link]
    command += ["--steps", str(spec.repeats * spec.block_steps)]
    if "dim" in spec.options:
        command += ["--row-length", str(spec.options["dim"])]
    return shlex.join(command + ["--loopback"] * spec.loopback)


def show(run: TrainingRun, json: str | None = None) -> None:
    """Prints the table of methods, their plans in words, and the verdict; to stderr where `json` is "-"."""
    console = words(json)
    console.print()
    console.print(f"{run.description}; data: {run.source}")
    console.print(training_table(run, compact=console.width < WIDE))
    for method in run.methods:
        if method.plan:
            console.print(f"What {method.name} did with each gradient:", style="bold")
            for line in method.plan:
                console.print(f"  {line}", highlight=False)
    for note in run.notes:
        console.print(f"Note: {note}", style="yellow")
    console.print(f"\n{verdict(run)}", highlight=False)
