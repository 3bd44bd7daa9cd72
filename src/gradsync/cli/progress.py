"""Progress on stderr: a spinner or a bar where that is a terminal, else one line when a phase begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .console import beside


class Phase:
    """The progress of a phase, as `phase` yields it; where nothing is shown, its methods do nothing."""

    def __init__(self, progress: Progress, title: str, total: float | None, now: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=total, now=now)
        progress.refresh()

    def say(self, now: str) -> None:
        """Shows what goes on now."""
        self._progress.update(self._task, now=now, refresh=True)

    def advance(self, by: float, now: str) -> None:
        """Advances the bar, and shows what goes on now."""
        self._progress.update(self._task, advance=by, now=now, refresh=True)

    def reach(self, done: float, now: str) -> None:
        """Sets the bar to `done` of its total, and shows what goes on now."""
        self._progress.update(self._task, completed=done, now=now, refresh=True)


@contextmanager
def phase(
    title: str, total: float | None = None, now: str = "", *, captures_stderr: bool = True, at_rest: bool = False
) -> Iterator[Phase]:
    """Shows on stderr, inside the block, what a command does: on a terminal a spinner with the time, else one line.

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
