"""Tables of simulated figures with the published ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One simulated number of a table; `published` is the paper's number or other code's, None where there is none."""

    table: str
    row: str
    column: str
    value: float
    unit: str
    published: float | None = None


@dataclass(frozen=True)
class Table:
    """Simulated figures under one title; `notes` say what is modelled, fitted and assumed."""

    title: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    decimals: int = 2

    def figure(self, row: str, column: str) -> Figure:
        (found,) = (figure for figure in self.figures if (figure.row, figure.column) == (row, column))
        return found


class Rows:
    """Collects the figures of one table."""

    def __init__(self, table: str, unit: str) -> None:
        self._table, self._unit = table, unit
        self.figures: list[Figure] = []

    def add(self, row: str, values: Iterable[tuple[str, float, float | None]], unit: str | None = None) -> None:
        """Adds figures to a row, each as (column, value, published)."""
        for column, value, published in values:
            self.figures.append(Figure(self._table, row, column, value, unit or self._unit, published))

    def done(self, title: str, *notes: str, decimals: int = 2) -> Table:
        return Table(title, tuple(self.figures), notes, decimals)
