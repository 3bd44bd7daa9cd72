"""A progress bar that advances with the events of a benchmark run, and says when workloads fetch data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradsync.cli.progress import phase

from ..bench.launch import START_OVER
from ..bench.rank import DISTURBED, TOLD, telling


@contextmanager
def event_bar(title: str, total: int, first: str = "starting the ranks") -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows a progress bar inside the block; yields a function that takes an event, shows it and advances the bar.

    Args:
        first: text before the first event.
    """
    with phase(title, total, first) as shown:

        def on_event(event: dict[str, Any]) -> None:
            kind = event.get("kind")
            if kind == TOLD:
                shown.say(event["text"])
            elif kind == START_OVER:
                shown.reach(0, "a rank crashed, starting over")
            elif kind == DISTURBED:
                shown.advance(-event["turns"], "the host took the processors, measuring again")
            else:
                words = (f"{v:.4f}" if isinstance(v, float) else str(v) for v in event.values() if v is not None)
                shown.advance(1, " ".join(words))

        with telling(shown.say):
            yield on_event
