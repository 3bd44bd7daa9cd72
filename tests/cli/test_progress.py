"""Phases of commands are shown on stderr: with a spinner on a terminal, in one line without codes elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from gradsync.characterization.footprint import Footprint, Shape
from gradsync.characterization.recording import save_recording
from gradsync.cli import app, progress
from gradsync.cli.console import LiteralConsole, beside
from gradsync.cli.progress import phase
from tests.hostile import STEERING
from tests.profiles import make_profile
from tests.terminals import terminal_as_stderr

ROOT = Path(__file__).parents[2]
ESCAPE = "\x1b"


def test_a_terminal_shows_the_phase_and_what_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal_as_stderr(monkeypatch)
    with phase("searching", now="first") as shown:
        assert "searching" in seen.getvalue() and "first" in seen.getvalue() and ESCAPE in seen.getvalue()
        shown.say("second")
    assert "second" in seen.getvalue()
    with phase("cases", 3) as shown:
        shown.advance(2, "this one")
        shown.reach(3, "the last")
    assert "3/3" in seen.getvalue() and "the last" in seen.getvalue()


def test_a_phase_at_rest_moves_only_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, before = terminal_as_stderr(monkeypatch), {*threading.enumerate()}
    with phase("measuring", at_rest=True) as shown:
        assert "measuring" in seen.getvalue() and not {*threading.enumerate()} - before
        shown.say("links")
        assert "links" in seen.getvalue() and "0:00:0" not in seen.getvalue()


def test_elsewhere_a_phase_is_one_line_without_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    seen = io.StringIO()
    monkeypatch.setattr(beside, "_file", seen)
    with phase("a phase of many words " * 10, 3, "first") as shown:
        for call in (shown.say, lambda now: shown.advance(1, now), lambda now: shown.reach(3, now)):
            call("more")
    assert seen.getvalue() == "a phase of many words " * 10 + "\n"


def test_elsewhere_a_long_phase_has_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, clock = io.StringIO(), [0.0]
    monkeypatch.setattr(beside, "_file", seen)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with phase("jobs", 5) as shown:
        for clock[0], job in ((1, "one"), (61, "two"), (62, "three"), (122, "four"), (183, "five")):
            shown.advance(1, job)
    assert seen.getvalue().splitlines() == ["jobs", "jobs: 2 of 5, two", "jobs: 4 of 5, four"]


def test_a_dumb_terminal_gets_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = terminal_as_stderr(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr(beside, "is_interactive", LiteralConsole(stderr=True).is_interactive)
    with phase("searching"):
        pass
    assert seen.getvalue() == "searching\n"


def test_what_a_script_prints_meanwhile_stays_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = terminal_as_stderr(monkeypatch)
    with phase("running"):
        print("of the script")
    assert capsys.readouterr().out == "of the script\n" and "of the script" not in seen.getvalue()


@pytest.mark.parametrize("command", ["plan", "doctor", "characterize"])
def test_commands_name_their_phase(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_profile().save(tmp_path / "profile.json")
    save_recording(tmp_path, [{"w": Footprint.of(torch.ones(16), Shape((16,)))}], rank=0, ranks=1)
    words, said = {
        "plan": (["plan", str(tmp_path / "profile.json"), "-o", str(tmp_path / "plan.json")], "searching a plan"),
        "doctor": (["doctor", "--no-ranks"], "examining the installation"),
        "characterize": (["characterize", "--recorded", str(tmp_path)], "reading the recording"),
    }[command]
    seen = terminal_as_stderr(monkeypatch)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert f"loading gradsync {command}" in seen.getvalue() and said in seen.getvalue()
    assert ESCAPE not in done.stdout and said not in done.stdout


def test_piped_output_has_no_codes(tmp_path: Path) -> None:
    make_profile().save(tmp_path / "profile.json")
    program = "from gradsync.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "profile.json", "-o", "plan.json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not STEERING.search(done.stdout + done.stderr)
    assert done.stderr.splitlines() == ["searching a plan for 3 parameters", "Plan: plan.json"]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_lets_pip_show_its_progress_on_a_terminal_alone(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--always-make", "demo"]
    ours, theirs = os.openpty()
    try:
        installing = [
            [line for line in done.stdout.splitlines() if "pip install" in line]
            for stderr in (theirs, subprocess.DEVNULL)
            if (done := subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True))
        ]
    finally:
        os.close(ours)
        os.close(theirs)
    assert [["--quiet" in line for line in lines] for lines in installing] == [[False] * 2, [True] * 2]


PIP = """#!/bin/sh
[ "$1" != --python ] || { while [ "$1" != --wheel-dir ]; do shift; done; mkdir -p "$2"; touch "$2/a.whl"; }
"""
PYTHON = """#!/bin/sh
[ "$2" != build ] || { mkdir a; tar -czf dist/a.tar.gz a; }
echo python
"""


def test_making_wheels_says_what_it_builds_before_it_does(tmp_path: Path) -> None:
    for name, text in {"pip": PIP, "python": PYTHON}.items():
        tool = tmp_path / ".venv-wheels" / "bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(text, encoding="utf-8")
        tool.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "wheels", tmp_path / ".ci")
    done = subprocess.run([script, "pure"], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        "wheels: installing what builds them into .venv-wheels",
        "wheels: building the source distribution",
        "wheels: dist/a.tar.gz",
        "wheels: building the wheel pure",
        "wheels: dist/a.whl",
    ]
