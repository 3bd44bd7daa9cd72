"""Tables of a record of faults: for the terminal, and as markdown for a page of the documentation."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from .cases import Fault, Phase
from .judge import GOOD, Ending
from .record import Entry, Header

if TYPE_CHECKING:
    from rich.table import Table

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
NAMED_AIM = 0.95
PAGE_COLUMNS = 120
NEW_PAGE = f"""# Reliability

What happens when a rank dies, stops, raises or loses its link is measured: `gradsync faults` injects faults at random
into small jobs under every frontend, and judges what each surviving rank says and does. A good outcome is that all
survivors go on, or raise a clear error within the timeout and 5 s, and can start again in the same processes.
`gradsync soak` trains for hours under torchrun while such faults come, and compares the bits with a run without them.

{BEGIN}
{END}
"""
SHARES = ("start again", "victim named", "says where")


@dataclass(frozen=True)
class Share:
    """A number of things out of how many."""

    of: int
    out_of: int

    @classmethod
    def among(cls, found: Iterable[bool | None]) -> Share:
        """Counts what is true among what is known: None counts as unknown."""
        known = [each for each in found if each is not None]
        return cls(sum(known), len(known))

    def __str__(self) -> str:
        return f"{self.of}/{self.out_of}" if self.out_of else ""

    @property
    def share(self) -> float:
        return self.of / self.out_of if self.out_of else 1.0


def judged(entries: Iterable[Entry]) -> list[Entry]:
    """Returns the cases whose fault came about."""
    return [entry for entry in entries if entry.verdict.struck and not entry.verdict.not_possible]


def again(entries: Sequence[Entry]) -> Share:
    """Returns how many ranks could start again."""
    return Share.among(rank.again for entry in entries for rank in entry.verdict.ranks)


def named(entries: Sequence[Entry]) -> Share:
    """Returns how many errors name the victim, and nobody else as the cause."""
    return Share.among(
        None if rank.names_victim is None else rank.names_victim and not rank.blames
        for entry in entries
        for rank in entry.verdict.ranks
    )


def where(entries: Sequence[Entry]) -> Share:
    """Returns how many errors say where it happened."""
    return Share.among(rank.says_where for entry in entries for rank in entry.verdict.ranks)


def summary_table(entries: Sequence[Entry]) -> Table:
    """Returns the summary for the terminal: a row for each kind of fault, and the sums.

    It counts each case by the survivor that ended worst.
    """
    from rich.table import Table

    occurred = [ending for ending in Ending if _outcomes(entries)[ending]]
    others = [what for what in ("not struck", "not possible") if _outcomes(entries)[what]]
    columns = [*map(str, occurred), *others]
    table = Table(title="Faults, by what became of the survivor that ended worst")
    for column in ("fault", "cases", "good", *columns, *SHARES):
        table.add_column(column, justify="left" if column == "fault" else "right")
    rows = {str(fault): [entry for entry in entries if entry.case.fault is fault] for fault in Fault}
    for name, own in rows.items():
        if own:
            table.add_row(*_row(name, own, columns))
    table.add_section()
    table.add_row(*_row("all", entries, columns))
    return table


def _outcomes(entries: Sequence[Entry]) -> Counter[str]:
    """Counts the cases by outcome: an ending, `not struck` or `not possible`."""
    return Counter(
        "not possible" if e.verdict.not_possible else str(e.verdict.ending) if e.verdict.struck else "not struck"
        for e in entries
    )


def _row(name: str, own: Sequence[Entry], columns: Sequence[str]) -> list[str]:
    came, outcomes = judged(own), _outcomes(own)
    good = Share.among(entry.verdict.good for entry in came)
    shares = map(str, (again(came), named(came), where(came)))
    return [name, str(len(own)), str(good), *(str(outcomes[column] or "") for column in columns), *shares]


class Summary(BaseModel):
    """The verdict on cases of one seed, as `gradsync faults --json` gives it.

    Attributes:
        good: whether the aims hold: all cases good, all ranks can start again, almost all errors name the victim.
        wanted, ran: numbers of cases; fewer ran than were wanted where the time was up.
        outcomes: numbers of cases by the survivor that ended worst, `not struck` or `not possible`.
        cases_good, started_again, victim_named, says_where: how many of how many.
        bad: a line for each case that did not end well.
        not_possible: reasons why this machine could not bring faults about.
        seconds: of all cases together, which may have run at the same time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    good: bool
    seed: int
    wanted: int
    ran: int
    outcomes: dict[str, int]
    cases_good: tuple[int, int]
    started_again: tuple[int, int]
    victim_named: tuple[int, int]
    says_where: tuple[int, int]
    bad: list[str]
    not_possible: list[str]
    seconds: float

    @classmethod
    def of(cls, entries: Sequence[Entry], *, seed: int, wanted: int) -> Summary:
        """Returns the summary of the cases of a seed that ran, of so many wanted ones."""
        came = judged(entries)
        cases = Share.among(entry.verdict.good for entry in came)
        starts, names, places = again(came), named(came), where(came)
        return cls(
            good=bool(entries) and cases.share == 1.0 and starts.share == 1.0 and names.share >= NAMED_AIM,
            seed=seed,
            wanted=wanted,
            ran=len(entries),
            outcomes=dict(_outcomes(entries)),
            cases_good=(cases.of, cases.out_of),
            started_again=(starts.of, starts.out_of),
            victim_named=(names.of, names.out_of),
            says_where=(places.of, places.out_of),
            bad=bad_lines(entries),
            not_possible=sorted({entry.verdict.not_possible for entry in entries if entry.verdict.not_possible}),
            seconds=round(sum(entry.seconds for entry in entries), 1),
        )


