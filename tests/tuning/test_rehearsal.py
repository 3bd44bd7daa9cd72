"""Rehearsals time the computations of schemes between their awaits, part by part, as their steps list them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gradsync.costs.steps import Compute
from gradsync.planner.pieces import at_once
from gradsync.schemes import DOUBLING_OF_ROWS, AGSparse, BalancedElements, BalancedParallelism, Scheme, Traits
from gradsync.tensors.bucket import Layout
from gradsync.tuning.rehearsal import rehearse, times_between_awaits_s

WORK_S = 0.02


@dataclass(frozen=True)
class Busy(Scheme[torch.Tensor]):
    """A scheme that computes before its only transfer, not after it."""

    traits = Traits(Layout.FLAT)

    def stages(self, size: int) -> tuple[str, ...]:
        return ("sum",)

    async def synchronize(self, x: torch.Tensor, state: Any, group: Any, scale: float) -> Any:
        ends_s = time.thread_time() + WORK_S
        while time.thread_time() < ends_s:
            pass
        time.sleep(WORK_S)  # takes no processor
        return await group.all_reduce(x), state

    def steps(self, *known: Any, **more: Any) -> Any:
        raise AssertionError("not asked")


def test_time_is_told_apart_by_await_and_is_the_processors() -> None:
    before, behind = at_once(times_between_awaits_s(Busy(), [torch.ones(4)] * 3))
    assert WORK_S <= before < 1.9 * WORK_S
    assert behind < WORK_S / 2


def test_ranks_that_rehearse_exchange_what_they_have() -> None:
    inputs = [torch.tensor([0.0, 1.0 + rank]) for rank in range(3)]
    at_once(times_between_awaits_s(BalancedElements(), inputs))
    assert [float(x[1]) for x in inputs] == [1.0, 2.0, 3.0]  # and work on copies


@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [
        (BalancedParallelism(), [{"stripe_rows"}, {"sum_stripes"}, {"join_stripes"}]),
        (AGSparse(), [{"pack_table"}, {"sum_tables"}]),
        (DOUBLING_OF_ROWS, [{"sum_rows", "pack_rows"}, {"sum_rows", "pack_rows"}, {"sum_rows"}]),
    ],
    ids=lambda value: getattr(value, "title", ""),
)
def test_each_part_has_the_kernels_of_the_steps_in_it(scheme: Scheme[Any], kernels: list[set[str]]) -> None:
    samples = at_once(rehearse([scheme]))
    assert [{step.kernel for step in computed} for computed, _ in samples[: len(kernels)]] == kernels
    assert len(samples) % len(kernels) == 0 and len(samples) > len(kernels)  # several sizes
    assert all(seconds > 0 and all(isinstance(s, Compute) for s in computed) for computed, seconds in samples)
