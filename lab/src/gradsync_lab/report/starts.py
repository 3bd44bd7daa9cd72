"""The table of starts of jobs: a row a figure, a column a job, in seconds with the ratio to DDP's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .record import Record
from .tables import NOTHING

if TYPE_CHECKING:
    from rich.table import Table


def start_table(records: Sequence[Record], *, compact: bool = False) -> Table:
    """Returns a rich table of the records of `bench.start`; DDP's column has A/A in place of ratios.

    Args:
        compact: without a title, for narrow terminals.
    """
    from rich.table import Table
    from rich.text import Text

    caption = "medians in seconds (ratio to DDP's; of DDP: A/A, p5-p95); steps are timed from the end of attach"
    table = Table(title=None if compact else Text(_title(records)), caption=Text(caption))
    jobs: dict[str, list[Record]] = {}
    for record in records:
        jobs.setdefault(f"{record.subject}, {record.params['job']}", []).append(record)
    for number, heading in enumerate(("", "ddp", *jobs)):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in zip(*jobs.values(), strict=True):
        table.add_row(*map(Text, (str(row[0].params["figure"]), _of_ddp(row[0]), *map(_of_job, row))))
    table.add_row(*map(Text, ("settled", NOTHING, *map(_settled, jobs.values()))))
    return table


def _title(records: Sequence[Record]) -> str:
    params = records[0].params if records else {}
    return ", ".join(
        f"{name} {params[name]}" for name in ("model", "nodes", "ranks_per_node", "link") if name in params
    )


def _of_ddp(record: Record) -> str:
    noise = f" ({record.aa.p5:.2f}-{record.aa.p95:.2f})" if record.aa else ""
    return f"{record.baseline_s.median:.3f}{noise}" if record.baseline_s else NOTHING


def _of_job(record: Record) -> str:
    if record.subject_s is None or record.ratio is None:
        return NOTHING
    at = f" at {record.params['at_step']}" if "at_step" in record.params else ""
    return f"{record.subject_s.median:.3f}{at} ({record.ratio.median:.2f})"


def _settled(records: Sequence[Record]) -> str:
    params = {name: value for record in records for name, value in record.params.items()}
    said = [f"{params['settled_s']:.1f} s, step {params['settled_step']}"] if "settled_s" in params else []
    return ", ".join([*said, *([f"in {params['settled']}"] if "settled" in params else [])]) or NOTHING
