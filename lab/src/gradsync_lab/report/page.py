"""The HTML pages about a training run, or about records: self-contained files that load nothing from the network."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from . import plots
from .record import Record, Spread, TrainingRun
from .tables import (
    against_baseline,
    factor,
    failure,
    in_words,
    own_words,
    records_caption,
    records_cells,
    shared_params,
    training_columns,
    training_rows,
)
from .trace import TRACE

if TYPE_CHECKING:
    import plotly.graph_objects as go

TEMPLATES = Path(__file__).parent
SUBJECT = "gradsync"
ITSELF = Spread(median=1.0, p5=1.0, p95=1.0)  # the baseline's ratio to itself, without noise
LOOPBACK = "loopback"  # how `TrainingRun.link` begins when no link's rate was limited


def verdict(run: TrainingRun) -> str:
    """Returns the run's result in sentences, which also say when gradsync is slower or a method failed."""
    sentences = [_standing(run)]
    records = against_baseline(run)
    if SUBJECT in records:
        sentences += _others(records)
    sentences += [f"{m.name} {error}." for m in run.methods if m.name != SUBJECT and (error := failure(m))]
    if run.link.startswith(LOOPBACK):
        sentences.append("This ran on loopback, where bytes cost almost nothing: the times say little about a network.")
    return " ".join(sentences)


def _standing(run: TrainingRun) -> str:
    """Returns the sentence that compares gradsync with the baseline."""
    subject = next((method for method in run.methods if method.name == SUBJECT), None)
    if subject is None:
        return f"This run did not include {SUBJECT}."
    if error := failure(subject):
        return f"{SUBJECT} {error}."
    record = against_baseline(run).get(SUBJECT)
    if record is None or record.ratio is None:
        return f"{SUBJECT} ran without a baseline to compare with."
    text = f"{SUBJECT} is {_pace(record.ratio, record.aa)} {record.baseline}: {factor(record.ratio)} of its step time"
    wire = record.wire_bytes
    if wire and wire.subject is not None and wire.baseline:
        text += f", with {wire.subject / wire.baseline:.2f} of its bytes on the busiest node's link"
    return f"{text}."


def _pace(ratio: Spread, aa: Spread | None, other: Spread = ITSELF) -> str:
    """Returns "faster than", "slower than" or "within this run's noise of".

    Args:
        ratio: step times of a method over the baseline's.
        aa: step times of the baseline over its own in other blocks of steps.
        other: step times, over the baseline's, of the method to compare with; by default that is the baseline.
    """
    overlap = ratio.p5 <= other.p95 and other.p5 <= ratio.p95
    if overlap or (aa and aa.p5 * other.median <= ratio.median <= aa.p95 * other.median):
        return "within this run's noise of"
    return "faster than" if ratio.median < other.median else "slower than"


def what_if(run: TrainingRun) -> str:
    """Returns how long each method's step would be without waiting for exchanges, in a sentence; "" if not known."""
    steps_s = [
        (method.name, median(method.step_s), method.exposed_s)
        for method in run.methods
        if not failure(method) and method.exposed_s is not None
    ]
    known = [
        f"{name} {1e3 * max(step_s - exposed_s, 0.0):.1f} ms of {1e3 * step_s:.1f}"
        for name, step_s, exposed_s in steps_s
    ]
    if not known:
        return ""
    return (
        f"What if nothing waited for exchanges? A step would then take, with {', '.join(known)}. The rest is what "
        "backward does not hide. Exchanges also take cores from backward, which this leaves in."
    )


def _others(records: dict[str, Record]) -> list[str]:
    """Returns a sentence about the fastest method other than gradsync and the baseline; an empty list without one."""
    ratios = {name: record.ratio for name, record in records.items() if record.ratio}
    mine = ratios.pop(SUBJECT)
    if not ratios:
        return []
    name, ratio = min(ratios.items(), key=lambda pair: pair[1].median)
    pace, base = _pace(ratio, records[name].aa, mine), records[name].baseline
    return [f"The fastest other method, {name}, is {pace} {SUBJECT}: {factor(ratio)} of {base}'s step time."]


def figures(run: TrainingRun) -> list[tuple[str, str, go.Figure]]:
    """Returns the page's plots in order, as (title, hint for the reader, figure), without those that lack data."""
    result: list[tuple[str, str, go.Figure]] = []
    if plots.shown(run):
        result = [
            ("Loss over time", "The same loss, sooner or later.", plots.loss_over_time(run)),
            ("Loss over steps", "Methods that compute the same mean lie on one line.", plots.loss_over_steps(run)),
            ("Where a step goes", "Communication counts where backward does not hide it.", plots.step_breakdown(run)),
            ("Step times", "A dot is a counted step; the scatter is this run's noise.", plots.step_distribution(run)),
        ]
    for method in run.methods:
        if method.buckets:
            title, most = f"Bytes by bucket: {method.name}", plots.MOST_SHOWN_BUCKETS
            hint = "Recorded bytes, and the plan's prediction."
            if len(method.buckets) > most:
                hint += f" The {most} largest of {len(method.buckets)} buckets."
            result.append((title, hint, plots.bytes_by_bucket(run, method)))
        if method.timeline:
            hint = "Operations in flight overlap backward and each other; wait is what the training loop waits for."
            if method.predicted_timeline:
                hint += " Pale: what the plan and the measured network predict for it."
            result.append((f"One step of {method.name}", hint, plots.step_timeline(method)))
    return result


