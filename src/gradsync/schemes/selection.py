"""Selection of the scheme that is expected to be fastest for a bucket, given densities and network (Zen, OSDI 2025).

The paper compares two volumes, counted in indices and values. Here each scheme lists its own steps, so the comparison
covers bytes in the formats that are used, latencies, and the work of kernels.
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

CHANGE_MARGIN = 0.1  # share of the present scheme's time that another one must save to replace it
TOLERANCE = 0.05  # the accuracy of estimates: schemes slower than the fastest by up to this share count as equal
NO_HANDICAPS: Mapping[Scheme[Any], float] = {}


@dataclass(frozen=True)
class TimedScheme:
    """A scheme with the seconds in which it is expected to synchronise the bucket in question.

    Attributes:
        scheme: the scheme.
        seconds: the expected seconds.
    """

    scheme: Scheme[Any]
    seconds: float


@dataclass(frozen=True)
class Selection:
    """The result of `select`: all schemes with their expected seconds, and the chosen one.

    Attributes:
        choices: all schemes, the fastest first.
        chosen: the chosen one.
    """

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
    """Compares the expected times of `schemes` for a bucket, and returns all of them and the one to use.

    Deterministic: with the same arguments on all ranks (reduced statistics, agreed measurements), all ranks choose the
    same scheme.

    Args:
        schemes: the candidates. The first one within `tolerance` of the fastest wins, so callers list simple schemes
            first, which need little of the transport.
        specs: shape and dtype of each of the bucket's tables, or of its one flat tensor.
        profiles: the densities of these tensors.
        placement: the ranks on their nodes.
        cost: predicts the time of a scheme's computations and transfers.
        current: the scheme in use. If it is among the candidates, whatever room in messages it was planned with,
            another one replaces it only if that saves `margin` of its time: densities drift, and a change has a price.
        margin: a share of the time of `current`, in [0, 1).
        handicaps: measured over expected time, for schemes that proved slower than expected.
        tolerance: a share of the fastest time.

    Raises:
        ValueError: for no schemes, or a margin outside [0, 1).
    """
    if not schemes:
        raise ValueError("select needs at least one scheme to choose from")
    if not 0 <= margin < 1:
        raise ValueError(f"margin must be a share of the present scheme's time in [0, 1), got {margin}")

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
