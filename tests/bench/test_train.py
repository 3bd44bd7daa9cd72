"""A training run's figures become what the records say they are, and a method that fails stays in the table."""

from __future__ import annotations

from typing import Any

import pytest

from gradsync.bench import train
from gradsync.bench.methods import DDP_SWEEP, METHODS, method
from gradsync.bench.train import AGAIN, TrainSpec, block_medians, run_training, training_records
from gradsync.lab import Lab
from gradsync.report.record import MethodRun, TrainingRun


def rank_result(blocks: list[list[float]], failed: str | None = None) -> dict[str, Any]:
    return {"failed": failed, "blocks": blocks}


def blocks_of(*medians: float) -> list[list[float]]:
    return [[m, m, 9.0] if m < 9 else [m] for m in medians]


def run_of(names: list[str], failed: dict[str, str] | None = None) -> TrainingRun:
    methods = [
        MethodRun(name=n, failed=(failed or {}).get(n), step_s=[0.1], interface_bytes_per_step=10.0 * len(n))
        for n in names
    ]
    return TrainingRun(
        workload="w", description="d", source="s", nodes=2, link="1gbit", methods=methods, records=[], commit="abc"
    )


def test_a_block_is_as_slow_as_its_slowest_rank() -> None:
    ranks = [rank_result(blocks_of(1.0, 2.0)), rank_result(blocks_of(3.0, 1.0))]
    assert block_medians(ranks) == [3.0, 2.0]


def test_ratios_are_taken_block_by_block_and_the_baseline_is_held_against_itself() -> None:
    spec = TrainSpec(methods=("ddp_default", "gradsync"), repeats=3)
    ranks = {
        "ddp_default": [rank_result(blocks_of(1.0, 2.0, 4.0))],
        "gradsync": [rank_result(blocks_of(0.5, 1.0, 2.0))],
        f"ddp_default:{AGAIN}": [rank_result(blocks_of(1.1, 2.2, 4.4))],
    }
    (record,) = training_records(spec, run_of(["ddp_default", "gradsync"]), ranks)
    assert (record.subject, record.baseline, record.repeats) == ("gradsync", "ddp_default", 3)
    assert record.ratio is not None and record.ratio.p5 == record.ratio.p95 == 0.5
    assert record.aa is not None and record.aa.median == pytest.approx(1.1)
    assert record.within(0.46) and not record.within(0.45)


def test_the_best_of_the_sweep_is_picked_on_one_half_and_judged_on_the_other() -> None:
    spec = TrainSpec(methods=("ddp", "gradsync"), repeats=4)
    steady = {name: [rank_result(blocks_of(2.0, 2.0, 2.0, 2.0))] for name in DDP_SWEEP}
    # Fast where it is picked, slow where it is judged: luck must not make the baseline look better than it is.
    lucky = {"ddp_1mb": [rank_result(blocks_of(1.0, 3.0, 1.0, 3.0))]}
    others = {
        "gradsync": [rank_result(blocks_of(1.5, 1.5, 1.5, 1.5))],
        f"{DDP_SWEEP[0]}:{AGAIN}": [rank_result(blocks_of(2.0, 2.0, 2.0, 2.0))],
    }
    run = run_of([*DDP_SWEEP, "gradsync"])
    records = {r.subject: r for r in training_records(spec, run, {**steady, **lucky, **others})}
    ours = records["gradsync"]
    assert ours.baseline == "ddp" and ours.params["baseline_method"] == "ddp_1mb"
    assert ours.ratio is not None and ours.ratio.median == 0.5
    assert ours.wire_bytes is not None and ours.wire_bytes.baseline == 10.0 * len("ddp_1mb")
    assert set(records) == {*DDP_SWEEP, "gradsync"} - {"ddp_1mb"}


def test_a_failed_method_keeps_its_row_with_the_error() -> None:
    spec = TrainSpec(methods=("ddp_default", "ddp_bf16"), repeats=2)
    ranks = {
        "ddp_default": [rank_result(blocks_of(1.0, 1.0))],
        "ddp_bf16": [rank_result([], failed="TypeError: no")],
        f"ddp_default:{AGAIN}": [rank_result(blocks_of(1.0, 1.0))],
    }
    run = run_of(["ddp_default", "ddp_bf16"], failed={"ddp_bf16": "TypeError: no"})
    (record,) = training_records(spec, run, ranks)
    assert record.failed == "TypeError: no" and record.ratio is None and record.subject_s is None


def test_a_failed_baseline_leaves_the_others_their_times_and_its_error() -> None:
    spec = TrainSpec(methods=("ddp_fp16", "gradsync"), repeats=2)
    ranks = {
        "ddp_fp16": [{"failed": "TypeError: no"}],
        "gradsync": [rank_result(blocks_of(1.0, 2.0))],
        f"ddp_fp16:{AGAIN}": [{"failed": "TypeError: no"}],
    }
    run = run_of(["ddp_fp16", "gradsync"], failed={"ddp_fp16": "TypeError: no"})
    (record,) = training_records(spec, run, ranks)
    assert record.failed == "the baseline ddp_fp16 failed: TypeError: no"
    assert record.subject_s is not None and record.subject_s.median == 1.5
    assert (record.baseline_s, record.ratio, record.aa) == (None, None, None)


