"""The figures of docs/concepts/convergence.md are those of the schedules, and its bounds hold in simulated training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gradsync.comm import shuffle
from gradsync.comm.shuffle import (
    GroupSchedule,
    Round,
    crossing,
    exact,
    grid,
    thinned,
    together,
    with_local_steps,
    with_ranks_absent,
)

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "convergence.md"
Array = NDArray[np.float64]
Gradient = Callable[[Array], Array]  # of (ranks, copies of a problem of one weight)

STATIC = Round(((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)))
SCHEDULES = {
    "grid": grid((4, 4)),
    "pairs": grid((2,) * 4),
    "digits": grid((2, 3, 4)),
    "prime": exact(7, 3),
    "racks": crossing([range(4), range(4, 8)], 1),
    "slow": with_ranks_absent(grid((3, 3)), (4,), 2),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def table(*columns: str) -> list[tuple[str, ...]]:
    """Returns the rows of the page's table with these columns, as text."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index(f"| {' | '.join(columns)} |") + 2 :]
    end = next(number for number, line in enumerate(rows) if not line.startswith("|"))
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in rows[:end]]


def named(cell: str) -> GroupSchedule:
    """Returns the schedule that the first cell of a row names."""
    found = eval(cell.strip("`"), vars(shuffle))
    assert isinstance(found, GroupSchedule)
    return found


def rounds_to_consensus(schedule: GroupSchedule) -> int | None:
    """The fewest rounds, of two cycles at most, after which all ranks have the mean."""
    each = range(1, 2 * len(schedule.rounds) + 1)
    return next((rounds for rounds in each if np.allclose(schedule.product(0, rounds), 1 / schedule.size)), None)


def drawn(sizes: Sequence[int], rounds: int) -> GroupSchedule:
    """Rounds of groups of these sizes, drawn at random."""
    rng, cuts = np.random.default_rng(0), np.cumsum(sizes)[:-1]
    draws = (np.split(rng.permutation(sum(sizes)), cuts) for _ in range(rounds))
    return GroupSchedule(tuple(Round(tuple(tuple(group.tolist()) for group in each)) for each in draws))


def written(figure: float, digits: int = 3) -> str:
    return f"{figure:.{digits}g}"


def left(schedule: GroupSchedule) -> str:
    return "0" if schedule.is_exact else written(schedule.left, 2)


def test_the_pages_schedules_mix_as_it_says() -> None:
    columns = ("schedule", "rounds", "rounds to consensus", "left of a cycle", "groups", "spread", "spread per rank")
    rows = table(*columns)
    assert len(rows) >= 9
    for name, *figures in rows:
        schedule = named(name)
        spread = schedule.spread()
        expected = [len(schedule.rounds), rounds_to_consensus(schedule) or "never", left(schedule)]
        expected += [len(schedule.distinct), written(spread), written(spread / schedule.size)]
        assert figures == list(map(str, expected)), name


def test_the_pages_racks_mix_as_it_says() -> None:
    rows = table("racks", "budget", "rounds", "spread, kept apart", "spread, all mix", "left of a cycle, all mix")
    assert len(rows) >= 5
    for racks, budget, *figures in rows:
        places = [range(8 * rack, 8 * rack + 8) for rack in range(int(racks))]
        kept, mixed = (crossing(places, int(budget), keep_apart=keep) for keep in (True, False))
        assert kept.is_exact
        expected = [str(len(mixed.rounds)), written(kept.spread()), written(mixed.spread()), left(mixed)]
        assert figures == expected, (racks, budget)


def test_the_pages_spreads_with_momentum_are_those_of_schedules() -> None:
    rows = table("schedule", "none", "local", "averaged")
    assert len(rows) >= 5
    for name, *figures in rows:
        schedule = named(name)
        none, local, averaged = schedule.spread(), schedule.spread(0.9), schedule.spread(0.9, averaged=True)
        assert figures == list(map(written, (none, local, averaged))), name
        assert 5 <= local / none <= 12 and 3.5 <= local / averaged <= 5.3


