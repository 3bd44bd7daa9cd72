"""The command `gradsync faults`: injects random faults into small jobs and judges what the survivors do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradsync.cli.console import WIDE, LiteralConsole, beside, console, plain_errors
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, put, words

from ..faults.campaign import LINKS_FROM, numbers, run_campaign
from ..faults.record import Entry, entries, read_record
from ..faults.tables import Summary, markdown, summary_table, write_page

AIM_MISSED = 1


def faults(
    count: Annotated[int, typer.Option(min=0, max=1_000_000, help="Faults of processes, drawn at random.")] = 20,
    links: Annotated[
        int,
        typer.Option(min=0, max=1_000_000, help="Faults of links, drawn at random, on an emulated cluster (Linux)."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Draws the cases.")] = 0,
    record: Annotated[
        Path | None, typer.Option(help="File for the results, where a run goes on that was ended early.")
    ] = None,
    only: Annotated[
        int | None, typer.Option(help=f"Run this case alone, and show its verdict; links begin at {LINKS_FROM}.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=100, help="Cases at the same time.")] = 1,
    limit: Annotated[float | None, typer.Option(min=0, help="Seconds after which no further case begins.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Page for the table of the record, between two marks; runs nothing.")
    ] = None,
    json: Json = None,
) -> None:
    """Injects random faults into small jobs, and judges what surviving ranks say and do."""
    with plain_errors():
        if table is not None:
            if record is None:
                raise ValueError("--table is made from a record: name it with --record")
            if json is not None:
                raise ValueError(
                    "--json is the verdict on cases that run, and --table runs none: leave one of them out"
                )
            header, lines = read_record(record)
            write_page(table, markdown(header, list(entries(lines))))
            console.print(f"Table: {table}")
            return
        wanted = numbers(count, links) if only is None else [only]
        with phase("injecting faults", len(wanted)) as shown:

            def on_entry(entry: Entry) -> None:
                _say(entry)
                shown.advance(1, entry.case.words)

            def on_known(count: int) -> None:
                if count:
                    shown.reach(count, f"{count} are in {record}")

            done = run_campaign(seed, wanted, record, on_entry, jobs=jobs, limit_s=limit, on_known=on_known)
    said, summary = words(json), Summary.of(done, seed=seed, wanted=len(wanted))
    if only is not None:
        for entry in done:
            said.print_json(entry.model_dump_json())
    _show(done, summary, said)
    put(json, summary.model_dump_json(indent=1))
    raise typer.Exit(0 if summary.good else AIM_MISSED)


def _say(entry: Entry) -> None:
    verdict = entry.verdict
    if verdict.not_possible:
        found = "not possible here"
    elif not verdict.struck:
        found = "not struck"
    else:
        found = str(verdict.ending) if verdict.good else f"BAD: {verdict.ending}"
    beside.print(
        f"{entry.case.number}: {entry.case.words}: {found} ({entry.seconds:.0f} s)", highlight=False, soft_wrap=True
    )


def _show(done: list[Entry], summary: Summary, said: LiteralConsole) -> None:
    said.width = max(said.width, WIDE)
    said.print(summary_table(done))
    for line in summary.bad:
        said.print(line, highlight=False, soft_wrap=True)
    for what in summary.not_possible:
        said.print(f"not possible here: {what}", highlight=False, soft_wrap=True)
    if left := summary.wanted - summary.ran:
        said.print(f"{left} of {summary.wanted} cases were not run: the time was up", highlight=False)
