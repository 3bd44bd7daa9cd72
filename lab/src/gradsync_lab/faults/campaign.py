"""A campaign: runs cases one after another, or several at a time, until there are enough, and records each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from ..cluster import LabUnavailableError
from .cases import Case, draw
from .judge import Verdict, judge
from .record import Entry, Header, append, entries, open_record
from .run import NotPossibleError, run_case

LINKS_FROM = 1_000_000  # numbers of cases whose fault is one of a link


def numbers(count: int, links: int) -> list[int]:
    """Returns the numbers of the cases of a campaign: `count` of processes, `links` of links."""
    return list(chain(range(count), range(LINKS_FROM, LINKS_FROM + links)))


def case_of(seed: int, number: int) -> Case:
    return draw(seed, number, links=number >= LINKS_FROM)


def outcome(seed: int, case: Case) -> Entry:
    """Runs a case and judges it."""
    began = time.monotonic()
    try:
        verdict = judge(case, run_case(case))
    except (NotPossibleError, LabUnavailableError) as error:
        verdict = Verdict(struck=False, not_possible=str(error))
    return Entry(seed=seed, case=case, verdict=verdict, seconds=round(time.monotonic() - began, 1))


def run_campaign(
    seed: int,
    wanted: Iterable[int],
    path: Path | None,
    on_entry: Callable[[Entry], None],
    *,
    jobs: int = 1,
    limit_s: float | None = None,
    on_known: Callable[[int], None] = lambda count: None,
) -> list[Entry]:
    """Runs the wanted cases of a seed that the record does not have yet, and returns the entries of all wanted.

    Args:
        path: the record; None: nothing is kept.
        on_entry: called with each new entry.
        jobs: the number of cases that run at the same time.
        limit_s: seconds after which no further case begins.
        on_known: called once with the number of wanted cases that the record has already.

    Raises:
        ValueError: for a file that is no record, or one of another engine.
    """
    known = {} if path is None else {e.case.number: e for e in entries(open_record(path, Header.here("faults")))}
    known = {number: entry for number, entry in known.items() if entry.seed == seed}
    wanted = list(wanted)
    on_known(sum(number in known for number in wanted))
    ends = None if limit_s is None else time.monotonic() + limit_s

    def run(number: int) -> None:
        if ends is not None and time.monotonic() > ends:
            return
        entry = outcome(seed, case_of(seed, number))
        known[number] = entry
        if path is not None:
            append(path, entry)
        on_entry(entry)

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(run, [number for number in wanted if number not in known]):
            pass  # raises what a case raised
    return [known[number] for number in wanted if number in known]
