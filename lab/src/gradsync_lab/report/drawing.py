"""Drawings as SVG text: shapes, bars, curves and timelines on a white sheet as wide as a phone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from gradsync.costs.timeline import Task

from .record import Spread

WIDTH = 420.0
MARGIN = 12.0
INK, PALE = "#333333", "#d9d9d9"
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def _number(value: float) -> str:
    """Returns a coordinate with one decimal, so that the last bits of a computation do not change a picture."""
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """A sheet of fixed width that grows downwards: `y` is where the next part begins."""

    def __init__(self, title: str) -> None:
        self.title, self.y = title, 6.0
        self._shapes: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", colour: str = INK,
        bold: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{_number(x)}" y="{_number(y)}" font-size="{_number(size)}" text-anchor="{anchor}" '
            f'fill="{colour}"{weight}>{escape(words)}</text>'
        )

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, *, opacity: float = 1) -> None:
        clear = "" if opacity == 1 else f' fill-opacity="{opacity:.2f}"'
        self._shapes.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" '
            f'fill="{colour}"{clear}/>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1, dashed: bool = False
    ) -> None:
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{_number(width)}"{dashes}/>'
        )

    def circle(self, x: float, y: float, radius: float, colour: str, *, opacity: float = 1) -> None:
        self._shapes.append(
            f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}" fill="{colour}" '
            f'fill-opacity="{opacity:.2f}" stroke="{INK}"/>'
        )

    def heading(self, words: str, colour: str = INK) -> None:
        self.text(MARGIN, self.y + 16, words, bold=True, colour=colour)
        self.y += 24

    def note(self, words: str) -> None:
        self.text(MARGIN, self.y + 13, words, size=11, colour="#666666")
        self.y += 20

    def legend(self, entries: Mapping[str, str]) -> None:
        """Draws a row of coloured squares with their words, and begins a new row where one is full."""
        x = MARGIN
        for words, colour in entries.items():
            wide = 22 + 6.2 * len(words)
            if x > MARGIN and x + wide > WIDTH:
                x, self.y = MARGIN, self.y + 18
            self.rectangle(x, self.y + 3, 10, 10, colour)
            self.text(x + 14, self.y + 12, words, size=11)
            x += wide
        self.y += 24

    def bars(
        self, names: Sequence[str], series: Mapping[str, Sequence[float]], most: float, height: float = 80
    ) -> None:
        """Draws a group of bars for each name, one of each colour, `most` being the whole height."""
        wide = (WIDTH - 2 * MARGIN) / len(names)
        bar = wide * 0.8 / len(series)
        for place, name in enumerate(names):
            left = MARGIN + place * wide + wide * 0.1
            for number, (colour, values) in enumerate(series.items()):
                tall = height * values[place] / most
                self.rectangle(left + number * bar, self.y + height - tall, bar - 1, tall, colour)
            self.text(left + wide * 0.4, self.y + height + 13, name, size=10, anchor="middle")
        self.line([(MARGIN, self.y + height), (WIDTH - MARGIN, self.y + height)], INK)
        self.y += height + 22

    def spreads(self, spreads: Mapping[str, Spread]) -> None:
        """Draws for each name a bar of the median, in milliseconds, and a line from the 5th to the 95th percentile.

        Args:
            spreads: seconds by name. Names that are alike up to their comma have bars of one colour.
        """
        left, right = 170.0, WIDTH - 68.0
        scale = (right - left) / max(spread.p95 for spread in spreads.values())
        kinds = list(dict.fromkeys(name.partition(",")[0] for name in spreads))
        for name, spread in spreads.items():
            colour = COLOURS[(kinds.index(name.partition(",")[0]) + 1) % len(COLOURS)]
            low, high, middle = left + spread.p5 * scale, left + spread.p95 * scale, self.y + 11
            self.text(left - 6, self.y + 15, name, size=11, anchor="end")
            self.rectangle(left, self.y + 3, spread.median * scale, 16, colour)
            self.line([(low, middle), (high, middle)], INK)
            for end in (low, high):
                self.line([(end, middle - 4), (end, middle + 4)], INK)
            self.text(WIDTH - MARGIN, self.y + 15, f"{1e3 * spread.median:.0f} ms", size=11, anchor="end")
            self.y += 22
        self.line([(left, self.y - 22 * len(spreads)), (left, self.y)], INK)
        self.y += 4

    def timeline(self, tasks: Sequence[Task], streams: Mapping[str, str], seconds: float) -> None:
        """Draws a row for each stream; the width is `seconds`. Colours go by the number before a task's colon."""
        left = 70.0
        scale = (WIDTH - MARGIN - left) / seconds
        for row, (stream, words) in enumerate(streams.items()):
            top = self.y + 22 * row
            self.text(MARGIN, top + 14, words, size=11)
            for task in (task for task in tasks if task.stream == stream and task.duration_s > 0):
                number, colon, _ = task.name.partition(":")
                colour = COLOURS[int(number) % len(COLOURS)] if colon else PALE
                wide = max(task.duration_s * scale - 0.6, 0.4)
                self.rectangle(left + task.start_s * scale, top + 3, wide, 16, colour)
        end = left + max(task.end_s for task in tasks) * scale
        self.line([(end, self.y), (end, self.y + 22 * len(streams) + 2)], INK, dashed=True)
        self.y += 22 * len(streams) + 8

    def curves(
        self, lines: Mapping[str, Sequence[tuple[float, float]]], across: Sequence[float], up: Sequence[float],
        names: tuple[Sequence[str], Sequence[str]], *, height: float = 190, logarithmic: bool = True,
    ) -> None:  # fmt: skip
        """Draws one line a colour over a grid; `across` and `up` are the grid's lines, `names` what they are called."""
        scaled = math.log if logarithmic else float
        left, right, bottom = 50.0, WIDTH - 2 * MARGIN, self.y + height
        x0, x1, y0, y1 = scaled(across[0]), scaled(across[-1]), scaled(up[0]), scaled(up[-1])

        def place(x: float, y: float) -> tuple[float, float]:
            inside = min(max(scaled(y), y0), y1)
            return (
                left + (scaled(x) - x0) / (x1 - x0) * (right - left),
                bottom - (inside - y0) / (y1 - y0) * (height - 10),
            )

        for value, name in zip(up, names[1], strict=True):
            self.line([place(across[0], value), place(across[-1], value)], PALE)
            self.text(left - 5, place(across[0], value)[1] + 4, name, size=10, anchor="end")
        for value, name in zip(across, names[0], strict=True):
            x = place(value, up[0])[0]
            self.line([(x, bottom), (x, bottom + 4)], INK)
            self.text(x, bottom + 15, name, size=10, anchor="middle")
        for colour, points in lines.items():
            self.line([place(x, y) for x, y in points], colour, width=2)
        self.y = bottom + 22

    def svg(self) -> str:
        """Returns the drawing as the text of a file."""
        tall = _number(self.y + 4)
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_number(WIDTH)} {tall}" role="img" '
            'font-family="system-ui, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{_number(WIDTH)}" height="{tall}" rx="6" fill="#ffffff"/>',
            *self._shapes,
            "</svg>\n",
        ])  # fmt: skip
