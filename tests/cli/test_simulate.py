"""`gradsync simulate` prints a table, or its rows as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gradsync.cli import app


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


def test_an_unknown_paper_is_refused() -> None:
    assert CliRunner().invoke(app, ["simulate", "--paper", "zem"]).exit_code == 2
