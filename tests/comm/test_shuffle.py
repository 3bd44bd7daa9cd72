"""Schedules mix as they are said to: when all ranks agree, what is left if not, how far apart noise keeps them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.comm.shuffle import (
    GroupSchedule,
    Round,
    crossing,
    exact,
    grid,
    of_nodes,
    of_ranks,
    one_of,
    thinned,
    together,
    with_local_steps,
    with_ranks_absent,
)
from gradsync.costs.cluster import Placement

GRIDS = [(2, 2), (4, 4), (2,) * 4, (2, 3), (3, 4, 5), (8, 8), (4, 4, 4), (2,) * 6, (2,) * 7, (16, 4), (7,)]
DRAWN = GroupSchedule((Round(((0, 3), (1, 2, 4))), Round(((1, 4), (0, 2, 3))), Round(((0, 2), (1, 3, 4)))))
RADICES = st.lists(st.integers(2, 5), min_size=1, max_size=3)


def regular(racks: int, per_rack: int) -> list[range]:
    return [range(rack * per_rack, (rack + 1) * per_rack) for rack in range(racks)]


def played(schedule: GroupSchedule, rounds: int, *, seed: int = 0) -> np.ndarray:
    """Values of the ranks after so many rounds, each group for itself."""
    x = np.random.default_rng(seed).normal(size=schedule.size)
    for step in range(rounds):
        before = x.copy()
        for group, share in schedule.round(step).parts:
            x[list(group)] += share * (before[list(group)].mean() - before[list(group)])
        assert x.mean() == pytest.approx(before.mean(), abs=1e-9)
    return x


def noisy_spread(schedule: GroupSchedule, momentum: float, *, averaged: bool, cycles: int, seed: int) -> float:
    """Returns the ranks' squared distance from their mean under noise: the mean over the later half of the cycles."""
    rng = np.random.default_rng(seed)
    x, v = np.zeros((schedule.size, 400)), np.zeros((schedule.size, 400))
    mixings, found = [each.mixing for each in schedule.rounds], []
    for cycle in range(cycles):
        for w in mixings:
            v = momentum * v + rng.normal(size=v.shape)
            x = w @ (x + v)
            v = w @ v if averaged else v
            if 2 * cycle >= cycles:
                found.append(float(((x - x.mean(axis=0)) ** 2).sum(axis=0).mean()))
    return float(np.mean(found))


