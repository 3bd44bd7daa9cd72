"""The figures of a training run are in its records, and a method that fails stays in the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from gradsync_lab.bench import launch, train
from gradsync_lab.bench.methods import METHODS, SWEEPS, method
from gradsync_lab.bench.rank import TOLD
from gradsync_lab.bench.train import AGAIN, TrainSpec, block_steps_s, run_training
from gradsync_lab.bench.train_rank import Contestant, pick
from gradsync_lab.cluster import Lab
from gradsync_lab.report.record import PlanRan, TrainingRun
from gradsync_lab.workloads import Workload
from gradsync_lab.workloads.emulated import ComputeTimes
from tests.world import Ranks


def rank_result(blocks: list[list[float]]) -> dict[str, Any]:
    """Returns a rank's result of one method."""
    steps = sum(map(len, blocks))
    return {
        "failed": None, "blocks": blocks, "block_average": "median", "mixes_by": None, "in_step": True,
        "losses": [1.0] * steps, "samples_per_step": 8, "sent_bytes": 100 * steps,
        "final": {}, "backward_s": 0.1, "exposed_s": 0.0, "plan": [], "plan_digest": None, "buckets": [],
        "timeline": [], "predicted_timeline": [], "memory_bytes": None,
    }  # fmt: skip


def lost(text: str, failed_s: float = 1.0) -> dict[str, Any]:
    return {"failed": text, "failed_s": failed_s}


def blocks_of(*medians: float) -> dict[str, Any]:
    return rank_result([[m, m, 9.0] for m in medians])


@pytest.fixture
def run_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainingRun]:
    """Returns a function that makes a run from the measurements of ranks, one per node of a lab."""
    monkeypatch.setattr(Lab, "__enter__", lambda self: self)
    monkeypatch.setattr(Lab, "__exit__", lambda *arguments: None)

    def run(
        spec: TrainSpec,
        judged: list[dict[str, Any]],
        sweep: list[dict[str, Any]] | None = None,
        picked: dict[str, str] | None = None,
    ) -> TrainingRun:
        sweep = sweep or [{} for _ in judged]
        ranks = [
            {"methods": spec.methods, "picked": picked or {}, "sweep": s, "judged": j, "stolen": [0.0]}
            for s, j in zip(sweep, judged, strict=True)
        ]
        monkeypatch.setattr(train, "run_ranks", lambda *arguments: ranks)
        return run_training(spec.model_copy(update={"workload": "dense160", "nodes": len(judged)}), lambda event: None)

    return run


def test_ranks_that_do_not_wait_are_as_fast_as_they_are_together() -> None:
    ranks = [{**blocks_of(median), "in_step": False} for median in (1.0, 3.0)]
    assert block_steps_s(ranks) == [1.5], "four steps in 3 s, of which two are one of all ranks"


def test_a_block_is_as_slow_as_its_slowest_rank() -> None:
    assert block_steps_s([blocks_of(1.0, 2.0), blocks_of(3.0, 1.0)]) == [3.0, 2.0]


