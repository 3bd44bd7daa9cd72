"""`gradsync simulate` prints a table, or its rows as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.papers.mergecomp import highest_table
from gradsync_lab.papers.reference import cuts_table


def test_the_table_names_models_schemes_and_what_was_assumed(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["simulate", "--paper", "zen", "--json", str(file)], env={"COLUMNS": "140"})
    assert result.exit_code == 0
    for text in ("LSTM", "gradsync", "6.77", "LSTM: assumed 3 % after a node's sum"):
        assert text in result.stdout
    assert json.loads(file.read_text())[0]["scheme"] == "dense"


def test_json_alone_goes_to_the_output() -> None:
    result = CliRunner().invoke(app, ["simulate", "--json", "-"])
    assert json.loads(result.stdout)[0]["scheme"] == "dense"


@pytest.mark.parametrize("paper", ["bytecomp", "mergecomp", "gradientflow", "ds_sync"])
def test_tables_of_plans_have_the_published_figures_in_brackets(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [cuts_table(("lstm",)), highest_table()]
    monkeypatch.setattr(f"gradsync_lab.cli.simulate.{paper}_tables", lambda: tables)
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(app, ["simulate", "--paper", paper, "--json", str(file)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for text in ("119.5 (119.5)", "best has, buckets", "3 (3)", "99.9 (99.0)", *tables[0].notes[:1]):
        assert text in result.stdout
    rows = json.loads(file.read_text())
    assert rows[0] == {
        "table": "cuts",
        "row": "lstm",
        "column": "1 bucket",
        "value": tables[0].figures[0].value,
        "unit": "ms",
        "published": 135.0,
    }
    assert len(rows) == sum(len(table.figures) for table in tables)


def test_an_unknown_paper_is_refused() -> None:
    assert CliRunner().invoke(app, ["simulate", "--paper", "zem"]).exit_code == 2
