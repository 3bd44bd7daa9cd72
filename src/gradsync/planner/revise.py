"""A plan that was good when it was made, held against what gradients look like now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..bucket import Layout
from ..density import DensityProfile, ParameterProfile
from ..plan import BucketPlan, Plan
from ..schemes import AllReduce, BalancedElements, RowCapacity, Scheme, select, to_expression, with_capacity
from .default import timed_schemes
from .measure import Network

OF_ELEMENTS: tuple[Scheme[Any], ...] = (AllReduce(), BalancedElements())


def revised(plan: Plan, profiles: Sequence[ParameterProfile], network: Network) -> Plan:
    """The plan with other schemes for buckets whose densities have changed so much that these are clearly faster.

    Buckets stay as they are. Only schemes that a default plan chooses from are replaced, by each other: tables'
    schemes, and those of flat buckets of one whole parameter. Room for rows is made where these have outgrown it.
    Deterministic in its arguments.
    """
    known = {p.name: p for p in profiles}
    buckets = tuple(_revised(bucket, known, network) for bucket in plan.buckets)
    stages = {bucket.id: bucket.make_scheme().stages(plan.world) for bucket in buckets}
    return plan.model_copy(update={"buckets": buckets, "order": tuple(_reordered(plan.order, stages))})


def _revised(bucket: BucketPlan, known: Mapping[str, ParameterProfile], network: Network) -> BucketPlan:
    scheme = bucket.make_scheme()
    rivals = timed_schemes(network.placement) if scheme.layout is Layout.ROWS else OF_ELEMENTS
    densities = [_density(known[name], scheme.layout) for name in bucket.names]
    seen = tuple(density for density in densities if density is not None)
    pieces = [(start, stop) for _, start, stop in bucket.segments]
    cut = scheme.layout is Layout.FLAT and pieces != [(0, known[bucket.names[0]].tensor.numel)]
    if cut or len(seen) < len(densities) or scheme.unplanned not in [rival.unplanned for rival in rivals]:
        return bucket
    specs = bucket.bucket({name: known[name].tensor for name in bucket.names}).specs
    fitting = [with_capacity(rival, seen) for rival in rivals]
    chosen = select(fitting, specs, seen, network.placement, network.cost, current=scheme).chosen.scheme
    if chosen.unplanned == scheme.unplanned and _has_room(scheme, seen):
        return bucket
    return bucket.model_copy(update={"scheme": to_expression(chosen)})


def _density(profile: ParameterProfile, layout: Layout) -> DensityProfile | None:
    return profile.density if layout is Layout.ROWS else profile.elements


def _has_room(scheme: Scheme[Any], densities: Sequence[DensityProfile]) -> bool:
    busiest = [replace(density, rows=max(density.rows, density.most_rows)) for density in densities]
    return not isinstance(scheme, RowCapacity | BalancedElements) or scheme.expects_to_fit(busiest)


def _reordered(order: Sequence[tuple[str, str]], stages: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """The turns in the places that the buckets have; a bucket with more stages than before adds them at its last."""
    left = {bucket: list(names) for bucket, names in stages.items()}
    turns = {bucket: sum(1 for name, _ in order if name == bucket) for bucket in stages}
    for bucket, _ in order:
        turns[bucket] -= 1
        take = left[bucket][:1] if turns[bucket] else left[bucket][:]
        del left[bucket][: len(take)]
        yield from ((bucket, stage) for stage in take)
