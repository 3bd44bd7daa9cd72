"""Every command that has a result gives it by `--json`: alone on stdout, with words on stderr and its own exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradsync.cli import COMMANDS, app, loaded
from gradsync_lab.bench.grid import CELLS
from gradsync_lab.cli import bench, demo, faults, lab, simulate, soak
from gradsync_lab.cluster import Lab, LinkRate
from gradsync_lab.faults.tables import Summary as Faults
from gradsync_lab.fuzz import run
from gradsync_lab.fuzz.record import Failure, Replay
from gradsync_lab.fuzz.record import Summary as Fuzz
from gradsync_lab.fuzz.run import Fuzzing
from gradsync_lab.papers.mergecomp import highest_table
from gradsync_lab.report.page import verdict
from gradsync_lab.report.record import TrainingRun, save_records
from gradsync_lab.soak.journal import Line
from gradsync_lab.soak.verdict import Summary as Soak
from lab.tests.faults.test_record import entry
from lab.tests.fuzz.test_workers import CASE, UNWATCHED
from lab.tests.report.test_report import records_of_two_links, training_run
from lab.tests.soak.test_verdict import soak as lines_of_soak
from tests.terminals import terminal_as_stderr


def leaves(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yields the commands below a command with their names, or the command itself."""
    below = getattr(command, "commands", {})
    for each, inner in below.items():
        yield from leaves(f"{name} {each}", inner)
    if not below:
        yield name, command


def said(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_the_option_is_the_same_of_all_commands() -> None:
    found = {}
    for top in COMMANDS:
        for name, command in leaves(top, loaded(top)):
            found[name] = [(p.metavar, p.help) for p in command.params if "--json" in p.opts]
    assert len(found) > 20 and [name for name, options in found.items() if len(options) != 1] == []
    assert len({options[0] for options in found.values()}) == 1


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_training", lambda spec, on_event: training_run())
    done = said("demo", "--quick", "--out", str(tmp_path / "out"), "--json", "-")
    assert done.exit_code == 0, done.output
    assert TrainingRun.model_validate_json(done.stdout).workload == "deepfm" and "Report: " in done.stderr
    assert verdict(training_run()) in squeezed(done.stderr)


def test_a_demo_that_fails_prints_no_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: Any, on_event: Any) -> None:
        raise RuntimeError("a rank died")

    monkeypatch.setattr(demo, "run_training", fail)
    done = said("demo", "--quick", "--out", str(tmp_path / "out"), "--json", "-")
    assert done.exit_code == 1 and done.stdout == "" and "a rank died" in done.stderr


def test_report(tmp_path: Path) -> None:
    save_records(records_of_two_links(), tmp_path / "records.json")
    done = said("report", str(tmp_path / "records.json"), "-o", str(tmp_path / "page.html"), "--json", "-")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["page"] == str(tmp_path / "page.html")
    assert found["verdict"].startswith("gradsync, 2 records") and "gradsync, 2 records" in done.stderr


def test_a_dry_run_of_the_grid_gives_its_cells(tmp_path: Path) -> None:
    command = "bench", "train", "--grid", "defaults", "--dry-run", "--json"
    done = said(*command, "-")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and [each["cell"] for each in found["cells"]] == [cell.name for cell in CELLS]
    assert found["cells"][0]["methods"] == list(CELLS[0].methods)
    assert found["seconds"] == sum(each["seconds"] for each in found["cells"]) > 60
    assert "36 cells, about" in done.stderr
    kept = tmp_path / "grid.json"
    kept.write_text("records", encoding="utf-8")
    done = said(*command, str(kept))
    assert done.exit_code == 2 and "take --json -" in done.stderr and kept.read_text(encoding="utf-8") == "records"


def test_figures_lists_the_pages_that_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "written", lambda root: {Path("a.md"): "text of a", Path("b.md"): "text of b"})
    done = said("bench", "figures", "--root", str(tmp_path), "--json", "-")
    assert done.exit_code == 0 and json.loads(done.stdout) == ["a.md", "b.md"] and "b.md: written" in done.stderr
    assert (tmp_path / "b.md").read_text(encoding="utf-8") == "text of b"


