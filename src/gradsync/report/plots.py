"""The plots of a training run, as plotly figures."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .record import MethodRun, TrainingRun

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's colours, which most colour-blind people can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
STREAM_COLOURS = {"compute": "#0072B2", "link": "#D55E00", "kernel": "#009E73", "wait": "#BBBBBB"}
HEIGHT = 420


def colour_of(run: TrainingRun, name: str) -> str:
    """One colour a method, the same in every plot."""
    names = [method.name for method in run.methods]
    return COLOURS[names.index(name) % len(COLOURS)]


def figure(x: str, y: str, **layout: Any) -> go.Figure:
    """An empty figure with axis titles in the report's style."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise ImportError("the report needs plotly: pip install 'gradsync[plot]'") from None
    settings = {"template": "plotly_white", "height": HEIGHT, "margin": {"l": 60, "r": 20, "t": 30, "b": 50}}
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return go.Figure(layout={**settings, "legend": legend, "xaxis_title": x, "yaxis_title": y, **layout})


def shown(run: TrainingRun) -> list[MethodRun]:
    return [method for method in run.methods if not method.failed]


def loss_over_time(run: TrainingRun) -> go.Figure:
    """Training loss over the seconds spent in steps: what the user waits for."""
    plot = figure("seconds of training", "training loss, mean over the ranks")
    for method in shown(run):
        counted = method.losses[-len(method.step_s) :]
        elapsed = list(accumulate(method.step_s))
        plot.add_scatter(x=elapsed, y=counted, name=method.name, line_color=colour_of(run, method.name), mode="lines")
    return plot


def loss_over_steps(run: TrainingRun) -> go.Figure:
    """Training loss step by step: exact methods lie on one line."""
    plot = figure("step", "training loss, mean over the ranks")
    for number, method in enumerate(shown(run)):
        dash = ("solid", "dash", "dot", "dashdot")[number % 4]
        line = {"color": colour_of(run, method.name), "dash": dash}
        plot.add_scatter(y=method.losses, name=method.name, line=line, mode="lines")
    return plot


def step_breakdown(run: TrainingRun) -> go.Figure:
    """Where a step's time goes: backward alone, communication that backward does not hide, everything else."""
    from statistics import median

    methods = shown(run)
    names = [method.name for method in methods]
    steps_ms = [median(method.step_s) * 1e3 for method in methods]
    backward_ms = [(method.backward_s or 0.0) * 1e3 for method in methods]
    exposed_ms = [(method.exposed_s or 0.0) * 1e3 for method in methods]
    rest_ms = [max(s - b - e, 0.0) for s, b, e in zip(steps_ms, backward_ms, exposed_ms, strict=True)]
    plot = figure("milliseconds", "", barmode="stack", yaxis={"autorange": "reversed"})
    parts = (
        ("backward alone", backward_ms, "#0072B2"),
        ("exposed communication", exposed_ms, "#D55E00"),
        ("forward, optimiser, data", rest_ms, "#BBBBBB"),
    )
    for label, values, colour in parts:
        plot.add_bar(y=names, x=values, name=label, orientation="h", marker_color=colour)
    return plot


def step_distribution(run: TrainingRun) -> go.Figure:
    """How step times scatter."""
    plot = figure("", "step, milliseconds", showlegend=False)
    for method in shown(run):
        times_ms = [seconds * 1e3 for seconds in method.step_s]
        plot.add_box(y=times_ms, name=method.name, marker_color=colour_of(run, method.name), boxpoints="outliers")
    return plot


def bytes_by_bucket(method: MethodRun) -> go.Figure:
    """What each bucket of a method handed to the transport, recorded beside predicted."""
    labels = [f"{bucket_name(row.names)}<br>{row.scheme.replace('_', ' ')}" for row in method.buckets]
    plot = figure("kilobytes a step from one rank", "", barmode="group", yaxis={"autorange": "reversed"})
    recorded = [row.sent_bytes / 1e3 for row in method.buckets]
    predicted = [None if row.predicted_bytes is None else row.predicted_bytes / 1e3 for row in method.buckets]
    plot.add_bar(y=labels, x=recorded, name="recorded", orientation="h", marker_color="#0072B2")
    plot.add_bar(y=labels, x=predicted, name="predicted", orientation="h", marker_color="#56B4E9")
    plot.update_yaxes(automargin=True)
    return plot


def step_timeline(method: MethodRun) -> go.Figure:
    """One step: what ran when on which stream."""
    plot = figure("milliseconds since backward began", "", barmode="overlay", showlegend=False, height=300)
    for task in method.timeline:
        length_ms = (task.end_s - task.start_s) * 1e3
        plot.add_bar(
            y=[task.stream],
            x=[length_ms],
            base=[task.start_s * 1e3],
            orientation="h",
            marker={"color": STREAM_COLOURS.get(task.stream, "#000000"), "line": {"color": "white", "width": 1}},
            opacity=0.75,
            hovertemplate=f"{task.name}<br>{length_ms:.2f} ms<extra></extra>",
        )
    plot.update_yaxes(categoryorder="array", categoryarray=list(reversed(STREAM_COLOURS)))
    return plot


def bucket_name(names: list[str]) -> str:
    """A bucket by its parameters, short."""
    return names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"
