"""Measures training: methods train the same model on the same data in turns, each for a block of steps.

Turns keep the ratio of two methods right when the machine's speed drifts. The first method is the baseline and runs
twice, as two copies: their ratio (A/A) is the noise of the run. `ddp`, `ddp_sparse` and `ddp_16bit` are DDP with the
best of several settings (a sweep), which are timed first: the steps that choose the best are not the steps that are
compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from pydantic import BaseModel, Field, field_validator

from .. import workloads
from ..cluster import Scenario
from ..report.record import BucketRow, MethodRun, Record, Spread, TimelineTask, TrainingRun, WireBytes
from ..workloads.emulated import ComputeTimes, measured_times
from .card import Device, describe_card
from .launch import LOOPBACK, Loopback, cluster, once_more_after_crash, run_ranks
from .methods import SWEEPS, TORCH_SPARSE, method
from .provenance import code, machine
from .steal import MOST_STOLEN, Patience, Steal

BLOCK_AVERAGES: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "mean": statistics.fmean}
AGAIN = "again"  # suffix of the baseline's second copy

Figures = dict[str, list[dict[str, Any]]]  # the ranks' measurements, by method and rank


class TrainSpec(BaseModel):
    """The settings of one training benchmark; the first of `methods` is the baseline of all others."""

    workload: str = "deepfm"
    options: dict[str, Any] = {}
    methods: tuple[str, ...] = ("ddp_default", "ddp_sparse_default", "ddp_sparse_bf16", "gradsync")
    nodes: int = 4
    ranks_per_node: int = 1
    link: str = "1gbit"
    scenario: dict[str, Any] = {}  # further settings of the lab's scenario
    scenario_name: str | None = None  # in a scenario steps vary: blocks are then compared by their mean step
    loopback: bool = False
    device: Device = "cpu"
    emulate_compute: bool = False  # sleep instead of computing, see `workloads/emulated.py`
    compute: dict[bool, ComputeTimes] = {}  # times to sleep, for models with (True) and without sparse gradients
    repeats: int = 5  # pairs of blocks that are compared
    pick_repeats: int | None = Field(default=None, ge=1)  # blocks that choose the best of a sweep; see `sweep_repeats`
    fastest_first: bool = False  # of the sweeps in `methods`, the one whose best is fastest is the baseline
    block_steps: int = 8
    most_block_s: float = 8.0  # a block has fewer steps where the slowest method would take longer for it
    warmup_steps: int = Field(default=6, ge=1)  # pass DDP's re-bucketing, PowerSGD's start
    patience_s: float = Field(default=0.0, ge=0)  # for repeating disturbed measurements, see `steal.py`
    method_timeout_s: float = 60.0  # a method fails if a rank waits longer for the others
    seed: int = 0
    evaluate: bool = True

    @field_validator("methods")
    @classmethod
    def _distinct(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(methods))

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def block_average(self) -> str:
        """Returns how step times are averaged over a block of steps: a key of `BLOCK_AVERAGES`."""
        return "median" if self.scenario_name is None else "mean"

    @property
    def sweep(self) -> tuple[str, ...]:
        """Returns the names of the DDP variants to time first, if `methods` ask for the best of them; else empty."""
        return tuple(chain.from_iterable(SWEEPS[name] for name in self.methods if name in SWEEPS))

    @property
    def sweep_repeats(self) -> int:
        """Returns how many blocks time each DDP variant, to choose the best: `pick_repeats`, or half of `repeats` and
        at least 3.
        """
        return self.pick_repeats or max(3, self.repeats // 2)

    @property
    def turns(self) -> int:
        """Returns the number of progress events: a warm-up and all blocks, for each method and each DDP variant."""
        return len(self.sweep) * (1 + self.sweep_repeats) + (len(self.methods) + 1) * (1 + self.repeats)


def check_names(methods: Iterable[str]) -> None:
    """Raises ValueError, with all names that there are, where a method is unknown."""
    for name in methods:
        if name not in SWEEPS:
            method(name)


def run_training(spec: TrainSpec, on_event: Callable[[dict[str, Any]], None]) -> TrainingRun:
    """Runs the benchmark and returns its records and each method's figures, merged over the ranks.

    Raises:
        ValueError: a workload, method or option is unknown, or there is no GPU where one is asked for.
        RuntimeError: a rank failed.
    """
    check_names(spec.methods)
    card = describe_card(spec.world_size) if spec.device == "cuda" else {}
    workload = workloads.load(spec.workload, **spec.options)  # fetched here: ranks in a lab reach no registry
    if spec.emulate_compute:  # before ranks share the cores
        kinds = sorted({method(name).sparse for name in (*spec.methods, *spec.sweep) if name not in SWEEPS})
        patience = Patience(spec.patience_s)
        spec = spec.model_copy(update={"compute": {kind: _times(workload, kind, patience) for kind in kinds}})
    scenario = Scenario(nodes=spec.nodes, link=spec.link, ranks_per_node=spec.ranks_per_node, **spec.scenario)
    notes: list[str] = []
    with cluster(scenario, notes, loopback=spec.loopback) as where:
        environment = {**machine(), **where.describe(), **card}

        def run_methods() -> list[dict[str, Any]]:
            return run_ranks(where, spec.world_size, "gradsync_lab.bench.train_rank", spec.model_dump_json(), on_event)

        may_crash = not TORCH_SPARSE.isdisjoint((*spec.methods, *spec.sweep))
        ranks = once_more_after_crash(run_methods, notes, on_event) if may_crash else run_methods()
    environment["stolen_share"] = round(max(ranks[0]["stolen"]), 4)  # in the worst round of blocks
    if environment["stolen_share"] > MOST_STOLEN:
        notes.append(f"disturbed: the host took up to {environment['stolen_share']:.0%} of the processors' time")
    on_loopback = isinstance(where, Loopback)
    run = TrainingRun(
        workload=spec.workload,
        options=workload.options,
        description=workload.describe() + (", computation emulated" if spec.emulate_compute else ""),
        source=workload.source,
        nodes=spec.nodes,
        link=LOOPBACK if on_loopback else spec.link,
        methods=[],
        records=[],
        environment=environment,
        **code(),
        notes=notes,
    )
    # On loopback all ranks share one interface, which counts the bytes of all ranks.
    _fill(run, spec, ranks, sharing=spec.world_size if on_loopback else spec.ranks_per_node)
    return run


def _times(workload: workloads.Workload, sparse: bool, patience: Patience) -> ComputeTimes:
    """Measures the times that emulated computation sleeps; repeats this while the host steals much processor time."""
    while True:
        since = Steal()
        times = measured_times(workload, sparse=sparse)
        if not patience.is_lost(since):
            return times


def _fill(run: TrainingRun, spec: TrainSpec, ranks: list[dict[str, Any]], sharing: int) -> None:
    """Sets the methods, records and chosen DDP variants of `run`, from the results of all ranks."""
    picked: dict[str, str] = ranks[0]["picked"]
    spec = spec.model_copy(update={"methods": tuple(ranks[0]["methods"])})
    judged: Figures = {name: [rank["judged"][name] for rank in ranks] for name in ranks[0]["judged"]}
    sweep: Figures = {name: [rank["sweep"][name] for rank in ranks] for name in ranks[0]["sweep"]}
    methods = [_merge(name, judged[name], spec, sharing) for name in spec.methods]
    run.methods = list(methods)
    run.records = training_records(spec, run, methods, judged, picked)
    for name, best in picked.items():
        members = [_merge(member, sweep[member], spec, sharing) for member in SWEEPS[name]]
        run.methods += [m for m in members if m.name not in spec.methods]
        found = sweep_records(spec, run, members, sweep, name, best)
        run.records += [r for r in found if r.subject not in spec.methods]
        run.notes.append(_pick_in_words(name, best, {m: sweep[m] for m in SWEEPS[name]}))


def training_records(
    spec: TrainSpec, run: TrainingRun, methods: list[MethodRun], figures: Figures, picked: Mapping[str, str]
) -> list[Record]:
    """Returns a record for each method, compared with the first one."""
    baseline, *subjects = methods
    aa = _ratio(_blocks(figures[f"{baseline.name}:{AGAIN}"]), _blocks(figures[baseline.name]))
    return [_record(spec, run, subject, baseline, figures, aa, picked) for subject in subjects]


def sweep_records(
    spec: TrainSpec, run: TrainingRun, members: list[MethodRun], figures: Figures, name: str, picked: str
) -> list[Record]:
    """Returns records of all timed DDP variants of a sweep against the best one, over the blocks that chose it."""
    best = next(member for member in members if member.name == picked)
    records = [_record(spec, run, member, best, figures, None, {}) for member in members if member is not best]
    return [r.model_copy(update={"baseline": name, "params": {**r.params, "phase": "pick"}}) for r in records]


def _pick_in_words(name: str, picked: str, sweep: Figures) -> str:
    medians = {name: statistics.median(blocks) for name, ranks in sweep.items() if (blocks := _blocks(ranks))}
    if not medians:
        return f"{name} is {picked}: all settings of DDP failed"
    said = ", ".join(f"{member} {median_s * 1e3:.1f} ms" for member, median_s in medians.items())
    return f"{name} is {picked}, chosen before the methods were compared, by these steps: {said}"


def _ratio(mine: list[float], base: list[float]) -> Spread | None:
    """Returns the ratios of paired block times; None if one of the two methods failed."""
    return Spread.of([a / b for a, b in zip(mine, base, strict=True)]) if mine and base else None


def _record(
    spec: TrainSpec,
    run: TrainingRun,
    subject: MethodRun,
    baseline: MethodRun,
    figures: Figures,
    aa: Spread | None,
    picked: Mapping[str, str],
) -> Record:
    """Returns the record of a method against a baseline; if one of them failed, with its error and no ratio."""
    mine, base = _blocks(figures[subject.name]), _blocks(figures[baseline.name])
    lost = f"the baseline {baseline.name} failed: {baseline.failed}" if baseline.failed else None
    params = {"nodes": spec.nodes, "link": run.link, "workload": spec.workload}
    params["block_steps"] = steps_of(figures[baseline.name]) // max(len(base), 1) if base else spec.block_steps
    params |= {"ranks_per_node": spec.ranks_per_node, **spec.scenario, **spec.options}
    if spec.scenario_name is not None:
        params |= {"scenario": spec.scenario_name, "block_average": spec.block_average}
    if (scheme := figures[subject.name][0].get("mixes_by")) is not None:
        params["mixes_by"] = scheme
    if spec.emulate_compute:
        params["emulate_compute"] = True
    if spec.device != "cpu":
        params["device"] = spec.device
    params["baseline_method"] = picked.get(baseline.name, baseline.name)
    if chosen := {name: SWEEPS[name] for name in (baseline.name, subject.name) if name in picked}:
        # The rounds that chose these came before the `repeats` rounds that are compared.
        params["picked_of"] = {name: {"lines": len(of), "rounds": spec.sweep_repeats} for name, of in chosen.items()}
    if subject.name in picked:
        params["subject_method"] = picked[subject.name]
    if subject.step_memory_bytes is not None and baseline.step_memory_bytes is not None:
        params["memory_bytes"] = subject.step_memory_bytes
        params["baseline_memory_bytes"] = baseline.step_memory_bytes
    payload = sum(row.sent_bytes for row in subject.buckets) if subject.buckets else None
    return Record(
        case="train",
        metric="step_s",
        subject=subject.name,
        baseline=baseline.name,
        params=params,
        options=run.options,
        repeats=len(mine),
        subject_s=Spread.of(mine) if mine else None,
        baseline_s=Spread.of(base) if base else None,
        ratio=_ratio(mine, base),
        aa=aa,
        predicted_s=figures[subject.name][0].get("predicted_s"),
        plan=subject.ran,
        baseline_plan=baseline.ran,
        alone_s=_alone_s(spec, picked.get(subject.name, subject.name)),
        loss=subject.final or None,
        baseline_loss=baseline.final or None,
        loss_steps=len(subject.losses) if subject.final and len(subject.losses) == len(baseline.losses) else None,
        seeds=[spec.seed],
        wire_bytes=WireBytes(subject=subject.interface_bytes_per_step, baseline=baseline.interface_bytes_per_step),
        payload_bytes=WireBytes(subject=payload),
        versions=run.versions,
        environment=run.environment,
        commit=run.commit,
        engine=run.engine,
        failed=subject.failed or lost,
    )


def _alone_s(spec: TrainSpec, name: str) -> float | None:
    """Returns the emulated seconds of a step without communication; None unless computation is emulated."""
    times = spec.compute.get(method(name).sparse)
    return times.step_s if times else None


def _blocks(ranks: list[dict[str, Any]]) -> list[float]:
    """Returns `block_steps_s`, the step time of each block; empty for a method that failed."""
    return [] if ranks[0]["failed"] else block_steps_s(ranks)


def block_steps_s(ranks: list[dict[str, Any]]) -> list[float]:
    """Returns the average step time of each counted block on the slowest rank, for which all ranks wait.

    In asynchronous methods it is the time in which all ranks together make as many steps as there are ranks.
    """
    usual = BLOCK_AVERAGES[ranks[0]["block_average"]]
    together = max if ranks[0]["in_step"] else statistics.harmonic_mean
    return [together([usual(block) for block in blocks]) for blocks in zip(*(r["blocks"] for r in ranks), strict=True)]


def steps_of(ranks: list[dict[str, Any]]) -> int:
    """Returns the number of steps in all counted blocks, given one method's results on each rank."""
    return sum(len(block) for block in ranks[0]["blocks"])