@pytest.mark.parametrize(("after_s", "code"), [(1.0, 0), (20.0, 1)])
def test_faults(after_s: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done = [entry(0), entry(1, after_s=after_s)]
    monkeypatch.setattr(faults, "run_campaign", lambda *args, **options: done)
    result = said("faults", "--count", "3", "--seed", "0", "--json", "-")
    found = Faults.model_validate_json(result.stdout)
    assert result.exit_code == code and found.good is (code == 0)
    assert (found.seed, found.wanted, found.ran, found.seconds) == (0, 3, 2, 2.0)
    assert found.cases_good == (2 - code, 2) and len(found.bad) == code
    assert "1 of 3 cases were not run" in result.stderr and "Faults, by what became" in result.stderr
    shown = said("faults", "--only", "0", "--json", "-")
    assert Faults.model_validate_json(shown.stdout).wanted == 1 and '"verdict"' in shown.stderr


def test_a_table_of_faults_has_no_verdict_of_its_own(tmp_path: Path) -> None:
    done = said("faults", "--record", str(tmp_path / "r"), "--table", str(tmp_path / "page.md"), "--json", "-")
    assert done.exit_code == 2 and "--json is the verdict on cases that run" in done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setattr(run, "BATCH", 2)
    if fails:
        failure = Failure(problems=["step 1: a problem"], case="{}", script="fuzz-0.py")
        monkeypatch.setattr(Fuzzing, "_keep", lambda self, failed: None)
        kept = Fuzzing.run
        monkeypatch.setattr(Fuzzing, "run", lambda self, *args: (kept(self, *args), self.failures.append(failure)))
    options = "--seconds", "0.001", "--first", "100", "--record", str(tmp_path / "record.jsonl")
    done = said("fuzz", *options, "--json", "-")
    found = Fuzz.model_validate_json(done.stdout)
    assert done.exit_code == int(fails) and found.good is not fails and len(found.failures) == int(fails)
    assert (found.first, found.next, sum(found.cases.values())) == (100, 102, 2)
    assert "Record: " in done.stderr and ("a problem" in done.stderr) == fails


@pytest.mark.parametrize(
    ("case", "code"), [(CASE.model_copy(update={"world": "threads", "frontend": "engine"}), 0), (UNWATCHED, 1)]
)
def test_a_replay(tmp_path: Path, case: Any, code: int) -> None:
    file = tmp_path / "case.json"
    file.write_text(case.to_json())
    done = said("fuzz", "--replay", str(file), "--json", "-")
    found = Replay.model_validate_json(done.stdout)
    assert done.exit_code == code and found.good is (code == 0) and len(found.problems) >= code
    assert ("no problems" if code == 0 else "the guard did not see") in done.stderr


@pytest.mark.parametrize(("final", "code"), [("a", 0), ("b", 1)])
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, final: str, code: int) -> None:
    def run_soak(settings: Any, record: Path, on_line: Any) -> list[Line]:
        lines = lines_of_soak(final=final)
        for line in lines:
            on_line(line)
        return lines

    monkeypatch.setattr(soak, "run_soak", run_soak)
    options = "--record", str(tmp_path / "soak.jsonl"), "--faults", "1", "--loopback"
    done = said("soak", *options, "--json", "-")
    found = Soak.model_validate_json(done.stdout)
    assert done.exit_code == code and found.good is found.same_bits is (code == 0)
    assert found.settings.faults == found.struck == 1 and found.memory_growth == 0.0 and found.left == {}
    assert "restarted or went on as it should" in done.stderr


@pytest.mark.parametrize("paper", ["zen", "mergecomp"])
def test_simulate(paper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "mergecomp_tables", lambda: [highest_table()])
    done = said("simulate", "--paper", paper, "--json", "-")
    assert done.exit_code == 0 and len(json.loads(done.stdout)) > 3
    assert ("Zen (OSDI 2025)" if paper == "zen" else "Scaling factor, %, of 8 ranks") in done.stderr


class FakeLab(Lab):
    """A lab without namespaces, whose links and ranks are as given."""

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def check(self, seconds: float = 3.0) -> list[LinkRate]:
        return [LinkRate(0, 1, 125e5, 0.95 * 125e5, 5e-5), LinkRate(1, 0, 125e5, 0.5 * 125e5, 5e-5)]

    def run(self, *args: Any, **options: Any) -> list[int]:
        print("of a rank")
        self.first_failed = 1
        return [0, 7]


def test_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "Lab", FakeLab)
    checked = said("lab", "check", "--nodes", "2", "--link", "100mbit", "--json", "-")
    assert checked.exit_code == 1 and [each["source"] for each in json.loads(checked.stdout)["links"]] == [0, 1]
    assert "All links loaded at once" in checked.stderr
    ran = said("lab", "run", "--nodes", "2", "--json", "-", "--", "true")
    assert ran.exit_code == 7 and "of a rank" in ran.stderr
    assert {k: v for k, v in json.loads(ran.stdout).items() if k != "seconds"} == {
        "exit_code": 7,
        "codes": [0, 7],
        "first_failed": 1,
    }


COMMANDS_OF_PHASES = {
    "building 2 nodes": ("lab", "run", "--nodes", "2", "--", "true"),
    "loading all links for 4 s": ("lab", "check", "--nodes", "2"),
    "simulating zen": ("simulate",),
    "injecting faults": ("faults", "--count", "2"),
    "writing the report": ("demo", "--quick", "--out", "out"),
    "soaking": ("soak", "--record", "r", "--loopback"),
}


@pytest.mark.parametrize("phase", COMMANDS_OF_PHASES)
@pytest.mark.parametrize("on_terminal", [True, False])
def test_long_commands_name_their_phases(
    phase: str, on_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "Lab", FakeLab)
    monkeypatch.setattr(demo, "run_training", lambda spec, on_event: training_run())
    monkeypatch.setattr(faults, "run_campaign", lambda *args, **options: [entry(0), entry(1)])
    monkeypatch.setattr(soak, "run_soak", lambda *args: lines_of_soak())
    seen = terminal_as_stderr(monkeypatch) if on_terminal else None
    done = said(*COMMANDS_OF_PHASES[phase])
    text = done.stderr if seen is None else seen.getvalue()
    assert phase in text and phase not in done.stdout and ("\x1b" in text) == on_terminal
    assert on_terminal or text.splitlines().count(phase) == 1
