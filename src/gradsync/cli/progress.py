"""Progress on stderr: a spinner or a bar where that is a terminal, else a line when a phase begins and one a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .console import beside

BETWEEN_LINES_S = 60.0


class Phase:
    """The progress of a phase, as `phase` yields it."""

    def __init__(self, progress: Progress, title: str, total: float | None, now: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, now=now)
        self._told_at = time.monotonic()
        progress.refresh()

    def say(self, now: str) -> None:
        """Shows what goes on now."""
        self._progress.update(self._task, now=now, refresh=True)

    def advance(self, by: float, now: str) -> None:
        """Advances the bar, and shows what goes on now."""
        self._progress.update(self._task, advance=by, now=now, refresh=True)
        self._tell_without_bar(now)

    def reach(self, done: float, now: str) -> None:
        """Sets the bar to `done` of its total, and shows what goes on now."""
        self._progress.update(self._task, completed=done, now=now, refresh=True)
        self._tell_without_bar(now)

    def _tell_without_bar(self, now: str) -> None:
        """Prints how far a long phase is, as a line at most every `BETWEEN_LINES_S` seconds, if stderr has no bar."""
        (task,) = self._progress.tasks
        due = time.monotonic() - self._told_at >= BETWEEN_LINES_S
        if not due or not self._progress.disable or task.finished or task.total is None:
            return
        self._told_at = time.monotonic()
        done = f"{task.completed:g} of {task.total:g}"
        beside.print(f"{task.description}: {done}, {now}", highlight=False, soft_wrap=True)


@contextmanager
def phase(
    title: str, total: float | None = None, now: str = "", *, captures_stderr: bool = True, at_rest: bool = False
) -> Iterator[Phase]:
    """Shows on stderr, inside the block, what a command does: on a terminal a spinner with the time, else lines.

    Nothing is ever written to stdout, and no codes that steer a terminal where stderr is none.

    Args:
        total: the length of the bar; None: a spinner without a bar, which disappears at the end.
        now: what goes on at first.
        captures_stderr: whether lines that are written to stderr meanwhile appear above the bar. Loggers that are set
            up in the block would keep writing by way of it.
        at_rest: whether nothing moves between the calls of the phase's methods, so that no thread runs beside what the
            block measures.
    """
    on_terminal = is_terminal()
    if not on_terminal:
        beside.print(title, highlight=False, soft_wrap=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        *(() if total is None else (BarColumn(), MofNCompleteColumn())),
        *(() if at_rest else (TimeElapsedColumn(),)),
        TextColumn("{task.fields[now]}", markup=False),
        console=beside,
        auto_refresh=not at_rest,
        transient=total is None,
        redirect_stderr=captures_stderr,
        redirect_stdout=False,  # else rich would move what is printed meanwhile to stderr
        disable=not on_terminal,
    ) as progress:
        yield Phase(progress, title, total, now)


def is_terminal() -> bool:
    """Whether stderr is a terminal on which lines can be overwritten; settings such as FORCE_COLOR make none of it."""
    return beside.file.isatty() and beside.is_interactive