def test_the_best_of_the_sweep_is_never_one_that_failed() -> None:
    spec = TrainSpec(methods=("ddp", "gradsync"), repeats=2)
    figures = {name: [{"failed": "no"}] for name in (*DDP_SWEEP, f"{DDP_SWEEP[0]}:{AGAIN}")}
    ours = {"gradsync": [rank_result(blocks_of(1.0, 1.0))]}
    left = {"ddp_100mb": [rank_result(blocks_of(2.0, 2.0))]}
    names = [*DDP_SWEEP, "gradsync"]
    run = run_of(names, failed={name: "no" for name in DDP_SWEEP if name != "ddp_100mb"})
    records = {r.subject: r for r in training_records(spec, run, {**figures, **left, **ours})}
    assert records["gradsync"].params["baseline_method"] == "ddp_100mb"
    assert records["gradsync"].ratio is not None and records["gradsync"].ratio.median == 0.5
    assert records["ddp_1mb"].failed == "no"
    run = run_of(names, failed=dict.fromkeys(DDP_SWEEP, "no"))
    records = {r.subject: r for r in training_records(spec, run, {**figures, **ours})}
    assert records["gradsync"].failed == f"the baseline {DDP_SWEEP[0]} failed: no"


@pytest.mark.parametrize(("loopback", "counted"), [(True, 8000), (False, 4000)], ids=["one interface", "one a node"])
def test_bytes_of_a_step_are_those_of_one_node(loopback: bool, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks, each node sends 4000 bytes in 4 steps."""
    figures = rank_result([[0.1, 0.1], [0.1, 0.1]]) | {
        "losses": [1.0] * 4, "samples_per_step": 8, "sent_bytes": counted, "final": {}, "backward_s": 0.1,
        "exposed_s": 0.0, "plan": [], "buckets": [], "timeline": [],
    }  # fmt: skip
    rank = {name: figures for name in ("ddp_default", f"ddp_default:{AGAIN}")}
    monkeypatch.setattr(train, "run_ranks", lambda *arguments: [rank] * 4)
    monkeypatch.setattr(Lab, "__enter__", lambda self: self)
    monkeypatch.setattr(Lab, "__exit__", lambda *arguments: None)
    spec = TrainSpec(
        workload="dense160", methods=("ddp_default",), nodes=2, ranks_per_node=2, repeats=2, block_steps=2,
        loopback=loopback,
    )  # fmt: skip
    (method_run,) = run_training(spec, lambda event: None).methods
    assert method_run.interface_bytes_per_step == 1000.0
    assert method_run.samples_per_step == 4 * 8


def test_an_unknown_method_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"unknown method 'ddpp'; there are gradsync, ddp_default, .* and ddp \(the best"
    ):
        method("ddpp")
    with pytest.raises(ValueError, match="unknown method 'nccl'"):
        run_training(TrainSpec(methods=("nccl",)), lambda event: None)


@pytest.mark.timeout(200)
def test_methods_train_alike_in_one_run_on_loopback() -> None:
    names = ("ddp_default", "ddp_sparse", "ddp_sparse_bf16", "ddp_fp16", "ddp_powersgd1", "gradsync", "agsparse")
    spec = TrainSpec(
        options={"data": "zipf", "batch_size": 64, "dim": 4},
        methods=names,
        nodes=2,
        repeats=2,
        block_steps=2,
        warmup_steps=3,
        loopback=True,
    )
    events: list[dict[str, Any]] = []
    run = run_training(spec, events.append)
    losses = {m.name: m.losses for m in run.methods}
    assert [m.failed for m in run.methods] == [None] * len(names)
    assert all(len(values) == spec.warmup_steps + spec.repeats * spec.block_steps for values in losses.values())
    for name in names:
        tolerance = 1e-5 if METHODS[name].exact else 5e-2
        assert losses[name] == pytest.approx(losses["ddp_default"], abs=tolerance), name
    assert len(events) == (len(names) + 1) * (1 + spec.repeats)
    assert {r.subject for r in run.records} == set(names[1:])
    ours = next(m for m in run.methods if m.name == "gradsync")
    assert ours.plan and ours.timeline and {row.scheme for row in ours.buckets} >= {"all_reduce"}
    dense_rows = [row for row in ours.buckets if row.scheme == "all_reduce"]
    assert all(row.sent_bytes == row.predicted_bytes for row in dense_rows)
    assert run.link == "loopback (not shaped)" and "loopback" in run.notes[0]


def test_a_rank_that_fails_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # The parent finds a workload, the ranks, which are processes of their own, do not.
    spec = TrainSpec(workload="nothing", methods=("ddp_default",), nodes=2, loopback=True, repeats=1)
    original = train.workloads.load

    def load(name: str, **options: Any) -> Any:
        return original("dense160")

    monkeypatch.setattr(train.workloads, "load", load)
    with pytest.raises(RuntimeError, match=r"rank \d ended with code 1:[\s\S]*nothing"):
        run_training(spec, lambda event: None)
