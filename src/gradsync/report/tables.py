"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .record import MethodRun, Record, Spread, TrainingRun

if TYPE_CHECKING:
    from rich.table import Table


def milliseconds(spread: Spread | None) -> str:
    """`median [p5-p95]`."""
    if spread is None:
        return "-"
    return f"{spread.median * 1e3:.1f} [{spread.p5 * 1e3:.1f}-{spread.p95 * 1e3:.1f}]"


def factor(spread: Spread | None) -> str:
    """A ratio with its spread."""
    return "-" if spread is None else f"{spread.median:.3f} [{spread.p5:.3f}-{spread.p95:.3f}]"


def megabytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.2f}"


def payload_bytes(method: MethodRun) -> float | None:
    """Bytes a step that rank 0 handed to the transport; None for methods that cannot tell."""
    return sum(row.sent_bytes for row in method.buckets) if method.buckets else None


def ratios(run: TrainingRun) -> dict[str, Spread]:
    """Method -> step time over the baseline's, where measured."""
    return {record.subject: record.ratio for record in run.records if record.ratio is not None}


def training_rows(run: TrainingRun) -> list[list[str]]:
    """The cells of the training table, one row a method; a failed method keeps its row."""
    ratio = ratios(run)
    baselines = {record.baseline for record in run.records}
    rows = []
    for method in run.methods:
        if method.failed:
            rows.append([method.name, f"failed: {method.failed}"] + [""] * (len(TRAINING_COLUMNS) - 2))
            continue
        spread = Spread.of(method.step_s)
        rows.append(
            [
                method.name,
                milliseconds(spread),
                f"{method.samples_per_step / spread.median:,.0f}",
                megabytes(method.interface_bytes_per_step),
                megabytes(payload_bytes(method)),
                f"{method.final['loss']:.5f}" if "loss" in method.final else "-",
                f"{method.final['auc']:.4f}" if "auc" in method.final else "-",
                factor(ratio[method.name]) if method.name in ratio else ("1" if method.name in baselines else "-"),
            ]
        )
    return rows


TRAINING_COLUMNS = (
    "method",
    "step, ms",
    "samples/s",
    "MB a step and node",
    "payload MB",
    "held-out loss",
    "AUC",
    "step / baseline",
)


def training_table(run: TrainingRun) -> Table:
    """Every method of a run: median step time [p5-p95], bytes at the interface, what it learned, ratio."""
    from rich.table import Table
    from rich.text import Text

    aa = next((record.aa for record in run.records if record.aa), None)
    noise = f"; the baseline against itself: {factor(aa)}" if aa else ""
    table = Table(title=f"{run.workload} on {run.nodes} nodes, {run.link}", caption=Text(f"median [p5-p95]{noise}"))
    for number, column in enumerate(TRAINING_COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in training_rows(run):
        table.add_row(*map(Text, row))
    return table


def records_table(records: Sequence[Record]) -> Table:
    """Records as rows: subject, baseline, both times, their ratio, noise, bytes and bound."""
    from rich.table import Table
    from rich.text import Text

    table = Table(caption=Text("times in ms, median [p5-p95]; A/A: the baseline against itself in the same run"))
    columns = ("case", "subject", "baseline", "subject ms", "baseline ms", "ratio", "A/A", "wire MB", "bound ms")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 3 else "right", overflow="fold")
    for record in records:
        wire = record.wire_bytes
        cells = (
            f"{record.case} {_what(record.params)}",
            record.subject,
            record.baseline,
            milliseconds(record.subject_s) if not record.failed else f"failed: {record.failed}",
            milliseconds(record.baseline_s),
            factor(record.ratio),
            factor(record.aa),
            f"{megabytes(wire.subject)} / {megabytes(wire.baseline)}" if wire else "-",
            "-" if record.bound_s is None else f"{record.bound_s * 1e3:.1f}",
        )
        table.add_row(*map(Text, cells))
    return table


def _what(params: dict[str, Any]) -> str:
    if "size_bytes" in params:
        return f"{params['size_bytes'] / 1024:.0f} KiB"
    return str(params.get("workload", ""))
