"""Revises a running plan after densities of gradients have changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...plans.plan import BucketPlan, Plan
from ...schemes import Scheme, select
from ...schemes.selection import CHANGE_MARGIN
from ...tensors.bucket import Layout, TensorSpec
from ...tensors.density import DensityProfile, ParameterProfile
from .flat import dense_schemes, element_schemes, is_dense
from .network import Network
from .plan import MOST_OF_DENSE, price, timed_schemes


def revised(plan: Plan, before: Sequence[ParameterProfile], now: Sequence[ParameterProfile], network: Network) -> Plan:
    """Returns the plan with other schemes for buckets whose densities changed so that others are clearly faster.

    Only schemes that default plans choose from are replaced, by one another: schemes of tables (sparse gradients), and
    of flat buckets with one whole parameter. Buckets stay as they are; messages get more room for rows where it has
    become too small. Deterministic.

    Args:
        plan: the plan in use.
        before: parameters with their densities when the plan was made. If another scheme was then expected to be faster
            than the chosen one, by a factor f, trials on real steps must have found it slower; so its expected time now
            is multiplied by f. Without a change of densities nothing is revised.
        now: parameters with their present densities.
        network: measured costs of links and kernels.
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
    rivals = timed_schemes(network.placement) if scheme.traits.layout is Layout.ROWS else of_flat
    then, seen = (_densities(bucket.names, known, scheme.traits.layout) for known in (before, now))
    pieces = [(start, stop) for _, start, stop in bucket.segments]
    cut = scheme.traits.layout is Layout.FLAT and pieces != [(0, now[bucket.names[0]].tensor.numel)]
    if cut or not seen or scheme.planned_for(()) not in [rival.planned_for(()) for rival in rivals]:
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
    if chosen.planned_for(()) == scheme.planned_for(()) and scheme.has_room_for(seen):
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
    """Returns a factor for the expected seconds of each rival scheme: p / r if p > r, which trials disproved, else 1.

    p and r are the seconds that were expected for `scheme`, which is in use, and for the rival, by the densities when
    the plan was made (`then`). The rivals that are keys have the capacities for the present densities (`seen`).
    """
    present_s = price(scheme.planned_for(then).steps(specs, then, network.placement), network)
    expected_s = {r: price(r.planned_for(then).steps(specs, then, network.placement), network) for r in rivals}
    return {r.planned_for(seen): max(present_s / expected_s[r], 1.0) for r in rivals}


def _densities(
    names: Sequence[str], known: Mapping[str, ParameterProfile], layout: Layout
) -> tuple[DensityProfile, ...]:
    """Returns the densities of the bucket's tensors, by rows or by elements; () unless all are known."""
    densities = [known[name].density if layout is Layout.ROWS else known[name].elements for name in names]
    seen = tuple(density for density in densities if density is not None)
    return seen if len(seen) == len(densities) else ()


def reordered(order: Sequence[tuple[str, str]], stages: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yields the turns of a plan whose buckets have got other schemes, in the order of the old plan's turns.

    A turn is (bucket id, stage): one collective of one bucket. A bucket's n-th turn keeps its place for the n-th stage
    of the new scheme; further stages follow the bucket's last turn.

    Args:
        order: the turns of the old plan.
        stages: the stages of each bucket's new scheme, by bucket id.
    """
    left = {bucket: list(names) for bucket, names in stages.items()}
    turns = {bucket: sum(1 for name, _ in order if name == bucket) for bucket in stages}
    for bucket, _ in order:
        turns[bucket] -= 1
        take = left[bucket][:1] if turns[bucket] else left[bucket][:]
        del left[bucket][: len(take)]
        yield from ((bucket, stage) for stage in take)
