"""`bench train --grid defaults` keeps finished cells, goes on behind them, and tries a failed one once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench import grid
from gradsync_lab.bench.grid import CELLS, SUBJECTS, USUAL, Cell, cells_with, estimate_s
from gradsync_lab.bench.provenance import code
from gradsync_lab.bench.train import TrainSpec
from gradsync_lab.cli import grid as cli
from gradsync_lab.cluster import Lab, LabUnavailableError
from gradsync_lab.report.grid import geometric_mean, grid_table
from gradsync_lab.report.record import Record, Spread, TrainingRun, load_records, save_records

DENSE, SPARSE = Cell("alexnet", "1gbit", 4, 1), Cell("deepfm", "1gbit", 2, 2)


def spread(median: float) -> Spread:
    return Spread(median=median, p5=median - 0.01, p95=median + 0.01)


def record_of(spec: TrainSpec, subject: str, of_best: float | None = 0.5, **changes: Any) -> Record:
    params = {"workload": spec.workload, "link": spec.link, "baseline_method": "ddp_views"}
    values: dict[str, Any] = {
        "case": "train", "metric": "step_s", "subject": subject, "baseline": "ddp", "params": params, "repeats": 5,
        "subject_s": spread(1.0), "baseline_s": spread(1.0), "ratio": None if of_best is None else spread(of_best),
        "aa": spread(1.0), **code(),
    }  # fmt: skip
    return Record(**(values | changes))


class Machine:
    """Runs cells without measuring: notes their names, and fails in those of `broken`."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.broken: set[str] = set()
        self.killed = False

    def run(self, spec: TrainSpec, on_event: object) -> TrainingRun:
        name = Cell(spec.workload, spec.link, spec.nodes, spec.ranks_per_node).name
        self.ran.append(name)
        if self.killed:
            raise KeyboardInterrupt
        if name in self.broken:
            raise RuntimeError("a rank died")
        records = [record_of(spec, subject) for subject in SUBJECTS]
        picks = record_of(spec, "ddp_1mb", params={"phase": "pick"}, aa=None)
        return TrainingRun(
            workload=spec.workload, description="", source="", nodes=spec.nodes, link=spec.link, methods=[],
            records=[*records, picks], notes=["slow"], **code(),
        )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(grid, "run_training", made.run)
    monkeypatch.setattr(cli, "require_links", lambda: None)
    return made


def bench(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["bench", "train", "--grid", "defaults", *map(str, arguments)])
    assert "Traceback" not in done.output
    return done


