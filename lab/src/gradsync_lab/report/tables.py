"""Tables of training runs and records for the terminal; the HTML page shows the same cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .record import MethodRun, Record, Spread, TrainingRun

if TYPE_CHECKING:
    from rich.table import Table

_TRAINING_COLUMNS = (
    "method",
    "step, ms",
    "samples/s",
    "sent MB a step and node",
    "payload MB",
    "test loss",
    "measure",  # AUC, accuracy, ..: `training_columns` puts the workload's measure here
    "ratio",
)
RECORD_COLUMNS = (
    "case",
    "subject",
    "baseline",
    "subject, ms",
    "baseline, ms",
    "subject / baseline",
    "A/A",
    "wire MB",
    "predicted, ms",
    "bound, ms",
    "subject / bound",
    "scaling",
    "held-out",
)
# Measures of held-out samples after the run: name in `Workload.evaluate` -> (name in tables, decimals).
# Perplexity is of the softmax over the whole vocabulary, even where training samples the softmax.
MEASURES = {"auc": ("AUC", 4), "perplexity": ("perplexity", 1), "accuracy": ("accuracy", 4)}
NOTHING = "-"


def milliseconds(spread: Spread | None) -> str:
    """Returns a spread of seconds in milliseconds, as `median [p5-p95]`."""
    if spread is None:
        return NOTHING
    digits = _digits(spread.median)
    return f"{spread.median * 1e3:.{digits}f} [{spread.p5 * 1e3:.{digits}f}-{spread.p95 * 1e3:.{digits}f}]"


def _digits(seconds: float) -> int:
    """Returns how many decimals milliseconds are shown with; kernels take microseconds and need more."""
    return 1 if seconds >= 1e-3 or seconds == 0 else 4


def factor(spread: Spread | None) -> str:
    """Returns a ratio with its spread, as `median [p5-p95]`."""
    return NOTHING if spread is None else f"{spread.median:.3f} [{spread.p5:.3f}-{spread.p95:.3f}]"


def megabytes(nbytes: float | None) -> str:
    return NOTHING if nbytes is None else f"{nbytes / 1e6:.2f}"


def payload_bytes(method: MethodRun) -> float | None:
    """Returns the payload bytes that rank 0 sends per step; None for methods that do not count them."""
    return sum(row.sent_bytes for row in method.buckets) if method.buckets else None


def failure(method: MethodRun) -> str | None:
    """Returns why a method has no step times, as text; None if it has some."""
    if method.failed:
        return f"failed: {method.failed}"
    return None if method.step_s else "failed: no step was counted"


def against_baseline(run: TrainingRun) -> dict[str, Record]:
    """Returns, by method name, each method's record against the baseline of the run's first record.

    Methods without a ratio are left out, and so are records whose `params` have a "phase": they compare variants of
    DDP (bucket sizes) in separate steps, to find the fastest, which then ran as DDP.
    """
    first = run.records[0].baseline if run.records else None
    judged = (r for r in run.records if r.baseline == first and "phase" not in r.params)
    return {r.subject: r for r in judged if r.ratio is not None}


def measure_of(final: Mapping[str, float] | None) -> tuple[str, str] | None:
    """Returns name and formatted value of the first of `MEASURES` (AUC, ...) that `final` has; None if it has none."""
    for name, (words, digits) in MEASURES.items():
        if final and name in final:
            return words, f"{final[name]:.{digits}f}"
    return None


def training_columns(run: TrainingRun) -> tuple[str, ...]:
    """Returns the headings of the training table, with the name of the workload's measure, such as AUC."""
    found = next((measure for method in run.methods if (measure := measure_of(method.final))), None)
    return tuple(found[0] if found and heading == "measure" else heading for heading in _TRAINING_COLUMNS)


def training_rows(run: TrainingRun) -> list[list[str]]:
    """Returns the cells of the training table, one row a method; a failed method's row is its name and its error."""
    records = against_baseline(run)
    return [
        [method.name, error] if (error := failure(method)) else _figures(method, records, run) for method in run.methods
    ]


