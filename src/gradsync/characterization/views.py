"""Shows sparsity figures (a `Characterization`) to people: as a table for terminals, and as an HTML page of plots."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from ..tensors.density import MOST_FOUND
from .figures import Characterization
from .plots import COLOURS, figure
from .statistics import HISTOGRAM_BINS, Estimate, Sparsity

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.table import Table

SKEW_COLUMNS = (8, 128)
TOGETHER = "all together"
NOTHING = "-"


def views(found: Characterization) -> dict[str, tuple[str, Sparsity]]:
    """Returns the figures to show, by tensor name: ("rows" or "elements", the sparsity figures of these).

    It has tensors with at most half of their rows or elements not zero, and last "all together" for all such gradients;
    empty if there are none.
    """
    named = {
        name: ("rows" if tensor.view() is tensor.rows else "elements", tensor.view())
        for name, tensor in found.tensors.items()
        if tensor.view().density.mean <= MOST_FOUND
    }
    return {**named, TOGETHER: ("elements", found.together)} if found.together is not None else named


def summary(found: Characterization) -> str:
    """Returns a text on what was measured: ranks, steps, sampling, and tensors that the table leaves out as dense."""
    dense = [n for n, t in found.tensors.items() if t.view().density.mean > MOST_FOUND]
    looked = "from samples of rows (+-: standard error)" if found.sampled else "everything counted"
    text = f"{found.ranks} ranks, mean over {found.steps} steps, {looked}."
    if dense:
        most = ", ".join(dense[:3]) + (", ..." if len(dense) > 3 else "")
        text += f" Left out, as more than half of their elements are not zero: {len(dense)} tensors ({most})."
    return text


def sparsity_table(found: Characterization, *, compact: bool = False) -> Table:
    """Returns a table of gradients' density, overlap between ranks and skewness, with a row for each sparse tensor.

    Densities are of one rank's gradient and of sums over ranks; gamma is the ratio of the sum's to one rank's. Skewness
    is the density of the densest of 8, or 128, even partitions of a tensor over the tensor's. Densities and gamma carry
    a standard error if sampled. `compact`, for narrow terminals, leaves out errors, sums over some ranks, and 128
    partitions.
    """
    from rich.table import Table
    from rich.text import Text

    counts = sorted({1, found.ranks} if compact else {k for _, v in views(found).values() for k in v.union_density})
    skews = SKEW_COLUMNS[:1] if compact else SKEW_COLUMNS
    table = Table(
        title=Text("Sparsity of gradients"),
        caption=Text("d k: density of the sum over k ranks, %; gamma: its growth; skew: of one rank / of the sum"),
    )
    headings = ["tensor", *(f"d {k}" for k in counts), f"gamma {found.ranks}", "overlap", *(f"skew {n}" for n in skews)]
    for number, heading in enumerate([*headings, "filled"]):
        table.add_column(heading, justify="left" if number == 0 else "right", min_width=0 if number else 20)
    for name, (unit, view) in views(found).items():
        tensor = found.tensors.get(name)
        filled = tensor.filled_ratio if tensor is not None else None
        cells = [
            f"{name}, {view.size:,} {unit}",
            *(_estimate(view.union_density.get(k), 100, errors=not compact) for k in counts),
            _estimate(view.densification_ratio.get(found.ranks), 1, errors=not compact),
            NOTHING if view.overlap_ratio is None else f"{view.overlap_ratio.mean:.2f}",
            *(_skews(view, n) for n in skews),
            NOTHING if filled is None else f"{filled:.0%}",
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _estimate(estimate: Estimate | None, scale: float, *, errors: bool) -> str:
    """Formats `scale` times a figure, as `2.64`, or as `2.61 +-0.04` with `errors` if it comes from a sample."""
    if estimate is None:
        return NOTHING
    error = f" +-{estimate.error * scale:.2f}" if estimate.error and errors else ""
    return f"{estimate.value * scale:.2f}{error}"


def _skews(view: Sparsity, n: int) -> str:
    pair = [ratios.get(n) for ratios in (view.skewness_ratio, view.union_skewness_ratio)]
    return " / ".join(NOTHING if ratio is None else f"{ratio.value:.1f}" for ratio in pair)


def figures(found: Characterization) -> list[tuple[str, str, go.Figure]]:
    """Returns plotly figures as (title, how to read it, figure): density of sums over ranks, overlap, skewness."""
    shown = views(found)
    return [
        ("Density of the sum", "Flat: the ranks touch the same places. A straight rise: different ones.", _sums(shown)),
        ("Overlap of pairs of ranks", "Share of the smaller index set that the other has too.", _overlaps(shown)),
        ("Skew", "Densest of n even partitions over the mean: 1 is even, n all in one. Dotted: the sum.", _skew(shown)),
    ]


def _sums(shown: dict[str, tuple[str, Sparsity]]) -> go.Figure:
    plot = figure("ranks", "density of the sum, %")
    for number, (name, (_, view)) in enumerate(shown.items()):
        plot.add_scatter(
            x=list(view.union_density),
            y=[100 * estimate.value for estimate in view.union_density.values()],
            error_y={"array": [100 * estimate.error for estimate in view.union_density.values()]},
            name=escape(name),
            line={"color": COLOURS[number % len(COLOURS)]},
        )
    plot.update_xaxes(type="log", tickvals=sorted({k for _, view in shown.values() for k in view.union_density}))
    return plot.update_yaxes(type="log")


def _overlaps(shown: dict[str, tuple[str, Sparsity]]) -> go.Figure:
    plot = figure("overlap ratio", "share of the pairs", barmode="overlay")
    middles = [(bin_ + 0.5) / HISTOGRAM_BINS for bin_ in range(HISTOGRAM_BINS)]
    for number, (name, (_, view)) in enumerate(shown.items()):
        colour = COLOURS[number % len(COLOURS)]
        plot.add_bar(x=middles, y=view.overlap_histogram, name=escape(name), marker_color=colour, opacity=0.6)
    return plot.update_xaxes(range=[0, 1])


def _skew(shown: dict[str, tuple[str, Sparsity]]) -> go.Figure:
    plot = figure("partitions", "skewness ratio")
    for number, (name, (_, view)) in enumerate(shown.items()):
        for ratios, dash in ((view.skewness_ratio, "solid"), (view.union_skewness_ratio, "dot")):
            plot.add_scatter(
                x=list(ratios),
                y=[ratio.value for ratio in ratios.values()],
                name=escape(name),
                legendgroup=str(number),
                showlegend=dash == "solid",
                line={"color": COLOURS[number % len(COLOURS)], "dash": dash},
            )
    plot.update_xaxes(type="log", tickvals=sorted({n for _, view in shown.values() for n in view.skewness_ratio}))
    return plot.update_yaxes(type="log")


def write_sparsity_page(found: Characterization, path: str | Path) -> None:
    """Writes one self-contained HTML page with the plots of a characterization.

    Raises:
        ImportError: if plotly is missing; the message says what to install.
        ValueError: if no tensor is sparse, so that there is nothing to draw.
    """
    if not views(found):
        raise ValueError("no gradient is sparse (more than half of the elements of each are not zero): nothing to plot")
    drawn = figures(found)
    parts = [f"<h1>Sparsity of gradients</h1><p>{escape(summary(found))}</p>"]
    for number, (title, hint, plot) in enumerate(drawn):
        html = plot.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"plot-{number}")
        parts.append(f"<h2>{escape(title)}</h2><p>{escape(hint)}</p>{html}")
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sparsity of gradients</title></head>'
    body = f'<body style="font-family: system-ui, sans-serif; max-width: 60rem; margin: auto">{"".join(parts)}</body>'
    Path(path).write_text(f"{head}{body}</html>", encoding="utf-8")
