"""One self-contained page about a training run: opens anywhere, loads nothing from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from . import plots
from .record import TrainingRun
from .tables import TRAINING_COLUMNS, factor, ratios, training_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

TEMPLATE = Path(__file__).parent / "page.html"
SUBJECT = "gradsync"


def verdict(run: TrainingRun) -> str:
    """The run in a sentence or two, from its figures; says so when gradsync is slower or failed."""
    subject = next((method for method in run.methods if method.name == SUBJECT), None)
    if subject is None:
        return "This run did not include gradsync."
    if subject.failed:
        return f"gradsync failed: {subject.failed}"
    record = next((r for r in run.records if r.subject == SUBJECT and r.ratio is not None), None)
    if record is None or record.ratio is None:
        return "gradsync ran without a baseline to compare with."
    pace = "faster" if record.ratio.median < 1 else "slower"
    text = f"gradsync is {pace} than {record.baseline}: {factor(record.ratio)} of its step time"
    wire = record.wire_bytes
    if wire and wire.subject and wire.baseline:
        text += f", with {wire.subject / wire.baseline:.2f} of its bytes on the busiest node's link"
    text += "."
    others = {name: ratio.median for name, ratio in ratios(run).items() if name != SUBJECT}
    if others:
        best = min(others, key=lambda name: others[name])
        standing = "The best other method" if record.ratio.median <= others[best] else "Faster than gradsync here"
        text += f" {standing}: {best}, {others[best]:.3f}."
    if run.link.startswith("loopback"):
        text += " This ran on loopback, where bytes cost nothing: the ratio says little about a network."
    return text


def figures(run: TrainingRun) -> list[tuple[str, str, go.Figure]]:
    """(title, what to look for, figure) in the order of the page."""
    result = [
        ("Loss over time", "The same loss, reached sooner.", plots.loss_over_time(run)),
        ("Loss over steps", "Exact methods lie on one line.", plots.loss_over_steps(run)),
        ("Where a step goes", "Communication counts where backward does not hide it.", plots.step_breakdown(run)),
        ("Step times", "Their scatter is the noise of the run.", plots.step_distribution(run)),
    ]
    for method in run.methods:
        if method.buckets:
            title = f"Bytes of each bucket: {method.name}"
            result.append((title, "Predicted from the plan, recorded in the run.", plots.bytes_by_bucket(method)))
        if method.timeline:
            title = f"One step of {method.name}"
            result.append((title, "Operations in flight overlap backward and each other.", plots.step_timeline(method)))
    return result


def write_page(run: TrainingRun, path: str | Path) -> None:
    """Writes the page.

    Raises:
        ImportError: without plotly or Jinja2, naming what to install.
    """
    try:
        from jinja2 import Environment
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(f"the report needs {error.name}: pip install 'gradsync[plot]'") from None
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    drawn = [
        (title, hint, Markup(plot.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})))
        for title, hint, plot in figures(run)
    ]
    html = template.render(
        run=run,
        verdict=verdict(run),
        columns=TRAINING_COLUMNS,
        rows=training_rows(run),
        figures=drawn,
        plotly=Markup(get_plotlyjs()),
    )
    Path(path).write_text(html, encoding="utf-8")
