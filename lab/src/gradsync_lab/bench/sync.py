"""Measures the gradient exchange alone: schemes on real gradients and on plain sizes, compared with DDP's collectives.

Latency and bandwidth are fitted in the same run from plain all-reduces, the memory's rate from a copy. `bound_s` is the
least time that the network allows for the rounds and bytes of a scheme's `steps`; `predicted_s` adds the computation in
the steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from gradsync.costs.cost_model import CostModel
from gradsync.costs.steps import Compute
from gradsync.schemes import AllReduce, BalancedElements

from ..cluster import Scenario
from ..report.record import Record, Spread, WireBytes
from . import topk
from .launch import LOOPBACK, Loopback, cluster, once_more_after_crash, run_ranks
from .methods import SPARSE_SCHEMES
from .provenance import code, machine

DENSE_SIZES_BYTES = (4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 4 << 20)
# ddp: dense all-reduce, compared with DDP's sparse one; ddp_bf16: in 16 bits, compared with ddp.
SUBJECTS = (AllReduce.name, *SPARSE_SCHEMES, BalancedElements.name, "ddp", "ddp_bf16")
FIT_SIZES_BYTES = (8, 4 << 10, 1 << 20, 4 << 20)


class SyncSpec(BaseModel):
    """The settings of a run that times gradient exchanges."""

    workloads: tuple[str, ...] = ("deepfm",)
    options: dict[str, Any] = {}  # of every workload
    nodes: int = 4
    ranks_per_node: int = 1
    link: str = "1gbit"
    scenario: dict[str, Any] = {}
    loopback: bool = False
    schemes: Literal["planned", "all"] = "planned"  # all: every candidate of selection, and how the selected one does
    repeats: int = 15
    warmup: int = 3
    seed: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


def run_sync(spec: SyncSpec, on_event: Callable[[dict[str, Any]], None]) -> tuple[list[Record], list[str]]:
    """Times the exchanges, and returns their records and notes on the cluster that was used.

    Raises:
        ValueError: a workload or option is unknown.
        RuntimeError: a rank failed.
    """
    for name in spec.workloads:
        topk.load(name, **spec.options)  # fetched here: ranks in a lab reach no registry
    scenario = Scenario(nodes=spec.nodes, link=spec.link, ranks_per_node=spec.ranks_per_node, **spec.scenario)
    notes: list[str] = []
    with cluster(scenario, notes, loopback=spec.loopback) as where:
        environment = {**machine(), **where.describe()}

        def run_exchanges() -> list[dict[str, Any]]:
            return run_ranks(where, spec.world_size, "gradsync_lab.bench.sync_rank", spec.model_dump_json(), on_event)

        ranks = once_more_after_crash(run_exchanges, notes, on_event)  # the baseline is torch's sparse all-reduce
    return sync_records(spec, ranks, environment, on_loopback=isinstance(where, Loopback)), notes


def sync_records(
    spec: SyncSpec, ranks: list[dict[str, Any]], environment: dict[str, Any], *, on_loopback: bool
) -> list[Record]:
    """Makes a record for each timed exchange against its case's baseline, from the measurements of all ranks."""
    cost = CostModel.of(ranks[0]["cost"])  # all ranks have agreed on it
    environment = {**environment, **ranks[0]["cost"]}
    params = {"nodes": spec.nodes, "link": LOOPBACK if on_loopback else spec.link}
    params |= {"ranks_per_node": spec.ranks_per_node, **spec.scenario}
    # On loopback all ranks share one interface, which counts the bytes of all nodes.
    node_share = 1 / spec.nodes if on_loopback else 1.0
    records = []
    for index, case in enumerate(ranks[0]["cases"]):
        rows = [rank["cases"][index] for rank in ranks]
        subjects = [name for name in case["times"] if name not in ("again", case["baseline"])]
        found = [_record(spec, name, rows, params, cost, environment, node_share) for name in subjects]
        if case["selected"] is not None:
            found.append(_selection_record(case, rows, next(r for r in found if r.subject == case["selected"])))
        records += found
    return records


