"""Published records: every one can be read again, as `gradsync report` reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync_lab.report.record import load_records

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
NO_RECORDS = ("simulate", "characterize")  # files of these commands have other fields
RECORDS = sorted(path for path in RESULTS.glob("*.json") if not any(word in path.name for word in NO_RECORDS))


def test_there_are_records() -> None:
    assert len(RECORDS) > 50


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_published_record_is_read(path: Path) -> None:
    assert load_records(path)