def _merge(name: str, ranks: list[dict[str, Any]], spec: TrainSpec, sharing: int) -> MethodRun:
    """Merges one method's results on all ranks; `sharing` ranks count sent bytes on the same network interface."""
    if failures := [r for r in ranks if r["failed"]]:
        # The first one is the cause: the other ranks only lost this one.
        return MethodRun(name=name, failed=min(failures, key=lambda r: float(r["failed_s"]))["failed"])
    steps = steps_of(ranks)
    return MethodRun(
        name=name,
        step_s=[max(times) for times in zip(*(sum(r["blocks"], []) for r in ranks), strict=True)],
        losses=[statistics.fmean(losses) for losses in zip(*(r["losses"] for r in ranks), strict=True)],
        samples_per_step=sum(r["samples_per_step"] for r in ranks),
        interface_bytes_per_step=max(r["sent_bytes"] for r in ranks) / sharing * spec.ranks_per_node / steps,
        final=ranks[0]["final"],
        backward_s=ranks[0]["backward_s"],
        exposed_s=ranks[0]["exposed_s"],
        plan=ranks[0]["plan"],
        plan_digest=ranks[0]["plan_digest"],
        buckets=[BucketRow(**row) for row in ranks[0]["buckets"]],
        timeline=[TimelineTask(**task) for task in ranks[0]["timeline"]],
        predicted_timeline=[TimelineTask(**task) for task in ranks[0]["predicted_timeline"]],
        step_memory_bytes=max((r["memory_bytes"] for r in ranks if r["memory_bytes"] is not None), default=None),
    )
