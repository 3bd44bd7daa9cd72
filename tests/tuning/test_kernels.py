"""Kernels of candidates are rehearsed at growing sizes, by all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from gradsync.compressors import THC, Cast, Compressor, ErrorFeedback, SharedBlockInt, TopK, dgc
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Compute
from gradsync.schemes import AGSparse, AllReduce, CompressedTwoWay, PowerSGD, Scheme, ways
from gradsync.tuning import kernels as rehearsed
from gradsync.tuning.kernels import CANDIDATES, FEWEST_SIZES, NUMELS, flat_schemes, measured_kernels
from gradsync.tuning.rehearsal import Sample, rehearse_dense


def test_a_compressor_stands_for_the_schemes_that_may_carry_it() -> None:
    compressor = ErrorFeedback(TopK(0.01))
    assert flat_schemes([PowerSGD(2), compressor]) == [PowerSGD(2), *ways(compressor)]
    with pytest.raises(ValueError, match="schemes of flat buckets, got AGSparse"):
        flat_schemes([AGSparse()])


@pytest.mark.parametrize("candidate", [AllReduce(), *CANDIDATES], ids=lambda scheme: scheme.title)
def test_dense_buckets_are_rehearsed_part_by_part_with_what_schemes_keep(candidate: Scheme[Any]) -> None:
    samples = rehearse_dense([candidate], 1 << 10)
    steps = [step for computed, _ in samples for step in computed]
    assert samples and all(seconds > 0 for _, seconds in samples)
    assert all(isinstance(step, Compute) and step.nbytes > 0 for step in steps)


@pytest.mark.parametrize("compressor", [SharedBlockInt(2), THC(2), dgc(0.01, momentum=0.9)], ids=lambda c: c.title)
def test_compressors_made_for_other_ranks_are_rehearsed_among_as_many(compressor: Compressor[Any]) -> None:
    samples = rehearse_dense(flat_schemes([compressor]), 1 << 10)
    assert compressor.kernel("compress") in {step.kernel for computed, _ in samples for step in computed}


def test_sizes_grow_until_the_budget_is_spent() -> None:
    asked: list[int] = []

    def rehearse(schemes: object, numel: int) -> list[Sample]:
        asked.append(numel)
        return [((Compute("compress", 4.0 * numel),), 1e-4 + numel * 1e-9)]

    def highest(mine: Sequence[float]) -> list[float]:
        return list(mine)

    with patch.object(rehearsed, "PLANNED", ()), patch.object(rehearsed, "rehearse_dense", rehearse):
        all_sizes = measured_kernels((), Placement.one_per_node(2), highest, budget_s=1e3)
        assert asked == list(NUMELS) and list(all_sizes) == ["compress"]
        asked.clear()
        measured_kernels((), Placement.one_per_node(2), highest, budget_s=0.0)
    assert asked == list(NUMELS[:FEWEST_SIZES])


def test_the_slowest_rank_counts() -> None:
    def kernels(slower: float) -> float:
        def highest(mine: Sequence[float]) -> list[float]:
            return [1.0 * slower] * len(mine)

        dense = [((Compute("cast", 4.0 * numel),), 1e-4) for numel in NUMELS]
        with (
            patch.object(rehearsed, "PLANNED", ()),
            patch.object(rehearsed, "rehearse_dense", lambda schemes, numel: dense),
        ):
            found = measured_kernels((Cast("bfloat16"),), Placement.one_per_node(2), highest)
        return found["cast"].call_s.value

    assert kernels(2.0) == pytest.approx(2 * kernels(1.0))


def test_candidates_are_schemes_that_plans_can_name() -> None:
    assert any(isinstance(candidate, CompressedTwoWay) for candidate in CANDIDATES)
    assert flat_schemes(CANDIDATES) == list(CANDIDATES)
