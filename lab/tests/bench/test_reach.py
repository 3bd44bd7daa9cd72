"""The time to a loss is counted steps times the seconds of a timed run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradsync.cli import app
from gradsync.comm.shuffle import together, with_local_steps
from gradsync.schemes import Shuffled, to_expression
from gradsync_lab.bench import reach
from gradsync_lab.bench.converge import processes, trained
from gradsync_lab.bench.launch import LOOPBACK
from gradsync_lab.bench.reach import Learner, ReachSpec, crossing, run_reach, steps_to, timed_runs
from gradsync_lab.bench.whole import WholeRun, _merged
from gradsync_lab.report.record import Record, Spread, load_records, save_records
from gradsync_lab.report.tables import judgements
from gradsync_lab.workloads import load
from tests.world import PRELOADED

OPTIONS = {"batch_size": 8, "data": "digits"}


@pytest.fixture
def forked_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that count steps are forked from one that has torch loaded, not spawned."""

    @contextmanager
    def forked(jobs: int) -> Iterator[Executor]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with ProcessPoolExecutor(jobs, context) as executor:
            yield executor

    monkeypatch.setattr(reach, "processes", forked)


def timed(subject: str, median_s: float, workload: str = "resnet8", **changes: Any) -> Record:
    """Returns a record of training steps against DDP's of 2 s."""
    task = load(workload, **OPTIONS)
    return Record(
        case="train",
        metric="step_s",
        subject=subject,
        baseline="ddp",
        params={"workload": workload, "nodes": 2, "ranks_per_node": 1, "link": "1gbit", **changes},
        options=task.options | {"data": "digits"},
        repeats=5,
        subject_s=Spread.of([median_s]),
        baseline_s=Spread.of([2.0]),
        ratio=None,
        aa=None,
    )


def test_a_loss_is_reached_on_the_line_between_two_means_of_the_last_ones() -> None:
    assert crossing([4.0, 2.0, 0.0], 3.5) == 0.5, "the mean of two is 3"
    assert crossing([4.0, 2.0, 0.0, 0.0], 1.0) == pytest.approx(2 + (2 - 1) / (2 - 2 / 3))
    assert crossing([4.0, 2.0], 4.0) == 0.0
    assert crossing([4.0, 2.0], 2.5) is None and crossing([], 1.0) is None


def test_who_learns_like_a_method() -> None:
    assert [Learner.of(name).name for name in ("ddp", "ddp_1mb", "lazy", "ddp_bf16", "lazy_bf16", "hierarchical2")] == [
        *["dense"] * 3,
        *["bf16"] * 2,
        "dense",
    ]
    assert [Learner.of(name).name for name in ("asp", "ssp", "post_local_sgd", "post_local_sgd8")] == [
        *["asp"] * 2,
        "local_sgd4",
        "local_sgd8",
    ]
    assert Learner.of("csc0.1_4k_lazy") == Learner.of("csc0.1_4k") == Learner("csc0.1_4k")
    for name in ("auto_lossy", "ddp_int8", "csc_free"):
        with pytest.raises(
            ValueError, match=f"learns as {name} does: its errors are torch's own, or depend on its measurements"
        ):
            Learner.of(name)


def test_steps_are_those_of_training() -> None:
    """The first evaluation is after `every` steps, and no step is evaluated after `most_steps`."""
    loss = trained(load("resnet8", **OPTIONS), "dense", seed=1, steps=3, ranks=2)["loss"]
    spec = ReachSpec(loss, "ddp", every=3, most_steps=3)
    assert steps_to("resnet8", OPTIONS, Learner("dense"), 1, 2, spec) == 3
    assert (
        steps_to("resnet8", OPTIONS, Learner("dense"), 1, 2, ReachSpec(loss - 1e-6, "ddp", every=3, most_steps=5))
        is None
    )


def test_steps_are_counted_in_spawned_processes() -> None:
    with processes(1) as executor:
        assert executor.submit(crossing, [4.0, 2.0, 0.0], 3.5).result(60) == 0.5


