"""The order of samples is shuffled, complete, disjoint over ranks, and a function of its arguments alone."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from gradsync_lab.workloads.base import shuffled_rows

ROWS, BATCH, WORLD = 1003, 16, 4
STEPS = ROWS // (BATCH * WORLD)


def take(rank: int, steps: int = STEPS, *, world: int = WORLD, batch: int = BATCH, seed: int = 0, start: int = 0):
    return np.stack(list(islice(shuffled_rows(ROWS, batch, rank, world, seed=seed, start_step=start), steps)))


def test_an_epoch_visits_no_sample_twice_over_all_ranks() -> None:
    visited = np.concatenate([take(rank).ravel() for rank in range(WORLD)])
    assert len(np.unique(visited)) == STEPS * BATCH * WORLD
    assert visited.min() >= 0
    assert visited.max() < ROWS


def test_the_global_batch_does_not_depend_on_the_number_of_ranks() -> None:
    alone = take(0, world=1, batch=BATCH * WORLD)
    together = np.concatenate([take(rank) for rank in range(WORLD)], axis=1)
    assert np.array_equal(alone, together)


@pytest.mark.parametrize("start", [1, STEPS - 1, STEPS, 2 * STEPS + 3])
def test_a_late_start_continues_the_same_order(start: int) -> None:
    assert np.array_equal(take(2, 2 * STEPS, start=start), take(2, start + 2 * STEPS)[start:])


def test_epochs_and_seeds_differ_and_repeat() -> None:
    two_epochs = take(1, 2 * STEPS)
    assert np.array_equal(two_epochs, take(1, 2 * STEPS))
    assert not np.array_equal(two_epochs[:STEPS], two_epochs[STEPS:])
    assert not np.array_equal(two_epochs, take(1, 2 * STEPS, seed=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 4}, "rank must be in"),
        ({"rank": -1}, "rank must be in"),
        ({"rank": 0, "start": -1}, "must not be negative"),
        ({"rank": 0, "batch": 500}, "lower batch_size"),
    ],
)
def test_impossible_orders_are_refused_at_the_call(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(**arguments)
