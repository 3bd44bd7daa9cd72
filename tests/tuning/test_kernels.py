"""Kernels of candidates are rehearsed at growing sizes, the same ones on all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from gradsync.comm import LocalGroup, run_local
from gradsync.comm.links import highest_over
from gradsync.compressors import THC, Cast, Compressor, ErrorFeedback, SharedBlockInt, TopK, dgc
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import KernelCost
from gradsync.costs.steps import Compute
from gradsync.planner.pieces import Pieces, at_once
from gradsync.plans.profile import KernelEstimate
from gradsync.schemes import AGSparse, CompressedTwoWay, PowerSGD, Route, Scheme, ways
from gradsync.tuning import kernels as rehearsed
from gradsync.tuning.kernels import (
    CANDIDATES,
    CPU,
    FEWEST_SIZES,
    NUMELS,
    flat_schemes,
    kernel_costs,
    measured_kernels,
)
from gradsync.tuning.rehearsal import Sample, rehearse_dense

NO_PLANS = patch.object(rehearsed, "planned_schemes", lambda placement: ())


def test_a_compressor_stands_for_the_schemes_that_may_carry_it() -> None:
    compressor = ErrorFeedback(TopK(0.01))
    assert flat_schemes([PowerSGD(2), compressor]) == [PowerSGD(2), *ways(compressor)]
    with pytest.raises(ValueError, match="schemes of flat buckets, got AGSparse"):
        flat_schemes([AGSparse()])


@pytest.mark.parametrize("candidate", [Route(("all_reduce",)), *CANDIDATES], ids=lambda scheme: scheme.title)
def test_dense_buckets_are_rehearsed_part_by_part_with_what_schemes_keep(candidate: Scheme[Any]) -> None:
    samples = at_once(rehearse_dense([candidate], 1 << 10))
    steps = [step for computed, _ in samples for step in computed]
    assert samples and all(seconds > 0 for _, seconds in samples)
    assert all(isinstance(step, Compute) and step.nbytes > 0 for step in steps)


@pytest.mark.parametrize("compressor", [SharedBlockInt(2), THC(2), dgc(0.01, momentum=0.9)], ids=lambda c: c.title)
def test_compressors_made_for_other_ranks_are_rehearsed_among_as_many(compressor: Compressor[Any]) -> None:
    samples = at_once(rehearse_dense(flat_schemes([compressor]), 1 << 10))
    assert compressor.kernel("compress") in {step.kernel for computed, _ in samples for step in computed}


def test_sizes_grow_until_the_budget_is_spent() -> None:
    asked: list[int] = []

    def rehearse(schemes: object, numel: int, device: object) -> Pieces[list[Sample]]:
        asked.append(numel)
        yield
        return [((Compute("compress", 4.0 * numel),), 1e-4 + numel * 1e-9)]

    def highest(mine: Sequence[float]) -> list[float]:
        return list(mine)

    with NO_PLANS, patch.object(rehearsed, "rehearse_dense", rehearse):
        all_sizes = at_once(measured_kernels((), Placement.one_per_node(2), highest, budget_s=1e3))
        assert asked == list(NUMELS) and list(all_sizes) == ["compress"]
        asked.clear()
        at_once(measured_kernels((), Placement.one_per_node(2), highest, budget_s=0.0))
    assert asked == list(NUMELS[:FEWEST_SIZES])


def test_the_slowest_rank_counts() -> None:
    def kernels(group: LocalGroup) -> dict[str, KernelEstimate]:
        candidates = (Cast("bfloat16" if group.rank else "float16"),)
        return at_once(measured_kernels(candidates, Placement.one_per_node(2), highest_over(group, 5.0)))

    def rehearse(schemes: Sequence[Scheme[Any]], numel: int, device: object) -> Pieces[list[Sample]]:
        yield
        slow = any("bfloat16" in repr(scheme) for scheme in schemes)
        return [((Compute("cast", 4.0 * each),), 2e-3 if slow else 1e-3) for each in NUMELS]

    with (
        NO_PLANS,
        patch.object(rehearsed, "rehearse_dense", rehearse),
        patch.object(rehearsed, "_on_shared_cores", as_they_are),
    ):
        first, second = run_local(2, kernels)
    assert first == second and first["cast"].call_s.value == pytest.approx(2e-3)


def as_they_are(samples: Pieces[list[Sample]], device: object) -> Pieces[list[Sample]]:
    return samples


def test_the_slowest_rank_counts_and_all_ranks_know_the_same() -> None:
    def samples(cost: KernelCost) -> list[Sample]:
        steps = [Compute("pack", nbytes) for nbytes in (1e3, 1e5, 1e7)]
        return [((step,), cost.seconds(step.nbytes, step.calls)) for step in steps]

    each = [samples(KernelCost(1e-4, 3e-9)), samples(KernelCost(1e-4, 1e-9))]

    def rank(group: LocalGroup) -> dict[str, KernelCost]:
        return at_once(kernel_costs((group.rank,), highest_over(group, 5.0)))

    def rehearse(schemes: tuple[int], device: object) -> Pieces[list[Sample]]:
        yield
        return each[schemes[0]]

    with patch.object(rehearsed, "rehearse", rehearse), patch.object(rehearsed, "_on_shared_cores", as_they_are):
        first, second = run_local(2, rank)
    assert first == second and first["pack"].knee_bytes == 0.0
    assert (first["pack"].call_s, first["pack"].byte_s) == (pytest.approx(1e-4), pytest.approx(3e-9))


def test_ranks_that_share_cores_take_longer() -> None:
    parts: list[Sample] = [((Compute("pack", 1e6, calls=calls),), 1e-3 * calls + 1e-2) for calls in (1, 2, 3)]

    def rehearse() -> Pieces[list[Sample]]:
        time.sleep(0.2)  # another rank has the core
        ends_s = time.thread_time() + 0.1
        while time.thread_time() < ends_s:
            pass
        yield
        return parts

    pieces = rehearsed._on_shared_cores(rehearse(), CPU)
    next(pieces)
    time.sleep(0.5)  # a training step, which does not count
    stretched = at_once(pieces)
    assert [computed for computed, _ in stretched] == [computed for computed, _ in parts]
    factors = [longer / alone for (_, longer), (_, alone) in zip(stretched, parts, strict=True)]
    assert 2.5 < factors[0] < 7 and factors == pytest.approx([factors[0]] * 3)


def test_candidates_are_schemes_that_plans_can_name() -> None:
    assert any(isinstance(candidate, CompressedTwoWay) for candidate in CANDIDATES)
    assert flat_schemes(CANDIDATES) == list(CANDIDATES)
