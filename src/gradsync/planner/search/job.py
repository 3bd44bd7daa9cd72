"""A training job as planners see it: gradients, the times when they become ready, and the costs of its network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from ...costs.cluster import Cluster
from ...plans.plan import Plan
from ...plans.profile import Overlap, Profile
from ...tensors.density import ParameterProfile
from ..default.network import Network


@dataclass(frozen=True)
class Slowdown:
    """Factors by which backward, transfers and kernels of the exchange take longer while another of the three runs.

    `a_by_b` is the factor by which a takes longer while b runs; 1: no longer than alone.

    Attributes:
        backward_by_transfer: the factor of backward, while a transfer is in flight.
        backward_by_kernel: the factor of backward, while the communication thread computes.
        transfer_by_backward: the factor of a transfer, while backward runs.
        kernel_by_backward: the factor of a computation of the communication thread, while backward runs.
        transfer_by_kernel: the factor of a transfer, while the communication thread computes.
        kernel_by_transfer: the factor of a computation of the communication thread, while a transfer is in flight.
    """

    backward_by_transfer: float = 1.0
    backward_by_kernel: float = 1.0
    transfer_by_backward: float = 1.0
    kernel_by_backward: float = 1.0
    transfer_by_kernel: float = 1.0
    kernel_by_transfer: float = 1.0

    def __post_init__(self) -> None:
        for field_ in fields(self):
            if not getattr(self, field_.name) >= 1.0:
                raise ValueError(f"Slowdown.{field_.name} must be at least 1, got {getattr(self, field_.name)}")

    @classmethod
    def of(cls, overlap: Overlap) -> Slowdown:
        """Returns the factors measured where work overlaps; ones below 1, which is chance, or not measured become 1."""
        measured = {field_.name: getattr(overlap, field_.name) for field_ in fields(cls)}
        return cls(**{name: max(factor.value, 1.0) for name, factor in measured.items() if factor is not None})

    @property
    def matters(self) -> bool:
        """Whether any factor is above 1, so that work that runs at the same time slows each other down."""
        return self != NO_SLOWDOWN


NO_SLOWDOWN = Slowdown()


@dataclass(frozen=True)
class Job:
    """A training job as planners see it: its gradients, when they become ready, and the costs of kernels and links.

    Attributes:
        profiles: parameters in model order, with what was measured of each.
        ready_s: seconds from the begin of backward until each gradient is ready, by parameter.
        backward_s: seconds of backward alone.
        network: costs of kernels and links, and the node of each rank.
        slowdown: factors by which backward, transfers and kernels slow each other down.
        beside_s: seconds of a step without backward and exchange: forward, optimiser, data.
        errors: relative errors of lossy schemes and compressors in one step, by parameter, then by the name that
            `errors.name_of` returns for the scheme or compressor.
        present: the plan that the job runs, the fastest of those tried so far; None for a job that is not running.
    """

    profiles: tuple[ParameterProfile, ...]
    ready_s: Mapping[str, float]
    backward_s: float
    network: Network
    slowdown: Slowdown = NO_SLOWDOWN
    beside_s: float = 0.0
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    present: Plan | None = None

    def __post_init__(self) -> None:
        unknown = [p.name for p in self.profiles if p.name not in self.ready_s]
        if unknown:
            raise ValueError(f"Job.ready_s has no time for {len(unknown)} parameters, the first is {unknown[0]!r}")

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster | None = None) -> Job:
        """Returns the job measured in `profile`; with `cluster`, its links and nodes replace the measured ones.

        Costs of kernels stay those of the profile. All nodes get the latency and rate of the cluster's slowest link.

        Raises:
            ValueError: for a profile of one rank, which has no measured links, without a cluster.
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
        return cls(
            profiles=tuple(profile.parameter_profiles()),
            ready_s={p.name: p.ready.median_s for p in profile.parameters},
            backward_s=profile.parts.backward.median_s,
            network=network,
            slowdown=Slowdown.of(profile.overlap),
            beside_s=profile.parts.beside.median_s,
            errors={p.name: p.errors for p in profile.parameters},
        )

    def with_hidden_latencies(self) -> Job:
        """Returns the job with half of its links' latencies, as two transfers in flight hide each other's latency.

        The search, which simulates one transfer after another, uses it; predictions of a plan let transfers overlap
        (`costs/forecast.py`).
        """
        cost = self.network.cost
        intra = cost.intra and replace(cost.intra, latency_s=cost.intra.latency_s / 2)
        cost = replace(cost, alpha_s=cost.alpha_s / 2, stage_s=cost.stage_s / 2, intra=intra)
        return replace(self, network=replace(self.network, cost=cost))

    @property
    def world_size(self) -> int:
        """The number of ranks of the job."""
        return self.network.placement.size
