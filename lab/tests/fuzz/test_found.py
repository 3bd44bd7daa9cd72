"""Cases that `gradsync fuzz` once found to fail, by a fault of the library or of the judge, have no problems now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsync_lab.fuzz.case import Case
from gradsync_lab.fuzz.workers import MOST_RANKS, Workers

FOUND = [Case.from_json(line) for line in Path(__file__).with_name("found.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(MOST_RANKS) as running:
        yield running


@pytest.mark.parametrize("case", FOUND, ids=lambda case: str(case.seed))
def test_a_case_that_once_failed_has_no_problems(workers: Workers, case: Case) -> None:
    assert not workers.judged(case)