def spread_with_momenta(schedule: GroupSchedule, momenta: GroupSchedule, momentum: float = 0.9) -> float:
    """Returns the spread of values mixed by one schedule with momenta mixed by another, from the rounds' covariance."""
    n, rounds = schedule.size, len(momenta.rounds)
    apart = np.eye(n) - 1 / n
    covariance, found = np.zeros((2 * n, 2 * n)), []
    for step in range(rounds * -(-400 // rounds)):
        w, own = schedule.round(step).mixing, momenta.round(step).mixing
        move = np.block([[w, momentum * w], [np.zeros((n, n)), momentum * own]])
        spill = np.vstack([w, own])
        covariance = move @ covariance @ move.T + spill @ apart @ spill.T
        found.append(float(np.trace(covariance[:n, :n])))
    return float(np.mean(found[-rounds:]))


@pytest.mark.parametrize(
    "schedule", [grid((4, 4)), grid((2,) * 4), with_local_steps(together(16), 3), with_local_steps(together(16), 4)]
)
def test_momenta_that_are_seldom_averaged_bring_what_is_said(schedule: GroupSchedule) -> None:
    text = " ".join((PAGE.parents[1] / "how-to" / "averaging.md").read_text(encoding="utf-8").split())
    assert "Averaging them in one round of four brings 40 to 60 % of what averaging in every round would." in text
    local, always = schedule.spread(0.9), schedule.spread(0.9, averaged=True)
    assert spread_with_momenta(schedule, schedule) == pytest.approx(always, rel=1e-3)
    assert 0.4 <= (local - spread_with_momenta(schedule, thinned(schedule, 4))) / (local - always) <= 0.6


def test_random_groups_have_the_spread_that_the_page_says() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "Random groups of 8 among 64 ranks have 7.9, random pairs 61." in text
    assert drawn((8,) * 8, 200).spread() == pytest.approx(7.9, rel=0.02)
    assert drawn((2,) * 32, 200).spread() == pytest.approx(61, rel=0.02)


def trained(
    rounds: Sequence[Round],
    gradient: Gradient,
    rate: float,
    steps: int,
    start: Array,
    *,
    momentum: float = 0.0,
    averaged: bool = False,
    noise: float = 1.0,
    seed: int = 0,
) -> Iterator[Array]:
    """Returns the ranks' parameters after each round of SGD, (ranks, copies), from `start` on all ranks."""
    rng, mixings = np.random.default_rng(seed), [each.mixing for each in rounds]
    x = np.tile(start, (len(mixings[0]), 1))
    v = np.zeros_like(x)
    for step in range(steps):
        w = mixings[step % len(mixings)]
        v = momentum * v + gradient(x) + noise * rng.normal(size=x.shape)
        x = w @ (x - rate * v)
        v = w @ v if averaged else v
        yield x


def apart(x: Array) -> float:
    """Returns the sum over the ranks of the squared distance to their mean, as a mean over copies."""
    return float(((x - x.mean(axis=0)) ** 2).sum(axis=0).mean())


RATE, COPIES = 0.04, 400
CURVATURES = np.repeat([0.5, 1.0], COPIES)  # of f(x) = x'Ax/2


@pytest.mark.parametrize(
    "schedule",
    [together(1), together(4), grid((2, 2)), together(16), grid((4, 4)), grid((2,) * 4)],
    ids=["1", "4", "4 in pairs", "16", "16 in fours", "16 in pairs"],
)
def test_the_means_error_on_a_quadratic_is_that_of_one_rank_over_the_number_of_ranks(schedule: GroupSchedule) -> None:
    errors, spreads = [], []
    for step, x in enumerate(trained(schedule.rounds, lambda x: CURVATURES * x, RATE, 2000, 0 * CURVATURES)):
        if step >= 300:
            errors.append((x.mean(axis=0) ** 2).reshape(2, COPIES).mean(axis=1))
            spreads.append(apart(x) / RATE**2)
    of_one_rank = np.array([RATE / (curvature * (2 - RATE * curvature)) for curvature in (0.5, 1.0)])
    np.testing.assert_allclose(np.mean(errors, axis=0), of_one_rank / schedule.size, rtol=0.05)
    assert np.mean(spreads) == pytest.approx(schedule.spread(), rel=0.05)  # curvature draws ranks together a little


def test_static_groups_and_averages_of_gradients_alone_leave_ranks_to_walk_at_random() -> None:
    with pytest.raises(ValueError, match="never meet"):
        GroupSchedule((STATIC,))
    flat, schedule = np.zeros(COPIES), grid((4, 4))
    static = [apart(x) for x in trained([STATIC], np.zeros_like, 1.0, 400, flat)]
    rng, x, gradients_alone = np.random.default_rng(1), np.zeros((16, COPIES)), []
    for step in range(400):
        x = x - schedule.round(step).mixing @ rng.normal(size=x.shape)
        gradients_alone.append(apart(x))
    for walked in (static, gradients_alone):
        for steps in (25, 100, 400):
            assert walked[steps - 1] == pytest.approx(steps * (4 - 1), rel=0.15)
    *_, mixed = trained(schedule.rounds, np.zeros_like, 1.0, 400, flat)
    assert apart(mixed) == pytest.approx(schedule.spread(), rel=0.15)


@pytest.mark.parametrize("schedule", [grid((4, 4)), grid((2,) * 4)], ids=["fours", "pairs"])
def test_averaged_momentum_keeps_ranks_nearer(schedule: GroupSchedule) -> None:
    found = []
    for averaged in (False, True):
        run = trained(
            schedule.rounds, np.zeros_like, 1.0, 300, np.zeros(COPIES), momentum=0.9, averaged=averaged, seed=2
        )
        found.append(float(np.mean([apart(x) for step, x in enumerate(run) if step >= 100])))
    assert found == pytest.approx([schedule.spread(0.9), schedule.spread(0.9, averaged=True)], rel=0.05)
    assert found[0] > 4 * found[1]


def clipped(x: Array) -> Array:
    return np.clip(CURVATURES * x, -0.5, 0.5)


@pytest.mark.parametrize(("momentum", "averaged"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_mean_makes_the_steps_of_one_group_as_long_as_they_are_linear(momentum: float, averaged: bool) -> None:
    """Noise is added after clipping, so the runs differ only in where gradients are taken."""

    def means(schedule: GroupSchedule, gradient: Gradient) -> Array:
        run = trained(schedule.rounds, gradient, 0.2, 60, 0 * CURVATURES + 1, momentum=momentum, averaged=averaged)
        return np.stack([x.mean(axis=0) for x in run])

    for schedule in (grid((4, 4)), grid((2,) * 4)):
        np.testing.assert_allclose(
            means(schedule, lambda x: CURVATURES * x), means(together(16), lambda x: CURVATURES * x), atol=1e-9
        )
        assert np.abs(means(schedule, clipped) - means(together(16), clipped)).max() > 0.01


def depth(schedule: GroupSchedule) -> float:
    """Returns the page's constant D."""
    found = []
    for last in range(len(schedule.rounds)):
        product, total, norm = np.eye(schedule.size), 0.0, 1.0
        for number in range(1000):
            product = product @ schedule.round(last - number).mixing
            norm = float(np.linalg.norm(product - 1 / schedule.size, 2))
            total += norm
            if norm < 1e-9:
                break
        found.append(total)
    return max(found)


@pytest.mark.parametrize("radices", [(4, 4), (2, 2, 2, 2), (2, 3, 4), (7,)])
def test_a_grids_disagreement_lasts_as_many_rounds_as_it_has_digits_but_one(radices: tuple[int, ...]) -> None:
    assert depth(grid(radices)) == pytest.approx(len(radices) - 1, abs=1e-6)


START, NOISE = 2.0, 0.5  # where f(x) = 1 - cos x, of curvature 1 at most, is not convex


@every_schedule
@pytest.mark.parametrize("differing", [0.0, 0.3], ids=["alike", "differing"])
def test_ranks_are_as_near_and_gradients_as_small_as_the_bounds_say(schedule: GroupSchedule, differing: float) -> None:
    n, steps, rate = schedule.size, 400, 0.03
    own = np.linspace(-1, 1, n)[:, None]
    own *= differing / np.sqrt((own**2).mean())  # rank i's loss is f(x) + own_i x
    distances, slopes = [], []
    run = trained(schedule.rounds, lambda x: np.sin(x) + own, rate, steps, np.full(2000, START), noise=NOISE)
    for x in run:
        distances.append(apart(x) / n)
        slopes.append(float((np.sin(x.mean(axis=0)) ** 2).mean()))
    s = max(schedule.spreads()) / n
    bound = (rate * (NOISE * np.sqrt(s) + depth(schedule) * differing) / (1 - rate * depth(schedule))) ** 2
    assert max(distances) < 1.03 * bound  # by 2000 copies they are known to 1 %
    assert differing or max(distances) > 0.5 * bound, "of noise alone, the bound is near"
    falls = 1 - np.cos(START)
    assert np.mean([np.sin(START) ** 2, *slopes[:-1]]) < 2 * falls / (rate * steps) + rate * NOISE**2 / n + bound
