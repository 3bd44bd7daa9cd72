"""Commands are listed without importing their modules; the names of the package are those of its stub."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gradsync
from gradsync.cli import COMMANDS, app, extensions, loaded


def loads_torch(code: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('torch' in sys.modules)"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1] == "True"


def test_help_names_all_commands_and_imports_no_torch() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    assert all(name in said for name in COMMANDS)
    assert not loads_torch("from typer.testing import CliRunner\nfrom gradsync.cli import app\nCliRunner().invoke(app)")
    assert loads_torch("import gradsync\ngradsync.attach"), "the check would notice"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does_as_the_list_does(name: str) -> None:
    assert (loaded(name).help or "").strip() == COMMANDS[name].line


@pytest.mark.parametrize("arguments", [["bench", "train"], ["measure", "--workload", "deepfm"]])
def test_commands_of_the_lab_say_how_it_is_installed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda **wanted: [])
    done = CliRunner().invoke(app, arguments)
    said = " ".join(done.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert done.exit_code == 2 and "not installed; in the folder of gradsync: pip install ./lab" in said


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"gradsync {gradsync.__version__}\n"


def test_an_unknown_command_is_told_with_those_that_are_near() -> None:
    done = CliRunner().invoke(app, ["plann"])
    assert done.exit_code == 2 and "plan" in done.output


@pytest.mark.parametrize("name", gradsync.__all__)
def test_names_of_the_stub_are_there(name: str) -> None:
    assert getattr(gradsync, name) is not None
