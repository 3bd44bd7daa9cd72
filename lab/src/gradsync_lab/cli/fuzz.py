"""The command `gradsync fuzz`: random cases of synchronisation against oracles, for some seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from gradsync.cli.console import beside, console, plain_errors
from gradsync.inputs.files import read_text

from ..fuzz.record import Batch
from ..fuzz.replay import problems_of
from ..fuzz.run import Fuzzing


def fuzz(
    seconds: Annotated[float, typer.Option(min=0, help="Run so long; the cases that are begun are finished.")] = 60.0,
    record: Annotated[
        Path, typer.Option(help="File of JSON lines; the command goes on behind the last seed in it.")
    ] = Path("fuzz-out/record.jsonl"),
    first: Annotated[int, typer.Option(min=0, help="First seed of a new record.")] = 0,
    replay: Annotated[Path | None, typer.Option(help="Run the case in this JSON file instead, once.")] = None,
) -> None:
    """Draws random models, plans and worlds, and holds each against oracles; shrinks what fails to a script."""
    with plain_errors():
        if replay is not None:
            _replay(replay)
            return
        fuzzing = Fuzzing(record, record.parent, first)
        try:
            with console.status("") as status:
                fuzzing.run(seconds, lambda batch: status.update(f"{batch.next} seeds"))
        finally:
            fuzzing.close()
    _print(fuzzing.batches)
    for failure in fuzzing.failures:
        problem = failure.problems[0].partition("\n")[0]
        beside.print(f"{record.parent / (failure.script or '')}: {problem}", style="red", markup=False)
    console.print(f"Record: {record}")
    if fuzzing.failures:
        raise typer.Exit(1)


def _replay(path: Path) -> None:
    found = problems_of(read_text(path, "case"))
    for problem in found:
        console.print(problem, style="red", markup=False)
    if found:
        raise typer.Exit(1)
    console.print("The case has no problems.")


def _print(batches: list[Batch]) -> None:
    from rich.table import Table

    table = Table(title="Cases by the present sources of the library", title_justify="left")
    table.add_column("ranks as")
    for column in ("cases", "mismatches", "hangs"):
        table.add_column(column, justify="right")
    columns = [
        sum((Counter(counts) for counts in found), Counter())
        for found in ([b.cases for b in batches], [b.mismatches for b in batches], [b.hangs for b in batches])
    ]
    for way in sorted(columns[0]):
        table.add_row(way, *(f"{column[way]:,}" for column in columns))
    table.add_section()
    table.add_row("all", *(f"{column.total():,}" for column in columns))
    console.print(table)
    console.print(f"{sum(batch.seconds for batch in batches):,.0f} s in {len(batches)} batches", highlight=False)
