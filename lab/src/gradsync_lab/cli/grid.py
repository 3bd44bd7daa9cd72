"""`gradsync bench train --grid defaults`: measures the cells that a file does not have yet, a line for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradsync.cli.console import WIDE, beside, console
from gradsync.cli.results import PRINTED, put, words

from ..bench.grid import CELLS, SUBJECTS, Cell, Finished, Kept, estimate_s, require_links, run_cell, settings_of
from ..bench.train import TrainSpec
from ..report.grid import grid_table
from ..report.tables import factor
from .progress import event_bar


def show_plan(cells: Sequence[Cell], spec: TrainSpec, json: str | None) -> None:
    """Prints the cells, their methods and about how long each takes; where `json` is "-", as JSON, in seconds.

    Raises:
        ValueError: `json` names a file, which is where a run would keep its records.
    """
    if json not in (None, PRINTED):
        raise ValueError(f"--json {json} is the file in which finished cells are kept: with --dry-run, take --json -")
    said, took_s = words(json), [round(estimate_s(cell, cell.spec(spec))) for cell in cells]
    for cell, seconds in zip(cells, took_s, strict=True):
        said.print(f"{cell.name}: {', '.join(cell.methods)}; about {_time(seconds)}", highlight=False)
    said.print(f"{len(cells)} cells, about {_time(sum(took_s))}")
    plan = [
        {"cell": cell.name, "methods": cell.methods, "seconds": seconds}
        for cell, seconds in zip(cells, took_s, strict=True)
    ]
    put(json, {"cells": plan, "seconds": sum(took_s)})


def measure(cells: Sequence[Cell], spec: TrainSpec, path: Path, *, again: bool) -> list[Finished]:
    """Measures the cells that the file does not have, prints the table of all that it has, and returns those.

    Raises:
        ValueError: the file holds something else, or cells of other settings or of another library.
        RuntimeError: this machine cannot emulate links and loopback is not asked for.
    """
    kept = Kept(path, settings_of(spec), again=again)
    left = [cell for cell in cells if kept.is_left(cell)]
    for cell in cells:
        if (old := kept.cells.get(cell.name)) is not None and old.failed:
            more = "trying once more" if kept.is_left(cell) else "tried twice, left as it is"
            beside.print(f"{cell.name} failed: {old.failed}; {more}", style="yellow", highlight=False)
    if there := len(cells) - len(left):
        console.print(f"{there} of {len(cells)} cells are in {path}")
    if left and not spec.loopback:
        require_links()
    took_s = expected_s = 0.0
    for number, cell in enumerate(left, 1):
        own = cell.spec(spec)
        with event_bar(cell.name, own.turns) as on_event:
            found, notes = run_cell(cell, spec, kept, on_event)
        took_s, expected_s = took_s + found.seconds, expected_s + estimate_s(cell, own)
        rest_s = sum(estimate_s(other, other.spec(spec)) for other in left[number:]) * took_s / expected_s
        for note in notes:
            beside.print(f"Note: {cell.name}: {note}", style="yellow", highlight=False)
        rest = f"; about {_time(rest_s)} left" if number < len(left) else ""
        console.print(f"[{number}/{len(left)}] {cell.name}: {_words(found)}{rest}", highlight=False, markup=False)
    finished = {cell.name: kept.cells[cell.name] for cell in CELLS if cell.name in kept.cells}
    tables = {cell.name: cell.has_tables for cell in CELLS}
    compared = {name: each.compared for name, each in finished.items()}
    console.print(grid_table(compared, tables, SUBJECTS, compact=console.width < WIDE))
    console.print(f"Records: {path}")
    return list(finished.values())


def _words(found: Finished) -> str:
    said = [
        f"{record.subject} {factor(record.ratio) if record.ratio else f'failed ({record.failed})'}"
        for record in found.compared
        if record.subject in SUBJECTS
    ]
    first = found.compared[0]
    best = first.params.get("baseline_method", first.baseline)
    return f"{_time(found.seconds)}; {', '.join(said)} of {best}, A/A {factor(first.aa)}"


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
