"""Progress bars over the events of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

console = Console()


@contextmanager
def event_bar(title: str, total: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar that moves by one with every event and shows what the event says."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, now="starting the ranks")

        def on_event(event: dict[str, Any]) -> None:
            now = " ".join(f"{v:.4f}" if isinstance(v, float) else str(v) for v in event.values() if v is not None)
            progress.update(task, advance=1, now=now)

        yield on_event
