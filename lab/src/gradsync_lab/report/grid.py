"""The table of a grid of defaults: each cell's ratios to DDP's best line, and geometric means over the cells."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .record import Record, Spread
from .tables import NOTHING, factor

if TYPE_CHECKING:
    from rich.table import Table

MOST_DENSE, MOST_SPARSE = 1.01, 0.70  # medians of ratios to DDP's best line that cells are to stay within


def bound_of(record: Record, *, tables: bool) -> float:
    """Returns the largest median of a ratio that counts as not behind: 0.70 with tables; else 1.01, or A/A's p95."""
    return MOST_SPARSE if tables else max(MOST_DENSE, record.aa.p95 if record.aa else MOST_DENSE)


def grid_table(
    cells: Mapping[str, Sequence[Record]],
    with_tables: Mapping[str, bool],
    subjects: Sequence[str],
    *,
    compact: bool = False,
) -> Table:
    """Returns a rich table, a row a cell: DDP's best line, the subjects' ratios to it, and its ratio to itself (A/A).

    Rows of means follow, for cells of dense models and of models with tables: each subject's geometric mean, and of how
    many cells.

    Args:
        cells: compared records by the name of a cell, workload first.
        with_tables: whether the cell's model has tables, by the name of the cell.
        compact: medians alone, for narrow terminals.
    """
    from rich.table import Table
    from rich.text import Text

    spread = "" if compact else " [p5-p95]"
    caption = (
        f"ratios to DDP's best line: median{spread}; *: above the bound, {MOST_SPARSE:g} for models with tables, else "
        f"{MOST_DENSE:g} or A/A's p95; A/A: the best line against itself, p5-p95"
    )
    table = Table(title=Text("Defaults against DDP's best line"), caption=Text(caption))
    for number, heading in enumerate(("cell", "DDP's best line", *subjects, "A/A")):
        table.add_column(heading, justify="left" if number < 2 else "right", overflow="fold")
    for name, records in cells.items():
        row = _row(name, records, subjects, tables=with_tables[name], compact=compact)
        table.add_row(*map(Text, row))
    for tables, words in ((False, "dense"), (True, "tables")):
        own = [records for name, records in cells.items() if with_tables[name] is tables]
        means = [geometric_mean(own, subject) for subject in subjects]
        if any(mean is not None for mean in means):
            said = [NOTHING if mean is None else f"{mean[0]:.3f} ({mean[1]})" for mean in means]
            table.add_row(*map(Text, (f"mean, {words}", "", *said, "")))
    return table


def geometric_mean(cells: Sequence[Sequence[Record]], subject: str) -> tuple[float, int] | None:
    """Returns the geometric mean of a subject's median ratios, and of how many cells; None if no cell has its ratio."""
    ratios = [r.ratio.median for records in cells for r in records if r.subject == subject and r.ratio is not None]
    return (statistics.geometric_mean(ratios), len(ratios)) if ratios else None


def _row(name: str, records: Sequence[Record], subjects: Sequence[str], *, tables: bool, compact: bool) -> list[str]:
    found, first = {record.subject: record for record in records}, records[0]
    cells = [_cell(found.get(subject), tables=tables, compact=compact) for subject in subjects]
    return [name, first.params.get("baseline_method", first.baseline), *cells, _spread(first.aa)]


def _cell(record: Record | None, *, tables: bool, compact: bool) -> str:
    if record is None:
        return NOTHING
    if record.ratio is None:
        return "failed" if compact else f"failed: {record.failed}"
    mark = " *" if record.ratio.median > bound_of(record, tables=tables) else ""
    return (f"{record.ratio.median:.3f}" if compact else factor(record.ratio)) + mark


def _spread(aa: Spread | None) -> str:
    return NOTHING if aa is None else f"{aa.p5:.2f}-{aa.p95:.2f}"
