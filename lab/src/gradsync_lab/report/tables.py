"""Tables for the terminal; the page shows the same cells."""

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
    "measure",  # of what the workload learns, if it has one: named by `training_columns`
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
# Measures of held-out samples after the run, by the names that `Workload.evaluate` gives them: in words, and digits.
# Perplexity is that of the softmax over the whole vocabulary, whatever the training samples.
MEASURES = {"auc": ("AUC", 4), "perplexity": ("perplexity", 1), "accuracy": ("accuracy", 4)}
NOTHING = "-"


def milliseconds(spread: Spread | None) -> str:
    """`median [p5-p95]`."""
    if spread is None:
        return NOTHING
    digits = _digits(spread.median)
    return f"{spread.median * 1e3:.{digits}f} [{spread.p5 * 1e3:.{digits}f}-{spread.p95 * 1e3:.{digits}f}]"


def _digits(seconds: float) -> int:
    """Of milliseconds, after the point: kernels take microseconds."""
    return 1 if seconds >= 1e-3 or seconds == 0 else 4


def factor(spread: Spread | None) -> str:
    """A ratio with its spread."""
    return NOTHING if spread is None else f"{spread.median:.3f} [{spread.p5:.3f}-{spread.p95:.3f}]"


def megabytes(nbytes: float | None) -> str:
    return NOTHING if nbytes is None else f"{nbytes / 1e6:.2f}"


def payload_bytes(method: MethodRun) -> float | None:
    """Bytes a step that rank 0 handed to the transport; None for methods that cannot tell."""
    return sum(row.sent_bytes for row in method.buckets) if method.buckets else None


def failure(method: MethodRun) -> str | None:
    """Why a method has no figures; None for one that has."""
    if method.failed:
        return f"failed: {method.failed}"
    return None if method.step_s else "failed: no step was counted"


def against_baseline(run: TrainingRun) -> dict[str, Record]:
    """Method -> its record against the run's first baseline, where that was measured.

    Records of a phase of their own, which the baseline was picked from, are of other blocks.
    """
    first = run.records[0].baseline if run.records else None
    judged = (r for r in run.records if r.baseline == first and "phase" not in r.params)
    return {r.subject: r for r in judged if r.ratio is not None}


def measure_of(final: Mapping[str, float] | None) -> tuple[str, str] | None:
    """What was learned, in words, and how well; None where nothing was measured, or the loss only."""
    for name, (words, digits) in MEASURES.items():
        if final and name in final:
            return words, f"{final[name]:.{digits}f}"
    return None


def training_columns(run: TrainingRun) -> tuple[str, ...]:
    """The headings of `training_rows`."""
    found = next((measure for method in run.methods if (measure := measure_of(method.final))), None)
    return tuple(found[0] if found and heading == "measure" else heading for heading in _TRAINING_COLUMNS)


def training_rows(run: TrainingRun) -> list[list[str]]:
    """The cells of the training table, one row a method; the row of a failed method has two: its name and its error."""
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


SCALING, LEARNED = RECORD_COLUMNS.index("scaling"), RECORD_COLUMNS.index("held-out")
COMPACT_RECORD_COLUMNS = (0, 1, 2, 3, 5, 6, SCALING, LEARNED)
COMPACT_COLUMNS = (0, 1, 3, 5, 6, 7)  # what matters most, for narrow terminals


def training_table(run: TrainingRun, *, compact: bool = False) -> Table:
    """Every method of a run: median step time [p5-p95], bytes at the interface, what it learned, ratio."""
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
    """Records as rows: subject, baseline, both times, their ratio, noise, bytes, prediction, bound; what was learned.

    What all records share (nodes, link, ...) is the title, what tells them apart stands beside the case.
    """
    from rich.table import Table
    from rich.text import Text

    shared = _shared(records)
    caption = "times: median [p5-p95]; A/A: the baseline against itself; wire: subject / baseline, a step and node"
    unknown = set()
    if any(record.scaling is not None for record in records):
        caption += "; scaling: what all ranks process over as many times what one would alone"
    else:
        unknown.add(SCALING)
    if any(measure_of(record.loss) for record in records):
        caption += "; held-out: subject / baseline, after the run"
    else:
        unknown.add(LEARNED)
    table = Table(title=Text(_in_words(shared)), caption=Text(caption))
    chosen = [n for n in (COMPACT_RECORD_COLUMNS if compact else range(len(RECORD_COLUMNS))) if n not in unknown]
    for number in chosen:
        table.add_column(RECORD_COLUMNS[number], justify="left" if number < 3 else "right", overflow="fold")
    for record in records:
        cells = _record_row(record, shared)
        table.add_row(*(Text(cells[number]) for number in chosen))
    return table


def _record_row(record: Record, shared: dict[str, Any]) -> list[str]:
    wire, bound_s = record.wire_bytes, record.bound_s
    own = {key: value for key, value in record.params.items() if key not in shared}
    over_bound = record.subject_s.median / bound_s if record.subject_s and bound_s else None
    return [
        f"{record.case} {_in_words(own)}".rstrip(),
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
    """`AUC 0.7841 / 0.7840`."""
    measures = [measure_of(record.loss), measure_of(record.baseline_loss)]
    name = next((measure[0] for measure in measures if measure), None)
    return f"{name} {' / '.join(measure[1] if measure else NOTHING for measure in measures)}" if name else NOTHING


def judgements(records: Sequence[Record], bounds: Sequence[tuple[str, float]]) -> list[tuple[bool, str]]:
    """For each record of each bound's subject: whether it holds by the noise rule, and the rule's figures in words.

    Whole runs, which are made once, only say whether other records hold.
    """
    shared = _shared(records)
    return [
        (record.within(bound), _judgement(record, bound, shared))
        for subject, bound in bounds
        for record in records
        if record.subject == subject and not record.params.get("whole")
    ]


def _judgement(record: Record, bound: float, shared: dict[str, Any]) -> str:
    own = _in_words({key: value for key, value in record.params.items() if key not in shared})
    holds = record.within(bound)
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


def _shared(records: Sequence[Record]) -> dict[str, Any]:
    """The parameters that have the same value in every record."""
    if not records:
        return {}
    first, *others = (record.params for record in records)
    missing = object()
    return {key: value for key, value in first.items() if all(o.get(key, missing) == value for o in others)}


def _in_words(params: dict[str, Any]) -> str:
    """`nodes 4, link 1gbit, size 4096 kB`; what has a column of its own is left out."""
    words = []
    for key, value in params.items():
        # Figures of a record, not what it is about; `kernel` is the subject.
        if key in {"bound_ratio", "copy_bytes_per_s", "kernel"} or isinstance(value, list | dict):
            continue
        if key == "size_bytes":
            words.append(f"size {value / 1e3:,.0f} kB")
        else:
            words.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(words)
