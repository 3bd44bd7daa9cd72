"""Bad files and arguments end a command with a message and status 2; exceptions of a script keep their traceback."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradsync.cli import app, world
from gradsync.cli.world import ranks_of_environment
from tests.profiles import make_profile

FILES: dict[str, bytes] = {
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "empty": b"",
    "list": b"[1, 2]",
    "digits": b'{"version": ' + b"9" * 5000 + b"}",
    "twice": b'{"version": 1, "version": 2}',
    "rates": b'nodes = 4\nlink = "0.0001bit"',
    "nodes": b'nodes = 1000000000\nlink = "1gbit"',
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a good profile, bad files and a folder."""
    monkeypatch.chdir(tmp_path)
    for name in (*world.Ranks._fields, world.RANK, world.WORLD_SIZE, world.ADDRESS, world.PORT, world.AGENT):
        monkeypatch.delenv(name, raising=False)
    make_profile().save("good.json")
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    Path("folder").mkdir()
    return tmp_path


def run(*words: str) -> tuple[int, str]:
    """Returns the exit code and what was said, in one line; fails if an exception got out."""
    done = CliRunner().invoke(app, words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


COMMANDS = {
    "plan": ("plan", "?"),
    "plan --cluster": ("plan", "good.json", "--cluster", "?"),
    "explain": ("explain", "?", "--profile", "good.json"),
    "explain --profile": ("explain", "good.json", "--profile", "?"),
    "characterize": ("characterize", "--recorded", "?"),
}


@pytest.mark.parametrize("name", [*FILES, "folder", "none"])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_bad_file_is_named(place: Path, words: tuple[str, ...], name: str) -> None:
    code, said = run(*(name if word == "?" else word for word in words))
    assert code == 2 and name in said, said
    assert not Path("plan.json").exists()


@pytest.mark.parametrize("out", ["folder", "none/plan.json", "good.json/plan.json", "x" * 300])
@pytest.mark.parametrize(
    "words",
    [("plan", "none", "-o"), ("measure", "-o"), ("characterize", "--json"), ("characterize", "--plot")],
    ids=" ".join,
)
def test_what_cannot_be_written_is_told_before_any_work(place: Path, words: tuple[str, ...], out: str) -> None:
    script = () if words[0] == "plan" else ("--", "script.py")
    Path("script.py").write_text("raise SystemExit('it ran')")
    code, said = run(*words, out, *script)
    assert code in (1, 2) and "it ran" not in said and ("cannot be written" in said or "is a folder" in said), said


SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ValueError": ("def f():\n    raise ValueError('my own')\nf()", ("Traceback", "script.py", "line 2", "my own")),
    "RuntimeError": ("raise RuntimeError('my own')", ("Traceback", "line 1", "RuntimeError: my own")),
    "OSError": ("open('nowhere')", ("Traceback", "FileNotFoundError")),
    "cause": ("try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e", ("direct cause", "KeyError")),
    "ours": ("import gradsync\ngradsync.Plan.load('deep')", ("Traceback", "ValueError: deep: the plan is nested")),
    "syntax": ("def (", ("SyntaxError", "script.py")),
    "NULs": ("\0", ("null bytes",)),
}


@pytest.mark.parametrize("command", ["measure", "characterize"])
@pytest.mark.parametrize(("script", "shown"), SCRIPTS.values(), ids=SCRIPTS)
def test_exceptions_of_a_script_are_shown_as_python_shows_them(
    place: Path, command: str, script: str, shown: tuple[str, ...]
) -> None:
    Path("script.py").write_text(script)
    code, said = run(command, "--", "script.py")
    assert code == 1 and all(each in said for each in shown), said
    assert "runpy" not in said and "cli/script" not in said and "Invalid value" not in said
    assert ("Traceback" in said) == ("Traceback" in shown or "direct cause" in shown), said


def test_a_script_ends_with_its_own_status(place: Path) -> None:
    Path("script.py").write_text("raise SystemExit(3)")
    assert run("measure", "--", "script.py")[0] == 3