def _selection_record(case: dict[str, Any], ranks: list[dict[str, Any]], selected: Record) -> Record:
    """Returns a record of the selected scheme against the fastest exchange, DDP's collectives included.

    One half of the repeats chooses the fastest, the other half compares, so that luck does not decide. The fastest may
    be the selected scheme itself. Turns alternate in order; each half gets pairs of both orders, and the last of an odd
    number of turns has no pair.
    """
    times = {name: _slowest(ranks, name) for name in case["times"] if name != "again"}

    def half(name: str, which: int) -> list[float]:
        return [seconds for repeat, seconds in enumerate(times[name]) if repeat // 2 % 2 == which]

    rival = min(times, key=lambda name: statistics.median(half(name, 0)))
    mine, base = half(selected.subject, 1), half(rival, 1)
    return selected.model_copy(
        update={
            "metric": "selected_sync_s",
            "baseline": rival,
            "params": {k: v for k, v in selected.params.items() if k != "bound_ratio"} | {"phase": "selection"},
            "repeats": len(mine),
            "subject_s": Spread.of(mine),
            "baseline_s": Spread.of(base),
            "ratio": Spread.of([a / b for a, b in zip(mine, base, strict=True)]),
            "aa": None,
            "cpu_s": None,
            "wire_bytes": None,
        }
    )


def _slowest(ranks: list[dict[str, Any]], name: str) -> list[float]:
    """Returns the seconds of the named exchange on the slowest rank, one for each repeat."""
    return [max(times) for times in zip(*(rank["times"][name] for rank in ranks), strict=True)]


def _record(
    spec: SyncSpec,
    subject: str,
    ranks: list[dict[str, Any]],
    params: dict[str, Any],
    cost: CostModel,
    environment: dict[str, Any],
    node_share: float,
) -> Record:
    case = ranks[0]

    def node_bytes(name: str) -> float:
        return float(max(r["wire_bytes"][name] for r in ranks) * node_share)

    baseline = case["baseline"]
    mine, base = _slowest(ranks, subject), _slowest(ranks, baseline)
    bound_s, predicted_s = _expected_s(case["costs"][subject], cost) if subject in case["costs"] else (None, None)
    extra = {"bound_ratio": Spread.of(mine).median / bound_s} if bound_s else {}
    if subject in case.get("memory_bytes", {}):
        extra["memory_bytes"] = max(r["memory_bytes"][subject] for r in ranks)
    return Record(
        case="sync",
        metric="sync_s",
        subject=subject,
        baseline=baseline,
        params={**params, **case["params"], **extra},
        options=case.get("options", {}),
        repeats=len(mine),
        subject_s=Spread.of(mine),
        baseline_s=Spread.of(base),
        ratio=Spread.of([a / b for a, b in zip(mine, base, strict=True)]),
        aa=Spread.of([a / b for a, b in zip(_slowest(ranks, "again"), base, strict=True)]),
        predicted_s=predicted_s,
        bound_s=bound_s,
        cpu_s=sum(r["cpu_s"][subject] for r in ranks),
        seeds=[spec.seed],
        wire_bytes=WireBytes(subject=node_bytes(subject), baseline=node_bytes(baseline)),
        payload_bytes=WireBytes(subject=case["payload_bytes"].get(subject)),
        **code(),
        environment=environment,
    )


def _expected_s(costs: dict[str, Any], cost: CostModel) -> tuple[float | None, float]:
    """Returns a lower bound on a scheme's seconds, None where ranks share nodes, and the predicted sum of its steps."""
    if "predicted_s" in costs:
        return None, float(costs["predicted_s"])
    rounds, fewest, nbytes = (sum(column) for column in zip(*costs["transfers"], strict=True))
    bytes_s = nbytes / cost.bandwidth_bytes_per_s + len(costs["transfers"]) * cost.stage_s
    compute_s = cost.total_s(Compute(kernel, nbytes, calls=calls) for kernel, calls, nbytes in costs["computations"])
    return fewest * cost.alpha_s + bytes_s, rounds * cost.alpha_s + bytes_s + compute_s
