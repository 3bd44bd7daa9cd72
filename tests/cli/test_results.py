"""`--json` is one option with one meaning: a file for the result, or stdout with nothing else on it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from gradsync.characterization.footprint import Footprint, Shape
from gradsync.characterization.recording import save_recording
from gradsync.cli import app
from gradsync.cli import doctor as command
from gradsync.cli.results import put
from gradsync.diagnosis.examination import Finding, Report
from gradsync.plans.profile import Profile
from tests.profiles import make_profile
from tests.quick import quickly

SCRIPT = """
import torch
import torch.distributed as dist
import gradsync

print("of the script")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    model = torch.nn.Linear(4, 1)
    handle = gradsync.attach(model)
    for step in range(100):
        model(torch.ones(1, 4)).sum().backward()
finally:
    dist.destroy_process_group()
"""
WORDS = {  # of each command, and some of what it says
    "doctor": (("doctor", "--no-ranks"), "kernels on the CPU"),
    "plan": (("plan", "profile.json", "-o", "plan.json"), "longer than the best plan"),
    "explain": (("explain", "given.json", "--profile", "profile.json"), "ms a step"),
    "characterize": (("characterize", "--recorded", "recorded"), "Sparsity of gradients"),
    "characterize a script": (("characterize", "--steps", "1", "--out", "own", "--", "train.py"), "of the script"),
    "measure": (("measure", "--steps", "1", "--warmup", "2", "-o", "own.json", "--", "train.py"), "of the script"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a profile, a plan, a recording and a script."""
    monkeypatch.chdir(tmp_path)
    make_profile().save("profile.json")
    assert run("plan", "profile.json", "-o", "given.json").exit_code == 0
    gradient = torch.zeros(16)
    gradient[5] = 1.0
    save_recording(Path("recorded"), [{"w": Footprint.of(gradient, Shape((16,)))}], rank=0, ranks=1)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def run(*words: str) -> Result:
    with quickly():
        return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def with_json(words: tuple[str, ...], to: str) -> Result:
    """Runs a command with `--json TO` in front of the script, if it has one."""
    here = words.index("--") if "--" in words else len(words)
    return run(*words[:here], "--json", to, *words[here:])


@pytest.mark.parametrize("name", WORDS)
def test_json_is_alone_on_stdout_and_words_are_on_stderr(place: Path, name: str) -> None:
    words, said = WORDS[name]
    printed = with_json(words, "-")
    assert printed.exit_code == 0, printed.output
    assert isinstance(json.loads(printed.stdout), dict) and said in printed.stderr, printed.stderr


@pytest.mark.parametrize("name", WORDS)
def test_a_file_gets_the_same_and_words_stay_on_stdout(place: Path, name: str) -> None:
    words, said = WORDS[name]
    written = with_json(words, "out.json")
    assert written.exit_code == 0 and said in written.stdout, written.output
    assert ": out.json" in written.stderr
    found = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert found.keys() == json.loads(with_json(words, "-").stdout).keys()


def test_a_measured_profile_is_printed_as_the_file_has_it(place: Path) -> None:
    words, _ = WORDS["measure"]
    printed = with_json(words, "-")
    assert Profile.from_json(printed.stdout) == Profile.load("own.json")


def test_a_fault_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report({"gradsync": None}, "m", [], {}, {}, [Finding("fault", "torch", "broken")])
    monkeypatch.setattr(command, "examined", lambda **_: report)
    done = run("doctor", "--json", "-")
    assert done.exit_code == 1 and json.loads(done.stdout)["findings"][0]["verdict"] == "fault"
    assert "broken" in done.stderr


def test_an_examination_that_fails_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with patch.object(command, "examined", side_effect=OSError("no processor here")):
        done = run("doctor", "--json", "-")
    assert done.exit_code == 1 and done.stdout == "" and isinstance(done.exception, SystemExit)
    assert "The run failed: no processor here" in done.stderr


def test_an_error_prints_no_json(place: Path) -> None:
    Path("train.py").write_text("raise SystemExit(3)", encoding="utf-8")
    for name, code in (("plan", 2), ("measure", 3)):
        words = [word.replace("profile.json", "none.json") for word in WORDS[name][0]]
        done = with_json(tuple(words), "-")
        assert done.exit_code == code and done.stdout == "", done.output


def test_a_file_that_cannot_be_written_is_told_in_time(place: Path) -> None:
    done = run("plan", "profile.json", "-o", "new.json", "--json", "none/out.json")
    assert done.exit_code == 2 and not Path("new.json").exists()


@pytest.mark.parametrize("result", ['{"a": 1}', '{"a": 1}\n', {"a": 1}], ids=["text", "line", "data"])
def test_text_and_data_end_in_one_line_break(result: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    file.write_text("old")
    put(str(file), result)
    put("-", result)
    put(None, result)
    out, err = capsys.readouterr()
    assert file.read_text() == out and json.loads(out) == {"a": 1} and out.endswith("}\n") and not out.endswith("\n\n")
    assert err.startswith("Result: ") and [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_an_option_is_not_taken_for_the_file() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--no-ranks"])
    assert result.exit_code == 2 and "write --json - --no-ranks" in result.stderr.replace("\n", " ")


def test_a_result_goes_into_a_pipe() -> None:
    reading, writing = os.pipe()
    put(f"/dev/fd/{writing}", {"good": True})
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.load(pipe) == {"good": True}


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES])
def test_a_file_that_cannot_be_replaced_is_written_to(tmp_path: Path, number: int) -> None:
    there = tmp_path / "result.json"
    there.write_text("before", encoding="utf-8")
    with patch.object(Path, "replace", side_effect=OSError(number, "busy")):
        put(str(there), {"good": True})
    assert json.loads(there.read_text(encoding="utf-8")) == {"good": True}
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_a_file_is_kept_where_the_disk_is_full(tmp_path: Path) -> None:
    there = tmp_path / "result.json"
    there.write_text("before", encoding="utf-8")
    with patch.object(Path, "replace", side_effect=OSError(errno.ENOSPC, "full")), pytest.raises(typer.Exit):
        put(str(there), {"good": True})
    assert there.read_text(encoding="utf-8") == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
