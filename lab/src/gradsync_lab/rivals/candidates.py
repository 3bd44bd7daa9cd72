"""Lists the schemes, gradsync's and other systems', that `gradsync.schemes.select` chooses from for a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from gradsync.compressors.cast import HalfType
from gradsync.costs.cluster import Placement
from gradsync.schemes import (
    BLOCKS_OF_256,
    DOUBLING_OF_ELEMENTS,
    DOUBLING_OF_ROWS,
    PARAMETER_SERVER_OF_ELEMENTS,
    PARAMETER_SERVER_OF_ROWS,
    POINTS,
    SPLIT_OF_ELEMENTS,
    SPLIT_OF_ROWS,
    AGSparse,
    AllReduce,
    BalancedElements,
    BalancedParallelism,
    ElementPoint,
    HalfPrecision,
    Hierarchical,
    Partitioned,
    ReduceScatter,
    RowPoint,
    Scheme,
    SparseReduceScatter,
)
from gradsync.tensors.bucket import Layout
from gradsync.tensors.density import DensityProfile

from .regions import OkTopkLike
from .zen_hash import ZenHash

MOST_RANKS_FOR_POINTS = 16  # with more ranks, rounds and messages of `POINTS` are too many to be worth a try


def candidates(
    layout: Layout, profiles: Sequence[DensityProfile], placement: Placement, *, values: HalfType | None = None
) -> tuple[Scheme[Any], ...]:
    """Returns the schemes that can synchronise a bucket of this layout among ranks with this placement.

    Room in messages is set for data of the given profiles. Where several nodes have several ranks each, hierarchical
    schemes, which first sum inside the nodes, are included.

    Args:
        values: "bfloat16" or "float16" rounds values to that type on the wire; None keeps all schemes exact.
    """
    points = POINTS if placement.size <= MOST_RANKS_FOR_POINTS else ()
    schemes: list[Scheme[Any]]
    if layout is Layout.FLAT:
        schemes = [AllReduce(), *(scheme.planned_for(profiles) for scheme in (BalancedElements(), ZenHash()))]
        schemes += [OkTopkLike()]
        schemes += [DOUBLING_OF_ELEMENTS, SPLIT_OF_ELEMENTS, PARAMETER_SERVER_OF_ELEMENTS, BLOCKS_OF_256]
        schemes += [ElementPoint.at(point) for point in points]
    else:
        schemes = [scheme.planned_for(profiles) for scheme in (BalancedParallelism(), AGSparse())]
        schemes += [
            DOUBLING_OF_ROWS,
            SPLIT_OF_ROWS,
            PARAMETER_SERVER_OF_ROWS,
            *(RowPoint.at(point) for point in points),
        ]
    schemes += _hierarchies(layout, profiles, placement)
    if values is not None:
        schemes = [_in_half(scheme, values) for scheme in schemes]
    return tuple(dict.fromkeys(schemes))


def _in_half(scheme: Scheme[Any], values: HalfType) -> Scheme[Any]:
    """Returns the scheme with 16-bit values on the wire; in a hierarchy between nodes only, where bytes cost most."""
    if isinstance(scheme, Hierarchical):
        return replace(scheme, inter=HalfPrecision(scheme.inter, values))
    return HalfPrecision(scheme, values)


def _hierarchies(layout: Layout, profiles: Sequence[DensityProfile], placement: Placement) -> Iterator[Scheme[Any]]:
    """Yields each hierarchical scheme of a reduction in nodes and an exchange between them, each dense or sparse."""
    per_node = placement.ranks_per_node
    if per_node is None or not placement.is_hierarchy:
        return
    intra: list[Partitioned[Any, Any]]
    inter: list[Scheme[Any]]
    if layout is Layout.FLAT:
        intra, inter = [ReduceScatter(), SparseReduceScatter()], [AllReduce(), BalancedElements(), DOUBLING_OF_ELEMENTS]
    else:
        intra = [BalancedParallelism(owners="table_stripe")]
        inter = [BalancedParallelism(), AGSparse(), DOUBLING_OF_ROWS]
    for inside, across in product(intra, inter):
        yield Hierarchical(inside, across, per_node).planned_for(profiles)
