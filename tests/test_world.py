"""Tests of `World`: its ranks return results, errors and hangs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.world import Ranks, World


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def total(mine: int) -> int:
    buffer = torch.tensor([mine * (dist.get_rank() + 1)])
    dist.all_reduce(buffer)
    return int(buffer)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("on purpose")


def warn() -> None:
    warnings.warn("a warning", stacklevel=1)


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.parametrize("size", [4, 1, 2, 2, 3])
def test_each_size_has_its_own_process_group(world: Callable[[int], Ranks], size: int) -> None:
    assert world(size).run(place) == [(rank, size) for rank in range(size)]
    assert world(size).run(total, 10) == [10 * sum(range(1, size + 1))] * size


def test_a_rank_that_raises_shows_its_traceback_and_the_world_goes_on(world: Callable[[int], Ranks]) -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 ranks failed\n--- rank 1: Traceback[\s\S]*on purpose"):
        world(2).run(fail_on, 1)
    assert world(2).run(place) == [(0, 2), (1, 2)]


def test_warnings_are_errors_in_the_ranks(world: Callable[[int], Ranks]) -> None:
    with pytest.raises(AssertionError, match="2 of 2 ranks failed[\\s\\S]*UserWarning: a warning"):
        world(2).run(warn)


def test_a_rank_that_hangs_is_named_with_the_line_and_killed() -> None:
    with World(2) as world:
        with pytest.raises(AssertionError, match=r"1 of 2 ranks failed\n--- rank 1: hung[\s\S]*in hang_on"):
            world.run(hang_on, 1, limit_s=3)
        assert world.run(total, 1) == [3, 3]