@pytest.mark.usefixtures("forked_pool")
def test_times_are_steps_by_seconds(tmp_path: Path) -> None:
    """A method that learns as the baseline has the ratio of their step times.

    Methods that nothing learns alike are left out.
    """
    records = [
        timed("ddp_bf16", 1.0),
        timed("bf16", 0.5),
        timed("auto_lossy", 0.1),
        timed("ddp_bf16", 9.0, phase="pick"),
    ]
    events: list[dict[str, Any]] = []
    spec = ReachSpec(1e3, "ddp_bf16", seeds=2, every=1, most_steps=2)
    (ddp, ours), notes = run_reach(timed_runs(records), spec, events.append)
    assert (ddp.subject, ours.subject, ours.baseline, ours.metric) == ("ddp", "bf16", "ddp_bf16", "time_to_loss_s")
    assert ours.params["steps"] == ours.params["baseline_steps"] == [1.0, 1.0]
    assert ours.ratio == Spread.of([0.5]) and ddp.ratio == Spread.of([2.0]) and ours.aa == Spread.of([1.0])
    assert len(events) == 4, "two learners from two seeds"
    assert len(notes) == 1 and "learns as auto_lossy does" in notes[0]
    save_records(records, tmp_path / "timed.json")
    command = ["bench", "reach", str(tmp_path / "timed.json"), "--loss", "1000", "--every", "1", "--seeds", "1"]
    result = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert [record.subject for record in load_records(tmp_path / "out.json")] == ["ddp", "bf16"]


@pytest.mark.usefixtures("forked_pool", "forked_ranks")
def test_whole_runs_take_the_steps_that_are_counted() -> None:
    """Whole runs are on loopback, as the timed run: seconds are real, and simulated replicas learn as the ranks."""
    pairs = to_expression(Shuffled.by(with_local_steps(together(2), 2)))
    records = [timed("local_sgd2", 1.0, "alexnet", link=LOOPBACK, mixes_by=pairs, baseline_method="ddp_1mb")]
    loss = trained(load("alexnet", **OPTIONS), "dense", seed=0, steps=6, ranks=2)["loss"] * 1.001
    spec = ReachSpec(loss, "ddp", seeds=1, every=2, most_steps=12, whole=("local_sgd2",))
    events: list[dict[str, Any]] = []
    (product, *whole), _ = run_reach(timed_runs(records), spec, events.append)
    assert [record.subject for record in whole] == ["ddp", "local_sgd2"] and "whole" not in product.params
    for record, counted, step_s in zip(whole, ("baseline_steps", "steps"), (2.0, 1.0), strict=True):
        assert record.params["steps"] == pytest.approx(product.params[counted], abs=0.1)
        assert record.predicted_s == pytest.approx(step_s * product.params[counted][0])
        assert record.subject_s is not None and 0 < record.subject_s.median < 60
    assert [event["method"] for event in events if event.get("kind") == "whole"] == ["ddp_1mb", "local_sgd2"]


def test_what_cannot_be_trained_whole_is_refused() -> None:
    best = {"baseline_method": "ddp_1mb"}
    asp, emulated = timed("asp", 1.0, **best), timed("bf16", 1.0, emulate_compute=True, **best)
    for record, baseline, name, message in (
        (asp, "ddp", "topk", "topk cannot be trained whole: there are asp, ddp"),
        (emulated, "ddp", "bf16", "nothing is learnt"),
        (asp, "ddp", "asp", "not of asp"),
        (asp, "asp", "ddp", "not of asp"),
    ):
        with pytest.raises(ValueError, match=message):
            run_reach(timed_runs([record]), ReachSpec(1e3, baseline, every=1, whole=(name,)), lambda event: None)


