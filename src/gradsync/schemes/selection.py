"""Selection: the scheme that is fastest for what is known of the data and of the network (after Zen, OSDI 2025).

The paper compares two volumes, of integers and values in either way. Here every scheme tells its own steps, so that
what is compared are the bytes it sends in the formats it uses, latencies, and the work of its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..costs.cluster import Placement
from ..costs.cost_model import CostModel
from ..tensors.bucket import TensorSpec
from ..tensors.density import DensityProfile
from .base import Scheme

CHANGE_MARGIN = 0.1  # share of its time that another scheme must save before the present one is left
TOLERANCE = 0.05  # estimates are no better: of schemes so much slower than the fastest the first is taken
NO_HANDICAPS: Mapping[Scheme[Any], float] = {}


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
    callers list those first that ask least of the transport. `current`, if it is among the schemes, whatever rows
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
    present = next(
        (choice for choice in timed if current and choice.scheme.planned_for(()) == current.planned_for(())), None
    )
    stays = present is not None and best.seconds > (1 - margin) * present.seconds
    return Selection(ordered, present if stays and present is not None else best)
