"""A plan that was good when it was made, held against what gradients look like now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..plans.plan import BucketPlan, Plan
from ..schemes import Scheme, select
from ..schemes.selection import CHANGE_MARGIN
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile, ParameterProfile
from .default import MOST_OF_DENSE, price, timed_schemes
from .flat import dense_schemes, element_schemes, is_dense
from .network import Network


def revised(plan: Plan, before: Sequence[ParameterProfile], now: Sequence[ParameterProfile], network: Network) -> Plan:
    """The plan with other schemes for buckets that have changed so much since that these are clearly faster.

    `before`: what was known when the plan was made. A scheme that was expected to be faster then, and was not chosen,
    proved to be slower, in a trial: it is held to be slower by as much now. So without a change nothing is revised.

    Buckets stay as they are. Only schemes that a default plan chooses from are replaced, by each other: tables'
    schemes, and those of flat buckets of one whole parameter. Room for rows is made where these have outgrown it.
    Deterministic in its arguments.
    """
    known_before, known = {p.name: p for p in before}, {p.name: p for p in now}
    buckets = tuple(_revised(bucket, known_before, known, network) for bucket in plan.buckets)
    stages = {bucket.id: bucket.scheme.stages(plan.world) for bucket in buckets}
    return plan.model_copy(update={"buckets": buckets, "order": tuple(reordered(plan.order, stages))})


def _revised(
    bucket: BucketPlan,
    before: Mapping[str, ParameterProfile],
    now: Mapping[str, ParameterProfile],
    network: Network,
) -> BucketPlan:
    scheme = bucket.scheme
    of_flat = (*dense_schemes(network.placement), *element_schemes(network.placement))
    rivals = timed_schemes(network.placement) if scheme.layout is Layout.ROWS else of_flat
    then, seen = (_densities(bucket.names, known, scheme.layout) for known in (before, now))
    pieces = [(start, stop) for _, start, stop in bucket.segments]
    cut = scheme.layout is Layout.FLAT and pieces != [(0, now[bucket.names[0]].tensor.numel)]
    if cut or not seen or scheme.unplanned not in [rival.unplanned for rival in rivals]:
        return bucket
    specs = bucket.bucket({name: now[name].tensor for name in bucket.names}).specs
    choice = select(
        [rival.planned_for(seen) for rival in rivals],
        specs,
        seen,
        network.placement,
        network.cost,
        current=scheme,
        margin=1 - MOST_OF_DENSE if is_dense(scheme) else CHANGE_MARGIN,
        handicaps=_handicaps(rivals, scheme, specs, then, seen, network) if then else {},
    )
    chosen = choice.chosen.scheme
    if chosen.unplanned == scheme.unplanned and scheme.has_room_for(seen):
        return bucket
    return bucket.model_copy(update={"scheme": chosen})


def _handicaps(
    rivals: Sequence[Scheme[Any]],
    scheme: Scheme[Any],
    specs: tuple[TensorSpec, ...],
    then: tuple[DensityProfile, ...],
    seen: tuple[DensityProfile, ...],
    network: Network,
) -> dict[Scheme[Any], float]:
    """Of each rival as it would be now: how much longer it takes than expected, as the present scheme was chosen."""
    present_s = price(scheme.unplanned.planned_for(then).steps(specs, then, network.placement), network)
    expected_s = {r: price(r.planned_for(then).steps(specs, then, network.placement), network) for r in rivals}
    return {r.planned_for(seen): max(present_s / expected_s[r], 1.0) for r in rivals}


def _densities(
    names: Sequence[str], known: Mapping[str, ParameterProfile], layout: Layout
) -> tuple[DensityProfile, ...]:
    """Of the bucket's tensors, by rows or by elements; () while not all are known."""
    densities = [known[name].density if layout is Layout.ROWS else known[name].elements for name in names]
    seen = tuple(density for density in densities if density is not None)
    return seen if len(seen) == len(densities) else ()


def reordered(order: Sequence[tuple[str, str]], stages: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """The turns in the places that the buckets have; a bucket with more stages than before adds them at its last."""
    left = {bucket: list(names) for bucket, names in stages.items()}
    turns = {bucket: sum(1 for name, _ in order if name == bucket) for bucket in stages}
    for bucket, _ in order:
        turns[bucket] -= 1
        take = left[bucket][:1] if turns[bucket] else left[bucket][:]
        del left[bucket][: len(take)]
        yield from ((bucket, stage) for stage in take)
