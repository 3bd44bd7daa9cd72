"""Fits costs and slowdowns to measured seconds, each with a 95 % confidence interval.

The fits are non-negative least squares over the relative errors of medians over repeats. Intervals come from the fit's
covariance; those of rates combine the intervals of latency, seconds per operation and measured time. A cost that the
samples cannot separate from other costs gets an interval from 0 to its value if it alone took the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from ..costs.cost_model import CostModel
from ..costs.steps import Compute, Pattern
from ..planner.pieces import Pieces
from ..plans.profile import MOST_BYTES_PER_S, Interval, KernelEstimate, LinkEstimate, LinkPoint

CONFIDENCE = 0.95
KNEE_DOUBT = 0.01  # the chance of a knee where there is none
FEWEST_FOR_KNEE = 5  # different amounts of a kernel; some line with a knee meets any four
SAME = 1e-6  # share of a column that must differ from the other columns
DRAWS = 1000  # of a bootstrap
MOST_SLOWDOWN = 10.0  # that two things on one processor or link are believed to have

Array = NDArray[np.float64]


def load_scipy() -> Pieces[None]:
    """Imports the parts of SciPy that fits need: a generator that imports one at each `next`, in some ten milliseconds.

    So no training step waits long for imports.
    """
    import scipy.special

    yield
    import scipy.linalg

    yield
    import scipy.sparse.linalg

    yield
    import scipy.spatial.transform

    yield
    import scipy.optimize  # noqa: F401 (with which the ones above are imported)

    yield


def median_of(repeats: Sequence[float]) -> Interval:
    """Returns the median of repeated timings with a 95 % interval, whose ends are two of the timings.

    For up to 8 timings these are the shortest and the longest.
    """
    from scipy.special import bdtr

    ordered = sorted(repeats)
    fewer = bdtr(np.arange(len(ordered)), len(ordered), 0.5)  # the chance that so many, or fewer, are below the median
    below = max(int(np.searchsorted(fewer, (1 - CONFIDENCE) / 2)) - 1, 0)
    return Interval(value=statistics.median(ordered), low=ordered[below], high=ordered[-1 - below])


def nonnegative(table: Array, seconds: Array, known_s: Array | float = 0.0) -> list[Interval]:
    """Returns the costs x >= 0, with intervals, that solve `known_s + table @ x = seconds` with least relative errors.

    Args:
        table: (samples, costs) float64, how often each cost occurs in each sample, such as calls or bytes.
        seconds: (samples,) float64, the measured time of each sample.
        known_s: seconds of each sample that are explained by costs outside of `table`.
    """
    from scipy.special import stdtrit

    scaled, unit = _scaled(table, seconds)
    target = 1 - known_s / seconds
    solution, misfit = _solved(scaled, target)
    free = solution > 0
    freedom = len(target) - int(free.sum())
    told_apart = np.linalg.pinv(scaled) @ scaled  # the identity, where all columns are
    variance = misfit / max(freedom, 1)
    result = []
    for column, value in enumerate(solution):
        told = scaled[:, free | (np.arange(len(solution)) == column)]
        place = int(free[:column].sum())
        used = scaled[:, column] > 0
        low, high = 0.0, float((1 / scaled[used, column]).min()) if used.any() else None
        if freedom > 0 and told_apart[column, column] > 1 - SAME and np.linalg.matrix_rank(told) == told.shape[1]:
            inverse = np.linalg.inv(told.T @ told)
            error = float(np.sqrt(variance * inverse[place, place]) * stdtrit(freedom, (1 + CONFIDENCE) / 2))
            low, high = max(value - error, 0.0), value + error
        high = None if high is None else float(max(high, value) / unit[column])
        result.append(Interval(value=float(value / unit[column]), low=float(low / unit[column]), high=high))
    return result


def _scaled(table: Array, seconds: Array) -> tuple[Array, Array]:
    """Divides rows by their seconds and columns by their maxima; returns the scaled table and the maxima."""
    weighted = table / seconds[:, None]
    unit = np.maximum(weighted.max(axis=0, initial=0.0), np.finfo(float).tiny)
    return weighted / unit, unit


def _solved(scaled: Array, target: Array) -> tuple[Array, float]:
    """Returns the least-squares solution x >= 0 of `scaled @ x = target`, and its sum of squared errors."""
    from scipy.optimize import nnls

    solution, norm = nnls(scaled, target)
    return solution, float(norm**2)


def fit_kernels(samples: Sequence[tuple[Sequence[Compute], float]]) -> dict[str, KernelEstimate]:
    """Fits the cost of each kernel to timed computations; returns it by the kernel's name, in alphabetical order.

    A kernel costs seconds per call and per byte. It gets a knee, the bytes per call up to which bytes cost nothing,
    where that fits clearly better. A kernel to which the fit assigns no time counts as limited by the rate of memory.

    `samples`: some computations each, and their seconds together.
    """
    names = sorted({step.kernel for steps, _ in samples for step in steps})
    seconds = np.array([s for _, s in samples])
    calls, nbytes = (np.zeros((len(samples), len(names))) for _ in range(2))
    for row, (steps, _) in enumerate(samples):
        for step in steps:
            calls[row, names.index(step.kernel)] += step.calls
            nbytes[row, names.index(step.kernel)] += step.nbytes
    knees = np.zeros(len(names))
    for column in range(len(names)):
        mine = calls[:, column] > 0
        knees[column] = _knee(calls[mine], nbytes[mine], seconds[mine], column)
    table = np.hstack([calls, np.maximum(nbytes - calls * knees, 0.0)])
    fitted = nonnegative(table, seconds)
    return {
        name: KernelEstimate(
            call_s=call_s, byte_s=byte_s if call_s.value or byte_s.value else _of_memory(byte_s), knee_bytes=float(knee)
        )
        for name, call_s, byte_s, knee in zip(
            names, fitted[: len(names)], fitted[len(names) :], knees.tolist(), strict=True
        )
    }


def _of_memory(byte_s: Interval) -> Interval:
    """Returns seconds per byte at memory's rate, in an interval from 0 to the upper end of the fitted `byte_s`."""
    value = 1 / CostModel.memory_bytes_per_s
    return Interval(value=value, low=0.0, high=None if byte_s.high is None else max(byte_s.high, value))


