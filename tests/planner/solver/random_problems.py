"""Small random problems: whole numbers, so that sums are exact and many moments coincide."""

from __future__ import annotations

import random

from gradsync.planner.solver.problem import Curve, Demand, Option, Part, Problem, Resource


def curve(random_: random.Random, most: int = 4) -> Curve:
    call, unit = float(random_.randrange(most)), float(random_.randrange(most))
    if random_.random() < 0.5:
        return Curve.linear(call, unit)
    return Curve.knee(call, unit, float(random_.randrange(1, 4)))


def one_channel(random_: random.Random, *, decode: bool, most_items: int = 7) -> Problem:
    """Returns a problem with one channel, INTER: plain, encoded on COMPUTE, or on OFFLOAD, and decoded on COMPUTE."""
    last = (Demand(Resource.COMPUTE, curve(random_)),) if decode else ()
    options = (
        Option("plain", (Demand(Resource.INTER, curve(random_, 9)),)),
        Option("device", (Demand(Resource.COMPUTE, curve(random_)), Demand(Resource.INTER, curve(random_)), *last)),
        Option("host", (Demand(Resource.OFFLOAD, curve(random_, 6)), Demand(Resource.INTER, curve(random_)), *last)),
    )
    return _problem(random_, options, most_items)


def any_chains(random_: random.Random, most_items: int = 7) -> Problem:
    """Returns a problem whose options have random demands in random order."""
    options = tuple(
        Option(
            str(number),
            tuple(Demand(random_.choice(list(Resource)), curve(random_)) for _ in range(random_.randrange(1, 6))),
        )
        for number in range(3)
    )
    return _problem(random_, options, most_items)


def _problem(random_: random.Random, options: tuple[Option, ...], most_items: int) -> Problem:
    count = random_.randrange(1, most_items + 1)
    return Problem(
        tuple(float(random_.choice([0, 0, 1, 2, 5])) for _ in range(count)),
        tuple(float(random_.choice([0, 1, 1, 2, 6])) for _ in range(count)),
        options,
        rest_s=float(random_.choice([0, 0, 3])),
    )


def random_parts(random_: random.Random, problem: Problem) -> tuple[Part, ...]:
    stops = [stop for stop in range(1, problem.size) if random_.random() < 0.6] + [problem.size]
    starts = [0, *stops[:-1]]
    chosen = [random_.randrange(len(problem.options)) for _ in stops]
    return tuple(Part(*cut) for cut in zip(starts, stops, chosen, strict=True))


def coded(random_: random.Random, *, knees: bool, most_items: int = 9) -> Problem:
    """Returns a problem of encode, send, decode with random costs; many gradients coincide, are empty or giant."""

    def costs() -> Curve:
        call, unit = float(random_.randrange(6)), float(random_.randrange(3))
        return Curve.knee(call, unit, float(random_.randrange(1, 9))) if knees else Curve.linear(call, unit)

    chain = (Demand(Resource.COMPUTE, costs()), Demand(Resource.INTER, costs()), Demand(Resource.COMPUTE, costs()))
    count = random_.randrange(1, most_items + 1)
    sizes = [float(random_.choice([0, 1, 2, 3])) for _ in range(count)]
    if random_.random() < 0.3:
        sizes[random_.randrange(count)] = 40.0
    if random_.random() < 0.3:
        sizes[count // 2 :] = [0.0] * (count - count // 2)
    gaps = [float(random_.choice([0, 0, 1, 4])) for _ in range(count)]
    return Problem(tuple(gaps), tuple(sizes), (Option("coded", chain),), rest_s=float(random_.choice([0, 3])))
