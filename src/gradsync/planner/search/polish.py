"""Improves a search's plan by effects that only `predict` contains.

These are the slowdown of backward by the exchange, the engine's one communication thread, and transfers that share a
link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ...plans.plan import BucketPlan, Plan
from ...tensors.bucket import Layout
from ..pieces import InPieces, Pieces
from .job import Job
from .options import Way
from .predict import predict, predict_steps, steps_of
from .reasons import SAME, alternatives, may_take, with_buckets, with_scheme
from .turns import with_best_turns


@InPieces
def polished(plan: Plan, job: Job, ways: Sequence[Way]) -> Pieces[Plan]:
    """Returns the plan with other schemes for single buckets where that clearly shortens the predicted training step.

    `ways`: the schemes to choose from, each with the gradients that may take it.
    """
    steps = {bucket.id: steps_of(bucket, bucket.scheme, job) for bucket in plan.buckets}
    seconds = predict_steps(plan, job, steps).seconds
    yield
    for place, bucket in enumerate(plan.buckets):
        others = []
        for other in alternatives(plan, place, job, ways, steps):
            others.append(other)
            yield
        best = min(others, key=lambda other: other.step_s, default=None)
        if best is not None and best.step_s < (1 - SAME) * seconds:
            seconds, steps[bucket.id] = best.step_s, steps_of(bucket, best.scheme, job)
            plan = with_scheme(plan, [place], best.scheme)
    return plan


@InPieces
def merged(plan: Plan, job: Job, ways: Sequence[Way]) -> Pieces[Plan]:
    """Returns the plan with neighbouring buckets merged where that clearly shortens the predicted training step.

    A merged bucket takes the scheme of one of the two. `ways`: the schemes allowed, each with the gradients that may
    take it.
    """
    seconds, place = predict(plan, job).seconds, 0
    yield
    while place + 1 < len(plan.buckets):
        found, steps_s = yield from _with_neighbours_merged(plan, place, job, ways)
        if found and min(steps_s) < (1 - SAME) * seconds:
            seconds, plan = min(steps_s), found[steps_s.index(min(steps_s))]
            place = max(place - 1, 0)
        else:
            place += 1
    return plan


@InPieces
def coarse(plan: Plan, job: Job, ways: Sequence[Way], most_s: float) -> Pieces[Plan]:
    """Returns the plan in fewer buckets: merges neighbours while the predicted step takes at most `most_s` seconds.

    A merged bucket takes the scheme of one of the two. `ways`: the schemes allowed, each with the gradients that may
    take it.
    """
    place = 0
    while place + 1 < len(plan.buckets):
        found, steps_s = yield from _with_neighbours_merged(plan, place, job, ways)
        if found and min(steps_s) <= most_s:
            plan = found[steps_s.index(min(steps_s))]
        else:
            place += 1
    return plan


def _with_neighbours_merged(
    plan: Plan, place: int, job: Job, ways: Sequence[Way]
) -> Pieces[tuple[list[Plan], list[float]]]:
    """Returns plans with the bucket at index `place` merged into the next one, and the predicted seconds of a step."""
    found, steps_s = [], []
    for each in _merged(plan, place, job, ways):
        found.append((yield from with_best_turns.pieces(each, job)))
        steps_s.append(predict(found[-1], job).seconds)
        yield
    return found, steps_s


def _merged(plan: Plan, place: int, job: Job, ways: Sequence[Way]) -> Iterator[Plan]:
    """Yields plans with the bucket at index `place` merged into the next one, which keeps its id and turns."""
    first, second = plan.buckets[place : place + 2]
    schemes = [first.scheme, second.scheme]
    dtypes = {p.tensor.dtype for p in job.profiles if p.name in {*first.names, *second.names}}
    if len(dtypes) > 1 or any(scheme.traits.layout is not Layout.FLAT for scheme in schemes):
        return
    pieces = [*first.segments, *second.segments]
    joined = [(name, list(same)) for name, same in groupby(pieces, key=lambda piece: piece[0])]
    segments = tuple((name, same[0][1], same[-1][2]) for name, same in joined)
    for scheme in dict.fromkeys(schemes):
        both = BucketPlan(id=second.id, segments=segments, scheme=scheme)
        if any(
            way.scheme.planned_for(()) == scheme.planned_for(()) and may_take(both, scheme, way, job) for way in ways
        ):
            yield with_buckets(plan, [*plan.buckets[:place], both, *plan.buckets[place + 2 :]])
