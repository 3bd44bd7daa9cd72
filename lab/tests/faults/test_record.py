"""Records of faults go on where they stopped, of the same engine only, and make the table of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench import provenance
from gradsync_lab.faults import campaign, tables
from gradsync_lab.faults.cases import Case, Fault
from gradsync_lab.faults.judge import judge
from gradsync_lab.faults.record import Entry, Header, append, entries, open_record, read_record
from gradsync_lab.faults.run import NotPossibleError
from gradsync_lab.faults.tables import BEGIN, END, again, markdown, named, summary_table, write_page
from lab.tests.faults.events import case, fault, survivor


def entry(number: int, **changes: Any) -> Entry:
    """Returns the entry of a killed rank whose survivors end well, but for changes to rank 2's error."""
    verdict = judge(case(number=number), [fault(), *survivor(0), *survivor(2, **changes)])
    return Entry(seed=0, case=case(number=number), verdict=verdict, seconds=1.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces running a case by one whose survivors end well; returns the numbers of cases that were run."""
    run: list[int] = []

    def run_case(of: Case) -> list[dict[str, Any]]:
        run.append(of.number)
        if of.is_of_link:
            raise NotPossibleError("no links here")
        return [fault()]

    monkeypatch.setattr(campaign, "run_case", run_case)
    return run


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, calls: list[int]) -> None:
    path = tmp_path / "record.jsonl"
    campaign.run_campaign(0, range(3), path, lambda _: None)
    with path.open("a") as file:
        file.write('{"seed": 0, "ca')  # killed while it wrote
    done = campaign.run_campaign(0, range(5), path, lambda _: None)
    assert calls == [0, 1, 2, 3, 4] and [each.case.number for each in done] == [0, 1, 2, 3, 4]
    assert len(list(entries(read_record(path)[1]))) == 5
    campaign.run_campaign(1, range(2), path, lambda _: None)
    assert calls[5:] == [0, 1], "another seed has other cases"


def test_the_time_is_up(tmp_path: Path, calls: list[int]) -> None:
    assert campaign.run_campaign(0, range(5), None, lambda _: None, limit_s=-1.0) == [] and calls == []


def test_what_this_machine_cannot_do_is_recorded(calls: list[int]) -> None:
    (found,) = campaign.run_campaign(0, [campaign.LINKS_FROM], None, lambda _: None)
    assert found.verdict.not_possible == "no links here" and not found.verdict.struck
    assert "no links here" in markdown(Header.here("faults"), [found])


def test_a_record_may_be_of_another_commit_but_not_of_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    open_record(path, Header.here("faults"))
    append(path, entry(0))
    monkeypatch.setattr(provenance, "commit", lambda: "another")
    assert len(open_record(path, Header.here("faults"))) == 1
    monkeypatch.setattr(provenance, "engine_digest", lambda: "another")
    with pytest.raises(ValueError, match="another value of engine: it has .*this run has another; name another file"):
        open_record(path, Header.here("faults"))
    (tmp_path / "notes.txt").write_text("notes\n")
    with pytest.raises(ValueError, match=r"notes\.txt is no record: expected a header in its first line, got 'notes'"):
        read_record(tmp_path / "notes.txt")


def test_tables_count_and_mark_what_is_bad(tmp_path: Path) -> None:
    found = [entry(0), entry(1), entry(2, after_s=20.0), entry(3, text="bucket '0', step 4: a connection broke")]
    assert str(again(found)) == "8/8" and str(named(found)) == "7/8"
    text = markdown(Header.here("faults"), found)
    assert "| kill | 3 clear error, 1 **late error** |" in text and "Good outcomes 3/4" in text
    assert [str(column.header) for column in summary_table(found).columns][:5] == [
        *("fault", "cases", "good", "clear error", "late error"),
    ]  # fmt: skip
    assert len(tables.bad_lines(found)) == 1 and "late error after 20.0 s" in tables.bad_lines(found)[0]
    page = tmp_path / "page.md"
    write_page(page, text)
    page.write_text(page.read_text().replace("# Reliability", "# My page") + "\nmore\n")
    write_page(page, "new")
    assert page.read_text().startswith("# My page") and page.read_text().endswith(f"{BEGIN}\n\nnew\n\n{END}\n\nmore\n")
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no lines"):
        write_page(page, text)


def test_the_command_writes_the_table_and_wants_a_record_for_it(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    open_record(path, Header.here("faults"))
    append(path, entry(0))
    done = CliRunner().invoke(app, ["faults", "--record", str(path), "--table", str(tmp_path / "page.md")])
    assert done.exit_code == 0 and f"| {Fault.KILL} | 1 clear error |" in (tmp_path / "page.md").read_text()
    done = CliRunner().invoke(app, ["faults", "--table", str(tmp_path / "page.md")])
    assert done.exit_code == 2 and "--record" in done.output