def _knee(calls: Array, nbytes: Array, seconds: Array, column: int) -> float:
    """Returns the bytes per call up to which bytes cost a column's kernel no time; 0 if a knee does not fit better.

    `calls` and `nbytes` are (samples, kernels), `seconds` (samples,), of the samples in which this kernel occurs.
    """
    from scipy.special import fdtri

    amounts = np.unique(nbytes[:, column] / calls[:, column])
    if len(amounts) < FEWEST_FOR_KNEE:
        return 0.0

    def misfit(knee: float) -> float:
        over = nbytes.copy()
        over[:, column] = np.maximum(nbytes[:, column] - calls[:, column] * knee, 0.0)
        return _solved(_scaled(np.hstack([calls, over]), seconds)[0], np.ones(len(seconds)))[1]

    straight = misfit(0.0)
    best, knee = min((misfit(float(amount)), float(amount)) for amount in amounts[1:-2])
    used = int(((calls > 0).any(axis=0)).sum())
    freedom = len(seconds) - 2 * used - 1
    if freedom < 1:
        return 0.0
    worth = (straight - best) * freedom > float(fdtri(1, freedom, 1 - KNEE_DOUBT)) * best
    return knee if worth and straight > np.finfo(float).eps else 0.0


def fit_links(
    points: Mapping[Pattern, Sequence[LinkPoint]], size: int
) -> tuple[LinkEstimate, dict[Pattern, LinkEstimate]]:
    """Fits the costs of links to timed collectives; returns those for all collectives together, and for each one.

    A pattern is a kind of collective. All patterns share one latency per message; seconds per operation and the rate
    are each pattern's own. With two ranks seconds per operation cannot be told from latency. They are 0 then, and the
    latency, which contains both, is each pattern's own too.

    Args:
        points: timed exchanges of several sizes, by pattern.
        size: the number of ranks among which they ran.

    Raises:
        ValueError: for a pattern that was timed at one size only.
    """
    for pattern, found in points.items():
        if len({point.busiest_bytes for point in found}) < 2:
            raise ValueError(f"fit_links needs points of at least 2 sizes of each pattern, got {found} of {pattern}")
    every = [point for found in points.values() for point in found]
    rounds = np.array([float(point.rounds) for point in every])
    busiest = np.array([point.busiest_bytes for point in every])
    seconds = np.array([point.seconds.value for point in every])
    if size == 2:
        nothing = Interval(value=0.0, low=0.0, high=0.0)

        def fitted(which: Sequence[Pattern]) -> LinkEstimate:
            mine = np.array([pattern in which for pattern, found in points.items() for _ in found])
            alpha_s, byte_s = nonnegative(np.stack([rounds, busiest], axis=1)[mine], seconds[mine])
            return _link(nothing, alpha_s, byte_s, [points[pattern] for pattern in which])

        return fitted(list(points)), {pattern: fitted([pattern]) for pattern in points}
    masks = np.array(
        [[float(pattern is other) for other in points] for pattern, found in points.items() for _ in found]
    )
    alpha_s, *rest = nonnegative(np.hstack([rounds[:, None], masks * busiest[:, None], masks]), seconds)
    byte_s, stage_s = nonnegative(np.stack([busiest, np.ones_like(busiest)], axis=1), seconds, alpha_s.value * rounds)
    each = zip(points, rest[: len(points)], rest[len(points) :], strict=True)
    return _link(stage_s, alpha_s, byte_s, list(points.values())), {
        pattern: _link(stage, alpha_s, byte, [points[pattern]]) for pattern, byte, stage in each
    }


