"""The plots of a training run, as plotly figures.

Names from the run are escaped, as plotly reads labels as HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from gradsync.characterization.plots import COLOURS, figure

from .record import MethodRun, Record, TimelineTask, TrainingRun
from .tables import factor, failure
from .trace import lanes

if TYPE_CHECKING:
    import plotly.graph_objects as go

BACKWARD, EXPOSED, REST = "#5B6C8F", "#B23A48", "#CFCFCF"
STREAM_COLOURS = {"compute": BACKWARD, "offload": "#8C6D31", "link": EXPOSED, "kernel": "#6A9F58", "wait": REST}
DASHES = ("solid", "dash", "dot", "dashdot")
LABEL_SHARE = 0.08  # a bar shorter than this share of the step has its name in the hover text only
MOST_SHOWN_BUCKETS = 40
MOST_SHOWN_RECORDS = 60
LABEL_LENGTH = 46  # characters of a row's label: what a phone has room for
BAR_GAP = 0.5  # of a row's height: its label stands above its bars


def colour_of(run: TrainingRun, name: str) -> str:
    """Returns the colour of the method `name`, which is the same in every plot."""
    names = [method.name for method in run.methods]
    return COLOURS[names.index(name) % len(COLOURS)]


def shown(run: TrainingRun) -> list[MethodRun]:
    """Returns the methods that have step times."""
    return [method for method in run.methods if not failure(method)]


def loss_over_time(run: TrainingRun) -> go.Figure:
    """Plots the training loss of the counted steps over the seconds spent in them: how long a user waits for a loss."""
    plot = figure("time in counted steps, s", "training loss, mean over the ranks")
    for method in shown(run):
        losses, elapsed_s = method.losses[-len(method.step_s) :], list(accumulate(method.step_s))
        line = {"color": colour_of(run, method.name)}
        plot.add_scatter(x=elapsed_s, y=losses, name=escape(method.name), line=line, mode="lines")
    return plot


def loss_over_steps(run: TrainingRun) -> go.Figure:
    """Plots the training loss step by step, warm-up included; exact methods lie on one line."""
    plot = figure("step, warm-up included", "training loss, mean over the ranks")
    for number, method in enumerate(shown(run)):
        # Lines that coincide stay visible: the first is the widest, the later ones are dashed.
        line = {"color": colour_of(run, method.name), "dash": DASHES[number % 4], "width": 5 if number == 0 else 2}
        plot.add_scatter(y=method.losses, name=escape(method.name), line=line, mode="lines")
    return plot


def step_breakdown(run: TrainingRun) -> go.Figure:
    """Plots the parts of each method's median step: backward alone, communication that backward does not hide, and the
    rest.
    """
    methods = shown(run)
    names = [escape(method.name) for method in methods]
    steps_ms = [median(method.step_s) * 1e3 for method in methods]
    backward_ms = [(method.backward_s or 0.0) * 1e3 for method in methods]
    exposed_ms = [(method.exposed_s or 0.0) * 1e3 for method in methods]
    rest_ms = [max(s - b - e, 0.0) for s, b, e in zip(steps_ms, backward_ms, exposed_ms, strict=True)]
    plot = figure("median step, ms", "", height=150 + 60 * len(methods), barmode="stack")
    parts = (
        ("backward alone", backward_ms, BACKWARD),
        ("exposed communication", exposed_ms, EXPOSED),
        ("rest: forward, optimiser, data", rest_ms, REST),
    )
    for label, values, colour in parts:
        text = f"{label}: %{{x:.1f}} ms<extra>%{{y}}</extra>"
        plot.add_bar(y=names, x=values, name=label, orientation="h", marker_color=colour, hovertemplate=text)
    return _rows_from_the_top(plot, [method.name for method in methods])


def step_distribution(run: TrainingRun) -> go.Figure:
    """Plots each method's step times as a box with all points."""
    methods = shown(run)
    plot = figure("step, ms", "", height=110 + 70 * len(methods), showlegend=False, boxgap=BAR_GAP)
    for method in methods:
        times_ms, colour = [seconds * 1e3 for seconds in method.step_s], colour_of(run, method.name)
        plot.add_box(
            x=times_ms, name=escape(method.name), orientation="h", marker_color=colour, boxpoints="all", jitter=0.4
        )
    plot.update_xaxes(rangemode="tozero")
    return _rows_from_the_top(plot, [method.name for method in methods])


def bytes_by_bucket(run: TrainingRun, method: MethodRun) -> go.Figure:
    """Plots the payload bytes that rank 0 sends for each bucket of a method in a step, recorded and predicted.

    Only the `MOST_SHOWN_BUCKETS` largest buckets are shown.
    """
    rows = sorted(method.buckets, key=lambda row: -row.sent_bytes)[:MOST_SHOWN_BUCKETS]
    # Numbered, as two buckets may have the same label.
    labels = [f"{number}: {row.scheme}, {bucket_name(row.names)}" for number, row in enumerate(rows, start=1)]
    plot = figure("payload sent by rank 0, kB a step", "", height=130 + 70 * len(rows), barmode="group")
    colour = colour_of(run, method.name)
    figures = (
        ("recorded", [row.sent_bytes for row in rows], ""),
        ("predicted", [row.predicted_bytes for row in rows], "/"),
    )
    for name, sent, pattern in figures:
        plot.add_bar(
            y=[escape(label) for label in labels],
            x=[None if nbytes is None else nbytes / 1e3 for nbytes in sent],
            text=[None if nbytes is None else f"{nbytes / 1e3:,.1f}" for nbytes in sent],
            textposition="outside",
            cliponaxis=False,
            name=name,
            orientation="h",
            marker={"color": colour, "pattern": {"shape": pattern}},
            hovertemplate=f"{name}: %{{x:,.3f}} kB<extra></extra>",
        )
    plot.update_layout(margin={"r": 70})  # room for the figure behind the longest bar
    return _rows_from_the_top(plot, labels)


