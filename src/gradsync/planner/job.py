"""What is known of a training job when it is planned for: its gradients, their times, and what things cost there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..density import ParameterProfile
from .measure import Network


@dataclass(frozen=True)
class Overlap:
    """How many times as long backward takes while something else goes on."""

    backward_by_transfer: float = 1.0  # an exchange is in flight
    backward_by_kernel: float = 1.0  # the issuing thread computes

    def __post_init__(self) -> None:
        for name in ("backward_by_transfer", "backward_by_kernel"):
            if not getattr(self, name) >= 1.0:
                raise ValueError(f"Overlap.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Job:
    """What is known of a training job: gradients, when they are ready since backward's begin, and what things cost."""

    profiles: tuple[ParameterProfile, ...]
    ready_s: Mapping[str, float]
    backward_s: float
    network: Network
    overlap: Overlap = Overlap()
    beside_s: float = 0.0  # what a step takes beside backward and the exchange: forward, optimiser, data

    def __post_init__(self) -> None:
        unknown = [p.name for p in self.profiles if p.name not in self.ready_s]
        if unknown:
            raise ValueError(f"Job.ready_s says of {len(unknown)} parameters nothing, the first is {unknown[0]!r}")

    @property
    def world_size(self) -> int:
        return self.network.placement.size
