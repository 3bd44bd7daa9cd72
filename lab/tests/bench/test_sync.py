"""The figures of an exchange run are in its records."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from gradsync.comm import LocalGroup, run_local
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import Pattern, Transfer
from gradsync.costs.transport import DIRECT_BYTES
from gradsync.tensors.bucket import Layout
from gradsync_lab.bench.sync import SyncSpec, sync_records
from gradsync_lab.bench.sync_rank import bound_rounds, gradients_of_step
from gradsync_lab.workloads import load

ALPHA_S, BYTES_PER_S = 1e-3, 1e8
COST = asdict(CostModel(ALPHA_S, BYTES_PER_S, 3e8, {"sum_tables": KernelCost(call_s=2e-3, byte_s=1e-8)}))
TRANSFERS = [(5, 1, 2e6), (3, 3, 1e6)]  # rounds, those of the bound, bytes
COMPUTATIONS = [("sum_tables", 2, 4e6), ("pack", 1, 6e6)]  # calls, bytes


def rank_result(subject_s: list[float], baseline_s: list[float], wire_bytes: float) -> dict[str, Any]:
    case = {
        "params": {"workload": "w"},
        "baseline": "ddp_sparse",
        "times": {"ddp_sparse": baseline_s, "agsparse": subject_s, "again": [1.1 * t for t in baseline_s]},
        "cpu_s": {"ddp_sparse": 9.0, "agsparse": subject_s[0] / 4, "again": 9.0},
        "wire_bytes": {"ddp_sparse": 2 * wire_bytes, "agsparse": wire_bytes, "again": 2 * wire_bytes},
        "payload_bytes": {"agsparse": 700.0},
        "costs": {"agsparse": {"transfers": TRANSFERS, "computations": COMPUTATIONS}},
        "selected": None,
    }
    return {"cost": COST, "cases": [case]}


RANKS = [rank_result([1.0, 4.0], [4.0, 2.0], 1000.0), rank_result([2.0, 3.0], [3.0, 8.0], 3000.0)]


def records(**options: Any) -> Any:
    spec = SyncSpec(nodes=2, link="200mbit", **options)
    (record,) = sync_records(spec, RANKS, {"cores": 2}, on_loopback=spec.loopback)
    return record


def test_an_exchange_is_over_when_its_slowest_rank_is_done() -> None:
    record = records()
    assert (record.subject, record.baseline, record.repeats) == ("agsparse", "ddp_sparse", 2)
    assert record.subject_s.median == pytest.approx((2.0 + 4.0) / 2)
    assert record.baseline_s.median == pytest.approx((4.0 + 8.0) / 2)
    assert record.ratio.p5 == record.ratio.p95 == 0.5  # 2 / 4 and 4 / 8, pair by pair
    assert record.aa.median == pytest.approx(1.1)


def test_the_bound_is_what_the_fitted_network_allows_for_the_transfers() -> None:
    record = records()
    assert record.environment["alpha_s"] == pytest.approx(ALPHA_S)
    assert record.environment["bandwidth_bytes_per_s"] == pytest.approx(BYTES_PER_S)
    assert record.bound_s == pytest.approx(4 * ALPHA_S + 3e6 / BYTES_PER_S)
    assert record.params["bound_ratio"] == pytest.approx(record.subject_s.median / record.bound_s)


def test_the_prediction_adds_what_kernels_were_measured_to_take_else_the_memory_rate() -> None:
    record = records()
    assert record.environment["kernels"]["sum_tables"]["call_s"] == 2e-3
    computed_s = 2 * 2e-3 + 4e6 * 1e-8 + 6e6 / 3e8
    assert record.predicted_s == pytest.approx(8 * ALPHA_S + 3e6 / BYTES_PER_S + computed_s)


def test_processor_time_is_that_of_all_ranks_together() -> None:
    assert records().cpu_s == pytest.approx((1.0 + 2.0) / 4)


def test_bytes_are_the_busiest_nodes() -> None:
    record = records()
    assert (record.wire_bytes.subject, record.wire_bytes.baseline) == (3000.0, 6000.0)
    assert record.payload_bytes.subject == 700.0
    assert record.params["link"] == "200mbit"


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_on_loopback_a_node_has_its_share_of_the_one_interface(ranks_per_node: int) -> None:
    record = records(loopback=True, ranks_per_node=ranks_per_node)
    assert record.wire_bytes.subject == 3000.0 / 2
    assert record.params["link"] == "loopback (not shaped)"


@pytest.mark.parametrize(
    ("pattern", "rounds"), [(Pattern.ALL_REDUCE, 2), (Pattern.ALL_TO_ALL, 3), (Pattern.ALL_GATHER, 3)]
)
def test_the_bound_takes_one_latency_of_what_can_hide_the_others_behind_its_bytes(
    pattern: Pattern, rounds: int
) -> None:
    small, large = (Transfer("", pattern, (nbytes,) * 4) for nbytes in (8.0, 2.0 * DIRECT_BYTES))
    assert (bound_rounds(small), bound_rounds(large)) == (rounds, 1)


def selecting(times: dict[str, list[float]], selected: str) -> Any:
    """Returns the record of a selection from one rank's times."""
    names = list(times)
    case = {
        "params": {"workload": "w"},
        "baseline": names[0],
        "times": {**times, "again": times[names[0]]},
        "cpu_s": dict.fromkeys([*names, "again"], 1.0),
        "wire_bytes": dict.fromkeys([*names, "again"], 1.0),
        "payload_bytes": {},
        "costs": {},
        "selected": selected,
    }
    ranks = [{"cost": COST, "cases": [case]}]
    return sync_records(SyncSpec(nodes=1), ranks, {}, on_loopback=False)[-1]


