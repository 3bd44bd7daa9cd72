"""The record of fuzzing: lines of JSON, which say what was run by which code, and where the next run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ..bench.provenance import code, machine


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Header(_Line):
    """The code and the machine of the lines that follow.

    Attributes:
        engine: the digest of the library's sources: cases count for every commit with the same ones.
    """

    kind: Literal["header"] = "header"
    engine: str
    commit: str | None
    versions: dict[str, str]
    machine: dict[str, Any]


class _Counted(_Line):
    """Numbers of cases that were run, and of failed ones, by the way in which ranks ran, with the seconds of all."""

    first: int
    next: int
    cases: dict[str, int]
    mismatches: dict[str, int]
    hangs: dict[str, int]
    seconds: float


class Batch(_Counted):
    """Cases that were run together: the seeds [first, next)."""

    kind: Literal["batch"] = "batch"


class Failure(_Line):
    """A case that failed, as it was drawn, with its problems, and the script that replays a smaller one."""

    kind: Literal["failure"] = "failure"
    problems: list[str]
    case: str
    script: str | None


class Summary(_Counted):
    """The verdict on a run of `gradsync fuzz`, as `--json` gives it.

    Attributes:
        good: whether no case of this run failed.
        first, next: this run's seeds are [first, next).
        cases, mismatches, hangs: numbers by the way in which ranks ran, of all cases in the record that the present
            sources of the library ran, this run's included.
        seconds: of those.
        failures: this run's.
    """

    good: bool
    failures: list[Failure]

    @classmethod
    def of(cls, batches: Sequence[Batch], failures: Sequence[Failure], first: int, after: int) -> Summary:
        """Returns the summary of a run of the seeds [first, after), by batches of the present sources."""
        cases, mismatches, hangs = (
            dict(sum((Counter(counts) for counts in found), Counter()))
            for found in ([b.cases for b in batches], [b.mismatches for b in batches], [b.hangs for b in batches])
        )
        return cls(
            good=not failures,
            first=first,
            next=after,
            cases=cases,
            mismatches=mismatches,
            hangs=hangs,
            seconds=round(sum(batch.seconds for batch in batches), 2),
            failures=list(failures),
        )


class Replay(_Line):
    """The problems of a case that `gradsync fuzz --replay` ran; good without any."""

    good: bool
    problems: list[str]


Line = Annotated[Header | Batch | Failure, Field(discriminator="kind")]
_LINE: TypeAdapter[Header | Batch | Failure] = TypeAdapter(Line)


def header() -> Header:
    """Returns the header of this checkout on this machine."""
    return Header(**code(), machine=machine())


def append(path: Path, line: Header | Batch | Failure) -> None:
    """Writes one line at the end of the record, which is made with its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line.model_dump_json() + "\n")


def read(path: Path) -> list[Header | Batch | Failure]:
    """Returns the lines of a record; none if there is no file.

    Raises:
        ValueError: for a line that is none of a record, with its number.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        try:
            lines.append(_LINE.validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]["msg"]
            raise ValueError(
                f"line {number} of {path} is not one of `gradsync fuzz`: {first}; name another file"
            ) from None
    return lines


def batches_of(lines: Iterable[Header | Batch | Failure], engine: str) -> list[Batch]:
    """Returns the batches that were run by the library with this digest."""
    found, present = [], ""
    for line in lines:
        if isinstance(line, Header):
            present = line.engine
        elif isinstance(line, Batch) and present == engine:
            found.append(line)
    return found


def next_seed(lines: Iterable[Header | Batch | Failure]) -> int:
    """Returns the first seed that no batch has, whichever code ran it."""
    return max((line.next for line in lines if isinstance(line, Batch)), default=0)