def said(done: Result) -> str:
    return " ".join(done.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


def test_the_grid_has_six_workloads_three_links_and_two_layouts() -> None:
    assert len(CELLS) == 6 * 3 * 2 == len(set(CELLS))
    assert {(cell.nodes, cell.ranks_per_node) for cell in CELLS} == {(4, 1), (2, 2)}
    assert DENSE.methods == ("ddp", *SUBJECTS) and SPARSE.methods == ("ddp", "ddp_sparse", *SUBJECTS)
    assert SPARSE.spec(USUAL).fastest_first and SPARSE.spec(USUAL).world_size == 4
    assert [cell.name for cell in cells_with(["gpt", "2x2"])] == [
        "gpt, 200mbit, 2x2",
        "gpt, 1gbit, 2x2",
        "gpt, unshaped, 2x2",
    ]
    assert all(60 < estimate_s(cell, cell.spec(USUAL)) < 1200 for cell in CELLS), "minutes"
    assert USUAL.sweep_repeats == USUAL.repeats, "the first half chooses DDP's line, the second compares"


def test_a_dry_run_prints_cells_and_an_estimate(machine: Machine) -> None:
    done = bench("--dry-run")
    assert done.exit_code == 0 and machine.ran == []
    assert "deepfm, 200mbit, 4x1: ddp, ddp_sparse, gradsync, auto, auto_lossy; about" in said(done)
    assert "36 cells, about" in said(done)


def test_an_interrupted_grid_goes_on_where_it_ended(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    assert bench("--json", out, "--only", "alexnet,4x1").exit_code == 0
    assert machine.ran == ["alexnet, 200mbit, 4x1", "alexnet, 1gbit, 4x1", "alexnet, unshaped, 4x1"]
    machine.ran.clear()
    machine.killed = True
    bench("--json", out, "--only", "alexnet")
    assert machine.ran == ["alexnet, 200mbit, 2x2"], "it was killed in this one"
    machine.killed = False
    done = bench("--json", out, "--only", "alexnet")
    assert done.exit_code == 0
    assert machine.ran[1:] == ["alexnet, 200mbit, 2x2", "alexnet, 1gbit, 2x2", "alexnet, unshaped, 2x2"]
    assert "3 of 6 cells are in" in said(done) and "[3/3] alexnet, unshaped, 2x2: 0 s; gradsync 0.500" in said(done)
    assert "[1/3] alexnet, 200mbit, 2x2" in said(done) and "left" in said(done)
    records = load_records(out)
    assert len(records) == 6 * (len(SUBJECTS) + 1)
    assert {record.params["grid"]["tries"] for record in records} == {1}
    assert not list(tmp_path.glob(".*")), "nothing unfinished stays"


def test_a_failed_cell_is_tried_once_more_by_the_next_run(machine: Machine, tmp_path: Path) -> None:
    out, cells = tmp_path / "grid.json", ("--only", "alexnet,1gbit")
    machine.broken = {DENSE.name}
    first = bench("--json", out, *cells)
    assert first.exit_code == 1 and len(machine.ran) == 2, "the others are measured all the same"
    assert "failed (a rank died)" in said(first)
    second = bench("--json", out, *cells)
    assert machine.ran[2:] == [DENSE.name] and "failed: a rank died; trying once more" in said(second)
    third = bench("--json", out, *cells)
    assert machine.ran[3:] == [] and third.exit_code == 1 and "tried twice, left as it is" in said(third)
    machine.broken = set()
    assert bench("--json", out, *cells, "--again").exit_code == 0
    assert len(machine.ran) == 5 and len(load_records(out)) == 2 * (len(SUBJECTS) + 1)


def test_a_file_of_another_library_of_other_settings_or_of_something_else_is_refused(
    machine: Machine, tmp_path: Path
) -> None:
    out, cells = tmp_path / "grid.json", ("--only", "alexnet,1gbit,4x1")
    bench("--json", out, *cells)
    done = bench("--json", out, *cells, "--repeats", 7)
    assert done.exit_code == 2 and "other settings: repeats 5 and not 7, pick_repeats 5 and not 7; move" in said(done)
    records = load_records(out)
    save_records([record.model_copy(update={"engine": "0123456789ab"}) for record in records], out)
    done = bench("--json", out, *cells)
    assert done.exit_code == 2 and f"its digest is 0123456789ab, now it is {code()['engine']}; move" in said(done)
    assert "--again" in said(done)
    save_records([record_of(TrainSpec(), "gradsync")], out)
    done = bench("--json", out, *cells)
    assert done.exit_code == 2 and "not of a grid of defaults" in said(done)
    assert len(machine.ran) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name it by --json FILE"),
        (("--json", "-"), "name it by --json FILE"),
        (("--workload", "gpt", "--nodes", "4", "--json", "a.json"), "leave out --nodes, --workload"),
        (("--only", "gpt,8x1", "--json", "a.json"), "no cell has all of 8x1, gpt; there are deepfm, 200mbit"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], message: str, machine: Machine) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2 and message in said(done)
    assert machine.ran == []


def test_the_table_marks_what_is_behind_and_means_cells_of_a_kind(machine: Machine, tmp_path: Path) -> None:
    spec = TrainSpec()
    cells = {
        "even": [record_of(spec, "gradsync", 1.005), record_of(spec, "auto", 1.05, aa=spread(1.045))],
        "behind": [record_of(spec, "gradsync", 1.03), record_of(spec, "auto", 2.0)],
        "tables": [record_of(spec, "gradsync", 0.71), record_of(spec, "auto", 0.7)],
        "lost": [
            record_of(spec, name, subject_s=None, of_best=None, failed="it died") for name in ("gradsync", "auto")
        ],
    }
    tables = {name: name == "tables" for name in cells}
    table = grid_table(cells, tables, ("gradsync", "auto"), compact=True)
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    assert rows[:4] == [
        ("even", "ddp_views", "1.005", "1.050", "0.99-1.01"),
        ("behind", "ddp_views", "1.030 *", "2.000 *", "0.99-1.01"),
        ("tables", "ddp_views", "0.710 *", "0.700", "0.99-1.01"),
        ("lost", "ddp_views", "failed", "failed", "0.99-1.01"),
    ]
    assert rows[4:] == [
        ("mean, dense", "", "1.017 (2)", "1.449 (2)", ""),
        ("mean, tables", "", "0.710 (1)", "0.700 (1)", ""),
    ]
    assert geometric_mean(list(cells.values()), "auto_lossy") is None


def test_a_machine_without_links_runs_no_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: Lab) -> Lab:
        raise LabUnavailableError("no namespaces here")

    monkeypatch.setattr(Lab, "__enter__", refuse)
    monkeypatch.setattr(grid, "run_training", None)
    done = bench("--json", tmp_path / "a.json")
    assert done.exit_code == 1 and "no namespaces here" in said(done) and not (tmp_path / "a.json").exists()


def test_records_are_replaced_at_once_and_devices_are_written_to(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    save_records([], link)
    assert path.read_text() == "[]\n" and link.is_symlink()
    save_records([], "/dev/null")
    assert Path("/dev/null").is_char_device()
