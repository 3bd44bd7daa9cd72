"""A file in place of stderr that calls itself a terminal, for tests of progress."""

from __future__ import annotations

import io

import pytest

from gradsync.cli.console import beside


class Terminal(io.StringIO):
    """A text file in memory that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal_as_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Lets commands print to a terminal in place of stderr, and returns it."""
    seen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(beside, "is_interactive", True)  # rich finds out once, for stderr as it is
    monkeypatch.setattr(beside, "_file", seen)
    return seen
