"""Ranks that die or stop during parameter averaging: the others continue where the planner allows it."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import gradsync
from gradsync.comm.shuffle import exact, grid, together, with_local_steps
from gradsync.compressors import BlockInt, Compressor
from gradsync.costs.cluster import Placement
from gradsync.planner import AveragingPlanner
from gradsync.planner.averaging.plan import schedule_of
from gradsync.tuning.auto import AutoPlanner
from tests.frontends.models import Perceptron
from tests.frontends.test_averaging_edges import both_ways, error_of
from tests.frontends.test_choice import STEPS, attached
from tests.quick import quickly
from tests.world import Outcome, Ranks, World

pytestmark = pytest.mark.waiting

TIMEOUT_S = 6.0
LIMIT_S = 90.0  # of a test, where others have the cores


@pytest.fixture
def short_lived(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("tests.world.GRACE_S", LIMIT_S)  # deaths are not the end here
    with World(4) as world:
        yield world


def make(**settings: Any) -> tuple[nn.Module, SGD, gradsync.Attachment]:
    torch.manual_seed(0)
    model = Perceptron()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.5)
    settings = {"schedule": grid((2, 2)), "survives": True} | settings
    gradsync.attach(nn.Linear(1, 1)).detach()  # so that no rank imports modules within the short timeout
    return model, optimizer, gradsync.attach(model, optimizer, AveragingPlanner(**settings), timeout=TIMEOUT_S)


def train(model: nn.Module, optimizer: SGD, seed: int) -> float:
    """Takes one step and returns the loss."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    optimizer.zero_grad()
    loss = model(torch.randn(16, 6, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def values(model: nn.Module) -> list[float]:
    flat: list[float] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return flat


def left(outcomes: list[Outcome], lost: set[int]) -> list[Any]:
    """Returns the results of all ranks but `lost`, after checking that exactly these died."""
    for rank, outcome in enumerate(outcomes):
        assert (rank in lost) == outcome.died, f"rank {rank}: {outcome.error}"
        assert rank in lost or outcome.error is None, f"rank {rank}: {outcome.error}"
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank not in lost]


def some_die(
    deaths: dict[int, int], early: bool, compressor: Compressor[Any] | None
) -> tuple[list[float], list[float], int, list[str]]:
    """Kills ranks; `deaths`: the step in which each rank dies."""
    model, optimizer, handle = make(early=early, compressor=compressor)
    losses = []
    for step in range(40):
        if deaths.get(dist.get_rank()) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(train(model, optimizer, step))
    handle.consensus()
    found = values(model), losses, schedule_of(handle.plan).size, handle.explain()
    assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
    handle.detach()
    return found


@pytest.mark.parametrize(
    ("deaths", "compressor", "early"),
    [
        ({3: 5}, None, True),
        ({0: 5, 2: 20}, BlockInt(8), False),
        ({0: 5, 2: 20}, BlockInt(8), True),
        ({1: 4, 2: 4, 3: 4}, None, True),
    ],
    ids=["one, early", "two in turn, compressed", "two in turn, compressed, early", "all others, early"],
)
def test_those_left_go_on_as_one_where_ranks_die(
    short_lived: World, deaths: dict[int, int], compressor: Compressor[Any] | None, early: bool
) -> None:
    short_lived.start(some_die, deaths, early, compressor)
    found = left(short_lived.outcomes(LIMIT_S), set(deaths))
    for parameters, losses, size, words in found:
        assert parameters == found[0][0], "the same bits"
        assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
        assert size == len(found) and words == found[0][3]


def one_dies_before_a_consensus() -> tuple[list[float], list[float]]:
    model, optimizer, handle = make()
    for step in range(6):
        train(model, optimizer, step)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle.consensus()
    first = values(model)
    for step in range(6, 9):
        train(model, optimizer, step)
    handle.consensus()
    handle.detach()
    return first, values(model)


def test_a_consensus_is_that_of_those_left(short_lived: World) -> None:
    short_lived.start(one_dies_before_a_consensus)
    found = left(short_lived.outcomes(LIMIT_S), {1})
    assert found[0] == found[1] == found[2] and found[0][0] != found[0][1]


@quickly()
def one_dies_after_a_choice() -> tuple[list[float], str, int]:
    planner = AutoPlanner(averaging=AveragingPlanner(schedule=grid((2, 2)), survives=True), steps=3, warmup=2)
    with pytest.MonkeyPatch.context() as patch:
        model, optimizer, handle = attached(planner, 0.5, patch)
        for step in range(STEPS + 10):
            if dist.get_rank() == 2 and step == STEPS:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, step)
        handle.consensus()
        found = values(model), handle.plan.what.value, schedule_of(handle.plan).size
        handle.detach()
    return found


def test_ranks_that_chose_averages_go_on_too(short_lived: World) -> None:
    short_lived.start(one_dies_after_a_choice)
    found = left(short_lived.outcomes(LIMIT_S), {2})
    assert all(each == (found[0][0], "parameter", 3) for each in found)


def stopped_by_a_death(lost: int, settings: dict[str, Any]) -> str:
    """Returns the error on this rank when rank `lost` dies."""
    model, optimizer, _ = make(**settings)
    for step in range(10):
        if dist.get_rank() == lost and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if said := error_of(lambda step=step: train(model, optimizer, step)):
            return said
    return ""


