"""Costs fitted to synthetic samples are exact without noise, within their intervals with noise, and never negative."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import Compute, Pattern
from gradsync.plans.profile import Interval, LinkPoint
from gradsync.tuning.fitting import fit_kernels, fit_links, fit_slowdown, median_of, slowdown

KERNELS = {"pack": KernelCost(2e-4, 1e-9), "sum": KernelCost(5e-5, 4e-9), "scale": KernelCost(1e-4, 5e-10, 65536.0)}
SIZES = [float(1 << power) for power in range(10, 23, 2)]
ALPHA_S = 3e-4
MEMORY_S = 1 / CostModel.memory_bytes_per_s
LINKS = {Pattern.ALL_REDUCE: (1e-3, 2e7), Pattern.ALL_TO_ALL: (5e-4, 1.5e7), Pattern.MESSAGES: (2e-3, 2.4e7)}


def holds(estimate: Interval, truth: float) -> bool:
    return estimate.low <= truth and (estimate.high is None or truth <= estimate.high)


def kernel_samples(noise: float, seed: int = 0) -> list[tuple[tuple[Compute, ...], float]]:
    """Returns timed samples of `pack` with `sum` at different sizes, of `pack` and of `scale` alone."""
    generator = np.random.default_rng(seed)
    parts: list[tuple[Compute, ...]] = []
    for number, nbytes in enumerate(SIZES):
        parts += [
            (Compute("pack", nbytes, calls=1 + number % 3), Compute("sum", SIZES[-1 - number])),
            (Compute("pack", nbytes),),
            (Compute("scale", nbytes),),
            (Compute("scale", 3 * nbytes, calls=2),),
        ]
    seconds = [sum(KERNELS[step.kernel].seconds(step.nbytes, step.calls) for step in part) for part in parts]
    factors = np.exp(noise * generator.standard_normal(len(parts)))
    return [(part, s * float(f)) for part, s, f in zip(parts, seconds, factors, strict=True)]


def link_points(size: int, noise: float, seed: int = 0, burst: float = 0.0) -> dict[Pattern, list[LinkPoint]]:
    """Returns times of transfers among `size` ranks; `burst` bytes pass at once."""
    generator = np.random.default_rng(seed)
    points: dict[Pattern, list[LinkPoint]] = {}
    for pattern, (stage_s, rate) in LINKS.items():
        points[pattern] = []
        for nbytes in SIZES:
            for rounds in {size - 1, 1} if pattern is Pattern.MESSAGES else {size - 1}:
                truth_s = stage_s + rounds * ALPHA_S + max(nbytes - burst, 0.0) / rate
                repeats = truth_s * np.exp(noise * generator.standard_normal(5))
                points[pattern].append(point(rounds, nbytes, repeats.tolist()))
    return points


def point(rounds: int, nbytes: float, repeats: list[float]) -> LinkPoint:
    return LinkPoint(part_bytes=nbytes, rounds=rounds, busiest_bytes=nbytes, seconds=median_of(repeats))


def test_kernels_come_back_with_the_knee_of_the_one_that_has_one() -> None:
    fitted = fit_kernels(kernel_samples(noise=0.0))
    assert fitted.keys() == KERNELS.keys()
    for name, truth in KERNELS.items():
        assert fitted[name].call_s.value == pytest.approx(truth.call_s, rel=1e-4)
        assert fitted[name].byte_s.value == pytest.approx(truth.byte_s, rel=1e-4)
        assert fitted[name].knee_bytes == truth.knee_bytes


def test_kernels_are_told_apart_that_run_in_one_part() -> None:
    truth = {name: KERNELS[name] for name in ("pack", "sum")}
    model = CostModel(0.0, 1.0, kernels=truth)
    parts = [
        (Compute("pack", pack, calls=calls), Compute("sum", sums))
        for pack, calls, sums in ((1e5, 1, 1e6), (1e6, 4, 1e5), (1e7, 2, 1e7), (1e4, 8, 1e4), (1e3, 1, 1e8))
    ]
    fitted = fit_kernels([(part, model.total_s(part)) for part in parts])
    for name, cost in truth.items():
        assert fitted[name].call_s.value == pytest.approx(cost.call_s, rel=1e-6)
        assert fitted[name].byte_s.value == pytest.approx(cost.byte_s, rel=1e-6)


def coverage(within: Sequence[bool]) -> float:
    return sum(within) / len(within)


def test_kernels_of_noisy_samples_lie_in_their_intervals() -> None:
    within = []
    for seed in range(20):
        fitted = fit_kernels(kernel_samples(noise=0.05, seed=seed))
        assert fitted["scale"].knee_bytes > 0 and fitted["pack"].call_s.low > 0
        for name in ("pack", "sum"):
            if fitted[name].knee_bytes == 0:
                within += [holds(fitted[name].call_s, KERNELS[name].call_s)]
                within += [holds(fitted[name].byte_s, KERNELS[name].byte_s)]
    assert len(within) > 60 and coverage(within) >= 0.85  # of 95 %


def test_what_samples_do_not_tell_apart_has_a_wide_interval() -> None:
    samples = [((Compute("a", nbytes), Compute("b", nbytes)), 1e-3 + nbytes * 3e-9) for nbytes in SIZES]
    fitted = fit_kernels(samples)
    for estimate in (kernel.byte_s for kernel in fitted.values()):
        assert estimate.low == 0.0 and estimate.high is not None and estimate.high >= 3e-9
    assert sum(kernel.byte_s.value for kernel in fitted.values()) == pytest.approx(3e-9 + MEMORY_S), "none is free"


def test_no_cost_is_negative_and_no_kernel_free() -> None:
    fitted = fit_kernels([((Compute("pack", 1e6),), 2e-3), ((Compute("pack", 2e6),), 1e-3)])
    assert fitted["pack"].call_s.value > 0 and fitted["pack"].byte_s.value == 0


def test_links_come_back_for_each_type_of_collective() -> None:
    link, each = fit_links(link_points(4, noise=0.0), 4)
    assert link.alpha_s.value == pytest.approx(ALPHA_S)
    assert 1.5e7 <= link.bandwidth_bytes_per_s.value <= 2.4e7 and 5e-4 <= link.stage_s.value <= 2e-3
    for pattern, (stage_s, rate) in LINKS.items():
        assert each[pattern].alpha_s == link.alpha_s
        assert each[pattern].stage_s.value == pytest.approx(stage_s)
        assert each[pattern].bandwidth_bytes_per_s.value == pytest.approx(rate)


def test_links_of_noisy_samples_lie_in_their_intervals() -> None:
    within = []
    for seed in range(20):
        link, each = fit_links(link_points(4, noise=0.05, seed=seed), 4)
        within.append(holds(link.alpha_s, ALPHA_S))
        for pattern, (stage_s, rate) in LINKS.items():
            within += [holds(each[pattern].stage_s, stage_s), holds(each[pattern].bandwidth_bytes_per_s, rate)]
    assert coverage(within) >= 0.85


def test_between_two_members_a_stage_is_part_of_the_latency() -> None:
    link, each = fit_links(link_points(2, noise=0.0), 2)
    assert link.stage_s.value == 0 and link.alpha_s.value > ALPHA_S
    for pattern, (stage_s, rate) in LINKS.items():
        assert each[pattern].alpha_s.value == pytest.approx(stage_s + ALPHA_S)
        assert each[pattern].bandwidth_bytes_per_s.value == pytest.approx(rate)


def test_a_link_whose_bytes_took_no_time_carries_what_was_seen() -> None:
    points = {Pattern.ALL_GATHER: [point(1, 1e3, [2e-3]), point(1, 1e4, [1.9e-3]), point(1, 1e6, [1.8e-3])]}
    rate = fit_links(points, 2)[0].bandwidth_bytes_per_s
    assert rate.value == pytest.approx(1e6 / 1.8e-3) and rate.high is None


def test_links_need_two_sizes() -> None:
    with pytest.raises(ValueError, match="at least 2 sizes"):
        fit_links({Pattern.ALL_GATHER: [point(1, 1e3, [2e-3]), point(2, 1e3, [1e-3])]}, 4)


def test_what_a_shaper_lets_pass_at_once_does_not_raise_the_rate() -> None:
    link, each = fit_links(link_points(4, noise=0.0, burst=98304.0), 4)
    for pattern, (_, rate) in LINKS.items():
        assert each[pattern].bandwidth_bytes_per_s.value == pytest.approx(rate, rel=0.05)
    assert link.bandwidth_bytes_per_s.value == pytest.approx(2e7, rel=0.05)


def test_a_median_is_not_moved_by_a_straggler() -> None:
    assert median_of([3.0, 1.0, 2.0, 2.0, 100.0]) == Interval(value=2.0, low=1.0, high=100.0)
    many = median_of([1.0 + number / 100 for number in range(100)])
    assert many.value == pytest.approx(1.495)
    assert many.high is not None and 1.3 < many.low < many.value < many.high < 1.7


@pytest.mark.parametrize(("factor", "shared"), [(1.0, 0.5), (1.5, 0.3), (2.0, 1.0), (4.0, 0.8)])
def test_slowdown_is_told_from_what_was_shared(factor: float, shared: float) -> None:
    """Work of 1 s shares a part of its time with other work, during which it runs at 1 / factor."""
    together_s = 1.0 + shared * (1 - 1 / factor)
    assert slowdown(1.0, together_s, shared) == pytest.approx(factor)


def test_time_that_sharing_does_not_explain_is_no_reason_for_any_factor() -> None:
    assert slowdown(1.0, 3.0, 0.1) == 3.0


def test_slowdown_is_that_of_the_rank_it_hits_most() -> None:
    generator = np.random.default_rng(0)
    alone_s = 1e-2 * np.exp(0.02 * generator.standard_normal((2, 10)))
    factors = np.array([[1.2], [1.6]])
    shared_s = np.full((2, 5), 8e-3)
    together_s = 1e-2 + shared_s * (1 - 1 / factors)
    found = fit_slowdown(alone_s, together_s * np.exp(0.01 * generator.standard_normal((2, 5))), shared_s)
    assert found is not None and found.value == pytest.approx(1.6, rel=0.1) and holds(found, 1.6)
    shared_s[1] = 0.0  # the second rank was done before
    rest = fit_slowdown(alone_s, together_s, shared_s)
    assert rest is not None and rest.value == pytest.approx(1.2, rel=0.1)
    assert fit_slowdown(alone_s, together_s, np.zeros((2, 5))) is None
