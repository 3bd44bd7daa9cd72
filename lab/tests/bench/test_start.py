"""`bench start` measures gradsync's jobs, the first on a machine and a later one, against DDP's in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench import start, start_models
from gradsync_lab.bench.start import EARLY, FIGURES, JOBS, JobSpec, Start, StartSpec, run_starts
from gradsync_lab.report.record import load_records
from gradsync_lab.report.starts import start_table
from gradsync_lab.workloads import open_workload
from lab.tests.workloads.training import assert_trains_alike, train


def rank_of(steps_s: list[float], attach_s: float = 1.0, settled: int | None = 0) -> dict[str, Any]:
    ends_s = [sum(steps_s[: number + 1]) for number in range(len(steps_s))]
    return {"attach_s": attach_s, "ends_s": ends_s, "settled": settled}


def test_a_job_is_as_slow_as_its_slowest_rank() -> None:
    usual = [1.0] * 100
    late = [2.0, *usual[1:69], 5.0, *usual[70:]]
    found = Start.of([rank_of(usual, settled=3), rank_of(late, attach_s=3.0, settled=4)])
    assert found.seconds == {
        "attach": 3.0, "first step": 2.0, "first 50 steps": 51.0, "all steps": 105.0, "longest step": 5.0,
        "steady step": 54.0 / 50,
    }  # fmt: skip
    assert found.longest == 70 and found.settled == (4, 5.0)
    assert Start.of([rank_of(usual, settled=None)] * 2).settled is None
    assert Start.of([rank_of(usual)]).settled == (0, 0.0), "a plan without trials is there from the start"


class Cluster:
    """Notes the jobs that run, with what they find in their cache directory, and leaves something there."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, list[str]]] = []

    def run(
        self, where: object, world_size: int, module: str, spec: str, on_event: Any, env: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        job, cache = JobSpec.model_validate_json(spec), Path(env["GRADSYNC_CACHE_DIR"])
        self.ran.append((job.method, [path.name for path in cache.iterdir()]))
        (cache / job.method).write_text("measured")
        seconds = {"ddp": 1.0, "gradsync": 2.0, "auto": 3.0}[job.method] + len(self.ran) // len(JOBS) / 2
        return [rank_of([seconds] * job.steps, settled=7 if job.method == "auto" else 0)] * world_size


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(start, "run_ranks", made.run)
    return made


def test_first_jobs_find_an_empty_cache_and_later_ones_what_the_first_left(cluster: Cluster) -> None:
    spec = StartSpec(model="mlp", nodes=2, steps=2 * EARLY, repeats=2, loopback=True)
    records, notes = run_starts(spec, lambda event: None)
    once = [
        ("ddp", []), ("gradsync", []), ("gradsync", ["gradsync"]), ("auto", []), ("auto", ["auto"]), ("ddp", ["ddp"])
    ]  # fmt: skip
    assert cluster.ran == once * 2 and len(cluster.ran) == spec.jobs and "loopback" in notes[0]
    assert len(records) == 4 * len(FIGURES) and {record.repeats for record in records} == {2}
    assert {(record.subject, record.params["job"]) for record in records} == {
        (method, job) for method in ("gradsync", "auto") for job in ("first", "later")
    }
    found = {(r.subject, r.params["job"], r.params["figure"]): r for r in records}
    late = found["auto", "later", "first 50 steps"]
    assert late.subject_s is not None and late.subject_s.median == pytest.approx(50 * 3.25)
    assert late.ratio is not None and late.ratio.p95 < 3.0, "repeat by repeat"
    assert found["auto", "first", "all steps"].params["settled_step"] == 7
    assert "settled_step" not in found["auto", "first", "attach"].params
    assert all(record.engine and record.aa for record in records)


def test_the_table_has_a_column_a_job(cluster: Cluster) -> None:
    records, _ = run_starts(StartSpec(model="mlp", nodes=2, steps=2 * EARLY, repeats=1, loopback=True), print)
    table = start_table(records)
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    assert list(columns) == ["", "ddp", "gradsync, first", "gradsync, later", "auto, first", "auto, later"]
    assert columns[""] == [*FIGURES, "settled"] and columns["ddp"][0] == "1.000 (1.00-1.00)"
    assert columns["auto, first"] == [
        *("1.000 (1.00)", "3.000 (3.00)", "150.000 (3.00)", "300.000 (3.00)", "3.000 at 1 (3.00)", "3.000 (3.00)"),
        "21.0 s, step 7",
    ]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(200)
def test_jobs_start_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other jobs are as those, and take longer."""
    monkeypatch.setattr(start, "JOBS", {job: JOBS[job] for job in ("ddp", "gradsync:first", "ddp:again")})
    monkeypatch.setattr(start, "EARLY", 2)
    spec = StartSpec(model="mlp", nodes=2, repeats=1, loopback=True).model_copy(update={"steps": 5})
    events: list[dict[str, Any]] = []
    records, _ = run_starts(spec, events.append)
    assert [event["method"] for event in events] == ["ddp", "gradsync", "ddp"] and len(events) == spec.jobs
    assert len(records) == len(FIGURES)
    assert all(r.subject_s is not None and r.ratio is not None and r.subject_s.median > 0 for r in records)


def test_the_command_prints_the_table_and_keeps_records(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    options = ["--model", "mlp", "--nodes", "2", "--loopback", "--quick", "--json", str(out)]
    done = CliRunner().invoke(app, ["bench", "start", *options])
    assert done.exit_code == 0 and "settled" in done.output and "Records" in done.output
    assert len(load_records(out)) == 4 * len(FIGURES)


def test_the_models_train_and_a_wrong_name_is_refused() -> None:
    tables = open_workload(start_models.kind_of("tables"), rows=2000, batch_size=64)
    assert_trains_alike(tables, 5, losses_within=1e-6, weights_within=1e-6)
    before, after = (
        tables.evaluate(model)["loss"] for model in (tables.model(sparse=True), train(tables, 60, sparse=True)[0])
    )
    assert after < before
    parameters = sum(p.numel() for p in open_workload(start_models.kind_of("mlp")).model(sparse=False).parameters())
    assert parameters == 4 * 512 * 513
    with pytest.raises(ValueError, match="unknown model 'table'; expected one of tables, mlp, deepfm"):
        start_models.kind_of("table")
    with pytest.raises(ValueError, match="rows and dim must be at least 1, got 0 and 32"):
        start_models.kind_of("tables")(rows=0)
