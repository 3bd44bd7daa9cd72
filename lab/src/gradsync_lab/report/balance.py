"""The table of `gradsync bench balance`: how evenly owner maps (which rank sums which element) spread gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .record import Imbalance, Record
from .tables import NOTHING

if TYPE_CHECKING:
    from rich.table import Table


def balance_columns(records: Sequence[Record]) -> list[str]:
    """Returns headings: gradient, ranks, density, and owner maps (which rank sums what), the baseline first."""
    baselines = list(dict.fromkeys(record.baseline for record in records))
    return ["gradient", "ranks", "density, %", *baselines, *dict.fromkeys(record.subject for record in records)]


def balance_rows(records: Sequence[Record], *, compact: bool = False) -> list[list[str]]:
    """Returns a row of cells per gradient and number of ranks: the imbalance of each owner map (which rank sums what).

    Imbalance is the most loaded owner's load over an even share; an owner is a rank that sums a part. A cell is
    `push / pull` (a rank's messages to owners, and the owners' sums), and in brackets the push imbalance minus that of
    the map `Record.baseline`, with its standard error. With `compact` a cell has the push imbalance only.
    """
    columns = balance_columns(records)[3:]
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for record in records:
        assert record.balance is not None, "expected records of `bench balance`"
        params = record.params
        row = rows.setdefault((params["gradient"], params["ranks"]), {"density": f"{100 * params['density']:.2f}"})
        row[record.baseline] = _in_words(record.balance.baseline, compact=compact)
        excess = record.balance.excess.push
        row[record.subject] = _in_words(record.balance.subject, compact=compact)
        if not compact:
            row[record.subject] += f" ({excess.value:+.3f} +-{excess.error:.3f})"
    return [
        [gradient, str(ranks), row["density"], *(row.get(column, NOTHING) for column in columns)]
        for (gradient, ranks), row in rows.items()
    ]


def _in_words(imbalance: Imbalance, *, compact: bool) -> str:
    push, pull = f"{imbalance.push.value:.3f}", f"{imbalance.pull.value:.3f}"
    return push if compact else f"{push} / {pull}"


def balance_table(records: Sequence[Record], *, compact: bool = False) -> Table:
    """Returns the imbalances of owner maps (which rank sums what) as a rich table; `compact` suits narrow terminals."""
    from rich.table import Table
    from rich.text import Text

    figures = "push" if compact else "push / pull (push minus the first map's, +- standard error)"
    table = Table(title=Text("Imbalance of owner maps"), caption=Text(f"{figures}, mean over draws; 1: even"))
    for number, heading in enumerate(balance_columns(records)):
        table.add_column(Text(heading.replace("_", " ")), justify="right" if number else "left", overflow="fold")
    for row in balance_rows(records, compact=compact):
        table.add_row(*map(Text, row))
    return table
