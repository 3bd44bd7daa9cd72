"""The bar of a benchmark advances with events, and says when workloads fetch data."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench.launch import START_OVER
from gradsync_lab.bench.rank import DISTURBED, TOLD
from gradsync_lab.cli import workloads
from gradsync_lab.cli.progress import event_bar
from gradsync_lab.faults import campaign
from gradsync_lab.faults.record import Header, append, open_record
from lab.tests.faults.test_record import entry
from tests.terminals import terminal_as_stderr

WORKLOADS = logging.getLogger("gradsync_lab.workloads")


def test_a_bar_advances_with_events_and_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal_as_stderr(monkeypatch)
    with event_bar("deepfm", 3, "first") as on_event:
        on_event({"method": "ddp", "seconds": 0.25, "none": None})
        assert "1/3" in seen.getvalue() and "ddp 0.2500" in seen.getvalue()
        on_event({"kind": TOLD, "text": "fetching flights"})
        assert "fetching flights" in seen.getvalue() and "2/3" not in seen.getvalue()
        on_event({"kind": "turn"})
        on_event({"kind": DISTURBED, "turns": 1})
        assert seen.getvalue().rpartition("measuring again")[0].rpartition("2/3")[2].count("1/3") == 1
        on_event({"kind": START_OVER})
        assert "a rank crashed" in seen.getvalue() and "0/3" in seen.getvalue()


def test_what_workloads_fetch_is_said_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch() -> None:
        with event_bar("deepfm", 3):
            data = logging.getLogger("gradsync_lab.workloads.data")
            data.info("fetching %s", "flights")
            data.warning("a warning")

    shown = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [shown])
    fetch()
    assert capsys.readouterr() == ("", "deepfm\na warning\n")
    seen = terminal_as_stderr(monkeypatch)
    fetch()
    assert "fetching flights" in seen.getvalue()
    assert not WORKLOADS.handlers and WORKLOADS.level == logging.NOTSET and WORKLOADS.propagate


def test_no_thread_of_the_display_disturbs_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal_as_stderr(monkeypatch)
    before = {*threading.enumerate()}
    monkeypatch.setattr(workloads, "measure_workload", lambda *args, **settings: {*threading.enumerate()} - before)
    assert workloads.measured("lstm", [], steps=1, warmup=2, candidates=()) == set()
    assert "measuring lstm" in seen.getvalue()


def test_a_bar_of_faults_ends_at_its_end_where_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record.jsonl"
    open_record(record, Header.here("faults"))
    append(record, entry(0))
    monkeypatch.setattr(campaign, "outcome", lambda seed, case: entry(case.number))
    seen = terminal_as_stderr(monkeypatch)
    done = CliRunner().invoke(app, ["faults", "--count", "2", "--seed", "0", "--record", str(record)])
    assert done.exit_code == 0, done.output
    assert "1/2" in seen.getvalue() and "2/2" in seen.getvalue()


@pytest.mark.parametrize(("rank", "said"), [("0", "measuring lstm\n"), ("1", "")])
def test_rank_0_alone_says_what_is_measured(
    rank: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(workloads, "measure_workload", lambda name, options, **settings: (name, options))
    assert workloads.measured("lstm", ["dim=8"], steps=1, warmup=2, candidates=()) == ("lstm", {"dim": 8})
    assert capsys.readouterr() == ("", said)
