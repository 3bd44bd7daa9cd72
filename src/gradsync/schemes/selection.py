"""Selection: the scheme that is fastest for what is known of the data and of the network (after Zen, OSDI 2025).

The paper compares two volumes, of integers and values in either way. Here every scheme tells its own steps, so that
what is compared are the bytes it sends in the formats it uses, latencies, and the work of its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..costs.cluster import Placement
from ..costs.cost_model import CostModel
from ..tensors.bucket import Layout, TensorSpec
from ..tensors.density import DensityProfile
from .base import Partitioned, Scheme
from .centralized import AGSparse
from .combine import Hierarchical
from .dense import AllReduce, ReduceScatter
from .elements import BalancedElements
from .partitioned import BalancedParallelism
from .points import (
    BLOCKS_OF_256,
    DOUBLING_OF_ELEMENTS,
    DOUBLING_OF_ROWS,
    PARAMETER_SERVER_OF_ELEMENTS,
    PARAMETER_SERVER_OF_ROWS,
    SPLIT_OF_ELEMENTS,
    SPLIT_OF_ROWS,
    ElementPoint,
    RowPoint,
)
from .precision import HalfPrecision
from .regions import OkTopkLike
from .scatter import SparseReduceScatter
from .space import POINTS
from .zen_hash import ZenHash

CHANGE_MARGIN = 0.1  # share of its time that another scheme must save before the present one is left
TOLERANCE = 0.05  # estimates are no better: of schemes so much slower than the fastest the first is taken
NO_HANDICAPS: Mapping[Scheme[Any], float] = {}
MOST_RANKS_FOR_POINTS = 16  # rounds and messages of the unnamed points grow too fast to be worth a look with more


@dataclass(frozen=True)
class TimedScheme:
    """A scheme and what it is expected to take."""

    scheme: Scheme[Any]
    seconds: float


@dataclass(frozen=True)
class Selection:
    """All that were compared, the fastest first, and which to use."""

    choices: tuple[TimedScheme, ...]
    chosen: TimedScheme


def candidates(
    layout: Layout, profiles: Sequence[DensityProfile], placement: Placement, *, values: str | None = None
) -> tuple[Scheme[Any], ...]:
    """What a bucket of this layout may be synchronised by, among ranks placed so; with room for data of these profiles.

    Where several nodes have several ranks each, also what sums inside the nodes first. `values`: rounded to "bfloat16"
    or "float16" on the wire; by default all is exact.
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


def _in_half(scheme: Scheme[Any], values: str) -> Scheme[Any]:
    """Rounded where bytes cost most: between the nodes of a hierarchy, else on all ways."""
    if isinstance(scheme, Hierarchical):
        return replace(scheme, inter=HalfPrecision(scheme.inter, values))
    return HalfPrecision(scheme, values)


def _hierarchies(layout: Layout, profiles: Sequence[DensityProfile], placement: Placement) -> Iterator[Scheme[Any]]:
    """Both stages dense or sparse, in any combination that there is."""
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


def select(
    schemes: Sequence[Scheme[Any]],
    specs: tuple[TensorSpec, ...],
    profiles: tuple[DensityProfile, ...],
    placement: Placement,
    cost: CostModel,
    *,
    current: Scheme[Any] | None = None,
    margin: float = CHANGE_MARGIN,
    handicaps: Mapping[Scheme[Any], float] = NO_HANDICAPS,
    tolerance: float = TOLERANCE,
) -> Selection:
    """The fastest of `schemes` for a bucket of `specs` whose data looks like `profiles`.

    Deterministic in its arguments: where these are the same on all ranks (reduced statistics, agreed measurements), all
    ranks choose alike. Of those that take at most a `tolerance` longer than the fastest, the first is taken:
    `candidates` has those first that ask least of the transport. `current`, if it is among the schemes, whatever rows
    it was planned for, is left for another one only if that saves `margin` of its time: densities drift, and a change
    has a price. `handicaps`: by how much a scheme proved to be slower than expected.

    Raises:
        ValueError: for no schemes, or a margin outside [0, 1).
    """
    if not schemes:
        raise ValueError("select needs at least one scheme to choose from")
    if not 0 <= margin < 1:
        raise ValueError(f"the margin is a share of the present scheme's time in [0, 1), got {margin}")

    def seconds(scheme: Scheme[Any]) -> float:
        return handicaps.get(scheme, 1.0) * cost.total_s(scheme.steps(specs, profiles, placement), placement)

    timed = [TimedScheme(scheme, seconds(scheme)) for scheme in schemes]
    ordered = tuple(sorted(timed, key=lambda choice: choice.seconds))
    best = next(choice for choice in timed if choice.seconds <= (1 + tolerance) * ordered[0].seconds)
    present = next((choice for choice in timed if current and choice.scheme.unplanned == current.unplanned), None)
    stays = present is not None and best.seconds > (1 - margin) * present.seconds
    return Selection(ordered, present if stays and present is not None else best)