@pytest.mark.parametrize("script", ["none.py", "folder", "x" * 300, "a\0b"])
@pytest.mark.parametrize("command", ["measure", "characterize"])
def test_a_script_that_is_not_there_is_told(place: Path, command: str, script: str) -> None:
    code, said = run(command, "--", script)
    assert code == 2 and "there is no script" in said, said


def listening() -> socket.socket:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(1)
    return server


HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
WORLDS: dict[str, tuple[dict[str, str], str]] = {
    "RANK alone": ({"RANK": "0"}, "only RANK is set"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, "only WORLD_SIZE is set"),
    "RANK of letters": ({"RANK": "abc"}, "RANK must be a whole number .* got 'abc'"),
    "WORLD_SIZE of letters": ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be a whole number .* got 'abc'"),
    "RANK too high": ({"RANK": "2", "WORLD_SIZE": "2", **HERE}, "RANK must be a whole number from 0 to 1, got '2'"),
    "RANK negative": ({"RANK": "-1", "WORLD_SIZE": "2", **HERE}, "RANK must be .* got '-1'"),
    "RANK empty": ({"RANK": "", "WORLD_SIZE": "2", **HERE}, "RANK must be .* got ''"),
    "RANK with a point": ({"RANK": "0.0", "WORLD_SIZE": "2", **HERE}, "RANK must be"),
    "RANK of other digits": ({"RANK": "\u0661", "WORLD_SIZE": "2", **HERE}, "RANK must be"),
    "RANK of 5000 digits": ({"RANK": "1" * 5000, "WORLD_SIZE": "2", **HERE}, "RANK must be"),
    "nobody": ({"RANK": "0", "WORLD_SIZE": "0", **HERE}, "WORLD_SIZE must be a whole number from 1"),
    "10^9 ranks": ({"RANK": "0", "WORLD_SIZE": "1000000000", **HERE}, "WORLD_SIZE must be"),
    "no master": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "MASTER_ADDR is not set"),
    "no port": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set"),
    "port of letters": ({"RANK": "0", "WORLD_SIZE": "2", **HERE, "MASTER_PORT": "abc"}, "MASTER_PORT must be"),
    "port too high": ({"RANK": "0", "WORLD_SIZE": "2", **HERE, "MASTER_PORT": "70000"}, "MASTER_PORT must be"),
    "no such host": ({"RANK": "1", "WORLD_SIZE": "2", **HERE, "MASTER_ADDR": "nohost.invalid"}, "cannot be reached"),
    "no name of a host": ({"RANK": "0", "WORLD_SIZE": "2", **HERE, "MASTER_ADDR": "a" * 300}, "cannot be reached"),
    "another machine": ({"RANK": "0", "WORLD_SIZE": "2", **HERE, "MASTER_ADDR": "192.0.2.1"}, "cannot be reached"),
}


@pytest.mark.parametrize(("given", "message"), WORLDS.values(), ids=WORLDS)
def test_a_wrong_world_is_told_before_anybody_waits(
    place: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        ranks_of_environment(joins=True)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("rank", ["abc", "2"])
@pytest.mark.parametrize("words", [("measure",), ("characterize",)], ids=" ".join)
def test_commands_tell_a_wrong_rank(place: Path, monkeypatch: pytest.MonkeyPatch, words: Any, rank: str) -> None:
    Path("script.py").write_text("raise SystemExit('it ran')")
    for name, value in {**HERE, "RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, said = run(*words, "--", "script.py")
    assert code == 2 and "RANK must be" in said, said


def test_ranks_are_as_torchrun_gives_them(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks_of_environment(joins=True) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert ranks_of_environment(joins=False) == (1, 3), "a script may find the others by other means"
    with listening() as server:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert ranks_of_environment(joins=True) == (1, 3)
    monkeypatch.setattr(world, "PATIENCE_S", 0.2)
    assert not capsys.readouterr().err
    assert ranks_of_environment(joins=True) == (1, 3), "rank 0 may come later"
    assert "nobody listens at 127.0.0.1" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_ADDR", "nohost.invalid")
    assert ranks_of_environment(joins=False) == (1, 3)
    assert "cannot be reached" in capsys.readouterr().err
