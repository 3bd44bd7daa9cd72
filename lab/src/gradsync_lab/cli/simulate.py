"""The command `gradsync simulate`: predicts papers' results by gradsync's cost models and planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from gradsync.cli.console import LiteralConsole
from gradsync.cli.progress import phase
from gradsync.cli.results import Json, put, words

from ..papers import (
    Communication,
    Table,
    bytecomp_tables,
    ds_sync_tables,
    gradientflow_tables,
    mergecomp_tables,
    zen_table,
)
from ..papers.zen import FIRST_OF_EIGHT, MODELS, RATES_BYTES_PER_S

COUNTED = ("tensors", "buckets", "of 20 steps", "ranks")  # units of whole numbers


class Paper(StrEnum):
    """The papers whose evaluations can be simulated."""

    ZEN = "zen"
    BYTECOMP = "bytecomp"
    MERGECOMP = "mergecomp"
    GRADIENTFLOW = "gradientflow"
    DS_SYNC = "ds_sync"


def simulate(
    paper: Annotated[Paper, typer.Option(help="Whose evaluation to simulate.")] = Paper.ZEN,
    json: Json = None,
) -> None:
    """Simulates a paper's evaluation beside its published values: communication (zen), or whole steps."""
    rows: Sequence[Any] = ()
    tables: Sequence[Table] = ()
    with phase(f"simulating {paper}"):
        match paper:
            case Paper.ZEN:
                rows = zen_table()
            case Paper.BYTECOMP:
                tables = bytecomp_tables()
            case Paper.MERGECOMP:
                tables = mergecomp_tables()
            case Paper.GRADIENTFLOW:
                tables = gradientflow_tables()
            case Paper.DS_SYNC:
                tables = ds_sync_tables()
    if paper is Paper.ZEN:
        _print(rows, words(json))
    else:
        rows = [figure for each in tables for figure in each.figures]
        for each in tables:
            _print_table(each, words(json))
    put(json, [asdict(row) for row in rows], "Rows")


def _print_table(each: Table, console: LiteralConsole) -> None:
    from rich.table import Table as Printed

    table = Printed(title=each.title, title_justify="left")
    columns = list(dict.fromkeys(figure.column for figure in each.figures))
    usual = each.figures[0].unit
    units = {figure.column: figure.unit for figure in each.figures}
    table.add_column("")
    for column in columns:
        table.add_column(column if units[column] == usual else f"{column}, {units[column]}", justify="right")
    found = {(figure.row, figure.column): figure for figure in each.figures}
    for row in dict.fromkeys(figure.row for figure in each.figures):
        cells = []
        for column in columns:
            figure = found.get((row, column))
            if figure is None:
                cells.append("")
                continue
            decimals = 0 if figure.unit in COUNTED else each.decimals
            published = "" if figure.published is None else f" ({figure.published:,.{decimals}f})"
            cells.append(f"{figure.value:,.{decimals}f}{published}")
        table.add_row(row, *cells)
    console.print(table)
    for note in each.notes:
        console.print(note, highlight=False)
    console.print()


def _print(rows: Sequence[Communication], console: LiteralConsole) -> None:
    from rich.table import Table

    table = Table(
        title="Zen (OSDI 2025): communication of 16 nodes of 8 ranks",
        caption="Bytes at line rate and 20 us a message, without kernels. Paper: over dense, at 25 Gbps.",
    )
    for column in ("model", "scheme"):
        table.add_column(column)
    for column in (
        "MB a link",
        *(text for rate in RATES_BYTES_PER_S for text in (f"ms, {rate}", "over dense")),
        "paper",
    ):
        table.add_column(column, justify="right")
    of_model = {row.model: [r for r in rows if r.model == row.model] for row in rows}
    for model, known in of_model.items():
        for number, scheme in enumerate(dict.fromkeys(row.scheme for row in known)):
            first, *others = (row for row in known if row.scheme == scheme)
            times = (text for r in (first, *others) for text in (f"{r.seconds * 1e3:.1f}", f"{r.speedup:.2f}"))
            name = model if number == 0 else ""
            table.add_row(name, scheme, f"{first.nbytes / 1e6:.0f}", *times, first.published or "")
        table.add_section()
    console.print(table)
    skew = f"{FIRST_OF_EIGHT:.0%} of the non-zeros lie in the first eighth, or as many as fit"
    console.print(f"Assumed of all: {skew}.", highlight=False)
    for each in MODELS:
        console.print(f"{each.name}: assumed {each.assumed}.", highlight=False)
