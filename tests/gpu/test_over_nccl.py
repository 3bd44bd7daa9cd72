"""Ranks over NCCL train as DDP does over NCCL, in all ways of training; a rank that stays away is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu import nccl, work
from tests.world import Ranks, World

Hosts = Callable[[int], Ranks]
NAMES = [*work.EXACT, *work.LOSSY, *work.TABLES, "default"]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Yields `hosts(n)`: n ranks that NCCL takes for hosts; their default process groups are on NCCL afterwards."""
    standing = World(4)
    yield lambda size: Ranks(standing, size)
    standing.close()


@pytest.mark.parametrize("name", NAMES)
def test_ranks_train_as_ddp_does(hosts: Hosts, card: str, name: str) -> None:
    (off, largest, first), (_, _, second) = hosts(2).run(
        nccl.over_nccl, work.beside_ddp, card, name, "attach", limit_s=110
    )
    assert first == second, "all ranks hold the same bits"
    if name in work.EXACT:
        assert off == 0.0
    elif name not in work.LOSSY:
        assert off <= 1e-5 * largest


@pytest.mark.parametrize("frontend", ["class", "hook"])
def test_so_they_do_by_every_frontend(hosts: Hosts, card: str, frontend: str) -> None:
    for off, _, _ in hosts(2).run(nccl.over_nccl, work.beside_ddp, card, "all_reduce", frontend, limit_s=110):
        assert off == 0.0


@pytest.mark.parametrize("communicator", ["own", "shared"])
def test_so_they_do_with_accumulated_and_clipped_gradients(hosts: Hosts, card: str, communicator: str) -> None:
    assert set(hosts(2).run(nccl.over_nccl, nccl.accumulated, card, communicator, limit_s=110)) == {0.0}


def test_a_step_that_overflows_float16_is_skipped_as_with_ddp(hosts: Hosts, card: str) -> None:
    for off, (theirs, ours) in hosts(2).run(nccl.over_nccl, nccl.scaled, card, limit_s=110):
        assert off == 0.0 and theirs == ours


def test_a_job_over_nccl_is_measured_and_planned(hosts: Hosts, card: str) -> None:
    (text, settled, first), (other, _, second) = hosts(2).run(nccl.over_nccl, work.planned, card, limit_s=110)
    assert settled and text == other and first == second


def test_training_goes_on_from_saved_residuals_to_the_bit(hosts: Hosts, card: str) -> None:
    assert set(hosts(2).run(nccl.over_nccl, nccl.continued, card, limit_s=110)) == {0.0}


@pytest.mark.parametrize("name", ["all_reduce", "early", "groups"])
def test_averaged_parameters_are_alike(hosts: Hosts, card: str, name: str) -> None:
    first, *others = hosts(3).run(nccl.over_nccl, nccl.averaged, card, name, limit_s=110)
    assert all(each == first for each in others)


@pytest.mark.parametrize("name", ["replicas and shards", "alone", "mixed"])
def test_models_in_shards_train_as_by_hsdp(hosts: Hosts, card: str, name: str) -> None:
    for off, theirs, ours in hosts(4).run(nccl.over_nccl, nccl.in_shards, card, name, limit_s=110):
        assert off == 0.0
        assert ours <= 1.5 * theirs, "a copy of the gradient's shards"


def test_a_rank_that_stays_away_is_named(card: str) -> None:
    with World(3) as world:  # apart, as operations hang
        said = Ranks(world, 3).run(nccl.over_nccl, nccl.one_stays_away, card, limit_s=100)
    assert said[1] == nccl.LEFT
    for each in (said[0], said[2]):
        assert "rank 1" in each