def test_the_selected_scheme_is_judged_by_other_repeats_than_its_rival_is_picked_by() -> None:
    """Repeats 0, 1, 4 and 5 choose the rival, the others compare; being fast in the former does not help."""
    base = [9.0] * 8
    lucky, steady = [1.0, 1.0, 8.0, 8.0, 1.0, 1.0, 8.0, 8.0], [4.0] * 8
    record = selecting({"ddp_sparse": base, "lucky": lucky, "steady": steady}, "steady")
    assert (record.subject, record.baseline, record.metric) == ("steady", "lucky", "selected_sync_s")
    assert (record.ratio.median, record.repeats) == (0.5, 4)
    own = selecting({"ddp_sparse": base, "slow": [6.0] * 8, "steady": steady}, "steady")
    assert (own.baseline, own.ratio.median) == ("steady", 1.0)


def test_the_order_of_turns_favours_neither_the_pick_nor_the_judgement() -> None:
    """A scheme that is slow in every second repeat, as after a slow scheme, is slow in both halves."""
    behind = [1.0, 5.0] * 4
    record = selecting({"ddp_sparse": [9.0] * 8, "behind": behind, "other": [4.0] * 8}, "other")
    assert record.baseline == "behind"
    assert sorted([record.baseline_s.p5, record.baseline_s.p95]) == [1.0, 5.0]


def test_ddps_ways_may_be_the_fastest_of_all() -> None:
    record = selecting({"ddp_sparse": [3.0] * 8, "ddp": [1.0] * 8, "sparse": [2.0] * 8}, "sparse")
    assert (record.baseline, record.ratio.median) == ("ddp", 2.0)


def test_a_step_without_sparse_gradients_brings_all_of_them_end_to_end() -> None:
    workload = load("resnet8", data="digits", batch_size=8)
    models = [workload.model(sparse=True) for _ in range(2)]

    def rank_main(group: LocalGroup) -> Any:
        found = gradients_of_step(workload, models[group.rank], group, seed=0)
        found.prepare()
        return found, found.x()

    for rank, (found, brought) in enumerate(run_local(2, rank_main)):
        loss = workload.loss(models[rank], next(workload.batches(rank, 2, seed=0)))
        gradients = torch.autograd.grad(loss, list(models[rank].parameters()))
        assert found.layout is Layout.FLAT
        assert torch.equal(brought, torch.cat([gradient.flatten() for gradient in gradients]))


def test_a_step_with_sparse_gradients_brings_these_by_rows() -> None:
    workload = load("lstm", data="zipf", batch_size=2, vocabulary=500, num_negatives=16)
    models = [workload.model(sparse=True) for _ in range(2)]
    for found in run_local(2, lambda group: gradients_of_step(workload, models[group.rank], group, seed=0)):
        assert (found.layout, len(found.specs)) == (Layout.ROWS, 3)
