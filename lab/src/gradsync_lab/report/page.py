"""The HTML page about a training run: one self-contained file that loads nothing from the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import plots
from .record import Record, Spread, TrainingRun
from .tables import against_baseline, factor, failure, training_columns, training_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

TEMPLATE = Path(__file__).parent / "page.html"
SUBJECT = "gradsync"
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


def _pace(ratio: Spread, aa: Spread | None) -> str:
    """Returns "faster than", "slower than" or "within this run's noise of".

    Args:
        ratio: step times of a method over the baseline's.
        aa: step times of the baseline over its own in other blocks of steps.
    """
    if ratio.p5 <= 1 <= ratio.p95 or (aa and aa.p5 <= ratio.median <= aa.p95):
        return "within this run's noise of"
    return "faster than" if ratio.median < 1 else "slower than"


def _others(records: dict[str, Record]) -> list[str]:
    """Returns a sentence about the fastest method other than gradsync and the baseline; an empty list without one."""
    medians = {name: record.ratio.median for name, record in records.items() if record.ratio}
    mine = medians.pop(SUBJECT)
    if not medians:
        return []
    best = min(medians, key=lambda name: medians[name])
    if medians[best] < mine:
        return [f"Faster than {SUBJECT} here: {best}, {medians[best]:.3f}."]
    return [f"The best other method: {best}, {medians[best]:.3f}."]


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


def write_page(run: TrainingRun, path: str | Path) -> None:
    """Writes the HTML page about the run to `path`.

    Raises:
        ImportError: plotly or Jinja2 is missing; the message says what to install.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the report needs {error.name}: pip install plotly Jinja2") from None
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    config = {"displayModeBar": False, "responsive": True}
    drawn = [
        (title, hint, Markup(plot.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=f"plot-{n}")))
        for n, (title, hint, plot) in enumerate(figures(run))
    ]
    html = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run=run,
        verdict=verdict(run),
        columns=training_columns(run),
        rows=training_rows(run),
        figures=drawn,
        aa=next((factor(record.aa) for record in run.records if record.aa), None),
        plotly=Markup(get_plotlyjs()),
    )
    Path(path).write_text(html, encoding="utf-8")
