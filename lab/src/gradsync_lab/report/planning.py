"""The table of `gradsync bench plan`: the times to find plans, and the step times predicted for the plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .record import Record
from .tables import NOTHING, milliseconds

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("problem", "items", "plan, ms", "bytecomp, ms", "step, ms", "by bytecomp, ms", "at most above the best")


def planning_table(records: Sequence[Record], *, compact: bool = False) -> Table:
    """Returns a rich table with a row for each planning problem: the time to find a plan, and its predicted step time.

    `compact` is ignored.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Planning", caption="times: median [p5-p95]; steps are of the machine that plans are made for")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in planning_rows(records):
        table.add_row(*map(Text, row))
    return table


def planning_rows(records: Sequence[Record]) -> list[list[str]]:
    """Returns a row of text for each problem: size, planners' times, predicted step times, gap to the best plan."""
    rows = []
    for record in records:
        params, found = record.params, record.planning
        name = " ".join(str(params[key]) for key in ("model", "case") if key in params)
        if found is None:  # one record for all small problems: gaps to the best plan, no times
            gaps = f"mean {params['mean_gap']:.4%}, worst {params['worst_gap']:.2%}, of the best"
            rows.append([f"{params['problems']} {name}", str(params["items"]), *[NOTHING] * 4, gaps])
            continue
        steps = (f"{found.step_s * 1e3:.2f}", f"{found.baseline_step_s * 1e3:.2f}")
        times = (milliseconds(record.subject_s), milliseconds(record.baseline_s))
        certified = f"{found.step_s / found.bound_s - 1:.2%} ({found.certificate_s * 1e3:.0f} ms)"
        rows.append([name, str(params["items"]), *times, *steps, certified])
    return rows
