"""The command `gradsync fuzz`: random cases of synchronisation against oracles, for some seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradsync.cli.console import LiteralConsole, beside, plain_errors
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, put, words
from gradsync.inputs.files import read_text

from ..fuzz.record import Batch, Replay, Summary
from ..fuzz.replay import problems_of
from ..fuzz.run import Fuzzing


def fuzz(
    seconds: Annotated[float, typer.Option(min=0, help="Run so long; the cases that are begun are finished.")] = 60.0,
    record: Annotated[
        Path, typer.Option(help="File of JSON lines; the command goes on behind the last seed in it.")
    ] = Path("fuzz-out/record.jsonl"),
    first: Annotated[int, typer.Option(min=0, help="First seed of a new record.")] = 0,
    replay: Annotated[Path | None, typer.Option(help="Run the case in this JSON file instead, once.")] = None,
    json: Json = None,
) -> None:
    """Draws random models, plans and worlds, and holds each against oracles; shrinks what fails to a script."""
    with plain_errors():
        if replay is not None:
            _replay(replay, json)
            return
        with phase("running random cases", now="starting processes") as shown:
            fuzzing = Fuzzing(record, record.parent, first)
            began = fuzzing.next

            def tell(batch: Batch) -> None:
                shown.say(f"{batch.next - began} cases, {len(fuzzing.failures)} failed")

            try:
                fuzzing.run(seconds, tell)
            finally:
                fuzzing.close()
    summary = Summary.of(fuzzing.batches, fuzzing.failures, began, fuzzing.next)
    _print(summary, len(fuzzing.batches), words(json))
    for failure in fuzzing.failures:
        problem = failure.problems[0].partition("\n")[0]
        beside.print(f"{record.parent / (failure.script or '')}: {problem}", style="red", markup=False)
    words(json).print(f"Record: {record}")
    put(json, summary.model_dump_json(indent=1))
    if not summary.good:
        raise typer.Exit(1)


def _replay(path: Path, json: str | None) -> None:
    with phase(f"running the case of {path}"):
        found = problems_of(read_text(path, "case"))
    said = words(json)
    for problem in found:
        said.print(problem, style="red", markup=False)
    put(json, Replay(good=not found, problems=found).model_dump_json(indent=1))
    if found:
        raise typer.Exit(1)
    said.print("The case has no problems.")


def _print(summary: Summary, batches: int, said: LiteralConsole) -> None:
    from rich.table import Table

    table = Table(title="Cases by the present sources of the library", title_justify="left")
    table.add_column("ranks as")
    for column in ("cases", "mismatches", "hangs"):
        table.add_column(column, justify="right")
    columns = summary.cases, summary.mismatches, summary.hangs
    for way in sorted(summary.cases):
        table.add_row(way, *(f"{column.get(way, 0):,}" for column in columns))
    table.add_section()
    table.add_row("all", *(f"{sum(column.values()):,}" for column in columns))
    said.print(table)
    said.print(f"{summary.seconds:,.0f} s in {batches} batches", highlight=False)
