"""Commands end with the exit codes that the page of the command line lists, and with a message, not a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradsync.cli import app
from gradsync.cli import doctor as doctor_command
from gradsync_lab.cli import bench, demo, lab, simulate, soak
from gradsync_lab.cluster import LabUnavailableError
from gradsync_lab.report.record import MethodRun
from lab.tests.cli.test_json import FakeLab
from lab.tests.report.test_report import training_run

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "command-line.md"
MEANINGS = dict(re.findall(r"^\| (\d\S*(?: \+ n)?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def said(*words: str) -> Result:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    assert isinstance(done.exception, SystemExit | None) and "Traceback" not in done.output, done.exception
    return done


def raising(error: BaseException) -> Callable[..., Any]:
    def fails(*args: Any, **options: Any) -> Any:
        raise error

    return fails


def test_the_page_lists_the_exit_codes() -> None:
    assert [*MEANINGS] == ["0", "1", "2", str(lab.TIME_WAS_UP), f"{lab.SIGNALLED} + n", str(bench.INTERRUPTED)]
    for words in ("`demo`", "`bench train --grid defaults`", "`lab check`", "`soak`", "`bench --require`"):
        assert words in MEANINGS["1"]
    assert "gradsync-lab" in MEANINGS["2"] and "no lab here (`lab`, `soak`)" in MEANINGS["2"]
    assert "`lab run --timeout`" in MEANINGS["124"] and "`bench converge`" in MEANINGS["130"]


PLACES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "doctor": (doctor_command, "examined", ()),
    "simulate": (simulate, "zen_table", ()),
    "demo": (demo, "run_training", ("--quick", "--out", "out")),
    "bench train": (bench, "run_training", ()),
    "bench converge": (bench, "run_converge", ()),
    "lab run": (FakeLab, "run", ("--", "true")),
    "lab check": (FakeLab, "check", ()),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "Lab", FakeLab)
    return tmp_path


@pytest.mark.parametrize("name", PLACES)
def test_a_command_that_is_interrupted_ends_with_130(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, options = PLACES[name]
    monkeypatch.setattr(module, attribute, raising(KeyboardInterrupt()))
    assert said(*name.split(), *options).exit_code == bench.INTERRUPTED


@pytest.mark.parametrize("bound", ["0.5", "0.1"])
def test_converge_that_was_interrupted_gives_its_records_whether_bounds_hold_or_not(
    bound: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = training_run().records[0].model_copy(update={"subject": "bf16"})  # its ratio: 0.4
    monkeypatch.setattr(bench, "run_converge", lambda spec, on_event: ([record], ["interrupted: 2 of 6 runs"]))
    done = said("bench", "converge", "--methods", "bf16,int8", "--require", f"bf16<={bound}", "--json", "out.json")
    assert done.exit_code == bench.INTERRUPTED and Path("out.json").exists()
    assert "interrupted: 2 of 6 runs" in done.stderr
    assert ("does not hold: bf16 <= 0.1" if bound == "0.1" else "holds: bf16 <= 0.5") in done.stdout


@pytest.mark.parametrize("lost", ["gradsync", "ddp_default"])
def test_a_demo_without_its_comparison_ends_with_1_after_its_report(
    lost: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training_run()
    methods = [MethodRun(name=m.name, failed="RuntimeError: gone") if m.name == lost else m for m in run.methods]
    record = run.records[0].model_copy(update={"ratio": None, "failed": "RuntimeError: gone"})
    broken = run.model_copy(update={"methods": methods, "records": [record]})
    monkeypatch.setattr(demo, "run_training", lambda spec, on_event: broken)
    done = said("demo", "--quick", "--out", "out")
    assert done.exit_code == 1 and f"{lost} failed: RuntimeError: gone." in " ".join(done.stdout.split())
    assert Path("out", "report.html").exists() and Path("out", "results.json").exists()


def test_a_demo_in_which_another_method_failed_ends_with_0(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = training_run()
    assert any(method.failed for method in run.methods)
    monkeypatch.setattr(demo, "run_training", lambda spec, on_event: run)
    assert said("demo", "--quick", "--out", "out").exit_code == 0


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RuntimeError("a probe of the lab's links failed"), 1, "The run failed: a probe of the lab's links failed"),
        (OSError("cannot allocate memory"), 1, "The run failed: cannot allocate memory"),
        (ValueError("embedded null byte"), 2, "Invalid value: embedded null byte"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, Exception) else "",
)
@pytest.mark.parametrize("words", [("lab", "run", "--", "true"), ("lab", "check")], ids=" ".join)
def test_an_error_of_a_lab_is_told(
    words: tuple[str, ...], error: Exception, code: int, text: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLab, words[1], raising(error))
    done = said(*words)
    assert done.exit_code == code and text in done.stderr


def test_a_soak_without_a_lab_ends_with_2(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "run_soak", raising(LabUnavailableError("no namespaces here")))
    done = said("soak", "--record", "r")
    assert done.exit_code == 2 and "no namespaces here; or use --loopback" in done.stderr