@pytest.mark.parametrize("radices", GRIDS)
def test_a_grid_agrees_after_as_many_rounds_as_it_has_digits(radices: tuple[int, ...]) -> None:
    schedule = grid(radices)
    assert schedule.is_exact and schedule.left < 1e-12
    for start, rounds in itertools.product(range(len(radices)), range(len(radices) + 1)):
        agree = np.allclose(schedule.product(start, rounds), 1 / schedule.size)
        assert agree == (rounds == len(radices))
    assert len(schedule.distinct) == sum(schedule.size // radix for radix in radices)
    assert np.ptp(played(schedule, len(radices))) < 1e-9


@given(RADICES, st.integers(0, 99))
def test_a_grid_is_exact_whoever_sits_where(radices: list[int], seed: int) -> None:
    ranks = np.random.default_rng(seed).permutation(math.prod(radices)).tolist()
    schedule = grid(radices, ranks)
    assert schedule.is_exact
    assert {len(group) for group in schedule.distinct} == set(radices)


def test_a_grid_of_twos_has_pairs() -> None:
    schedule = grid((2, 2, 2))
    assert len(schedule.rounds) == 3 and {len(group) for group in schedule.distinct} == {2}
    assert schedule.group_of(5, 0) == (1, 5) and schedule.group_of(5, 3) == (1, 5) and schedule.group_of(5, 5) == (4, 5)


@given(st.integers(1, 90), st.integers(2, 9))
def test_any_number_of_ranks_agrees_exactly(size: int, most: int) -> None:
    schedule = exact(size, most)
    assert schedule.size == size and schedule.is_exact
    assert all(len(group) <= most for group in schedule.distinct)
    assert np.ptp(played(schedule, len(schedule.rounds))) < 1e-9


@pytest.mark.parametrize(
    ("size", "most", "rounds"), [(31, 2, 9), (7, 4, 3), (13, 4, 5), (64, 8, 2), (60, 5, 3), (1, 2, 1)]
)
def test_few_rounds_are_enough(size: int, most: int, rounds: int) -> None:
    assert len(exact(size, most).rounds) == rounds


@pytest.mark.parametrize(
    ("schedule", "spread", "with_momentum", "with_averaged"),
    [
        (grid((4, 4)), 3.0, 15.8, 3.0),
        (grid((2,) * 4), 11.0, 104, 25.2),
        (grid((8, 8)), 7.0, 36.8, 7.0),
        (grid((4, 4, 4)), 18.0, 123, 25.8),
        (grid((2,) * 6), 57.0, 678, 189),
    ],
)
def test_spreads_are_those_of_the_specification(
    schedule: GroupSchedule, spread: float, with_momentum: float, with_averaged: float
) -> None:
    assert schedule.spread() == pytest.approx(spread)
    assert schedule.spread(0.9) == pytest.approx(with_momentum, rel=5e-3)
    assert schedule.spread(0.9, averaged=True) == pytest.approx(with_averaged, rel=5e-3)


def test_unequal_radices_oscillate() -> None:
    assert grid((16, 4)).spreads() == pytest.approx([3.0, 15.0])


@pytest.mark.parametrize("schedule", [grid((2, 3)), exact(5, 2), crossing(regular(2, 4), 1), DRAWN])
@pytest.mark.parametrize(("momentum", "averaged"), [(0.0, False), (0.7, False), (0.7, True)])
def test_spreads_are_those_of_ranks_with_noise(schedule: GroupSchedule, momentum: float, averaged: bool) -> None:
    seen = noisy_spread(schedule, momentum, averaged=averaged, cycles=60, seed=2)
    assert schedule.spread(momentum, averaged=averaged) == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize(
    ("racks", "per_rack", "budget", "apart", "mixed", "left"),
    [(2, 8, 1, 9.1, 5.2, 0.10), (4, 8, 1, 21.4, 13.7, 0.10), (4, 8, 2, 11.9, 8.5, 0.07), (8, 8, 1, 45.9, 30.7, 0.10)],
)
def test_crossing_is_exact_if_those_who_crossed_are_kept_apart(
    racks: int, per_rack: int, budget: int, apart: float, mixed: float, left: float
) -> None:
    kept, all_mix = (crossing(regular(racks, per_rack), budget, keep_apart=keep) for keep in (True, False))
    assert kept.is_exact and not all_mix.is_exact
    assert len(kept.rounds) == len(all_mix.rounds) == 1 + per_rack // budget
    assert all_mix.left == pytest.approx(left, abs=5e-3)
    assert kept.spread() == pytest.approx(apart, abs=0.06) and all_mix.spread() == pytest.approx(mixed, abs=0.06)


def groups_that_cross(each: Round, racks: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    rack_of = {rank: number for number, rack in enumerate(racks) for rank in rack}
    return [group for group in each.groups if len({rack_of[rank] for rank in group}) > 1]


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))
def test_in_a_cycle_each_rank_crosses_once(racks: int, times: int, budget: int) -> None:
    places = regular(racks, times * budget)
    for keep_apart in (False, True):
        schedule = crossing(places, budget, keep_apart=keep_apart)
        crossed = [groups_that_cross(each, places) for each in schedule.rounds]
        assert max(map(len, crossed)) == budget
        assert sorted(chain.from_iterable(chain.from_iterable(crossed))) == list(range(schedule.size))
        assert schedule.is_exact or not keep_apart


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 6), st.integers(0, 9))
def test_racks_may_have_any_sizes_and_ranks_in_any_order(sizes: list[int], budget: int, seed: int) -> None:
    ranks = np.random.default_rng(seed).permutation(sum(sizes)).tolist()
    racks = [[ranks.pop() for _ in range(size)] for size in sizes]
    schedule = crossing(racks, budget)
    assert all(len(groups_that_cross(each, racks)) <= budget for each in schedule.rounds)
    assert schedule.left < 1