@both_ways
def test_all_raise_unless_the_planner_says_otherwise(short_lived: World, early: bool) -> None:
    """Also ranks that are in other groups in that round raise."""
    assert not AveragingPlanner().survives
    short_lived.start(stopped_by_a_death, 3, {"early": early, "survives": False})
    assert all("bucket" in said and "step" in said for said in left(short_lived.outcomes(LIMIT_S), {3}))


def one_stops() -> tuple[str, list[float]]:
    """Stops rank 3 until the others are done; rank 0 then wakes it."""
    model, optimizer, handle = make()
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    said = ""
    for step in range(12):
        if dist.get_rank() == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        if said := error_of(lambda step=step: train(model, optimizer, step)):
            again = error_of(lambda step=step: train(model, optimizer, step))
            assert again == said, "it does not train on alone"
            break
    if not said:
        handle.consensus()
    handle.detach()
    if dist.get_rank() == 0:
        os.kill(int(pids[3]), signal.SIGCONT)
    return said, values(model)


def test_a_stopped_rank_is_left_behind_and_raises_when_it_is_back(short_lived: World) -> None:
    short_lived.start(one_stops)
    *others, (said, _) = left(short_lived.outcomes(LIMIT_S), set())
    assert said.startswith("ranks 0, 1, 2 went on without this one, rank 3")
    assert all(other == ("", others[0][1]) for other in others)


def one_is_slow() -> tuple[list[float], int]:
    """Makes rank 2 slower than the usual timeout, but quicker than the timeout for lost ranks."""
    model, optimizer, handle = make()
    for step in range(8):
        if dist.get_rank() == 2 and step == 3:
            time.sleep(1.4 * TIMEOUT_S)
        train(model, optimizer, step)
    handle.consensus()
    handle.detach()
    return values(model), schedule_of(handle.plan).size


def test_a_rank_that_is_slow_but_alive_is_not_lost(short_lived: World) -> None:
    short_lived.start(one_is_slow)
    found = left(short_lived.outcomes(LIMIT_S), set())
    assert all(other == (found[0][0], 4) for other in found)


def saved_after_a_death() -> tuple[bytes, list[float]]:
    model, optimizer, handle = make(momentum_every=2)
    for step in range(8):
        if dist.get_rank() == 3 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, step)
    content = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, handle)], content)
    for step in range(8, 11):
        train(model, optimizer, step)
    handle.wait()
    handle.detach()
    return content.getvalue(), values(model)


def loaded(contents: list[bytes]) -> list[float]:
    model, optimizer, handle = make(schedule=None, momentum_every=2)
    saved = torch.load(io.BytesIO(contents[dist.get_rank()]), weights_only=True)
    for part, state in zip((model, optimizer, handle), saved, strict=True):
        part.load_state_dict(state)
    for step in range(8, 11):
        train(model, optimizer, step)
    handle.wait()
    handle.detach()
    return values(model)


def test_a_job_of_those_left_goes_on_from_their_checkpoints(short_lived: World) -> None:
    short_lived.start(saved_after_a_death)
    found = left(short_lived.outcomes(LIMIT_S), {3})
    expected = [parameters for _, parameters in found]
    assert short_lived.run(loaded, [content for content, _ in found], size=3) == expected


def test_all_raise_where_the_store_died_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.world.GRACE_S", LIMIT_S)
    with World(4, store_on_rank_0=True) as world:
        world.start(stopped_by_a_death, 0, {})
        assert all("the store of torch.distributed" in said for said in left(world.outcomes(LIMIT_S), {0}))


def no_thread_is_left() -> None:
    model, optimizer, handle = make(schedule=together(2))
    train(model, optimizer, 0)
    del model, optimizer, handle
    gc.collect()
    assert not any("survivors" in thread.name for thread in threading.enumerate())


def test_a_model_that_is_dropped_takes_its_thread_along(world: Callable[[int], Ranks]) -> None:
    world(2).run(no_thread_is_left)


def a_node_dies() -> tuple[list[float], int, bool]:
    with patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank() // 2)}):
        model, optimizer, handle = make(schedule=with_local_steps(exact(3, 2), 2), momentum_every=2)
        for step in range(16):
            if dist.get_rank() in (2, 3) and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, step)
        handle.consensus()
        found = values(model), schedule_of(handle.plan).size
        rests = any(each.rests for each in schedule_of(handle.plan).rounds)
        assert all(bucket.predicted_bytes == bucket.sent_bytes for bucket in handle.statistics())
        handle.detach()
        return *found, rests


def test_the_ranks_of_other_nodes_go_on_by_groups_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.world.GRACE_S", LIMIT_S)
    with World(6) as world:
        world.start(a_node_dies)
        found = left(world.outcomes(LIMIT_S), {2, 3})
    assert all(other == (found[0][0], 4, True) for other in found)


def test_nodes_that_lost_different_numbers_of_ranks_are_averaged_together() -> None:
    model = Perceptron()
    planner = AveragingPlanner(schedule=grid((2, 2)), survives=True).for_other_ranks()
    placement = Placement((0, 0, 1))
    assert not planner.measures(placement) and planner.measures(Placement((0, 0, 1, 1)))
    plan = planner.plan(model, SGD(model.parameters(), lr=0.1), placement)
    assert schedule_of(plan) == together(3)
