"""A progress bar that advances with the events of a benchmark run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gradsync.cli.console import beside

from ..bench.launch import START_OVER
from ..bench.rank import DISTURBED


@contextmanager
def event_bar(title: str, total: int, first: str = "starting the ranks") -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows a progress bar inside the block; yields a function that takes an event, shows it and advances the bar.

    Args:
        first: text before the first event.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", markup=False),
    )
    with Progress(*columns, console=beside) as progress:
        task = progress.add_task(title, total=total, now=first)

        def on_event(event: dict[str, Any]) -> None:
            if event.get("kind") == START_OVER:
                progress.reset(task, now="a rank crashed, starting over")
                return
            if event.get("kind") == DISTURBED:
                progress.update(task, advance=-event["turns"], now="the host took the processors, measuring again")
                return
            now = " ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in event.values() if v is not None)
            progress.update(task, advance=1, now=now)

        yield on_event
