"""One self-contained page about a training run: opens anywhere, loads nothing from anywhere."""

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
LOOPBACK = "loopback"  # how `TrainingRun.link` begins when nothing was shaped


def verdict(run: TrainingRun) -> str:
    """The run in sentences, from its figures; says so when gradsync is slower or any method failed."""
    sentences = [_standing(run)]
    records = against_baseline(run)
    if SUBJECT in records:
        sentences += _others(records)
    sentences += [f"{m.name} {error}." for m in run.methods if m.name != SUBJECT and (error := failure(m))]
    if run.link.startswith(LOOPBACK):
        sentences.append("This ran on loopback, where bytes cost almost nothing: the times say little about a network.")
    return " ".join(sentences)


def _standing(run: TrainingRun) -> str:
    """gradsync beside the baseline."""
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
    """What the ratio means in view of its own spread and of the baseline's against itself."""
    if ratio.p5 <= 1 <= ratio.p95 or (aa and aa.p5 <= ratio.median <= aa.p95):
        return "within this run's noise of"
    return "faster than" if ratio.median < 1 else "slower than"


def _others(records: dict[str, Record]) -> list[str]:
    """The best method beside gradsync and the baseline."""
    medians = {name: record.ratio.median for name, record in records.items() if record.ratio}
    mine = medians.pop(SUBJECT)
    if not medians:
        return []
    best = min(medians, key=lambda name: medians[name])
    if medians[best] < mine:
        return [f"Faster than {SUBJECT} here: {best}, {medians[best]:.3f}."]
    return [f"The best other method: {best}, {medians[best]:.3f}."]


def figures(run: TrainingRun) -> list[tuple[str, str, go.Figure]]:
    """(title, what to look for, figure) in the order of the page; only what there is data for."""
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
            hint = "What the plan predicts beside what was recorded."
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
    """Writes the page.

    Raises:
        ImportError: without plotly or Jinja2, naming what to install.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the report needs {error.name}: pip install 'gradsync[plot]'") from None
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
