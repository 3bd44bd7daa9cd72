"""Plots in one style, drawn by plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Okabe and Ito's colours, which most colour-blind people can tell apart; grey for black, which dark pages hide.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#8C6D31")


def figure(x: str, y: str, height: int = 400, **layout: Any) -> go.Figure:
    """Returns an empty plotly figure whose axes have the titles `x` and `y`; `layout` has further layout settings.

    Raises:
        ImportError: without plotly, naming what to install.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise ImportError("plots need plotly: pip install plotly") from None
    plot = go.Figure()
    plot.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        xaxis={"title": x, "automargin": True},
        yaxis={"title": y, "automargin": True},
        font={"family": "system-ui, sans-serif", "size": 13},
        paper_bgcolor="rgba(0,0,0,0)",  # the page's, light or dark
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return plot.update_layout(**layout)