@pytest.mark.parametrize("schedule", [grid((8, 8)), grid((3, 3)), grid((2,) * 4), exact(7, 4)])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_who_sits_out_is_alone_but_for_one_round_of_so_many(schedule: GroupSchedule, every: int) -> None:
    out = with_ranks_absent(schedule, (2, 5), every)
    assert len(out.rounds) == every * len(schedule.rounds)
    for rank in (2, 5):
        with_others = [step for step in range(len(out.rounds)) if len(out.group_of(rank, step)) > 1]
        joined = {step % len(schedule.rounds) for step in with_others}
        alone = {step for step in range(len(schedule.rounds)) if len(schedule.group_of(rank, step)) == 1}
        assert joined == set(range(len(schedule.rounds))) - alone
        assert len(with_others) == len(joined)
    for step, each in enumerate(out.rounds):
        for group in each.groups:
            others = {rank for rank in group if rank not in (2, 5)}
            assert others <= set(schedule.group_of(min(others or {2}), step))
    assert out.left < 1 and np.ptp(played(out, 40 * len(out.rounds))) < 1e-6
    with pytest.raises(ValueError, match="ranks can sit out rounds"):
        with_ranks_absent(schedule, (), every)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("every", [2, 3, 4, 8])
def test_one_round_of_so_many_is_each_round_of_the_cycle_once(length: int, every: int) -> None:
    found = one_of(every, length)
    assert sorted(step % length for step in found) == list(range(length))
    assert sorted(step // every for step in found) == list(range(length))


@pytest.mark.parametrize("schedule", [grid((4, 4)), exact(7, 4), with_ranks_absent(grid((2, 2)), (3,), 2), together(5)])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_ranks_that_all_rest_mix_as_they_did_when_they_meet(schedule: GroupSchedule, every: int) -> None:
    out = with_local_steps(schedule, every)
    assert out.left == pytest.approx(schedule.left, abs=1e-12) and out.distinct == schedule.distinct
    assert [each for each in out.rounds if not each.rests] == list(schedule.rounds)
    assert [each.rests for each in out.rounds] == len(schedule.rounds) * [*[True] * (every - 1), False]
    for refused in (with_local_steps, thinned):
        with pytest.raises(ValueError, match=r"every must be in \[1, 1000\], got 0"):
            refused(schedule, 0)


@pytest.mark.parametrize(
    "schedule", [grid((2, 2)), grid((2,) * 4), with_local_steps(grid((2, 2)), 2), with_local_steps(together(3), 3)]
)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_thinned_schedule_has_its_groups_at_the_same_times(schedule: GroupSchedule, every: int) -> None:
    """Ranks that did not meet before do not meet now; one meeting in `every` is left, at its own time."""
    out = thinned(schedule, every)
    assert len(out.rounds) == every * len(schedule.rounds)
    left = {step: each for step, each in enumerate(out.rounds) if not each.rests}
    assert all(each == schedule.round(step) for step, each in left.items())
    assert len(left) == sum(not each.rests for each in schedule.rounds)
    assert out.left == pytest.approx(schedule.left, abs=1e-12)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1, 2, 2), (0, 1, 2, 0, 1, 2), (2, 0, 0, 1, 1, 2), (0, 0, 0, 1, 2, 2)])
@pytest.mark.parametrize("schedule", [with_local_steps(exact(3, 2), 2), with_ranks_absent(together(3), (1,), 2)])
def test_ranks_follow_their_nodes_and_rest_when_all_do(nodes: tuple[int, ...], schedule: GroupSchedule) -> None:
    """A node is numbered by its first rank, and its ranks are with it in every round but those in which all rest."""
    placement, order = Placement(nodes), list(dict.fromkeys(nodes))
    ranks = of_ranks(schedule, placement)
    assert of_nodes(ranks, placement) == schedule
    for of_all, of_each in zip(schedule.rounds, ranks.rounds, strict=True):
        assert of_all.rests == of_each.rests
        for group, share in of_each.parts if not of_each.rests else ():
            seats = {order.index(nodes[rank]) for rank in group}
            assert (tuple(sorted(seats)), share) in of_all.parts


def test_groups_that_divide_a_node_are_of_no_nodes() -> None:
    assert of_nodes(grid((2, 2)), Placement((0, 0, 1, 1))) is None
    assert of_nodes(together(4), Placement((0, 0, 1, 1))) == together(2)


def test_who_is_alone_moves_nowhere() -> None:
    assert Round(((0, 1), (2,)), (1.5, 1.5)).relaxations == (1.5, 1.0)


