"""Simulated ranks learn as real ones do: from the mean of their gradients, with error feedback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gradsync_lab.bench import converge
from gradsync_lab.bench.converge import BASELINE, ConvergeSpec, run_converge, trained
from gradsync_lab.report.compress import loss_rows
from gradsync_lab.workloads import Workload, load
from tests.waiting import runs, wait_until

RANKS, STEPS = 2, 4


@pytest.fixture(scope="module")
def task() -> Workload:
    """Returns a workload with a sparse table and dense layers."""
    return load("deepfm", data="zipf", dim=4, batch_size=64)


def loss_of(task: Workload, name: str) -> float:
    return trained(task, name, seed=0, steps=STEPS, ranks=RANKS)["loss"]


def test_dense_ranks_train_by_the_mean_of_their_gradients(task: Workload) -> None:
    model = task.model(sparse=False, seed=0)
    optimizer = task.optimizer(model)
    batches = [task.batches(rank, RANKS, 0) for rank in range(RANKS)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for mine in batches:
            (task.loss(model, next(mine)) / RANKS).backward()
        optimizer.step()
    assert loss_of(task, BASELINE) == pytest.approx(task.evaluate(model)["loss"], rel=1e-5)


def test_losses_are_those_of_the_method_and_come_out_the_same_again(task: Workload) -> None:
    dense, sent = loss_of(task, BASELINE), loss_of(task, "topk0.01")
    assert loss_of(task, "topk0.01") == sent != loss_of(task, "topk0.01_no_feedback")
    assert loss_of(task, "topk1") == pytest.approx(dense, rel=1e-5) and sent != pytest.approx(dense, rel=1e-5)


class Inline:
    """An executor that runs in this process."""

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Any:
        future: Any = converge.Future()
        future.set_result(function(*arguments))
        return future


def test_records_hold_losses_by_seed_beside_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converge, "processes", lambda jobs: Inline())
    monkeypatch.setattr(converge, "opened", lambda name, **options: load("dense20"))
    made = {BASELINE: [1.0, 2.0], "bf16": [1.1, 2.0], "topk0.01": [1.5, float("nan")]}

    def final(workload: str, options: object, name: str, seed: int, steps: int, ranks: int) -> dict[str, float]:
        assert steps == 3 * load("dense20").steps_per_epoch(ranks)
        return {"loss": made[name][seed], "accuracy": 1 - made[name][seed] / 10}

    monkeypatch.setattr(converge, "final", final)
    events: list[Any] = []
    spec = ConvergeSpec(("dense20",), ("bf16", "topk0.01"), seeds=2, epochs=3)
    records, notes = run_converge(spec, events.append)
    assert not notes
    assert len(events) == len(spec.runs) == 6
    half, lost = records
    assert half.losses is not None and half.losses.subject == [1.1, 2.0] and half.losses.baseline == [1.0, 2.0]
    assert half.ratio is not None and half.ratio.median == pytest.approx(1.05) and half.seeds == [0, 1]
    assert half.within(1.0)
    assert half.accuracies is not None and half.accuracies.baseline == [0.9, 0.8]
    assert half.accuracies.subject == pytest.approx([0.89, 0.8]) and lost.accuracies is None
    assert lost.failed == "the loss is not finite" and lost.losses is None
    headings, rows = loss_rows(records)
    assert headings == ["method", "dense20"] and [row[0] for row in rows] == [BASELINE, "bf16", "topk0.01"]
    assert (
        rows[0][1] == "1.5000"
        and rows[1][1].startswith("1.5500 (1.050")
        and "; -0.5 [-1.0, +0.0] points" in rows[1][1]
        and "not finite" in rows[2][1]
    )


def test_unknown_methods_and_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown method 'ddp'; there are dense, bf16, .* compressors: bf16"):
        ConvergeSpec(methods=("ddp",))
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        ConvergeSpec(steps=0)
    with pytest.raises(ValueError, match="epochs must be positive and finite, got 0"):
        ConvergeSpec(epochs=0)


def test_an_interrupted_run_keeps_the_methods_that_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converge, "processes", lambda jobs: Inline())
    monkeypatch.setattr(converge, "opened", lambda name, **options: load("dense20"))
    monkeypatch.setattr(converge, "final", lambda *arguments: {"loss": 1.0})
    spec = ConvergeSpec(("dense20",), ("bf16", "topk0.01", "int8"), seeds=2)
    seen: list[tuple[str, int]] = []

    def done(name: str) -> bool:
        return {(BASELINE, 0), (BASELINE, 1), (name, 0), (name, 1)} <= set(seen)

    def interrupted_once_one_is_done(event: dict[str, Any]) -> None:
        seen.append((event["method"], event["seed"]))
        if any(map(done, spec.methods)):
            raise KeyboardInterrupt

    records, notes = run_converge(spec, interrupted_once_one_is_done)
    assert [record.subject for record in records] == [name for name in spec.methods if done(name)] != []
    assert notes == [f"interrupted: {len(seen)} of 8 runs are done; methods that miss one have no record"]

    def at_once(event: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_converge(spec, at_once)


# Each run takes far longer than a test, and leaves a file, named by its process, in the folder of the first argument.
LONG_RUNS = """
import os, pathlib, sys, time
from gradsync_lab.bench.converge import processes

def run(number):
    (pathlib.Path(sys.argv[1]) / f"{os.getpid()}.{number}").touch()
    time.sleep(1000)

if __name__ == "__main__":
    with processes(2) as executor:
        for future in [executor.submit(run, number) for number in range(8)]:
            future.result()
"""


@pytest.mark.parametrize(
    ("by", "whole_group"),
    [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGKILL, False)],
    ids=["a terminal's Ctrl-C", "SIGINT", "SIGTERM", "SIGKILL"],
)
def test_an_ended_run_does_not_wait_for_its_processes_and_leaves_none(
    tmp_path: Path, by: signal.Signals, whole_group: bool
) -> None:
    (program := tmp_path / "program.py").write_text(LONG_RUNS, encoding="utf-8")
    (started := tmp_path / "started").mkdir()
    run = subprocess.Popen([sys.executable, program, started], start_new_session=True)
    try:
        wait_until(lambda: len(list(started.iterdir())) == 2)
        (os.killpg if whole_group else os.kill)(run.pid, by)
        assert run.wait(60) == -by
        wait_until(lambda: not any(runs(int(file.stem)) for file in started.iterdir()))
        assert len(list(started.iterdir())) == 2  # and no waiting run was begun
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
