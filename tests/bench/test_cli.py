"""The commands run as the README says, print results to stdout alone, and refuse wrong options with a message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.report.record import Record, TrainingRun


def gradsync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from gradsync.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


@pytest.mark.timeout(180)
def test_bench_sync_prints_records_as_json_and_nothing_else() -> None:
    done = gradsync("bench", "sync", "--quick", "--loopback", "--nodes", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    records = [Record.model_validate(row) for row in json.loads(done.stdout)]
    assert {r.subject for r in records} == {"all_reduce", "balanced_parallelism", "agsparse", "ddp"}
    for record in records:
        assert record.case == "sync" and record.ratio is not None and record.aa is not None
        if record.subject != "ddp":
            assert record.bound_s is not None and record.bound_s > 0 and "bound_ratio" in record.params
            assert record.predicted_s is not None and record.predicted_s > record.bound_s
            assert record.environment["memory_bytes_per_s"] > 0
        assert record.wire_bytes is not None and (record.wire_bytes.subject or 0) > 0


@pytest.mark.timeout(180)
def test_demo_leaves_results_report_and_trace(tmp_path: Path) -> None:
    done = gradsync("demo", "--workload", "dense160", "--loopback", "--quick", "--nodes", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "gradsync" in done.stdout and "all reduce" in done.stdout and "loopback" in done.stdout
    run = TrainingRun.model_validate_json((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert len(run.methods) == 4
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--link", "fast"), "a link rate must look like"),
        (("bench", "train", "--methods", "ddpp"), "unknown method"),
        (("bench", "train", "--workload", "deepfmm"), "deepfmm"),
        (("bench", "sync", "--link", "1mile"), "a link rate must look like"),
        (("bench", "sync", "--repeats", "2"), "5"),
    ],
)
def test_wrong_options_end_with_a_message(arguments: tuple[str, ...], message: str) -> None:
    done = gradsync(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