def _link(
    stage_s: Interval, alpha_s: Interval, byte_s: Interval, points: Sequence[Sequence[LinkPoint]]
) -> LinkEstimate:
    """Returns a link with the fitted latencies, and the median over the patterns of the rate seen at the largest size.

    `points`: those of each pattern (a type of collective). Rates exclude latency; if latency takes most of the time for
    some pattern, the fitted rate is taken instead. Shapers let the first bytes of a burst pass at once, so smaller
    sizes would give too high a rate.
    """
    largest = [max(found, key=lambda point: point.busiest_bytes) for found in points]
    rates = [_rate_of(point, stage_s, alpha_s) for point in largest]
    told = [rate for rate in rates if rate is not None]
    if len(told) < len(rates):
        seen = max(point.busiest_bytes / point.seconds.value for point in largest)
        return LinkEstimate(stage_s=stage_s, alpha_s=alpha_s, bandwidth_bytes_per_s=_rate(byte_s, seen))
    highs = [rate.high for rate in told]
    bandwidth = Interval(
        value=statistics.median(rate.value for rate in told),
        low=min(rate.low for rate in told),
        high=None if None in highs else max(high for high in highs if high is not None),
    )
    return LinkEstimate(stage_s=stage_s, alpha_s=alpha_s, bandwidth_bytes_per_s=bandwidth)


def _rate_of(point: LinkPoint, stage_s: Interval, alpha_s: Interval) -> Interval | None:
    """Returns a point's bytes per second without latency, with an interval; None where latency dominates."""
    latency_s = stage_s.value + point.rounds * alpha_s.value
    if 2 * latency_s > point.seconds.value:
        return None
    least_s = stage_s.low + point.rounds * alpha_s.low
    most_s = inf if stage_s.high is None or alpha_s.high is None else stage_s.high + point.rounds * alpha_s.high
    shortest_s, longest_s = point.seconds.low - most_s, point.seconds.high
    return Interval(
        value=point.busiest_bytes / (point.seconds.value - latency_s),
        low=0.0 if longest_s is None else point.busiest_bytes / (longest_s - least_s),
        high=_highest(point.busiest_bytes, shortest_s),
    )


def _rate(byte_s: Interval, seen: float) -> Interval:
    """Returns bytes per second from the fitted seconds per byte; where these are 0, the measured rate `seen`."""
    if byte_s.value * MOST_BYTES_PER_S <= 1:
        return Interval(value=seen, low=min(1 / byte_s.high, seen) if byte_s.high else seen, high=None)
    low = 1 / byte_s.high if byte_s.high else 0.0
    return Interval(value=1 / byte_s.value, low=low, high=_highest(1.0, byte_s.low))


def _highest(nbytes: float, seconds: float) -> float | None:
    """Returns the upper end of a rate; None where it is above what any link has, or seconds may be 0."""
    return nbytes / seconds if seconds * MOST_BYTES_PER_S > nbytes else None


def slowdown(alone_s: Array, together_s: Array, shared_s: Array) -> Array:
    """Returns the factor by which work takes longer while something else, the disturbance, runs beside it.

    Where that factor would be above `MOST_SLOWDOWN`, something unknown took time: it is `together_s / alone_s` then.

    Args:
        alone_s: seconds of the work alone; arrays of one shape, or numbers.
        together_s: seconds of the work when disturbed.
        shared_s: the part of `together_s` in which the disturbance was active.
    """
    done_s = shared_s + alone_s - together_s  # seconds that the work done meanwhile takes alone
    explained = done_s * MOST_SLOWDOWN > shared_s
    return np.where(explained, shared_s / np.where(explained, done_s, 1.0), together_s / alone_s)


def fit_slowdown(alone_s: Array, together_s: Array, shared_s: Array) -> Interval | None:
    """Returns the factor by which work takes longer while a disturbance runs beside it, on the rank it slows most.

    Each rank's factor follows from medians over its steps; steps in which work and disturbance shared no time do not
    count. The interval comes from a bootstrap over the steps. None if no rank shared time.

    Args:
        alone_s: (ranks, steps) float64, seconds of the work alone; perhaps in other steps than those of `together_s`.
        together_s: (ranks, steps) float64, seconds of the work when disturbed.
        shared_s: (ranks, steps) float64, the seconds of these in which the disturbance was active.
    """
    ranks = [
        (alone, together[shared > 0], shared[shared > 0])
        for alone, together, shared in zip(alone_s, together_s, shared_s, strict=True)
        if (shared > 0).any()
    ]
    if not ranks:
        return None
    generator = np.random.default_rng(0)

    def draws(count: int) -> NDArray[np.int64]:
        """Returns step numbers, (1 + DRAWS, count): in the first row each step once, then rows of bootstrap draws."""
        return np.vstack([np.arange(count), generator.integers(count, size=(DRAWS, count))])

    factors = []
    for alone, together, shared in ranks:
        mine, others = draws(len(alone)), draws(len(together))
        factors.append(slowdown(*(np.median(s, axis=1) for s in (alone[mine], together[others], shared[others]))))
    value, *drawn = np.max(factors, axis=0).tolist()
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    return Interval(value=value, low=min(low, value), high=max(high, value))