def _figures(method: MethodRun, records: dict[str, Record], run: TrainingRun) -> list[str]:
    spread = Spread.of(method.step_s)
    ratio = "1" if run.records and method.name == run.records[0].baseline else NOTHING
    return [
        method.name,
        milliseconds(spread),
        f"{method.samples_per_step / spread.median:,.0f}" if spread.median else NOTHING,
        megabytes(method.interface_bytes_per_step),
        megabytes(payload_bytes(method)),
        f"{method.final['loss']:.5f}" if "loss" in method.final else NOTHING,
        measure[1] if (measure := measure_of(method.final)) else NOTHING,
        factor(records[method.name].ratio) if method.name in records else ratio,
    ]


AA, SCALING, LEARNED = (RECORD_COLUMNS.index(name) for name in ("A/A", "scaling", "held-out"))
COMPACT_RECORD_COLUMNS = (0, 1, 2, 3, 5, AA, SCALING, LEARNED)
COMPACT_COLUMNS = (0, 1, 3, 5, 6, 7)  # the most important columns, for narrow terminals


def training_table(run: TrainingRun, *, compact: bool = False) -> Table:
    """Returns a rich table of methods: step time [p5-p95], interface bytes, held-out measures, ratio to baseline."""
    from rich.table import Table
    from rich.text import Text

    aa = next((record.aa for record in run.records if record.aa), None)
    noise = f"; the baseline against itself: {factor(aa)}" if aa else ""
    title, caption = f"{run.workload} on {run.nodes} nodes, {run.link}", f"median [p5-p95]{noise}"
    table = Table(title=Text(title), caption=Text(caption))
    columns = training_columns(run)
    chosen = COMPACT_COLUMNS if compact else range(len(columns))
    for number in chosen:
        justify: Literal["left", "right"] = "left" if number == 0 else "right"
        table.add_column(columns[number], justify=justify, no_wrap=number == 0, overflow="fold")
    for row in training_rows(run):
        cells = row + [""] * (len(columns) - len(row))  # the row of a failed method is short
        table.add_row(*(Text(cells[number]) for number in chosen))
    return table


