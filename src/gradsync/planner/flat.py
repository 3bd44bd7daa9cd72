"""Schemes of flat buckets in default plans, dense ones and those most of whose elements are zero.

Zen's data path (OSDI 2025): a stage inside the nodes, then one across them. Zen always has both, and the first one is
dense; here the costs of the network tell whether, and which. gloo's own all-reduce knows of no nodes. NCCL's does, so
dense buckets are left to it: nothing is measured there, and no plan is made by costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..costs.cluster import Placement
from ..plans.plan import Plan
from ..schemes import (
    AllReduce,
    BalancedElements,
    Hierarchical,
    Partitioned,
    ReduceScatter,
    Scheme,
    SparseReduceScatter,
    select,
)
from ..tensors.bucket import TensorSpec
from ..tensors.density import DensityProfile, ParameterProfile
from .network import Network


def dense_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Of dense buckets, the transport's own first."""
    return (AllReduce(), *over_nodes([(ReduceScatter(), AllReduce())], placement))


def element_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Of buckets most of whose elements are zero; over nodes either stage may be dense."""
    stages: list[tuple[Partitioned[Any, Any], Scheme[Any]]] = [
        (SparseReduceScatter(), BalancedElements()),
        (ReduceScatter(), BalancedElements()),
        (SparseReduceScatter(), AllReduce()),
    ]
    return (BalancedElements(), *over_nodes(stages, placement))


def over_nodes(
    stages: Sequence[tuple[Partitioned[Any, Any], Scheme[Any]]], placement: Placement
) -> Iterator[Scheme[Any]]:
    """(Inside, across) the nodes; none unless several nodes have several ranks, as many on each."""
    if placement.is_hierarchy and placement.ranks_per_node is not None:
        for inside, across in stages:
            yield Hierarchical(inside, across, placement.ranks_per_node)


def is_dense(scheme: Scheme[Any]) -> bool:
    """Whether it is one of `dense_schemes`, for whatever nodes."""
    over_nodes = isinstance(scheme, Hierarchical) and scheme.intra == ReduceScatter() and scheme.inter == AllReduce()
    return over_nodes or scheme == AllReduce()


def flat_spec(members: Sequence[ParameterProfile]) -> TensorSpec:
    """Of these parameters as one flat tensor."""
    return TensorSpec((sum(p.tensor.numel for p in members),), members[0].tensor.dtype)


def flat_scheme(
    schemes: Sequence[Scheme[Any]], flat: TensorSpec, profiles: tuple[DensityProfile, ...], network: Network | None
) -> Scheme[Any]:
    """The first of the schemes, unless another one saves as much of its time as a change of schemes must."""
    first, *others = (scheme.planned_for(profiles) for scheme in schemes)
    if network is None or not others:
        return first
    found = select([first, *others], (flat,), profiles, network.placement, network.cost, current=first)
    return found.chosen.scheme


def across_at_once(order: Iterable[tuple[str, str]], plan: Plan) -> Iterator[tuple[str, str]]:
    """The turns, with those of a dense bucket that goes over the nodes moved to its first one.

    So it is on its way between the nodes as soon as it is ready, like an all-reduce. Its way back into the nodes waits
    for the next bucket to be on its way, as the links between nodes are the slow ones.
    """
    stages = {b.id: b.scheme.stages(plan.world) for b in plan.buckets if is_dense(b.scheme)}
    back: list[tuple[str, str]] = []
    for bucket, stage in order:
        *turns, last = stages.get(bucket, (stage,))
        if turns and stage != turns[0]:
            continue  # moved
        yield from ((bucket, each) for each in turns or [last])
        yield from back
        back = [(bucket, last)] if turns else []
    yield from back
