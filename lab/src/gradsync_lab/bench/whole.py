"""Trains methods to a loss on an emulated cluster, to check the estimate of steps times seconds per step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from .. import workloads
from ..cluster import Scenario
from .launch import Loopback, cluster, once_more_after_crash, run_ranks
from .methods import TORCH_SPARSE
from .train import TrainSpec


class WholeSpec(TrainSpec):
    """The settings of training runs to a loss: each synchronous method trains alone, one after the other."""

    loss: float  # held-out, of the mean model, smoothed as `reach.crossing` does
    every: int = Field(ge=1)  # steps between evaluations, which are not timed
    most_steps: int


@dataclass(frozen=True)
class WholeRun:
    """The seconds and steps that one method took to the loss `WholeSpec.loss`; None if not reached, or if it failed."""

    seconds: float | None  # of the slowest rank, without evaluations and without measuring and trying plans before
    steps: float | None
    failed: str | None = None


def run_whole(
    spec: WholeSpec, on_event: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, WholeRun], dict[str, Any], list[str]]:
    """Trains each method to the loss `spec.loss`; returns the runs by method, a description of the cluster, and notes.

    Calls `on_event` once for each method.

    Raises:
        ValueError: a workload is unknown.
        RuntimeError: a rank failed, or this machine cannot emulate links with limited rates.
    """
    workloads.load(spec.workload, **spec.options)  # fetched here: ranks in a lab reach no registry
    scenario = Scenario(nodes=spec.nodes, link=spec.link, ranks_per_node=spec.ranks_per_node, **spec.scenario)
    notes: list[str] = []
    with cluster(scenario, notes, loopback=spec.loopback) as where:
        if isinstance(where, Loopback) and not spec.loopback:
            raise RuntimeError("; ".join(notes))

        def run() -> list[dict[str, Any]]:
            module = "gradsync_lab.bench.whole_rank"
            return run_ranks(where, spec.world_size, module, spec.model_dump_json(), on_event)

        may_crash = not TORCH_SPARSE.isdisjoint(spec.methods)
        ranks = once_more_after_crash(run, notes, on_event) if may_crash else run()
        described = where.describe()
    return {name: _merged([rank[name] for rank in ranks]) for name in spec.methods}, described, notes


def _merged(ranks: list[dict[str, Any]]) -> WholeRun:
    """Returns a method's seconds and steps to the loss; between two loss evaluations the slowest rank's time counts."""
    failures = [rank for rank in ranks if rank["failed"]]
    if failures:
        return WholeRun(None, None, min(failures, key=lambda rank: float(rank["failed_s"]))["failed"])
    place = ranks[0]["place"]
    if place is None:
        return WholeRun(None, None)
    parts_s = [max(parts) for parts in zip(*(rank["parts_s"] for rank in ranks), strict=True)]
    # The last part up to where the line between two evaluations is at the loss.
    seconds = sum(parts_s[:-1]) + parts_s[-1] * (place + 1 - (len(parts_s) - 1))
    return WholeRun(seconds, ranks[0]["every"] * (place + 1))