def test_ranks_may_change_places() -> None:
    ranks = [3, 1, 4, 2, 0, 5]
    moved = grid((2, 3)).with_ranks(ranks)
    assert moved == grid((2, 3), ranks) and moved.spread() == pytest.approx(grid((2, 3)).spread())
    with pytest.raises(ValueError, match="from 0 to 5 in any order"):
        moved.with_ranks(ranks[:5])


def test_groups_of_one_and_worlds_of_one() -> None:
    assert together(1).is_exact and together(1).distinct == () and together(1).spread() == 0.0
    sits_out = GroupSchedule((Round(((0, 1), (2,))), Round(((1, 2), (0,)))))
    assert sits_out.group_of(2, 0) == (2,) and sits_out.distinct == ((0, 1), (1, 2))
    assert not sits_out.is_exact and 0 < sits_out.left < 1


def test_schedules_do_not_depend_on_the_order_in_which_groups_are_named() -> None:
    assert Round(((3, 2), (1, 0)), (0.5, 1.0)) == Round(((0, 1), (2, 3)), (1.0, 0.5))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Round(((0, 1), (1, 2))), "each rank from 0 on once"),
        (lambda: Round(((0, 1), ())), "no empty group"),
        (lambda: Round(((0, 2),)), "each rank from 0 on once"),
        (lambda: Round(()), "each rank from 0 on once"),
        (lambda: Round(((0, 1),), (2.0,)), r"Round.relaxations.0 must be in \(0, 2\), got 2.0"),
        (lambda: Round(((0.0, 1),)), r"Round.groups.0.0 must be a whole number, got 0.0"),  # type: ignore[arg-type]
        (lambda: Round(((False, True),)), r"Round.groups.0.0 must be a whole number, got False"),
        (lambda: GroupSchedule(("01",)), r"GroupSchedule.rounds.0 must be"),  # type: ignore[arg-type]
        (lambda: Round(((0, 1),), (1.0, 1.0)), "one for each of 1 groups"),
        (lambda: GroupSchedule(()), "one or more, of the same ranks"),
        (lambda: GroupSchedule((Round(((0, 1),)), Round(((0,),)))), r"of the same ranks, got \[1, 2\]"),
        (lambda: GroupSchedule((Round(((0, 1), (2, 3))),)), r"never meet: \[0, 1\] and \[2, 3\]"),
        (lambda: GroupSchedule((Round(((0,), (1,))),) * 4), "never meet"),
        (lambda: grid((4, 1)), "radices.1 must be at least 2, got 1"),
        (lambda: grid(()), "one or more"),
        (lambda: grid((2, 2), [0, 1, 2, 2]), "those from 0 to 3 in any order"),
        (lambda: crossing(regular(1, 4), 1), "needs two racks"),
        (lambda: crossing([[0, 1], []], 1), "racks with ranks"),
        (lambda: crossing(regular(2, 4), 0), "budget must be at least 1, got 0"),
        (lambda: crossing(regular(2, 4), 3, keep_apart=True), "the budget divides them"),
        (lambda: crossing([[0, 1], [2]], 1, keep_apart=True), "racks of 1, 2 and a budget of 1"),
        (lambda: exact(0, 2), r"size must be in \[1, 131072\], got 0"),
        (lambda: exact(4, 1), "most must be at least 2, got 1"),
        (lambda: exact(10**30, 2), r"size must be in \[1, 131072\], got 10"),
        (lambda: together(10**9), r"size must be in \[1, 131072\]"),
        (lambda: grid((10**6, 10**6)), r"product of the radices must be in \[1, 131072\]"),
        (lambda: grid("22"), "radices must be a list, got '22'"),  # type: ignore[arg-type]
        (lambda: with_local_steps(together(4), 10**30), r"every must be in \[1, 1000\]"),
        (lambda: with_ranks_absent(together(4), [1], 1), r"every must be in \[2, 1000\], got 1"),
        (lambda: with_ranks_absent(together(4), [True], 2), "ranks.0 must be a whole number, got True"),
        (lambda: grid((2,)).spread(1.0), r"momentum must be in \[0, 1\)"),
    ],
)
def test_what_is_no_schedule_is_refused(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=said):
        make()