@pytest.mark.usefixtures("forked_pool")
def test_whole_runs_that_fail_are_said_and_cost_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that do not reach the loss are reported too; bounds apply to products only."""
    records = [timed("local_sgd2", 1.0, baseline_method="ddp_1mb", scenario="racks", nodes=4)]
    spec = ReachSpec(1e3, "ddp", seeds=1, every=1, most_steps=1, whole=("ddp", "local_sgd2"))

    def reached(ddp: WholeRun, local: WholeRun) -> tuple[list[Record], list[str]]:
        found = {"ddp_1mb": ddp, "local_sgd2": local}
        monkeypatch.setattr(reach, "run_whole", lambda whole, on_event: (found, {}, []))
        return run_reach(timed_runs(records), spec, lambda event: None)

    (product, ddp, local), notes = reached(WholeRun(9.0, 4.5), WholeRun(None, None, "it broke"))
    assert (ddp.failed, local.failed, local.ratio) == (None, "it broke", None)
    assert notes == ["1gbit, racks: ddp: 9.0 s to the loss, by the product 2.0 s; in 4.5 steps, counted 1.0"]
    assert [holds for holds, _ in judgements([product, ddp, local], [("local_sgd2", 0.5)])] == [True]
    (_, _, local), _ = reached(WholeRun(9.0, 4.5), WholeRun(None, None))
    assert local.failed == "the loss is not reached within 1 steps"
    (_,), notes = reached(WholeRun(None, None), WholeRun(3.0, 4.5))
    assert notes == ["1gbit, racks: no whole runs: ddp: it does not reach a loss of 1000.0 within 1 steps"]

    def fails(*_: Any) -> None:
        raise RuntimeError("rank 0 ended with code 1")

    monkeypatch.setattr(reach, "run_whole", fails)
    (_,), notes = run_reach(timed_runs(records), spec, lambda event: None)
    assert notes == ["1gbit, racks: no whole runs: rank 0 ended with code 1"]


def test_a_part_of_a_whole_run_takes_as_long_as_on_the_slowest_rank() -> None:
    """The last part counts up to the interpolated crossing; the rank that failed first gives the reason."""
    both = [
        {"failed": None, "parts_s": parts, "place": 1.5, "every": 10} for parts in ([1.0, 3.0, 4.0], [2.0, 1.0, 2.0])
    ]
    assert _merged(both) == WholeRun(2.0 + 3.0 + 0.5 * 4.0, 25.0)
    failed = [
        {"failed": why, "failed_s": at, "parts_s": [], "place": None, "every": 10} for why, at in (("b", 2), ("a", 1))
    ]
    assert _merged(failed) == WholeRun(None, None, "a")
    assert _merged([{**both[0], "place": None}]) == WholeRun(None, None)


@pytest.mark.usefixtures("forked_pool")
def test_a_loss_that_is_not_reached_fails() -> None:
    spec = ReachSpec(0.0, "ddp", seeds=1, every=1, most_steps=1)
    with pytest.raises(ValueError, match="ddp does not reach a loss of 0.0 within 1 steps"):
        run_reach(timed_runs([timed("bf16", 1.0)]), spec, lambda event: None)


def test_what_is_no_timed_run_of_one_workload_is_refused() -> None:
    spec = ReachSpec(1.0, "ddp")
    for records, message in (
        ([timed("bf16", 1.0), timed("bf16", 1.0, "alexnet")], "one workload, got"),
        ([], "one workload, got"),
        ([timed("bf16", 1.0).model_copy(update={"options": {**OPTIONS, "source": "zoo"}})], "trained on zoo, here"),
    ):
        with pytest.raises(ValueError, match=message):
            run_reach(timed_runs(records), spec, lambda event: None)
    with pytest.raises(ValueError, match="there is no time of 'topk', but of bf16, ddp"):
        run_reach(timed_runs([timed("bf16", 1.0)]), ReachSpec(1.0, "topk"), lambda event: None)
    with pytest.raises(ValueError, match="most_steps must be at least 10"):
        ReachSpec(1.0, "ddp", most_steps=5)
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        ReachSpec(1.0, "ddp", seeds=0)
