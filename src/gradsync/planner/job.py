"""What is known of a training job when it is planned for: its gradients, their times, and what things cost there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..cluster import Cluster
from ..density import ParameterProfile
from ..profile import Estimate, Profile
from .measure import Network


@dataclass(frozen=True)
class Slowdown:
    """How many times as long backward takes while something else goes on."""

    backward_by_transfer: float = 1.0  # an exchange is in flight
    backward_by_kernel: float = 1.0  # the issuing thread computes

    def __post_init__(self) -> None:
        for name in ("backward_by_transfer", "backward_by_kernel"):
            if not getattr(self, name) >= 1.0:
                raise ValueError(f"Slowdown.{name} must be at least 1, got {getattr(self, name)}")

    @property
    def matters(self) -> bool:
        """Whether anything takes longer."""
        return self != Slowdown()


@dataclass(frozen=True)
class Job:
    """What is known of a training job: gradients, when they are ready since backward's begin, and what things cost."""

    profiles: tuple[ParameterProfile, ...]
    ready_s: Mapping[str, float]
    backward_s: float
    network: Network
    slowdown: Slowdown = Slowdown()
    beside_s: float = 0.0  # what a step takes beside backward and the exchange: forward, optimiser, data
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by parameter and way, see `errors.py`

    def __post_init__(self) -> None:
        unknown = [p.name for p in self.profiles if p.name not in self.ready_s]
        if unknown:
            raise ValueError(f"Job.ready_s says of {len(unknown)} parameters nothing, the first is {unknown[0]!r}")

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster | None = None) -> Job:
        """What was measured; with a `cluster`, as it would be there: links are the cluster's, kernels as measured.

        Raises:
            ValueError: for a profile of one rank, whose links were not measured, without a cluster.
        """
        if cluster is None and profile.world == 1:
            raise ValueError("the profile is of one rank, which exchanges nothing: name a cluster to plan for")
        network = Network.of(profile)
        if cluster is not None:
            slowest = min([cluster.link, *cluster.slow.values()], key=lambda link: link.bandwidth_bytes_per_s)
            placement = cluster.placement()
            cost = replace(
                network.cost,
                alpha_s=slowest.latency_s,
                bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s,
                intra=cluster.intra if placement.is_hierarchy else None,
            )
            network = Network(cost, placement)
        overlap = profile.overlap
        return cls(
            profiles=tuple(profile.parameter_profiles()),
            ready_s={p.name: p.ready.mean_s for p in profile.parameters},
            backward_s=profile.parts.backward.mean_s,
            network=network,
            slowdown=Slowdown(*(_factor(f) for f in (overlap.backward_by_transfer, overlap.backward_by_kernel))),
            beside_s=profile.parts.step_s - profile.parts.backward.mean_s,
            errors={p.name: p.errors for p in profile.parameters},
        )

    @property
    def world_size(self) -> int:
        return self.network.placement.size


def _factor(measured: Estimate | None) -> float:
    return 1.0 if measured is None else max(measured.value, 1.0)
