"""Training runs: methods train the same model on the same data in turns, block by block.

Turn-taking makes the ratio of two methods hold when the machine's speed drifts. The first method runs twice, as two
copies: their ratio (A/A) is the noise of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from .. import workloads
from ..lab import Scenario
from ..report.record import BucketRow, MethodRun, Record, Spread, TimelineTask, TrainingRun, WireBytes
from .launch import Loopback, cluster, run_ranks
from .methods import DDP_SWEEP, method
from .provenance import commit, machine, versions

AGAIN = "again"  # suffix of the baseline's second copy


class TrainSpec(BaseModel):
    """One training run."""

    workload: str = "deepfm"
    options: dict[str, Any] = {}
    methods: tuple[str, ...] = ("ddp_default", "ddp_sparse", "ddp_sparse_bf16", "gradsync")
    nodes: int = 4
    ranks_per_node: int = 1
    link: str = "1gbit"
    scenario: dict[str, Any] = {}  # further settings of the lab's scenario
    loopback: bool = False
    repeats: int = 5  # pairs of blocks that are judged
    block_steps: int = 8
    warmup_steps: int = 6  # passes DDP's re-bucketing, our plan from the first step, PowerSGD's start
    seed: int = 0
    evaluate: bool = True

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def blocks(self) -> int:
        """Counted blocks of each method; of a sweep half of them only serve to pick the best."""
        return self.repeats * (2 if "ddp" in self.methods else 1)

    def expanded_methods(self) -> tuple[str, ...]:
        """`ddp` stands for the whole bucket sweep, of which the best is taken."""
        names: list[str] = []
        for name in self.methods:
            names += DDP_SWEEP if name == "ddp" else (name,)
        return tuple(dict.fromkeys(names))


def run_training(spec: TrainSpec, on_event: Callable[[dict[str, Any]], None]) -> TrainingRun:
    """Runs it and puts the ranks' figures together.

    Raises:
        ValueError: for an unknown workload, method or option.
        RuntimeError: when a rank failed.
    """
    for name in spec.expanded_methods():
        method(name)
    workload = workloads.load(spec.workload, **spec.options)  # fetched here: ranks in a lab reach no registry
    scenario = Scenario(nodes=spec.nodes, link=spec.link, ranks_per_node=spec.ranks_per_node, **spec.scenario)
    notes: list[str] = []
    with cluster(scenario, notes, loopback=spec.loopback) as where:
        environment = {**machine(), **where.describe()}
        ranks = run_ranks(where, spec.world_size, "gradsync.bench.train_rank", spec.model_dump_json(), on_event)
    # On loopback all ranks share one interface, which counts what all of them send.
    on_loopback = isinstance(where, Loopback)
    sharing = spec.world_size if on_loopback else spec.ranks_per_node
    runs = {name: _merge(name, [rank[name] for rank in ranks], spec, sharing) for name in ranks[0]}
    run = TrainingRun(
        workload=spec.workload,
        description=workload.describe(),
        source=workload.source,
        nodes=spec.nodes,
        link="loopback (not shaped)" if on_loopback else spec.link,
        methods=[runs[name] for name in spec.expanded_methods()],
        records=[],
        environment=environment,
        versions=versions(),
        commit=commit(),
        notes=notes,
    )
    run.records = training_records(spec, run, {name: [rank[name] for rank in ranks] for name in ranks[0]})
    return run


def training_records(spec: TrainSpec, run: TrainingRun, ranks: dict[str, list[dict[str, Any]]]) -> list[Record]:
    """Every method against the baseline: the first method, or the best of DDP's sweep if it was asked for."""
    first = spec.expanded_methods()[0]
    blocks = {name: [] if figures[0]["failed"] else block_medians(figures) for name, figures in ranks.items()}
    baseline, name, judged = first, first, slice(None)
    if "ddp" in spec.methods:
        # The best is picked on even blocks and judged on odd ones, so that picking does not flatter it.
        good = [m for m in DDP_SWEEP if blocks[m]]
        baseline = min(good, key=lambda m: statistics.median(blocks[m][::2]), default=first)
        name, judged = "ddp", slice(1, None, 2)
    aa = _ratio(blocks[f"{first}:{AGAIN}"], blocks[first])
    base_run = next(m for m in run.methods if m.name == baseline)
    records = []
    for subject in run.methods:
        if subject.name != baseline:
            mine, base = blocks[subject.name][judged], blocks[baseline][judged]
            records.append(_record(spec, run, subject, mine, base_run, base, aa).model_copy(update={"baseline": name}))
    return records


def _ratio(mine: list[float], base: list[float]) -> Spread | None:
    """Pair by pair; None when one of the two failed."""
    return Spread.of([a / b for a, b in zip(mine, base, strict=True)]) if mine and base else None


def _record(
    spec: TrainSpec,
    run: TrainingRun,
    subject: MethodRun,
    mine: list[float],
    baseline: MethodRun,
    base: list[float],
    aa: Spread | None,
) -> Record:
    """One record from the block medians of both; what failed has no figures, and the record has its error."""
    lost = f"the baseline {baseline.name} failed: {baseline.failed}" if baseline.failed else None
    params = {"nodes": spec.nodes, "link": run.link, "workload": spec.workload, "block_steps": spec.block_steps}
    params |= {"ranks_per_node": spec.ranks_per_node, "baseline_method": baseline.name, **spec.scenario, **spec.options}
    payload = sum(row.sent_bytes for row in subject.buckets) if subject.buckets else None
    return Record(
        case="train",
        metric="step_s",
        subject=subject.name,
        baseline=baseline.name,
        params=params,
        repeats=len(mine),
        subject_s=Spread.of(mine) if mine else None,
        baseline_s=Spread.of(base) if base else None,
        ratio=_ratio(mine, base),
        aa=aa,
        loss=subject.final or None,
        seeds=[spec.seed],
        wire_bytes=WireBytes(subject=subject.interface_bytes_per_step, baseline=baseline.interface_bytes_per_step),
        payload_bytes=WireBytes(subject=payload),
        versions=run.versions,
        environment=run.environment,
        commit=run.commit,
        failed=subject.failed or lost,
    )


def block_medians(ranks: list[dict[str, Any]]) -> list[float]:
    """Median step time of each counted block: of the slowest rank, which is the one everybody waits for."""
    return [
        max(statistics.median(block) for block in blocks) for blocks in zip(*(r["blocks"] for r in ranks), strict=True)
    ]


def _merge(name: str, ranks: list[dict[str, Any]], spec: TrainSpec, sharing: int) -> MethodRun:
    """One method's figures over the ranks; `sharing` ranks count on the same interface."""
    failed = next((r["failed"] for r in ranks if r["failed"]), None)
    if failed:
        return MethodRun(name=name, failed=failed)
    steps = spec.blocks * spec.block_steps
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
        buckets=[BucketRow(**row) for row in ranks[0]["buckets"]],
        timeline=[TimelineTask(**task) for task in ranks[0]["timeline"]],
    )
