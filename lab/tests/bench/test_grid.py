"""`bench train --grid links` runs every workload on every link in one command, and keeps finished records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync_lab.bench.train import TrainSpec
from gradsync_lab.cli import bench as cli
from gradsync_lab.report.record import Record, Spread

FEW = Spread(median=1.0, p5=0.9, p95=1.1)


class Finished:
    notes = ("slow",)

    def __init__(self, spec: TrainSpec) -> None:
        self.records = [
            Record(
                case="train",
                metric="step_s",
                subject=name,
                baseline=spec.methods[0],
                params={"workload": spec.workload, "link": spec.link},
                repeats=5,
                subject_s=FEW,
                baseline_s=FEW,
                ratio=FEW,
                aa=FEW,
            )
            for name in spec.methods[1:]
        ]


def test_a_grid_is_all_workloads_on_all_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, str]] = []

    def run(spec: TrainSpec, on_event: Any) -> Finished:
        if len(ran) == 5:
            raise RuntimeError("a rank died")
        ran.append((spec.workload, spec.link))
        return Finished(spec)

    monkeypatch.setattr(cli, "run_training", run)
    out = tmp_path / "grid.json"
    words = ["bench", "train", "--grid", "links", "--methods", "ddp_bf16,auto_lossy", "--json", str(out)]
    broken = CliRunner().invoke(app, words)
    assert broken.exit_code == 1 and "a rank died" in broken.output
    assert [(r["params"]["workload"], r["params"]["link"]) for r in json.loads(out.read_text())] == ran
    ran.clear()
    monkeypatch.setattr(
        cli, "run_training", lambda spec, on_event: ran.append((spec.workload, spec.link)) or Finished(spec)
    )
    whole = CliRunner().invoke(app, words)
    assert whole.exit_code == 0, whole.output
    assert ran == [(workload, link) for workload in cli.GRID_WORKLOADS for link in cli.GRID_LINKS] and len(ran) == 12
    assert len(json.loads(out.read_text())) == 12 and "lstm, 1gbit: slow" in whole.output


def test_scenarios_are_runs_with_a_bottleneck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    specs: list[TrainSpec] = []

    def run(spec: TrainSpec, on_event: object) -> Finished:
        specs.append(spec)
        return Finished(spec)

    monkeypatch.setattr(cli, "run_training", run)
    words = ["bench", "train", "--link", "200mbit", "--nodes", "4", "--methods", "ddp,ds_sync", "--scenario"]
    result = CliRunner().invoke(app, [*words, "slow-node,racks", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert [(spec.scenario_name, spec.scenario, spec.block_average) for spec in specs] == [
        ("slow-node", {"slow": {3: "50mbit"}}, "mean"),
        ("racks", {"rack_size": 2, "trunk": "100mbit"}, "mean"),
    ]
    assert "200mbit, racks: slow" in result.output
    wrong = CliRunner().invoke(app, [*words, "earthquake"])
    assert wrong.exit_code != 0 and "unknown scenario 'earthquake'" in " ".join(wrong.output.replace("│", " ").split())
