"""Writes the figures of Markdown pages from the records of runs, so that a page says what its records say.

A template in `benchmarks/figures/` names a page and its records, and has the text of a part of that page, in which each
figure is a placeholder: `{deepfm gradsync ratio}` is the ratio of the record whose subject is `gradsync` in the file
that the template calls `deepfm`. `{alexnet ds_sync/ddp@slow-node ms}` also names the baseline and the scenario, and
`{grid auto/ddp_bf16@lstm,1gbit ratio}` workload and link. The part of the page is between the comments
`<!-- figures: NAME begin -->` and `<!-- figures: NAME end -->`.

A template whose page is an `.svg` draws a picture. The first line of its text is the title, each line
`NAME: {deepfm gradsync subject_s}` is a bar with its spread, and all other lines are notes.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .drawing import Drawing
from .record import Record, Spread, load_records

TEMPLATES, RESULTS = Path("benchmarks/figures"), Path("benchmarks/results")
F = TypeVar("F")
PLACEHOLDER = re.compile(r"\{(\w+) ([\w.]+)(?:/([\w.]+))?(?:@([\w,-]+))? (\w+)\}")


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} [{spread.p5:.2f}-{spread.p95:.2f}]"


def _milliseconds(spread: Spread) -> str:
    return f"{1e3 * spread.median:.{0 if spread.median >= 1e-2 else 1}f}"


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.{1 if nbytes >= 1e7 else 2}f}"


def _steps(record: Record) -> str:
    """Returns the median steps to the loss over the baseline's, of a run that was trained to a loss."""
    mine, base = (statistics.median(record.params[name]) for name in ("steps", "baseline_steps"))
    return f"{mine / base:.2f}"


def _time(spread: Spread | None) -> Spread:
    if spread is None:
        raise TypeError("the record has no time")
    return spread


def _is_of(record: Record, cell: Collection[str]) -> bool:
    """Whether a record is of the workload, link and scenario in `cell`; one of a scenario only if it is named."""
    scenario = record.params.get("scenario")
    known = {scenario, *(record.params.get(name) for name in ("workload", "link"))}
    return known.issuperset(cell) and (scenario is None or scenario in cell)


# Each is rounded once, from the record's number; those that a record lacks raise.
FIGURES: dict[str, Callable[[Any], str]] = {
    "ratio": lambda record: _ratio(record.ratio),
    "median": lambda record: f"{record.ratio.median:.2f}",
    "aa": lambda record: f"{record.aa.p5:.2f}-{record.aa.p95:.2f}",
    "ms": lambda record: _milliseconds(record.subject_s),
    "baseline_ms": lambda record: _milliseconds(record.baseline_s),
    "mb": lambda record: _megabytes(record.wire_bytes.subject),
    "baseline_mb": lambda record: _megabytes(record.wire_bytes.baseline),
    "steps": _steps,
}
# Of the bars of a picture, in seconds.
TIMES: dict[str, Callable[[Any], Spread]] = {
    "subject_s": lambda record: _time(record.subject_s),
    "baseline_s": lambda record: _time(record.baseline_s),
}


@dataclass(frozen=True)
class Template:
    """The text of one part of a page, or of a picture, with placeholders for figures.

    Attributes:
        name: the name of the part, that of the template's file.
        page: the page or the picture, from the folder of the repository.
        files: the names of record files, without `.json`, by the names that placeholders use.
        body: the text.
    """

    name: str
    page: Path
    files: dict[str, str]
    body: str

    @classmethod
    def read(cls, path: Path) -> Template:
        """Reads a template: lines of `name: value`, the first for `page`, an empty line, and the text.

        Raises:
            ValueError: the file is no template.
        """
        head, empty, body = path.read_text(encoding="utf-8").partition("\n\n")
        lines = [line.partition(": ") for line in head.splitlines()]
        if not empty or not lines or lines[0][0] != "page" or not all(value for _, _, value in lines):
            raise ValueError(f"{path}: expected lines of 'name: value', the first 'page: PAGE.md', then an empty line")
        return cls(path.stem, Path(lines[0][2]), {name: value for name, _, value in lines[1:]}, body.strip())

    def text(self, results: Path) -> str:
        """Returns the text with the figures of the records in the folder `results`.

        Raises:
            ValueError: a placeholder names no record, several, or no figure.
        """
        records = self._records(results)
        return PLACEHOLDER.sub(lambda match: self._figure(match, records, FIGURES), self.body)

    def picture(self, results: Path) -> str:
        """Returns the text as a picture, an SVG, with bars for the times of the records in the folder `results`.

        Raises:
            ValueError: a placeholder names no record, several, or no time.
        """
        records = self._records(results)
        title, *lines = self.body.splitlines()
        drawing, bars, notes = Drawing(title), dict[str, Spread](), []
        for line in lines:
            name, _, place = line.partition(": ")
            if match := PLACEHOLDER.fullmatch(place):
                bars[name] = self._figure(match, records, TIMES)
            else:
                notes.append(line)
        if not bars:
            raise ValueError(f"{self.name}: expected a line 'NAME: {{FILE SUBJECT subject_s}}' for each bar")
        drawing.heading(title)
        drawing.spreads(bars)
        for note in notes:
            drawing.note(note)
        return drawing.svg()

    def put_into(self, page: str, results: Path) -> str:
        """Returns the text of the page with this part written anew.

        Raises:
            ValueError: the page has no such part.
        """
        begin, end = (f"<!-- figures: {self.name} {word} -->" for word in ("begin", "end"))
        before, found, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"{self.page} has no part for {self.name}: expected {begin} and {end}")
        return f"{before}{begin}\n{self.text(results)}\n{end}{after}"

    def _records(self, results: Path) -> dict[str, list[Record]]:
        return {name: load_records(results / f"{file}.json") for name, file in self.files.items()}

    def _figure(
        self, match: re.Match[str], records: Mapping[str, list[Record]], figures: Mapping[str, Callable[[Any], F]]
    ) -> F:
        file, subject, baseline, cell, figure = match.groups()
        found = [
            record
            for record in records.get(file, ())
            if record.subject == subject and record.baseline == (baseline or record.baseline)
            and _is_of(record, cell.split(",") if cell else ()) and "phase" not in record.params
        ]  # fmt: skip
        if len(found) != 1 or figure not in figures:
            raise ValueError(
                f"{self.name}: {match[0]} names {len(found)} records; expected one, in one of "
                f"{', '.join(self.files)}, and one of the figures {', '.join(figures)}"
            )
        try:
            return figures[figure](found[0])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{self.name}: the record that {match[0]} names has no such figure") from error


def written(root: Path) -> dict[Path, str]:
    """Returns the texts of all pages that have such parts, and of all pictures, by their paths in the folder `root`.

    Raises:
        ValueError: a template, a placeholder or a page is wrong.
    """
    pages: dict[Path, str] = {}
    for path in sorted((root / TEMPLATES).glob("*.md")):
        template = Template.read(path)
        if template.page.suffix == ".svg":
            pages[template.page] = template.picture(root / RESULTS)
            continue
        page = pages.get(template.page) or (root / template.page).read_text(encoding="utf-8")
        pages[template.page] = template.put_into(page, root / RESULTS)
    return pages
