"""The command `gradsync soak`: trains under torchrun while faults come at random."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradsync.cli.console import beside, plain_errors
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, put, words

from ..cluster import LabUnavailableError
from ..soak.journal import Line
from ..soak.settings import FAULTS_PER_HOUR, Settings
from ..soak.supervise import run_soak
from ..soak.verdict import AGENT, SoakVerdict, Summary, verdict

if TYPE_CHECKING:
    from rich.table import Table

AIM_MISSED = 1


def soak(
    record: Annotated[
        Path, typer.Option(help="File for the results, where a run goes on that was ended early; beside it a folder.")
    ],
    hours: Annotated[float, typer.Option(min=0.001, max=10_000, help="Hours of training, beside restarts.")] = 2.0,
    ranks: Annotated[int, typer.Option(min=2, max=100, help="Ranks of the job.")] = 3,
    faults: Annotated[
        int | None,
        typer.Option(min=0, max=100_000, help=f"Number of faults; by default drawn, {FAULTS_PER_HOUR:.0f} an hour."),
    ] = None,
    step_ms: Annotated[
        float, typer.Option("--step-ms", min=1, max=60_000, help="Milliseconds of a step at least.")
    ] = 100.0,
    every: Annotated[int, typer.Option(min=1, max=1_000_000, help="Steps between two checkpoints.")] = 50,
    seed: Annotated[int, typer.Option(help="Draws the model, the data and the faults.")] = 0,
    loopback: Annotated[bool, typer.Option(help="No namespaces, and no faults of links.")] = False,
    json: Json = None,
) -> None:
    """Trains under torchrun while faults come at random, and compares with a run without faults."""
    settings = Settings.of(
        hours, ranks=ranks, step_s=step_ms / 1e3, every=every, seed=seed, links=not loopback, faults=faults
    )
    with plain_errors():
        with phase("soaking", settings.steps, "training without faults first") as shown:

            def on_line(line: Line) -> None:
                _say(line)
                if line.kind != "clean" and line.step:  # the agent counts without a step
                    shown.reach(line.step, f"{line.elapsed_s:.0f} s with faults")

            try:
                lines = run_soak(settings, record, on_line)
            except LabUnavailableError as error:
                raise ValueError(f"{error}; or use --loopback, without faults of links") from None
    found = verdict(lines, settings.faults)
    words(json).print(_table(found))
    took_s = max((line.elapsed_s for line in lines), default=0.0)
    put(json, Summary.of(found, settings, took_s).model_dump_json(indent=1))
    raise typer.Exit(0 if found.good else AIM_MISSED)


def _say(line: Line) -> None:
    at = f"{line.elapsed_s:.0f} s, step {line.step}"
    if line.kind == "struck" and line.strike is not None and line.outcome is not None:
        strike, outcome = line.strike, line.outcome
        how = "restarted" if outcome.restarted else "went on"
        odd = "" if outcome.is_as_it_should(strike) else ", which it should not have"
        text = f"fault {strike.number}: {strike.fault}, rank {strike.victim}: {how} in {outcome.seconds:.1f} s{odd}"
        beside.print(f"{at}: {text}", highlight=False, soft_wrap=True)
    elif line.kind in ("clean", "final"):
        beside.print(f"{at}: {line.kind}: {line.digest[:12]} {line.text}", highlight=False, soft_wrap=True)


def _table(found: SoakVerdict) -> Table:
    from rich.table import Table

    table = Table(title="Soak", show_header=False)
    bits = {None: "not known", True: "yes", False: "NO"}[found.same_bits]
    grown = found.memory_growth
    rows = {
        "the bits of a run without faults": bits,
        "faults": f"{found.struck} of {found.planned}, {found.restarts} restarts",
        "restarted or went on as it should": f"{found.as_it_should} of {found.struck}",
        "slowest to train on": f"{found.slowest_s:.1f} s",
        "errors that name the victim": f"{found.names_victim[0]} of {found.names_victim[1]}",
        "growth of a rank's memory, at most": "no life was long enough" if grown is None else f"{grown:.2%}",
        "left over": ", ".join(f"{more} {what}" for what, more in found.left.items()) or "nothing",
    }
    for growth in found.growths:
        who = "agent" if growth.rank == AGENT else f"rank {growth.rank}"
        more = ", ".join(f"{what} {count:+d}" for what, count in growth.more.items())
        rows[f"longest life of {who}"] = (
            f"{growth.counts} counts, {growth.steps} steps: memory {growth.memory:+.2%}, {more}"
        )
    for name, value in rows.items():
        table.add_row(name, value)
    return table
