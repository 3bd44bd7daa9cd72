"""The commands run as the README says, print results to stdout alone, and refuse wrong options with a message."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench.train import TrainSpec
from gradsync_lab.cli import bench, demo
from gradsync_lab.report.record import Record, Spread, TrainingRun


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(180)
def test_bench_sync_prints_records_as_json_and_nothing_else() -> None:
    workloads = ["--workload", "deepfm,topk"]
    for small in ("data=any", "dim=64", "batch_size=4"):
        workloads += ["--option", small]
    options = ["--quick", "--loopback", "--nodes", "2", *workloads, "--json", "-"]
    done = CliRunner().invoke(app, ["bench", "sync", *options])
    assert done.exit_code == 0, done.stderr
    records = [Record.model_validate(row) for row in json.loads(done.stdout)]
    of_rows, of_elements = (
        {r.subject for r in records if r.params.get("workload") == name} for name in ("deepfm", "topk")
    )
    assert of_rows == {"balanced_parallelism", "agsparse", "ddp"}
    assert of_elements == {"balanced_elements", "all_reduce", "ddp_bf16"}
    assert {r.subject for r in records} == of_rows | of_elements
    for record in records:
        assert record.case == "sync" and record.ratio is not None and record.aa is not None
        if record.subject not in ("ddp", "ddp_bf16"):
            assert record.bound_s is not None and record.bound_s > 0 and "bound_ratio" in record.params
            assert record.cpu_s is not None and record.cpu_s > 0
            assert record.predicted_s is not None and record.predicted_s >= record.bound_s
            assert record.environment["memory_bytes_per_s"] > 0
        assert record.wire_bytes is not None and (record.wire_bytes.subject or 0) > 0


@pytest.mark.timeout(180)
def test_demo_leaves_results_report_and_trace(tmp_path: Path) -> None:
    options = ["--workload", "dense160", "--loopback", "--quick", "--nodes", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-c", "from gradsync.cli import main; main()", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert "gradsync" in done.stdout and "all reduce" in done.stdout and "loopback" in done.stdout
    run = TrainingRun.model_validate_json((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert len(run.methods) == 4
    assert run.command == "gradsync demo --workload dense160 --nodes 2 --link 1gbit --steps 16 --loopback"
    assert run.command in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--link", "fast"), "a link rate must look like"),
        (("bench", "train", "--methods", "ddpp"), "unknown method"),
        (("bench", "train", "--workload", "deepfmm"), "deepfmm"),
        (("bench", "sync", "--link", "1mile"), "a link rate must look like"),
        (("bench", "sync", "--repeats", "2"), "5"),
        (("bench", "train", "--methods", "ddp,gradsync", "--require", "ddp<=1"), "compares no 'ddp' with a baseline"),
        (("bench", "sync", "--require", "gradsync<=0.4"), "only all_reduce, balanced_parallelism"),
        (("bench", "train", "--require", "gradsync<0.4"), "must look like 'gradsync<=0.35'"),
        (("bench", "train", "--require", "gradsync<=-1"), "must look like 'gradsync<=0.35'"),
        (("bench", "train", "--require", "gradsync<=0.0"), "must look like 'gradsync<=0.35'"),
    ],
)
def test_wrong_options_end_with_a_message(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2
    assert message in unboxed(done.stderr) and "Traceback" not in done.stderr


def unboxed(text: str) -> str:
    """Removes the box around a message, whose lines the box breaks."""
    return " ".join(text.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workload", "dense160", "--nodes", "3", "--steps", "27", "--loopback"),
        ("--row-length", "8", "--link", "200mbit"),
        ("--quick",),
    ],
    ids=" ".join,
)
def test_the_demos_report_says_how_to_repeat_it(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[TrainSpec] = []

    def noting(spec: TrainSpec, on_event: object) -> TrainingRun:
        specs.append(spec)
        raise RuntimeError("nothing needs to run")

    monkeypatch.setattr(demo, "run_training", noting)
    CliRunner().invoke(app, ["demo", *arguments])
    CliRunner().invoke(app, shlex.split(demo.repeat_command(specs[0]))[1:])
    assert len(specs) == 2 and specs[0] == specs[1]


@pytest.mark.parametrize(("bound", "code"), [("0.5", 0), ("0.3", 1)])
@pytest.mark.parametrize("json_to", [None, "-"])
def test_a_bound_that_does_not_hold_ends_with_code_1(
    bound: str, code: int, json_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = Spread(median=0.4, p5=0.4, p95=0.4)
    record = Record(
        case="train", metric="step_s", subject="gradsync", baseline="ddp_default", params={}, repeats=5,
        subject_s=spread, baseline_s=spread, ratio=spread, aa=Spread(median=1.0, p5=1.0, p95=1.0),
    )  # fmt: skip
    run = TrainingRun(
        workload="w", description="d", source="s", nodes=2, link="1gbit", methods=[], records=[record]
    )  # fmt: skip
    monkeypatch.setattr(bench, "run_training", lambda spec, on_event: run)
    options = ["--methods", "ddp_default,gradsync", "--require", f"gradsync<={bound}"]
    done = CliRunner().invoke(app, ["bench", "train", *options, *(["--json", json_to] if json_to else [])])
    assert done.exit_code == code
    said = "does not hold: gradsync" if code else "holds: gradsync"
    assert said in unboxed(done.output)
    if json_to == "-":
        assert json.loads(done.stdout)[0]["subject"] == "gradsync" and said in unboxed(done.stderr)
        assert "subject / baseline" in unboxed(done.stderr)
