"""Schemes that default plans choose from for flat buckets: dense ones, and ones with mostly zero elements.

Zen (OSDI 2025) sends data in two stages, inside nodes and then across nodes, with a dense first stage. Here costs of
the network decide on whether there are two stages, and which. gloo's all-reduce ignores nodes. NCCL's does not, so it
keeps dense buckets: nothing is measured with NCCL, and no plan is made by costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...costs.cluster import Placement
from ...plans.plan import Plan
from ...schemes import (
    AllReduce,
    BalancedElements,
    Hierarchical,
    Partitioned,
    ReduceScatter,
    Scheme,
    SparseReduceScatter,
    select,
)
from ...tensors.bucket import TensorSpec
from ...tensors.density import DensityProfile, ParameterProfile
from .network import Network


def dense_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Returns the schemes that a default plan may use for dense buckets, the backend's own all-reduce first.

    Where `placement` has several ranks on each node, a second one sums inside nodes first, then across them.
    """
    return (AllReduce(), *two_level_schemes([(ReduceScatter(), AllReduce())], placement))


def element_schemes(placement: Placement) -> tuple[Scheme[Any], ...]:
    """Returns the schemes that a default plan may use for gradients whose elements are mostly zero.

    The first one sums non-zero elements over all ranks. Where `placement` has several ranks on each node, others sum
    inside nodes first, then across them; one of these two levels may send all elements.
    """
    stages: list[tuple[Partitioned[Any, Any], Scheme[Any]]] = [
        (SparseReduceScatter(), BalancedElements()),
        (ReduceScatter(), BalancedElements()),
        (SparseReduceScatter(), AllReduce()),
    ]
    return (BalancedElements(), *two_level_schemes(stages, placement))


def two_level_schemes(
    stages: Sequence[tuple[Partitioned[Any, Any], Scheme[Any]]], placement: Placement
) -> Iterator[Scheme[Any]]:
    """Yields, for each pair (inside nodes, across nodes) of schemes, one that sums inside nodes, then across them.

    Yields nothing unless there are several nodes, with several ranks on each and the same number on all.
    """
    if placement.is_hierarchy and placement.ranks_per_node is not None:
        for inside, across in stages:
            yield Hierarchical(inside, across, placement.ranks_per_node)


def is_dense(scheme: Scheme[Any]) -> bool:
    """Whether the scheme is all-reduce, or reduce-scatter inside nodes with all-reduce across them."""
    over_nodes = isinstance(scheme, Hierarchical) and scheme.intra == ReduceScatter() and scheme.inter == AllReduce()
    return over_nodes or scheme == AllReduce()


def flat_spec(members: Sequence[ParameterProfile]) -> TensorSpec:
    """Returns the length and dtype of the flat tensor that these parameters, of one dtype, make when concatenated."""
    return TensorSpec((sum(p.tensor.numel for p in members),), members[0].tensor.dtype)


def flat_scheme(
    schemes: Sequence[Scheme[Any]], flat: TensorSpec, profiles: tuple[DensityProfile, ...], network: Network | None
) -> Scheme[Any]:
    """Returns the first scheme, unless another one is expected to be faster by enough to justify a change.

    Args:
        schemes: the schemes to choose from.
        flat: length and dtype of the bucket's flat tensor.
        profiles: the measured density of the bucket, as the only entry; empty: dense.
        network: the costs to compare by; None: not measured, so the first scheme stays.
    """
    first, *others = (scheme.planned_for(profiles) for scheme in schemes)
    if network is None or not others:
        return first
    found = select([first, *others], (flat,), profiles, network.placement, network.cost, current=first)
    return found.chosen.scheme


def with_early_middle_stages(order: Iterable[tuple[str, str]], plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the turns of `order`, with middle stages of two-level dense buckets moved right behind their first stage.

    A turn is (bucket id, stage): one collective of one bucket. Two-level buckets are summed inside nodes, then across
    nodes. So such a bucket travels between nodes as soon as it is ready, like an all-reduce. The last stage, back into
    the nodes, comes after the next bucket has been sent, as links between nodes are the slow ones.
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
