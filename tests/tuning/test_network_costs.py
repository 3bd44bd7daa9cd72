"""What plans are made by: kernels' costs fitted from rehearsals, the same on all ranks."""

from __future__ import annotations

import time

import pytest

from gradsync.comm import LocalGroup, run_local
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import Compute
from gradsync.tuning import network_costs as measure
from gradsync.tuning.network_costs import agreed, fit_kernels, measured_network
from gradsync.tuning.rehearsal import Sample

TRUTH = {"pack": KernelCost(2e-4, 1e-9), "sum": KernelCost(5e-5, 4e-9)}


def test_the_fit_tells_kernels_apart_that_run_in_one_part() -> None:
    model = CostModel(0.0, 1.0, kernels=TRUTH)
    parts = [
        (Compute("pack", pack, calls=calls), Compute("sum", sums))
        for pack, calls, sums in ((1e5, 1, 1e6), (1e6, 4, 1e5), (1e7, 2, 1e7), (1e4, 8, 1e4), (1e3, 1, 1e8))
    ]
    fitted = fit_kernels([(part, model.total_s(part)) for part in parts])
    for name, cost in TRUTH.items():
        assert fitted[name].call_s == pytest.approx(cost.call_s, rel=1e-6)
        assert fitted[name].byte_s == pytest.approx(cost.byte_s, rel=1e-6)


def test_no_cost_is_negative() -> None:
    fitted = fit_kernels([((Compute("pack", 1e6),), 2e-3), ((Compute("pack", 2e6),), 1e-3)])
    assert fitted["pack"].call_s > 0 and fitted["pack"].byte_s == 0


def test_the_slowest_rank_counts_and_all_ranks_know_the_same() -> None:
    mine = [{"pack": KernelCost(1e-4, 3e-9)}, {"pack": KernelCost(2e-4, 1e-9)}]

    def rank(group: LocalGroup) -> dict[str, KernelCost]:
        return agreed(mine[group.rank], lambda costs: group.all_gather(costs).wait(5.0))

    assert run_local(2, rank) == [{"pack": KernelCost(2e-4, 3e-9)}] * 2


def test_where_the_network_was_not_measured_nothing_is_known() -> None:
    assert run_local(2, lambda group: measured_network(group, 5.0)) == [None, None]


def test_ranks_that_share_cores_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [((Compute("pack", 1e6, calls=calls),), 1e-3 * calls + 1e-2) for calls in (1, 2, 3)]

    def rehearse(schemes: object) -> list[Sample]:
        time.sleep(0.2)  # another rank has the core
        ends_s = time.thread_time() + 0.1
        while time.thread_time() < ends_s:
            pass
        return parts

    monkeypatch.setattr(measure, "rehearse", rehearse)
    alone, shared = fit_kernels(parts)["pack"], measure.kernel_costs.__wrapped__(())["pack"]
    assert shared.call_s > 2.5 * alone.call_s
    assert shared.byte_s / alone.byte_s == pytest.approx(shared.call_s / alone.call_s)
