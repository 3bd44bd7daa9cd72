"""The record of faults: JSON lines, a header first, to which each finished case is appended at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..bench.provenance import code, machine
from .cases import Case
from .judge import Verdict


class Header(BaseModel):
    """The first line of a record: where its results come from."""

    model_config = ConfigDict(extra="forbid")

    kind: str  # "faults" or "soak"
    engine: str  # digest of the library's sources
    commit: str | None = None
    versions: dict[str, str] = {}
    machine: dict[str, Any] = {}
    settings: dict[str, Any] = {}

    @classmethod
    def here(cls, kind: str, **settings: Any) -> Header:
        """Returns the header of a record that begins now, on this machine."""
        return cls(kind=kind, **code(), machine=machine(), settings=settings)

    def require_like(self, other: Header, path: Path) -> None:
        """Raises unless a run with this header may go on in the record that began with the other one.

        The commit may differ, where the library's sources do not.

        Raises:
            ValueError: naming what differs.
        """
        for what in ("kind", "engine", "settings"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise ValueError(
                    f"{path} is a record with another value of {what}: it has {theirs}, this run has {mine}; "
                    "name another file"
                )


class Entry(BaseModel):
    """One line of a record of faults: a case with its verdict, and the seconds that it took."""

    model_config = ConfigDict(extra="forbid")

    seed: int
    case: Case
    verdict: Verdict
    seconds: float


def open_record(path: Path, header: Header) -> list[str]:
    """Returns the lines of a record behind its header; begins the record where there is none.

    Raises:
        ValueError: for a file that is no record, or one that this run may not go on in.
    """
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header.model_dump_json() + "\n", encoding="utf-8")
        return []
    found, lines = read_record(path)
    header.require_like(found, path)
    return lines


def read_record(path: Path) -> tuple[Header, list[str]]:
    """Returns a record's header and the lines behind it; a last line that is cut short is dropped from the file.

    Raises:
        ValueError: for a file that is no record.
        OSError: for one that cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):  # the run was killed while it wrote
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    first, *lines = text.splitlines() or [""]
    try:
        return Header.model_validate_json(first), lines
    except ValidationError:
        raise ValueError(f"{path} is no record: expected a header in its first line, got {first[:80]!r}") from None


def append(path: Path, entry: BaseModel) -> None:
    """Appends a line to a record."""
    with path.open("a", encoding="utf-8") as file:
        file.write(entry.model_dump_json() + "\n")


def entries(lines: list[str]) -> Iterator[Entry]:
    """Yields the cases of a record of faults."""
    for line in lines:
        yield Entry.model_validate_json(line)
