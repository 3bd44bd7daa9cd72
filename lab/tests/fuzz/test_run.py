"""Failing cases are made smaller; a record says what ran, and the next run goes on behind it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench.provenance import engine_digest
from gradsync_lab.fuzz import run
from gradsync_lab.fuzz.case import Case
from gradsync_lab.fuzz.draw import drawn
from gradsync_lab.fuzz.record import Batch, append, batches_of, header, next_seed, read
from gradsync_lab.fuzz.run import script_of
from gradsync_lab.fuzz.shrink import is_possible, kind_of, shrunk
from lab.tests.fuzz.test_workers import CASE, UNWATCHED

BATCH = Batch(first=0, next=4, cases={"threads": 4}, mismatches={}, hangs={}, seconds=1.0)


def test_a_case_is_made_as_small_as_it_fails() -> None:
    runs = 0

    def judged(case: Case) -> list[str]:
        nonlocal runs
        runs += 1
        assert is_possible(case)
        return [f"step {case.steps}: 3 things"] if case.size >= 2 and any(p.sparse for p in case.parts) else []

    found = [case for seed in range(200) if judged(case := drawn(seed)) and case.buckets and len(case.parts) > 2]
    for case in found[:3]:
        runs = 0
        small = shrunk(case, judged, "step 1: 4 things", tries=300)
        assert runs <= 300
        assert (small.size, small.steps, small.micro, small.spoilt, small.clip) == (2, 1, 1, None, False)
        assert len(small.parts) <= 2 and {p.width for p in small.parts if p.sparse} == {1}
        assert {name for bucket in small.buckets or () for name in bucket.scheme} <= {"all_reduce", "agsparse"}
        assert shrunk(case, judged, "step 1: 4 things", tries=300) == small, "the same in each run"


def test_shrinking_ends_within_its_bound() -> None:
    runs: list[Case] = []
    shrunk(drawn(0), lambda case: runs.append(case) or [], "a problem", tries=7)  # type: ignore[func-returns-value]
    assert len(runs) <= 7


def test_problems_are_of_one_kind_whatever_their_numbers_and_names() -> None:
    one = "step 3: parts.mlp0.layers.1.bias: the ranks' gradients are not the same bits"
    assert kind_of(one) == kind_of(one.replace("3", "0").replace("mlp0.layers.1.bias", "table7"))
    assert kind_of(one) != kind_of("step 3: bucket 0: rank 1 sent 4.0 bytes, 8.0 were predicted")


def test_a_script_replays_its_case_and_fails_as_long_as_that_does(tmp_path: Path) -> None:
    for case, code in ((UNWATCHED, 1), (CASE.model_copy(update={"world": "threads", "frontend": "engine"}), 0)):
        file = tmp_path / "fuzz-0.py"
        file.write_text(script_of(case, 'a "problem" \\ of\ntwo lines'))
        ran = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
        assert ran.returncode == code, ran.stderr
        assert ("the guard did not see" in ran.stderr) == bool(code)


def test_records_tell_what_ran_with_which_sources(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "record.jsonl"
    assert read(file) == []
    present = header()
    append(file, present.model_copy(update={"engine": "another"}))
    append(file, BATCH)
    append(file, present.model_copy(update={"commit": "earlier"}))
    append(file, BATCH.model_copy(update={"first": 4, "next": 9}))
    lines = read(file)
    assert next_seed(lines) == 9
    assert [batch.first for batch in batches_of(lines, engine_digest())] == [4], "those of the same sources count"
    with file.open("a") as more:
        more.write('{"kind": "batch"}\n')
    with pytest.raises(
        ValueError, match=r"line 5 of .*record\.jsonl is not one of `gradsync fuzz`: .*name another file"
    ):
        read(file)


def test_the_command_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BATCH", 6)
    file = tmp_path / "record.jsonl"
    for expected in (6, 12):
        options = ["--seconds", "0.001", "--first", "100", "--record", str(file)]
        result = CliRunner().invoke(app, ["fuzz", *options], env={"COLUMNS": "100"})
        assert result.exit_code == 0, result.output
        assert next_seed(read(file)) == 100 + expected
        assert re.search(rf"all +│ +{expected} │ +0 │ +0 │", result.stdout)


def test_the_command_replays_a_case(tmp_path: Path) -> None:
    file = tmp_path / "case.json"
    file.write_text(UNWATCHED.to_json())
    result = CliRunner().invoke(app, ["fuzz", "--replay", str(file)])
    assert result.exit_code == 1 and "the guard did not see" in result.stdout
    file.write_text("{}")
    assert CliRunner().invoke(app, ["fuzz", "--replay", str(file)]).exit_code == 2
    assert CliRunner().invoke(app, ["fuzz", "--replay", str(tmp_path / "none.json")]).exit_code == 2