def step_timeline(method: MethodRun) -> go.Figure:
    """Plots one step as a timeline: each stream's tasks (computation, link, ...) as recorded, below as predicted."""
    known = list(STREAM_COLOURS)
    rows = []
    for what, tasks in (("", method.timeline), (", predicted", method.predicted_timeline)):
        found = lanes(tasks)
        found.sort(key=lambda row: known.index(row[1][0].stream) if row[1][0].stream in known else len(known))
        rows += [(f"{label}{what}", row, 0.5 if what else 1.0) for label, row in found]
    step_s = max(task.end_s for _, row, _ in rows for task in row)
    plot = figure("time since the step's backward began, ms", "", height=110 + 55 * len(rows), showlegend=False)
    plot.update_layout(barmode="overlay")
    for label, tasks, opacity in rows:
        plot.add_bar(
            opacity=opacity,
            y=[escape(label)] * len(tasks),
            x=[(task.end_s - task.start_s) * 1e3 for task in tasks],
            base=[task.start_s * 1e3 for task in tasks],
            text=[escape(t.name) if t.end_s - t.start_s > LABEL_SHARE * step_s else "" for t in tasks],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            orientation="h",
            marker={"color": STREAM_COLOURS.get(tasks[0].stream, "#000000"), "line": {"color": "white", "width": 1}},
            hovertext=[_task_in_words(task) for task in tasks],
            hoverinfo="text",
        )
    return _rows_from_the_top(plot, [label for label, _, _ in rows])


def bucket_name(names: list[str]) -> str:
    """Returns a short name for a bucket with these parameters, as `first.weight + 3 more`."""
    if not names:
        return "no parameter"
    return names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"


def _task_in_words(task: TimelineTask) -> str:
    times = f"{(task.end_s - task.start_s) * 1e3:.2f} ms, from {task.start_s * 1e3:.2f} ms"
    sent = f"<br>{task.nbytes / 1e3:,.1f} kB" if task.nbytes else ""
    return f"{escape(task.name)}<br>{times}{sent}"


def ratios(records: Sequence[Record], cases: Sequence[str]) -> go.Figure:
    """Plots each record's ratio of subject over baseline, on a logarithmic axis, with its spread and A/A.

    Only the first `MOST_SHOWN_RECORDS` records with a ratio are shown. `cases`: what tells the records apart, in words.
    """
    shown = [(record, case) for record, case in zip(records, cases, strict=True) if record.ratio][:MOST_SHOWN_RECORDS]
    labels = [f"{n}: {record.subject}{f', {case}' if case else ''}" for n, (record, case) in enumerate(shown, start=1)]
    plot = figure("subject over baseline", "", height=130 + 45 * len(shown), showlegend=False)
    for label, (record, _) in zip(labels, shown, strict=True):
        ratio, aa = record.ratio, record.aa
        assert ratio is not None
        if aa is not None:
            plot.add_scatter(
                x=[aa.p5, aa.p95],
                y=[escape(label)] * 2,
                mode="lines",
                line={"color": REST, "width": 12},
                hoverinfo="skip",
            )
        spread = {"array": [ratio.p95 - ratio.median], "arrayminus": [ratio.median - ratio.p5], "symmetric": False}
        colour = COLOURS[0] if ratio.median <= 1 else EXPOSED
        said = f"{escape(record.subject)} over {escape(record.baseline)}: {factor(ratio)}<br>A/A: {factor(aa)}"
        plot.add_scatter(
            x=[ratio.median],
            y=[escape(label)],
            mode="markers",
            marker={"color": colour, "size": 10},
            error_x={**spread, "type": "data", "color": colour},
            hovertemplate=f"{said}<extra></extra>",
        )
    plot.add_vline(x=1, line_color=BACKWARD, line_dash="dot")
    plot.update_xaxes(type="log")
    return _rows_from_the_top(plot, labels)


def _rows_from_the_top(plot: go.Figure, labels: list[str]) -> go.Figure:
    """Orders the plot's categories as `labels`, the first on top, and writes each above its bars, as phones are narrow.

    Categories are named by the escaped labels.
    """
    known = [escape(label) for label in labels]
    order = {"categoryorder": "array", "categoryarray": known, "showticklabels": False}
    plot.update_yaxes(type="category", range=[len(labels) - 0.5, -0.5], **order)
    for number, label in enumerate(labels):
        text = label if len(label) <= LABEL_LENGTH else f"{label[: LABEL_LENGTH - 1]}…"
        place = {"x": 0, "xref": "paper", "xanchor": "left", "y": number - 0.5, "yref": "y", "yanchor": "top"}
        plot.add_annotation(text=escape(text), hovertext=escape(label), showarrow=False, font_size=12, **place)
    return plot.update_layout(bargap=BAR_GAP, margin={"l": 20})