def test_ratios_are_taken_block_by_block_and_the_baseline_is_held_against_itself(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp_default", "gradsync"), repeats=3)
    figures = {
        "ddp_default": blocks_of(1.0, 2.0, 4.0),
        "gradsync": blocks_of(0.5, 1.0, 2.0),
        f"ddp_default:{AGAIN}": blocks_of(1.1, 2.2, 4.4),
    }
    run = run_with(spec, [figures] * 2)
    (record,) = run.records
    assert [m.name for m in run.methods] == ["ddp_default", "gradsync"]
    assert (record.subject, record.baseline, record.repeats) == ("gradsync", "ddp_default", 3)
    assert record.params["baseline_method"] == "ddp_default" and "subject_method" not in record.params
    assert record.ratio.p5 == record.ratio.p95 == 0.5
    assert record.aa.median == pytest.approx(1.1)
    assert record.within(0.46) and not record.within(0.45)


@pytest.mark.parametrize("in_shards", [True, False])
def test_records_of_models_in_shards_have_the_peak_memory_of_both_sides(run_with: Any, in_shards: bool) -> None:
    def figures(*memory_bytes: int) -> dict[str, Any]:
        names = ("hsdp", "sharded_gradsync", f"hsdp:{AGAIN}")
        given = [each if in_shards else None for each in memory_bytes]
        return {name: {**blocks_of(1.0), "memory_bytes": most} for name, most in zip(names, given, strict=True)}

    spec = TrainSpec(methods=("hsdp", "sharded_gradsync"), repeats=1)
    params = run_with(spec, [figures(10, 12, 10), figures(11, 15, 11)]).records[0].params
    found = params.get("memory_bytes"), params.get("baseline_memory_bytes")
    assert found == ((15, 11) if in_shards else (None, None)), "on the rank that needs most"


SWEEP = {name: blocks_of(2.0, 2.0) for name in SWEEPS["ddp"]} | {"ddp_1mb_views": blocks_of(1.0, 1.0)}
PICKED = {"ddp": "ddp_1mb_views"}


def test_ddp_is_the_picked_one_judged_anew_and_the_sweep_stays_in_the_run(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp", "gradsync"), repeats=2)
    # Fast in the sweep, slow in the comparison: luck must not make the baseline look better than it is.
    figures = {"ddp": blocks_of(3.0, 3.0), "gradsync": blocks_of(1.5, 1.5), f"ddp:{AGAIN}": blocks_of(3.3, 3.0)}
    run = run_with(spec, [figures] * 2, [SWEEP] * 2, PICKED)
    records = {r.subject: r for r in run.records}
    assert [m.name for m in run.methods] == ["ddp", "gradsync", *SWEEPS["ddp"]]
    ours = records.pop("gradsync")
    assert ours.baseline == "ddp" and ours.params["baseline_method"] == "ddp_1mb_views" and "phase" not in ours.params
    assert ours.ratio.median == 0.5 and ours.aa.median == pytest.approx(1.05)
    assert ours.params["picked_of"] == {"ddp": {"lines": len(SWEEPS["ddp"]), "rounds": 3}}, "before the two of ratios"
    assert set(records) == set(SWEEPS["ddp"]) - {"ddp_1mb_views"}
    for record in records.values():
        assert (record.baseline, record.params["phase"], record.ratio.median) == ("ddp", "pick", 2.0)
        assert record.aa is None
    assert "ddp is ddp_1mb_views" in run.notes[0] and "ddp_100mb_views 2000.0 ms" in run.notes[0]


def test_each_sweep_has_a_best_of_its_own(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp_16bit", "ddp", "auto"), repeats=2)
    half = {name: blocks_of(1.0, 1.0) for name in SWEEPS["ddp_16bit"]} | {"ddp_bf16_views": blocks_of(0.5, 0.5)}
    judged = {name: blocks_of(1.0, 1.0) for name in ("ddp_16bit", f"ddp_16bit:{AGAIN}", "ddp", "auto")}
    run = run_with(spec, [judged], [{**SWEEP, **half}], {"ddp_16bit": "ddp_bf16_views", **PICKED})
    records = {r.subject: r for r in run.records if "phase" not in r.params}
    assert records.keys() == {"ddp", "auto"}
    assert {r.params["baseline_method"] for r in records.values()} == {"ddp_bf16_views"}
    assert records["ddp"].params["subject_method"] == "ddp_1mb_views" and "subject_method" not in records["auto"].params
    picks = {r.subject: (r.baseline, r.params["baseline_method"]) for r in run.records if "phase" in r.params}
    assert picks["ddp_bf16"] == ("ddp_16bit", "ddp_bf16_views") and picks["ddp_default"] == ("ddp", "ddp_1mb_views")
    assert len(picks) == len(SWEEPS["ddp"]) + len(SWEEPS["ddp_16bit"]) - 2


def test_a_record_holds_the_plan_that_ran_and_losses_at_equal_steps_only(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp_default", "gradsync", "auto"), repeats=2)
    base = {**blocks_of(2.0, 2.0), "final": {"loss": 0.5}}
    planned = {**base, "plan": ["one bucket: ring"], "plan_digest": "abc"}
    longer = {**planned, "losses": [1.0] * 7}
    judged = {"ddp_default": base, f"ddp_default:{AGAIN}": base, "gradsync": planned, "auto": longer}
    records = {r.subject: r for r in run_with(spec, [judged]).records}
    assert records["gradsync"].plan == PlanRan(digest="abc", words=["one bucket: ring"])
    assert records["gradsync"].baseline_plan is None, "DDP has none"
    assert (records["gradsync"].loss_steps, records["gradsync"].loss) == (6, {"loss": 0.5})
    assert records["auto"].loss_steps is None


def test_emulated_records_know_what_a_rank_alone_takes(run_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(workload: Workload, *, sparse: bool) -> ComputeTimes:
        return ComputeTimes(forward_s=0.1, ready_s={}, backward_s=0.6 if sparse else 0.7, optimizer_s=0.1)

    monkeypatch.setattr(train, "measured_times", times)
    spec = TrainSpec(methods=("ddp", "ddp_sparse_1mb"), repeats=2, emulate_compute=True)
    figures = {name: blocks_of(1.0, 1.0) for name in ("ddp", "ddp_sparse_1mb", f"ddp:{AGAIN}")}
    records = run_with(spec, [figures], [SWEEP], PICKED).records
    assert {record.subject: record.scaling for record in records} == pytest.approx(
        {"ddp_sparse_1mb": 0.8} | {name: 0.45 for name in SWEEPS["ddp"] if name != "ddp_1mb_views"}
    )
    spec = spec.model_copy(update={"emulate_compute": False})
    assert {record.scaling for record in run_with(spec, [figures], [SWEEP], PICKED).records} == {None}


def test_ddp_that_is_not_first_is_a_subject(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp_default", "ddp"), repeats=2)
    figures = {name: blocks_of(2.0, 2.0) for name in ("ddp_default", f"ddp_default:{AGAIN}")}
    run = run_with(spec, [{**figures, "ddp": blocks_of(1.0, 1.0)}], [SWEEP], PICKED)
    first, *others = run.records
    assert (first.subject, first.baseline, first.ratio.median) == ("ddp", "ddp_default", 0.5)
    assert (first.params["subject_method"], first.params["baseline_method"]) == ("ddp_1mb_views", "ddp_default")
    # The default was compared: its figures from the sweep would be a second record under the same name.
    assert [m.name for m in run.methods] == ["ddp_default", "ddp", *SWEEPS["ddp"][1:]]
    assert {r.subject for r in others} == set(SWEEPS["ddp"][1:]) - {"ddp_1mb_views"}


def test_a_sweep_keeps_its_members_that_failed(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp", "gradsync"), repeats=2)
    judged = {name: blocks_of(1.0, 1.0) for name in ("ddp", "gradsync", f"ddp:{AGAIN}")}
    run = run_with(spec, [judged], [{**SWEEP, "ddp_100mb_views": lost("no")}], PICKED)
    assert {r.subject: r.failed for r in run.records}["ddp_100mb_views"] == "no"
    assert {m.name: m.failed for m in run.methods}["ddp_100mb_views"] == "no"


def test_a_failed_method_keeps_its_row_with_the_error_that_came_first(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp_default", "ddp_bf16"), repeats=2)
    good = {name: blocks_of(1.0, 1.0) for name in ("ddp_default", f"ddp_default:{AGAIN}")}
    errors = [lost("RuntimeError: timed out", 9.0), lost("TypeError: no", 2.0), lost("failed on another rank", inf)]
    run = run_with(spec, [{**good, "ddp_bf16": error} for error in errors])
    (record,) = run.records
    assert record.failed == run.methods[1].failed == "TypeError: no"
    assert record.ratio is None and record.subject_s is None


def test_a_failed_baseline_leaves_the_others_their_times_and_its_error(run_with: Any) -> None:
    spec = TrainSpec(methods=("ddp_fp16", "gradsync"), repeats=2)
    figures = {name: lost("TypeError: no") for name in ("ddp_fp16", f"ddp_fp16:{AGAIN}")}
    (record,) = run_with(spec, [{**figures, "gradsync": blocks_of(1.0, 2.0)}]).records
    assert record.failed == "the baseline ddp_fp16 failed: TypeError: no"
    assert record.subject_s.median == 1.5
    assert (record.baseline_s, record.ratio, record.aa) == (None, None, None)


def pick_of(blocks: dict[str, list[float]], failed: str) -> tuple[str, float]:
    """Returns this rank's choice.

    Both ranks see the same blocks, but rank 1 sees those of `slow` three times as long.
    """
    spec = TrainSpec(repeats=3)
    sweep = []
    for name, medians in blocks.items():
        factor = 3.0 if name == "slow" and dist.get_rank() == 1 else 1.0
        who = Contestant(name, nn.Module(), None, None, iter(()))
        who.blocks = [[factor * m] for m in medians]
        if name == failed:
            who.failed = "no"
        sweep.append(who)
    return pick(sweep, spec)


def test_all_ranks_pick_the_best_by_the_slowest_rank(world: Callable[[int], Ranks]) -> None:
    blocks = {"slow": [1.0, 1.0, 1.0], "steady": [2.0, 2.0, 2.0], "jumpy": [9.0, 1.9, 1.9], "gone": [0.1, 0.1, 0.1]}
    assert world(2).run(pick_of, blocks, "gone") == [("jumpy", 1.9)] * 2
    only = {"gone": [0.1] * 3, "steady": [2.0] * 3}
    assert world(2).run(pick_of, only, "gone") == [("steady", 2.0)] * 2
    assert world(2).run(pick_of, {"gone": [0.1] * 3}, "gone") == [("gone", inf)] * 2


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(200)
def test_the_fastest_of_two_sweeps_is_the_baseline() -> None:
    """Large tables are faster with sparse gradients, also on loopback."""
    spec = TrainSpec(
        options={"data": "zipf", "batch_size": 16, "dim": 32}, methods=("ddp", "ddp_sparse", "gradsync"), nodes=2,
        repeats=2, pick_repeats=1, block_steps=1, warmup_steps=2, fastest_first=True, loopback=True,
    )  # fmt: skip
    run = run_training(spec, lambda event: None)
    compared = {r.subject: r for r in run.records if "phase" not in r.params}
    assert compared.keys() == {"ddp", "gradsync"} and {r.baseline for r in compared.values()} == {"ddp_sparse"}
    assert compared["gradsync"].params["baseline_method"] in SWEEPS["ddp_sparse"]
    assert compared["ddp"].params["subject_method"] in SWEEPS["ddp"]
    assert compared["ddp"].params["picked_of"] == {
        name: {"lines": len(SWEEPS[name]), "rounds": 1} for name in ("ddp", "ddp_sparse")
    }
    assert not [m.failed for m in run.methods if m.failed]


@pytest.mark.parametrize(("loopback", "counted"), [(True, 8000), (False, 4000)], ids=["one interface", "one a node"])
def test_bytes_of_a_step_are_those_of_one_node(loopback: bool, counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks send 4000 bytes each in 4 steps."""
    figures = rank_result([[0.1, 0.1], [0.1, 0.1]]) | {"sent_bytes": counted}
    judged = {name: figures for name in ("ddp_default", f"ddp_default:{AGAIN}")}
    rank = {"methods": ["ddp_default"], "picked": {}, "sweep": {}, "judged": judged, "stolen": [0.0]}
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


def test_a_run_that_the_host_disturbed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = rank_result([[0.1, 0.1], [0.1, 0.1]])
    judged = {name: figures for name in ("ddp_default", f"ddp_default:{AGAIN}")}
    rank = {"methods": ["ddp_default"], "picked": {}, "sweep": {}, "judged": judged, "stolen": [0.01, 0.5]}
    monkeypatch.setattr(train, "run_ranks", lambda *arguments: [rank] * 2)
    spec = TrainSpec(workload="dense160", methods=("ddp_default",), nodes=2, repeats=2, block_steps=2, loopback=True)
    run = run_training(spec, lambda event: None)
    assert run.environment["stolen_share"] == 0.5
    assert run.notes[1:] == ["disturbed: the host took up to 50% of the processors' time"]


def test_an_unknown_method_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown method 'ddpp'; there are gradsync, auto, .* and ddp, ddp_sparse and ddp_16bit \(the ",
    ):
        method("ddpp")
    with pytest.raises(ValueError, match="unknown method 'nccl'"):
        run_training(TrainSpec(methods=("nccl",)), lambda event: None)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(200)
def test_methods_train_alike_in_one_run_on_loopback() -> None:
    names = (
        "ddp_default",
        "ddp_sparse_default",
        "ddp_sparse_bf16",
        "ddp_fp16",
        "ddp_powersgd1",
        "gradsync",
        "agsparse",
    )
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
    assert all(
        len(values) == 1 + spec.warmup_steps + spec.repeats * (1 + spec.block_steps) for values in losses.values()
    )
    for name in names:
        tolerance = 1e-5 if METHODS[name].exact else 5e-2
        assert losses[name] == pytest.approx(losses["ddp_default"], abs=tolerance), name
    turns = [event for event in events if event["kind"] != TOLD]
    assert len(turns) == spec.turns == (len(names) + 1) * (1 + spec.repeats)
    assert {r.subject for r in run.records} == set(names[1:])
    ours = next(m for m in run.methods if m.name == "gradsync")
    assert ours.plan and ours.timeline and {row.scheme for row in ours.buckets} >= {"all_reduce"}
    dense_rows = [row for row in ours.buckets if row.scheme == "all_reduce"]
    assert all(row.sent_bytes == row.predicted_bytes for row in dense_rows)
    measured, predicted = (
        {task.name for task in timeline if task.stream == "link"}
        for timeline in (ours.timeline, ours.predicted_timeline)
    )
    assert len(measured) > 1 and measured == predicted, "the operations of a real step, each with its forecast"
    assert all(task.end_s >= task.start_s >= 0 for task in ours.predicted_timeline)
    assert run.link == "loopback (not shaped)" and "loopback" in run.notes[0]


# Methods in which rank 1 fails alone in a backward: of warm-up, of calibration, of a counted block.
BREAKING = """
import itertools
from dataclasses import replace
import torch.distributed as dist
from gradsync_lab.bench import methods, train_rank
from gradsync_lab.bench.rank import run_rank

def breaking(way, step):
    def wrap(model, optimizer, timeout):
        steps = itertools.count(1)
        def hook(gradient):
            if next(steps) == step:
                raise ValueError("the cause")
        if dist.get_rank() == 1:
            list(model.parameters())[2].register_hook(hook)
        return way.wrap(model, optimizer, timeout)
    return replace(way, wrap=wrap)

for name, step in {"gradsync": 3, "ddp_1mb": 5, "ddp_default": 9}.items():
    methods.METHODS[f"{name}_breaks"] = breaking(methods.METHODS[name], step)
run_rank(train_rank.measure)
"""


# Little of kernels and links is measured. Of two automatic methods rank 1 fails alone: while one is measured, and in a
# counted block of the other.
AUTOMATIC = """
import itertools
from dataclasses import replace
import torch.distributed as dist
from gradsync_lab.bench import methods, train_rank
from gradsync_lab.bench.rank import run_rank
from tests.quick import hurry

hurry()

def breaking(way, step, settled):
    def wrap(model, optimizer, timeout):
        attachments, steps = [], itertools.count(1)
        def hook(gradient):
            if attachments and attachments[0].settled is settled and next(steps) == step:
                raise ValueError("the cause")
        if dist.get_rank() == 1:
            list(model.parameters())[2].register_hook(hook)
        wrapped, attachment = way.wrap(model, optimizer, timeout)
        attachments.append(attachment)
        return wrapped, attachment
    return replace(way, wrap=wrap)

methods.METHODS["measured_breaks"] = breaking(methods.method("auto"), 6, False)
methods.METHODS["counted_breaks"] = breaking(methods.method("bf16_layerwise"), 7, True)
run_rank(train_rank.measure)
"""


@pytest.fixture
def run_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, TrainSpec], TrainingRun]:
    """Returns a function that runs a program as ranks; the parent accepts methods that only the program defines."""

    def run(program: str, spec: TrainSpec) -> TrainingRun:
        (tmp_path / "program_of_ranks.py").write_text(program, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

        def run_ranks(where: Any, size: int, module: str, spec: str, on_event: Any) -> list[dict[str, Any]]:
            return launch.run_ranks(where, size, "program_of_ranks", spec, on_event)

        monkeypatch.setattr(train, "run_ranks", run_ranks)
        for name in spec.methods:
            if name.endswith("_breaks"):
                monkeypatch.setitem(METHODS, name, METHODS["gradsync"])
        return run_training(spec, lambda event: None)

    return run


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(600)
def test_automatic_methods_settle_one_by_one_and_one_that_fails_takes_no_other_along(
    run_program: Callable[[str, TrainSpec], TrainingRun],
) -> None:
    planned = ("topk0.01_cuts2", "bf16_layerwise")
    names = ("ddp_default", "measured_breaks", "counted_breaks", "topk0.01_cuts21", "topk0.01", "dgc0.01", *planned)
    spec = TrainSpec(
        workload="dense20", methods=names, nodes=2, repeats=2, block_steps=2, warmup_steps=2, method_timeout_s=10.0,
        loopback=True,
    )  # fmt: skip
    run = run_program(AUTOMATIC, spec)
    too_many = "21 buckets of compressed gradients were asked for; there are 20 gradients to compress"
    assert {m.name: m.failed for m in run.methods} == {
        **dict.fromkeys(names),
        **dict.fromkeys(("measured_breaks", "counted_breaks"), "ValueError: the cause"),
        "topk0.01_cuts21": f"RuntimeError: no plan was found: ValueError: {too_many}",
    }
    lossy = {m.name: [row for row in m.buckets if "all_reduce" != row.scheme] for m in run.methods if not m.failed}
    assert [len(lossy[name]) for name in planned] == [2, 20]
    predicted_s = {record.subject: record.predicted_s for record in run.records}
    assert all(predicted_s[name] is not None and predicted_s[name] > 0 for name in (*planned, "topk0.01"))
    assert predicted_s["dgc0.01"] is None, "what its kernels take was measured by nobody"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.timeout(100)
def test_a_method_that_fails_on_one_rank_drops_out_on_all_and_the_others_go_on(
    run_program: Callable[[str, TrainSpec], TrainingRun],
) -> None:
    names = ("gradsync_breaks", "ddp_1mb_breaks", "ddp_default_breaks", "ddp_default", "gradsync")
    spec = TrainSpec(
        workload="dense160", methods=names, nodes=3, repeats=2, block_steps=2, warmup_steps=4, method_timeout_s=5.0,
        loopback=True,
    )  # fmt: skip
    run = run_program(BREAKING, spec)
    assert {m.name: m.failed for m in run.methods} == {
        **dict.fromkeys(names[:3], "ValueError: the cause"),
        **dict.fromkeys(names[3:]),
    }
    assert [len(m.losses) for m in run.methods[3:]] == [1 + 4 + 2 * (1 + 2)] * 2


# A method in which both ranks wait in a backward for a message that never comes.
STUCK = """
import threading
from dataclasses import replace
from gradsync_lab.bench import methods, train_rank
from gradsync_lab.bench.rank import run_rank

def wrap(model, optimizer, timeout):
    next(model.parameters()).register_hook(lambda gradient: threading.Event().wait())
    return methods.METHODS["ddp_default"].wrap(model, optimizer, timeout)

methods.METHODS["stuck_breaks"] = replace(methods.METHODS["ddp_default"], wrap=wrap)
run_rank(train_rank.measure)
"""


@pytest.mark.usefixtures("forked_ranks")
def test_a_method_that_waits_for_ever_ends_the_run_and_is_named(
    run_program: Callable[[str, TrainSpec], TrainingRun],
) -> None:
    spec = TrainSpec(
        workload="dense160", methods=("ddp_default", "stuck_breaks"), nodes=2, loopback=True, method_timeout_s=2.0
    )
    with pytest.raises(RuntimeError, match="a step of stuck_breaks: stuck, no end after 5 s"):
        run_program(STUCK, spec)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_fails_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # The parent finds a workload, the ranks, which are processes of their own, do not.
    spec = TrainSpec(workload="nothing", methods=("ddp_default",), nodes=2, loopback=True, repeats=1)
    original = train.workloads.load

    def load(name: str, **options: Any) -> Any:
        return original("dense160")

    monkeypatch.setattr(train.workloads, "load", load)
    with pytest.raises(RuntimeError, match=r"rank \d ended with code 1:[\s\S]*nothing"):
        run_training(spec, lambda event: None)
