"""The command `gradsync report`: an HTML page about the results of a demo, or about records of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradsync.cli.console import plain_errors, writable
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, put, words
from gradsync.inputs.files import from_json, naming, read_as, read_text

from ..report.page import verdict, verdict_of_records, write_page, write_records_page
from ..report.record import TrainingRun, load_records

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE", help="results.json of a demo, or files of records (bench --json).")
]
Out = Annotated[Path, typer.Option("--out", "-o", callback=writable, help="File for the page.")]


def report(files: Files, out: Out = Path("report.html"), json: Json = None) -> None:
    """Writes an HTML page about the results of a demo, or about records of benchmarks, and prints its verdict."""
    with plain_errors(), phase(f"writing {out}"):
        run = _run_of(files[0])
        if run is None:
            records = [record for path in files for record in load_records(path)]
            write_records_page(records, out)
            said = verdict_of_records(records)
        elif len(files) > 1:
            raise ValueError(f"{files[0]} has the results of a whole run, which fill a page: give it alone")
        else:
            write_page(run, out, files[0])
            said = verdict(run)
    words(json).print(said, highlight=False)
    words(json).print(f"\nReport: {out}", highlight=False)
    put(json, {"verdict": said, "page": str(out)})


def _run_of(path: Path) -> TrainingRun | None:
    """Returns the training run in a file; None if it has a list, as of records.

    Raises:
        ValueError: naming the file, if it cannot be read, or holds no run.
    """
    noun = "results.json of a demo, or list of records"
    text = read_text(path, noun)
    with naming(path):
        data = from_json(text, noun, any_number=True)
        return None if isinstance(data, list) else read_as(TrainingRun.model_validate_json, data, "results of a demo")
