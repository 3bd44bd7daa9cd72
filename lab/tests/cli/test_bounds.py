"""Options of the lab's long commands are held to bounds before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.fuzz.case import Case

HUGE = str(10**30)
OUT_OF_BOUNDS = [
    *(("soak", "--record", "r", "--hours", hours) for hours in ("nan", "inf", "1e300", "0", "-1")),
    *(("soak", "--record", "r", option, HUGE) for option in ("--ranks", "--faults", "--every", "--step-ms")),
    *(("faults", option, HUGE) for option in ("--count", "--links", "--jobs")),
    ("faults", "--limit", "nan"),
    ("fuzz", "--seconds", "nan"),
]


@pytest.mark.parametrize("words", OUT_OF_BOUNDS, ids=" ".join)
def test_an_option_out_of_its_bounds_is_named(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"Invalid value for '{words[-2]}'" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff", "it is not UTF-8 text"),
        (b"[" * 100_000, "case"),
        (b'{"seed": "3", "size": 1, "parts": []}', "valid integer"),
        (b'{"seed": true, "size": 1, "parts": []}', "valid integer"),
    ],
    ids=["bytes", "deep", "text", "bool"],
)
def test_a_file_that_holds_no_case_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "case.json"
    file.write_bytes(content)
    done = CliRunner().invoke(app, ["fuzz", "--replay", str(file)], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and said in done.stderr.lower() + done.stderr, done.stderr


def test_a_folder_holds_no_case(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["fuzz", "--replay", str(tmp_path)], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "it is a folder; expected a case's file" in done.stderr


def test_a_case_of_right_types_is_read() -> None:
    case = Case(seed=3, size=1, parts=())
    assert Case.from_json(case.to_json()) == case


def test_one_method_alone_is_compared_with_nothing() -> None:
    done = CliRunner().invoke(app, ["bench", "train", "--methods", "gradsync,gradsync"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "two methods or more are compared" in done.stderr, done.stderr
