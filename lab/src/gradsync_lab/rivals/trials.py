"""Measures how far gradsync's search is from the best plan, on random problems small enough to try every plan."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradsync.planner.solver.joint import best_of_all, certify, search
from gradsync.planner.solver.problem import Curve, Demand, Option, Problem, Resource

COMPUTE, OFFLOAD, INTRA, INTER = Resource


@dataclass(frozen=True)
class GapCase:
    """The gaps in step time between gradsync's plan of a random problem, the best plan and a lower bound; 0.01: 1 %."""

    seed: int
    items: int
    gap: float  # step of the search's plan over the best plan's, minus 1
    certified_gap: float  # the largest gap that the search's certificate admits
    slack: float  # step of the best plan over the certificate's bound, minus 1


def gap_cases(seeds: Iterable[int], *, most_items: int = 8) -> Iterator[GapCase]:
    """Yields, for each seed's random problem, the gaps in step time of gradsync's plan, best plan and lower bound."""
    for seed in seeds:
        problem = random_problem(seed, most_items=most_items)
        found, best = search(problem), best_of_all(problem)
        certificate = certify(problem, found)
        slack = best.seconds / certificate.bound_s - 1.0
        yield GapCase(seed, problem.size, found.seconds / best.seconds - 1.0, certificate.gap, slack)


def random_problem(seed: int, *, most_items: int = 8, items: int | None = None, options: int | None = None) -> Problem:
    """Returns a random planning problem: gradients (items), and `options`, or 2 to 4, of 8 ways to exchange a gradient.

    Links, devices and backward matter about equally. Gradients' sizes differ by 3 orders of magnitude, and some are
    ready together. The ways: dense; in 16 bits; compressed on COMPUTE (backward's device), on OFFLOAD (another core
    or the host) or on both; hierarchical, with and without compression; compressed push and pull.
    """
    draw = random.Random(seed)

    def scale(least: float, most: float) -> float:
        return math.exp(draw.uniform(math.log(least), math.log(most)))

    size = items or draw.randint(2, most_items)
    gaps = tuple(0.0 if item and draw.random() < 0.15 else scale(0.05, 2.0) for item in range(size))
    nbytes = tuple(scale(0.001, 3.0) for _ in range(size))
    backward, total = sum(gaps), sum(nbytes)
    per_byte, per_call = backward / total, backward / size  # units of bandwidth and latency below
    call, inter, intra = scale(0.005, 0.5) * per_call, scale(0.3, 4.0) * per_byte, scale(0.02, 0.7)
    ratio, knee = scale(0.01, 0.3), scale(0.05, 1.0) * total / size
    launch, encode = scale(0.01, 0.6) * per_call, scale(0.03, 0.6) * per_byte
    relaunch, decode = launch * draw.uniform(0.1, 0.8), encode * draw.uniform(0.1, 0.8)
    begin, other = call * draw.uniform(0.0, 1.0), scale(0.1, 1.5) * per_byte

    def on(resource: Resource, call_s: float, unit_s: float) -> Demand:
        return Demand(resource, Curve.linear(call_s, unit_s))

    def sent(share: float) -> Demand:
        return on(INTER, call, inter * share)

    encoded = Demand(COMPUTE, Curve.knee(launch, encode, knee))
    decoded, inside = on(COMPUTE, relaunch, decode), on(INTRA, 0.3 * call, inter * intra)
    aside = on(OFFLOAD, begin, other)
    first, *rest = (
        Option("dense", (sent(1.0),)),
        Option("half", (on(COMPUTE, launch / 5, encode / 10), sent(0.5), on(COMPUTE, relaunch / 5, decode / 10))),
        Option("device", (encoded, sent(ratio), decoded)),
        Option("host", (aside, sent(ratio), on(OFFLOAD, 0.3 * begin, 0.3 * other))),
        Option("mixed", (aside, sent(ratio), decoded)),
        Option("levels", (inside, sent(0.5), inside)),
        Option("levels, compressed", (inside, encoded, sent(ratio / 2), on(COMPUTE, relaunch, decode / 3), inside)),
        Option(
            "push and pull", (encoded, sent(0.4 * ratio), on(COMPUTE, relaunch, decode / 5), sent(0.4 * ratio), decoded)
        ),
    )
    chosen = draw.sample(rest, (options or draw.randint(2, 4)) - 1)
    return Problem(gaps, nbytes, (first, *chosen), rest_s=draw.choice([0.0, scale(0.1, 2.0)]))
