"""Measurements in pieces: all ranks run the same pieces, and steps between them take little longer than others."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync.comm import Group, LocalGroup, run_local
from gradsync.comm.links import highest_over
from gradsync.comm.network_cost import network_cost
from gradsync.planner import candidate_plans
from gradsync.planner.default.network import Network
from gradsync.planner.pieces import InPieces, Pieces, around_each, at_once
from gradsync.tuning import pieces as timed
from gradsync.tuning.auto import AutoPlanner
from gradsync.tuning.default import MeasuringPlanner
from gradsync.tuning.pieces import SHARE_OF_A_STEP, after_steps
from tests.quick import SMALLER, patched
from tests.world import Ranks

World = Callable[[int], Ranks]


class Clock(threading.local):
    """A clock of each thread that only `pass_s` moves."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def pieces_of(clock: Clock, seconds: list[float]) -> Pieces[str]:
    for each_s in seconds:
        clock.pass_s(each_s)
        yield
    return "measured"


def slices(step_s: list[float], seconds: list[float]) -> list[float]:
    """Returns the seconds measured after each of the steps, until the pieces of these seconds have run."""
    clock = Clock()
    found = []
    with patch.object(timed, "time", clock):
        measuring = after_steps(pieces_of(clock, seconds), list)
        for each_s in step_s:
            clock.pass_s(each_s)
            began_s = clock.now_s
            if next(measuring, "ended"):
                return found
            found.append(clock.now_s - began_s)
    raise AssertionError("the steps do not suffice")


def test_all_pieces_run_at_once_and_give_the_result() -> None:
    assert at_once(pieces_of(Clock(), [1.0] * 5)) == "measured"


def test_a_slice_has_the_pieces_that_fit_into_its_share_of_a_step() -> None:
    first, *others = slices([1.0] * 100, [0.01] * 100)
    assert first == pytest.approx(0.01)
    assert all(0.01 <= each_s <= SHARE_OF_A_STEP for each_s in others)
    assert others[0] > SHARE_OF_A_STEP - 0.02


def test_a_piece_longer_than_the_share_is_followed_by_steps_without_one() -> None:
    step_s, piece_s = 0.01, 0.021
    found = slices([step_s] * 1000, [piece_s] * 20)
    after = [number for number, each_s in enumerate(found) if each_s]
    assert len(after) == 20 and max(found) == pytest.approx(piece_s)
    apart = math.ceil(piece_s / (SHARE_OF_A_STEP * step_s))
    assert {later - sooner for sooner, later in pairwise(after[1:])} == {apart}
    assert sum(found) <= (SHARE_OF_A_STEP + 0.05) * step_s * len(found)


def test_an_evaluation_between_two_steps_makes_no_slice_longer() -> None:
    found = slices([0.1, 0.1, 0.1, 60.0, 0.1, 0.1] + [0.1] * 100, [0.01] * 100)
    assert max(found) <= SHARE_OF_A_STEP * 0.1