def records_table(records: Sequence[Record], *, compact: bool = False) -> Table:
    """Returns a rich table, a row a record: subject's and baseline's times, ratio, A/A (measurement noise), bytes, ...

    Parameters that all records share (nodes, link, ...) stand in the title, others in the column `case`.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(in_words(shared_params(records))), caption=Text(records_caption(records)))
    columns, rows = records_cells(records, compact=compact)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in RECORD_COLUMNS[:3] else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def records_caption(records: Sequence[Record]) -> str:
    """Returns what the columns of the table of these records mean, in words."""
    caption = "times: median [p5-p95]; A/A: the baseline against itself; wire: subject / baseline, a step and node"
    if any(record.scaling is not None for record in records):
        caption += "; scaling: what all ranks process over as many times what one would alone"
    if any(measure_of(record.loss) for record in records):
        caption += "; held-out: subject / baseline, after the run"
    return caption


def records_cells(records: Sequence[Record], *, compact: bool = False) -> tuple[list[str], list[list[str]]]:
    """Returns the headings of the table of records, and the cells of each record.

    Columns that no record has figures for are left out; `compact`: so are those that a narrow terminal has no room for.
    """
    shared = shared_params(records)
    rows = [_record_row(record, shared) for record in records]
    known = {n for n in range(len(RECORD_COLUMNS)) if n <= AA or any(row[n] != NOTHING for row in rows)}
    chosen = [n for n in (COMPACT_RECORD_COLUMNS if compact else range(len(RECORD_COLUMNS))) if n in known]
    return [RECORD_COLUMNS[number] for number in chosen], [[row[number] for number in chosen] for row in rows]


def own_words(record: Record, shared: Mapping[str, Any]) -> str:
    """Returns the parameters of a record that are not `shared` by the others, in words."""
    return in_words({key: value for key, value in record.params.items() if key not in shared})


def _record_row(record: Record, shared: dict[str, Any]) -> list[str]:
    wire, bound_s = record.wire_bytes, record.bound_s
    over_bound = record.subject_s.median / bound_s if record.subject_s and bound_s else None
    return [
        f"{record.case} {own_words(record, shared)}".rstrip(),
        record.subject,
        record.baseline,
        f"failed: {record.failed}" if record.failed else milliseconds(record.subject_s),
        milliseconds(record.baseline_s),
        factor(record.ratio),
        factor(record.aa),
        f"{megabytes(wire.subject)} / {megabytes(wire.baseline)}" if wire else NOTHING,
        NOTHING if record.predicted_s is None else f"{record.predicted_s * 1e3:.1f}",
        NOTHING if bound_s is None else f"{bound_s * 1e3:.{_digits(bound_s)}f}",
        NOTHING if over_bound is None else f"{over_bound:.2f}",
        NOTHING if record.scaling is None else f"{record.scaling:.2f}",
        _learned(record),
    ]


def _learned(record: Record) -> str:
    """Returns the held-out measure of subject and baseline, as `AUC 0.7841 / 0.7840`."""
    measures = [measure_of(record.loss), measure_of(record.baseline_loss)]
    name = next((measure[0] for measure in measures if measure), None)
    return f"{name} {' / '.join(measure[1] if measure else NOTHING for measure in measures)}" if name else NOTHING


def judgements(records: Sequence[Record], bounds: Sequence[tuple[str, float]]) -> list[tuple[bool, str]]:
    """Returns, for each record whose subject has a bound, whether its ratio holds the bound, and the figures in words.

    `Record.within` decides. Records of whole runs (training to a loss) are left out, as a whole run is made only once.

    Args:
        bounds: pairs of a subject and the largest ratio that it may have to its baseline.
    """
    shared = shared_params(records)
    return [
        (record.within(bound), _judgement(record, bound, shared))
        for subject, bound in bounds
        for record in records
        if record.subject == subject and not record.params.get("whole")
    ]


def _judgement(record: Record, bound: float, shared: dict[str, Any]) -> str:
    own, holds = own_words(record, shared), record.within(bound)
    words = f"{record.subject} <= {bound:g} x {record.baseline}{f', {own}' if own else ''}"
    if record.ratio is None or record.aa is None:
        return f"does not hold: {words}: {record.failed or 'the baseline was not measured against itself'}"
    compared = f"{record.ratio.p5:.3f} {'<=' if holds else '>'} {bound:g} x {record.aa.p95:.3f}"
    figures = f"ratio {factor(record.ratio)}, A/A {factor(record.aa)}"
    median = (
        f"the median {record.ratio.median:.3f} is {'within' if record.ratio.median <= bound else 'beyond'} {bound:g}"
    )
    said = f"{words}: {compared} = {bound * record.aa.p95:.3f}; {median} ({figures})"
    return f"{'holds' if holds else 'does not hold'}: {said}"


def shared_params(records: Sequence[Record]) -> dict[str, Any]:
    """Returns the parameters that have the same value in every record."""
    if not records:
        return {}
    first, *others = (record.params for record in records)
    missing = object()
    return {key: value for key, value in first.items() if all(o.get(key, missing) == value for o in others)}


def in_words(params: dict[str, Any]) -> str:
    """Returns parameters as `nodes 4, link 1gbit, size 4,096 kB`, without results, lists, dicts and kernel names."""
    words = []
    for key, value in params.items():
        # Results rather than settings; `kernel` is the subject, which has a column.
        if key in {"bound_ratio", "copy_bytes_per_s", "kernel"} or isinstance(value, list | dict):
            continue
        if key == "size_bytes":
            words.append(f"size {value / 1e3:,.0f} kB")
        else:
            words.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(words)