def write_page(run: TrainingRun, path: str | Path, results: str | Path | None = None) -> None:
    """Writes the HTML page about the run to `path`.

    Args:
        results: the file that has the run as JSON. The page names it, and the trace beside it if there is one, as seen
            from the page's folder.

    Raises:
        ImportError: plotly or Jinja2 is missing; the message says what to install.
    """
    _write(
        "page.html",
        path,
        figures(run),
        title=f"{run.workload} on {run.nodes} nodes, {run.link}",
        run=run,
        verdict=verdict(run),
        what_if=what_if(run),
        columns=training_columns(run),
        rows=training_rows(run),
        aa=next((factor(record.aa) for record in run.records if record.aa), None),
        **_files(Path(path), results),
    )


def _files(page: Path, results: str | Path | None) -> dict[str, str | None]:
    """Returns where, seen from the page's folder, are the run's results and the trace beside them; None: not known."""
    if results is None:
        return {"results": None, "trace": None}
    trace = Path(results).with_name(TRACE)
    found = {"results": Path(results), "trace": trace if trace.exists() else None}
    return {name: None if file is None else _seen_from(page.parent, file) for name, file in found.items()}


def _seen_from(folder: Path, file: Path) -> str:
    # Bytes of a name that are no text would not fit into a page.
    return os.path.relpath(file, folder).encode(errors="backslashreplace").decode()


def verdict_of_records(records: Sequence[Record]) -> str:
    """Returns how each subject stands to its baseline, in a sentence each; of several records how often, and the worst.

    Records whose `params` have a "phase", which chose the line of DDP to compare with, are counted only.
    """
    shared = shared_params(records)
    judged = _judged(records)
    kinds = dict.fromkeys((record.subject, record.metric) for record in judged)
    sentences = [_standing_of([r for r in judged if (r.subject, r.metric) == kind], shared) for kind in kinds]
    if picking := len(records) - len(judged):
        sentences.append(f"{picking} more chose the line of DDP that is compared with.")
    return " ".join(sentences)


def _judged(records: Sequence[Record]) -> list[Record]:
    """Returns the records but for those that chose the line of DDP to compare with."""
    return [record for record in records if "phase" not in record.params]


def _standing_of(records: Sequence[Record], shared: Mapping[str, Any]) -> str:
    """Returns the sentence about one subject's records of one metric; `shared`: parameters that need not be named."""
    first, measured = records[0], [(record.ratio, record) for record in records if record.ratio is not None]
    subject = first.subject if first.metric.endswith("_s") else f"{first.subject} ({first.metric})"
    failures = list(dict.fromkeys(str(record.failed) for record in records if record.ratio is None))
    if not measured:
        return f"{subject} failed: {'; '.join(failures)}."
    worst, record = max(measured, key=lambda pair: pair[0].median)
    if len(records) == 1:
        return f"{subject} is {_words(worst, record)} {record.baseline}: {factor(worst)}."
    paces = Counter(_words(ratio, record) for ratio, record in measured)
    told = [f"{words} its baseline in {count}" for words, count in sorted(paces.items())]
    told += [f"failed in {len(records) - len(measured)} ({'; '.join(failures)})"] if failures else []
    of = f" ({own})" if (own := own_words(record, shared)) else ""
    return f"{subject}, {len(records)} records: {', '.join(told)}; at most {factor(worst)} of {record.baseline}{of}."


def _words(ratio: Spread, record: Record) -> str:
    """Returns how a record's subject stands to its baseline: faster or slower, or of what is no time below or above."""
    found = _pace(ratio, record.aa)
    no_time = {"faster than": "below", "slower than": "above"}
    return found if record.metric.endswith("_s") else no_time.get(found, found)


def write_records_page(records: Sequence[Record], path: str | Path) -> None:
    """Writes the HTML page about records of any runs to `path`: the verdict, the ratios as a plot, all figures.

    Raises:
        ValueError: there are no records.
        ImportError: plotly or Jinja2 is missing; the message says what to install.
    """
    if not records:
        raise ValueError("there are no records to report on")
    shared, (columns, rows) = shared_params(records), records_cells(records)
    hint = "Subject over baseline: the median, and a line from the 5th to the 95th percentile. Grey: A/A."
    compared = _judged(records) or records
    if len(compared) < len(records):
        hint += " Records that chose the line of DDP are in the table only."
    drawn = [("Ratios", hint, plots.ratios(compared, [own_words(record, shared) for record in compared]))]
    plans = {r.plan.digest or r.plan.words[0]: (r.subject, r.plan.words) for r in records if r.plan and r.plan.words}
    machine: dict[str, Any] = {}
    for record in records:
        for key, value in (*record.environment.items(), *record.versions.items(), ("commit", record.commit)):
            if value is not None:
                machine.setdefault(key, []).append(str(value))
    cases = ", ".join(dict.fromkeys(record.case for record in records))
    _write(
        "records.html",
        path,
        drawn if any(record.ratio for record in compared) else [],
        title=f"{len(records)} record{'s' if len(records) > 1 else ''} of {cases}",
        verdict=verdict_of_records(records),
        shared=in_words(shared),
        caption=records_caption(records),
        columns=columns,
        rows=rows,
        plans=list(plans.values()),
        machine=[(key, "; ".join(dict.fromkeys(values))) for key, values in machine.items()],
    )


def _write(template: str, path: str | Path, figures: Sequence[tuple[str, str, go.Figure]], **values: Any) -> None:
    """Writes the page that a template makes of these values and plots, (title, hint, figure) each, to `path`."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the report needs {error.name}: pip install plotly Jinja2") from None
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=FileSystemLoader(TEMPLATES),
    )
    config = {"displayModeBar": False, "responsive": True}
    drawn = [
        (title, hint, Markup(plot.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=f"plot-{n}")))
        for n, (title, hint, plot) in enumerate(figures)
    ]
    html = environment.get_template(template).render(figures=drawn, plotly=Markup(get_plotlyjs()), **values)
    Path(path).write_text(html, encoding="utf-8")