def bad_lines(entries: Sequence[Entry]) -> list[str]:
    """Returns a line for each case that did not end well: its number, the case in words, and why."""
    lines = []
    for entry in judged(entries):
        verdict = entry.verdict
        if verdict.good:
            continue
        why = [] if verdict.ending in GOOD else [str(verdict.ending)]
        why += [] if verdict.alike else ["parameters differ"]
        why += [] if verdict.again else ["cannot start again"]
        why += [f"left {name}" for name in verdict.threads_left]
        worst = next((rank for rank in verdict.ranks if rank.ending is verdict.ending), None)
        said = f": {worst.error}: {worst.text[:160]}" if worst is not None and worst.error else ""
        after = f" after {worst.after_s:.1f} s" if worst is not None and worst.after_s is not None else ""
        lines.append(f"{entry.case.number}: {entry.case.words}: {', '.join(why)}{after}{said}")
    return lines


def markdown(header: Header, entries: Sequence[Entry]) -> str:
    """Returns the table faults x phases x outcome, with a line on its origin and one on the aims."""
    came = judged(entries)
    phases = [phase for phase in Phase if any(entry.case.phase is phase for entry in came)]
    lines = [
        f"| fault | {' | '.join(phases)} |",
        f"|---|{'---|' * len(phases)}",
    ]
    for fault in Fault:
        own = [entry for entry in came if entry.case.fault is fault]
        if own:
            cells = [_cell([entry for entry in own if entry.case.phase is phase]) for phase in phases]
            lines.append(f"| {fault} | {' | '.join(cells)} |")
    good = Share.among(entry.verdict.good for entry in came)
    frontends = Counter(str(entry.case.frontend) for entry in came)
    origin = (
        f"{len(came)} faults ({', '.join(f'{name} {count}' for name, count in frontends.items())}) on "
        f"{header.machine.get('cpu', 'an unknown processor')}, {header.machine.get('cores')} cores, torch "
        f"{header.versions.get('torch')}, commit {header.commit}, engine {header.engine}."
    )
    aims = (
        f"Good outcomes {good}; ranks that could start again {again(came)}; errors that name the victim and nobody "
        f"else {named(came)}; errors that say where {where(came)}."
    )
    impossible = sorted({entry.verdict.not_possible for entry in entries if entry.verdict.not_possible})
    paragraphs = [origin, aims, *(f"Not possible there: {each}." for each in impossible)]
    return "\n\n".join(["\n".join(lines), *(textwrap.fill(each, PAGE_COLUMNS) for each in paragraphs)])


def _cell(own: Sequence[Entry]) -> str:
    """Returns a cell such as `5 clear error, 2 went on`; outcomes that are not good are bold."""
    words: Counter[str] = Counter()
    for entry in own:
        verdict = entry.verdict
        ending = str(verdict.ending) if verdict.ending not in GOOD or verdict.good else "cannot start again cleanly"
        words[ending if verdict.good else f"**{ending}**"] += 1
    return ", ".join(f"{count} {word}" for word, count in words.most_common())


def write_page(path: Path, content: str) -> None:
    """Writes `content` between the two marks of a page, which is made where there is none.

    Raises:
        ValueError: for a page without the marks.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else NEW_PAGE
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}, between which the table belongs: add them")
    path.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}", encoding="utf-8")