def test_the_slowest_rank_decides_for_all() -> None:
    clock = Clock()

    def rank(group: LocalGroup) -> list[int]:
        slower, counts = 1 + group.rank, []
        measuring = after_steps(pieces_of(clock, [0.011 * slower] * 60), highest_over(group, 5.0))
        while True:
            clock.pass_s(1.0 / slower)
            began_s = clock.now_s
            if next(measuring, "ended"):
                return counts
            counts.append(round((clock.now_s - began_s) / (0.011 * slower)))

    with patch.object(timed, "time", clock):
        first, second = run_local(2, rank)
    fit = math.floor(SHARE_OF_A_STEP / 0.022)
    assert first == second == [1] + [fit] * (59 // fit)


def test_a_context_is_around_each_piece_and_not_around_the_steps_between() -> None:
    inside: list[bool] = []
    seen: list[bool] = []

    @contextmanager
    def around() -> Iterator[None]:
        inside.append(True)
        yield
        inside.clear()

    def measured() -> Pieces[int]:
        for _ in range(3):
            seen.append(bool(inside))
            yield
        return 7

    pieces = around_each(measured(), around)
    for _ in range(3):
        next(pieces)
        assert not inside
    assert at_once(pieces) == 7 and seen == [True] * 3


class Spread(MeasuringPlanner):
    """A planner whose measurement takes `PIECES` pieces, one after each step; it notes what it planned by."""

    def __init__(self) -> None:
        super().__init__()
        self.measured_before: list[bool] = []

    def __call__(self, profiles: Any, world_size: int) -> Any:
        self.measured_before.append(self.network is not None)
        return super().__call__(profiles, world_size)

    def measure(self, group: Group, timeout_s: float) -> Iterator[None]:
        for _ in range(PIECES):
            highest_over(group, timeout_s)([0.0])
            yield
        cost = network_cost(group)
        assert cost is not None
        self.network = Network(cost, group.placement)


PIECES = 6


class Lookup(nn.Module):
    """A sparse table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 8, sparse=True)
        self.out = nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(ids))


def step(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randint(500, (20,), generator=generator)).square().mean().backward()


def trains_while_the_network_is_measured() -> tuple[list[bool], list[bool]]:
    torch.manual_seed(0)
    model, planner = Lookup(), Spread()
    handle = gradsync.attach(model, plan=planner, timeout=15)
    measured, settled = [], []
    for number in range(2 + PIECES):
        step(model, number)
        measured.append(planner.network is not None)
        settled.append(handle.settled)
    handle.detach()
    assert planner.measured_before == [False, False, True]
    return measured, settled


def test_training_goes_on_by_the_plan_at_hand_while_the_network_is_measured(world: World) -> None:
    for measured, settled in world(2).run(trains_while_the_network_is_measured):
        assert measured == [False] * PIECES + [True, True] and not any(settled)


def leaves_while_the_network_is_measured() -> str:
    torch.manual_seed(0)
    model = Lookup()
    handle = gradsync.attach(model, plan=Spread(), timeout=5)
    for number in range(3):
        step(model, number)
    if dist.get_rank() == 1:
        handle.detach()
        return "left"
    try:
        for number in range(3, 6):
            step(model, number)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_leaves_while_the_network_is_measured_is_an_error_on_the_others(world: World) -> None:
    said, left = world(2).run(leaves_while_the_network_is_measured)
    assert left == "left" and "rank 1" in said


def settles_in_usual_steps(warmup: int, steps: int) -> tuple[int, int, str]:
    """Returns the number of steps until the profile, that of usual ones among them, and the plan's digest."""
    torch.manual_seed(0)
    model = Lookup()
    with patched(SMALLER):
        handle = gradsync.attach(model, plan=AutoPlanner(steps=steps, warmup=warmup), timeout=15)
        number = usual = 0
        while handle.profile is None:
            assert number < 5000 and not handle.settled
            step(model, number)
            number += 1
            usual += not handle._engine._apart
        digest = handle.plan.digest
        handle.detach()
    return number, usual, digest


def test_auto_measures_between_usual_steps_which_it_does_not_count(world: World) -> None:
    warmup, steps = 2, 2
    found = world(2).run(settles_in_usual_steps, warmup, steps)
    assert found[0] == found[1]
    number, usual, _ = found[0]
    assert number - usual == 1 + 2 * steps and usual > warmup + 5


@InPieces
def counted(number: int) -> Pieces[int]:
    """Counts to `number`."""
    for _ in range(number):
        yield
    return number


def test_a_function_in_pieces_is_called_named_and_pickled_as_any_other() -> None:
    assert counted(3) == at_once(counted.pieces(3)) == 3
    assert len(list(counted.pieces(3))) == 3
    assert (counted.__name__, counted.__doc__) == ("counted", "Counts to `number`.")
    assert pickle.loads(pickle.dumps(candidate_plans)) is candidate_plans
