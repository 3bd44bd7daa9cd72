"""The tables of `gradsync bench compress` and `bench converge`: times, costs, errors and losses of compressors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .record import CompressionError, Record
from .tables import NOTHING

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_LAWS = {"unbiased": "omega", "contraction": "delta", "absolute": "tau"}


def time_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns headings, and a row of times for each compressor, number of threads, size and number of tensors.

    The cell of an operation, such as encoding, has milliseconds, and in brackets GB/s of the bytes that the operation
    must read and write, and their rate as a percentage of a copy's.
    """
    timed = [record for record in records if record.metric == "kernel_s"]
    operations = list(dict.fromkeys(record.params["operation"] for record in timed))
    rows: dict[tuple[str, int, str], dict[str, str]] = {}
    for record in timed:
        size, threads = _size(record), record.params["threads"]
        row = rows.setdefault((record.subject, threads, size), {"factor": _factor(record)})
        row[record.params["operation"]] = _rate(record)
    headings = ["compressor", "threads", "size", "dense / wire bytes", *map(_words, operations)]
    cells = [
        [name, str(threads), size, row["factor"], *(row.get(o, NOTHING) for o in operations)]
        for (name, threads, size), row in rows.items()
    ]
    return headings, cells


def error_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns headings, and a row for each compressor: its fitted costs, and its error on each workload.

    A cell with an error also has the constant of the compressor's error bound (`gradsync.compressors.law`), measured
    and, in brackets, declared.
    """
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        row = rows.setdefault(record.subject, {})
        if record.cost is not None:
            threads = f", {record.params['threads']} threads" if record.params["threads"] > 1 else ""
            cost = record.cost
            figures = f"{cost.call_s * 1e6:.1f} us + {cost.byte_s * 1e9:.3f} ns/B"
            row[f"{record.params['operation']}{threads}"] = figures
        if record.error is not None:
            row[f"error, {record.params['workload']}"] = _error(record.error)
            even = record.params["break_even_ranks"]
            row["gather from n"] = "any" if even is None else f"{even:.0f}"
    headings = list(dict.fromkeys(heading for row in rows.values() for heading in row))
    headings.sort(key=lambda heading: (heading == "gather from n", heading.startswith("error")))
    named = {"gather from n": "all-gather beats 16 bits: n <"}
    cells = [[name, *(row.get(heading, NOTHING) for heading in headings)] for name, row in rows.items() if row]
    return ["compressor", *(named.get(heading, heading) for heading in headings)], cells


def compress_tables(records: Sequence[Record], *, compact: bool = False) -> Group:
    """Returns the tables of compressors' times and errors; `compact` keeps the times of the largest size only."""
    from rich.console import Group

    headings, rows = time_rows(records)
    if compact and rows:
        largest = max((r.params["size_bytes"] for r in records if r.metric == "kernel_s"), default=0)
        rows = [row for row in rows if row[2] == size_in_words(largest)]
    note = "ms (GB/s of what must be read and written, % of a copy's)"
    times = _table("Compressors: times", note, headings, rows)
    note = "error: |C(x) - x| / |x|, measured (declared) law; !: broken. Costs: a call + a byte"
    return Group(times, _table("Compressors: costs and errors", note, *error_rows(records)))


def loss_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Returns headings, and a row for each method: held-out loss on each workload.

    A loss is the mean over seeds; in brackets is its ratio to the baseline's, seed by seed. Where the workload measures
    accuracy, the cell also says by how many points it is above the baseline's, seed by seed.
    """
    workloads = list(dict.fromkeys(record.params["workload"] for record in records))
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        workload = record.params["workload"]
        if record.failed or record.losses is None or record.ratio is None:
            rows.setdefault(record.subject, {})[workload] = f"failed: {record.failed}"
            continue
        losses, ratio = record.losses, record.ratio
        rows.setdefault(record.baseline, {})[workload] = f"{_mean(losses.baseline):.4f}"
        figures = f"{_mean(losses.subject):.4f} ({ratio.median:.3f} [{ratio.p5:.3f}-{ratio.p95:.3f}])"
        if (right := record.accuracies) is not None:
            points = [100 * (a - b) for a, b in zip(right.subject, right.baseline, strict=True)]
            figures += f"; {_mean(points):+.1f} [{min(points):+.1f}, {max(points):+.1f}] points"
        rows.setdefault(record.subject, {})[workload] = figures
    return ["method", *workloads], [[n, *(row.get(w, NOTHING) for w in workloads)] for n, row in rows.items()]


def loss_table(records: Sequence[Record], *, compact: bool = False) -> Table:
    """Returns a rich table of each method's held-out loss on each workload (`loss_rows`); `compact` is ignored."""
    note = "held-out loss, mean over seeds (over the baseline's, seed by seed); points of accuracy above it"
    return _table("Losses after as many steps", note, *loss_rows(records))


def size_in_words(nbytes: int) -> str:
    """Returns a number of bytes in the largest fitting unit of 1024, as `64 KB`."""
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def size_of(text: str) -> int:
    """Parses a size such as `64KB` (units of 1024) and returns bytes.

    Raises:
        ValueError: `text` has another form.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)B\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size must look like 64KB or 256MB, got {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def _size(record: Record) -> str:
    tensors = record.params["tensors"]
    return size_in_words(record.params["size_bytes"]) + (f", {tensors} tensors" if tensors > 1 else "")


def _factor(record: Record) -> str:
    wire = record.payload_bytes
    assert wire is not None and wire.subject is not None and wire.baseline is not None, "records of `bench compress`"
    return f"{wire.baseline / wire.subject:.1f}" if wire.subject else NOTHING


def _rate(record: Record) -> str:
    assert record.subject_s is not None and record.ratio is not None
    bytes_per_s = record.params["moved_bytes"] / record.subject_s.median
    return f"{record.subject_s.median * 1e3:.4g} ({bytes_per_s / 1e9:.1f}, {100 / record.ratio.median:.0f} %)"


def _error(error: CompressionError) -> str:
    if error.declared is None or error.measured is None:
        return f"{error.relative:.3g}, {error.law}"
    broken = "" if error.holds else " !"
    law = _LAWS.get(error.law, error.law)
    return f"{error.relative:.3g}, {law} {error.measured:.3g} ({error.declared:.3g}){broken}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _table(title: str, caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), caption=Text(caption))
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
