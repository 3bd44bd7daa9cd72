"""Writes `docs/reference/command-line.md`, the page of all commands, from the commands themselves.

python docs/command_line.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradsync.cli import COMMANDS, loaded

PAGE = Path(__file__).parent / "reference" / "command-line.md"
HEAD = """# Command line

`gradsync` is a command of the library; the commands that say so come with gradsync-lab (`pip install ./lab`).
`gradsync COMMAND --help` shows the same in a terminal. This page is written by `docs/command_line.py`.

| status | meaning |
|---|---|
| 0 | the command did what it was asked |
| 1 | it ended with a fault: the run failed, your script raised, `doctor` found a fault, `demo` could not compare \
gradsync with DDP, a method failed in a cell of `bench train --grid defaults`, or an aim was missed \
(`bench --require`, `faults`, `fuzz`, `soak`, `lab check`) |
| 2 | an argument or a file is wrong, the command needs gradsync-lab and it is not installed, or there can be no lab \
here (`lab`, `soak`); the message says what was expected, or what to do |
| 124 | the time of `lab run --timeout` was up |
| 128 + n | signal n killed the rank of `lab run` that failed first |
| 130 | the command was interrupted (Ctrl-C); `bench converge` gives the records of finished methods first |
| another | that of your own script, or in `lab run` of the rank that failed first ([lab](../how-to/lab.md)) |

`--json` means the same wherever it stands. `--json FILE` writes the command's result to a file; `--json -` prints it to
stdout and nothing else, while tables and words go to stderr. The status is the same as without it. The
result of `faults`, `fuzz` and `soak` is their verdict with its counts; the cases themselves are in the file of
`--record`, if there is one. `bench train --grid defaults` takes a file only, from which it goes on, and with
`--dry-run` only `-`. A script's own subprocesses still write to stdout.

A command that takes more than some seconds shows its phase and the time on stderr where that is a terminal, and
elsewhere one line when a phase begins.
"""


def words(text: str | None) -> str:
    """Returns a text in one line, without the marks of Rich and what Markdown would read as HTML or a column."""
    plain = re.sub(r"\\\[", "[", " ".join((text or "").split()))
    return re.sub(r"(`[^`]*`)|([<>|*_])", lambda found: found[1] or f"\\{found[2]}", plain)


def default_of(parameter: Any) -> str:
    """Returns how a table states the default of a parameter: empty if it has none worth a word."""
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or value is False or value in ("", (), []) or callable(value):
        return ""
    if value is True:
        return "on"
    return f"`{', '.join(map(str, value)) if isinstance(value, list | tuple) else value}`"


def rows(command: Any) -> Iterator[str]:
    """Yields a row for each argument and option."""
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion") or getattr(parameter, "hidden", False):
            continue
        names = (*parameter.opts, *parameter.secondary_opts)
        if parameter.param_type_name == "argument":
            names = ((parameter.metavar or parameter.name).upper(),)
        yield f"| {', '.join(f'`{each}`' for each in names)} | {words(parameter.help)} | {default_of(parameter)} |"


def sections(name: str, command: Any, level: int = 2) -> Iterator[str]:
    """Yields the parts of the page for a command, and for the commands below it."""
    owner = COMMANDS.get(name.split()[1])
    of_lab = level == 2 and owner is not None and owner.place is None
    yield f"{'#' * level} {name}\n"
    yield "\n\n".join(filter(None, (words(part) for part in (command.help or "").split("\n\n")))) + (
        " (gradsync-lab)\n" if of_lab else "\n"
    )
    below = getattr(command, "commands", {})
    table = list(rows(command))
    if table:
        yield "\n".join(["| argument or option | meaning | default |", "|---|---|---|", *table]) + "\n"
    for each, inner in below.items():
        yield from sections(f"{name} {each}", inner, level + 1)


def page() -> str:
    """Returns the text of the page."""
    return "\n".join([HEAD, *(part for name in COMMANDS for part in sections(f"gradsync {name}", loaded(name)))])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
