"""`gradsync simulate`: published results beside what our schemes' own steps say."""

from __future__ import annotations

import json as encoder
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..simulator import Communication, zen_table
from ..simulator.zen import FIRST_OF_EIGHT, MODELS, RATES_BYTES_PER_S
from .progress import console


class Paper(StrEnum):
    """Whose tables there are."""

    ZEN = "zen"


def simulate(
    paper: Annotated[Paper, typer.Option(help="Whose evaluation to simulate.")] = Paper.ZEN,
    json: Annotated[str | None, typer.Option(help="Write the rows here; - prints them instead of the table.")] = None,
) -> None:
    """Communication of a paper's evaluation, from the steps of the schemes, beside the published values."""
    rows = zen_table()
    text = encoder.dumps([asdict(row) for row in rows], indent=1)
    if json == "-":
        typer.echo(text)
        return
    _print(rows)
    if json is not None:
        Path(json).write_text(text + "\n", encoding="utf-8")
        console.print(f"Rows: {json}")


def _print(rows: list[Communication]) -> None:
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
