"""The latency-bandwidth (alpha-beta) model: seconds of computations and transfers, by costs fitted to measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .cluster import Link, Placement
from .steps import Compute, Step, Traffic, Transfer, busiest
from .transport import DEFAULT_TRANSPORT, RingOrDirect, Transport

MOST_KNOWN = 100_000  # transfers whose price a cost model remembers


@dataclass(frozen=True)
class KernelCost:
    """The cost of a kernel: a call takes call_s + byte_s * max(0, bytes - knee_bytes) seconds.

    Attributes:
        call_s: seconds of a call.
        byte_s: seconds of each byte beyond `knee_bytes` of a call.
        knee_bytes: up to so many bytes of a call, more bytes take no longer.
    """

    call_s: float
    byte_s: float
    knee_bytes: float = 0.0

    def seconds(self, nbytes: float, calls: float) -> float:
        """Returns the seconds of `calls` calls that read and write `nbytes` in all."""
        return calls * self.call_s + max(nbytes - calls * self.knee_bytes, 0.0) * self.byte_s


@dataclass(frozen=True)
class HostCost:
    """The costs of computations that are offloaded from an accelerator to the host.

    Attributes:
        fetch, send: copies to the host, and back.
        kernels: kernels on the host, by name.
    """

    fetch: KernelCost
    send: KernelCost
    kernels: Mapping[str, KernelCost]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> HostCost:
        """Returns the costs again from the dictionary that `dataclasses.asdict` made of them, as JSON files keep it."""
        kernels = {name: KernelCost(**costs) for name, costs in values["kernels"].items()}
        return cls(KernelCost(**values["fetch"]), KernelCost(**values["send"]), kernels)

    def copies_s(self, work: Compute) -> float:
        """Returns the seconds that an offloaded computation takes to copy bytes to the host and results back."""
        copies = ((self.fetch, work.fetched_bytes), (self.send, work.sent_bytes))
        return sum(cost.seconds(nbytes, work.calls) for cost, nbytes in copies if nbytes)


@dataclass(frozen=True)
class CostModel:
    """A model of the seconds that a scheme's computations and transfers take, by latency and rate.

    A transfer takes `stage_s + rounds * alpha_s + bytes on the busiest link / bandwidth`; a computation takes the
    measured time of its kernel, else `bytes / memory bandwidth`. Latency and bandwidth are those of a node's link,
    which all of its ranks share; ranks of one node have an `intra` link each, or without one a link like the node's.

    Attributes:
        alpha_s: latency of a message.
        bandwidth_bytes_per_s: rate of a node's link in each direction.
        memory_bytes_per_s: rate of kernels that were not measured.
        kernels: measured kernels, by name.
        intra: the link between ranks of one node.
        stage_s: fixed seconds of any transfer: to wake threads, and to wait for the slowest rank.
        transport: the way in which the backend carries a collective, which sets messages and rounds. It matters for an
            all-gather where nodes have several ranks: bytes that go round a ring cross between nodes fewer times.
            (Among the ranks of one node, and among one rank a node, ring and direct messages load the links alike.)
        host: copies and kernels of offloaded work, where gradients are on an accelerator; None: offloaded work runs on
            the same processor.
    """

    alpha_s: float
    bandwidth_bytes_per_s: float
    memory_bytes_per_s: float = 10e9
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)
    intra: Link | None = None
    stage_s: float = 0.0
    transport: Transport = DEFAULT_TRANSPORT
    host: HostCost | None = None

    def seconds(self, step: Step, placement: Placement | None = None) -> float:
        """Returns the seconds of one step of a scheme, a computation or a transfer.

        Args:
            step: the computation or transfer.
            placement: the node of each rank of the transfer; None: each on a node of its own.

        Raises:
            ValueError: where transfer and placement have different numbers of ranks, unless no node has several ranks.
        """
        if isinstance(step, Compute):
            kernel = self._kernels_for(step).get(step.kernel) or KernelCost(0.0, 1 / self.memory_bytes_per_s)
            copies_s = self.host.copies_s(step) if self.host is not None else 0.0
            return copies_s + kernel.seconds(step.nbytes, step.calls)
        known = self._known.get((step, placement))
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[step, placement] = self.latency_s(step, placement) + self._bytes_s(step, placement)
        return known

    def latency_s(self, transfer: Transfer, placement: Placement | None = None) -> float:
        """Returns the seconds of a transfer in which it sends no bytes, so that others can use the links.

        `placement`: the node of each rank of the transfer; None: each on a node of its own.

        Raises:
            ValueError: where transfer and placement have different numbers of ranks, unless no node has several ranks.
        """
        if placement is None or placement.num_nodes == placement.size:
            return self.stage_s + transfer.carried_by(self.transport).rounds * self.alpha_s
        self._require_of(transfer, placement)
        return self.stage_s + self._waits_s(transfer, placement)

    def unmeasured(self, steps: Iterable[Step]) -> list[str]:
        """Returns the names of kernels without measured costs in a scheme's `steps` (computations and transfers).

        None are returned if no kernel at all was measured. The time of unmeasured ones is estimated by
        `memory_bytes_per_s`.
        """
        if not self.kernels:
            return []
        computed = [step for step in steps if isinstance(step, Compute)]
        return list(dict.fromkeys(step.kernel for step in computed if step.kernel not in self._kernels_for(step)))

    def _kernels_for(self, work: Compute) -> Mapping[str, KernelCost]:
        return self.host.kernels if self.host is not None and work.is_copied else self.kernels

    def total_s(self, steps: Iterable[Step], placement: Placement | None = None) -> float:
        """Returns the seconds of a scheme's computations and transfers (`steps`) if they run one after the other.

        `placement`: the node of each rank; None: each on a node of its own.
        """
        return sum(self.seconds(step, placement) for step in steps)

    @cached_property
    def _known(self) -> dict[tuple[Transfer, Placement | None], float]:
        """A cache of the seconds of transfers, as a search asks for the same ones over and over."""
        return {}

    def _bytes_s(self, transfer: Transfer, placement: Placement | None) -> float:
        """Returns the seconds that a transfer's bytes take: the longer of those between nodes and inside nodes."""
        if placement is None or placement.num_nodes == placement.size:
            return transfer.carried_by(self.transport).busiest_bytes / self.bandwidth_bytes_per_s
        self._require_of(transfer, placement)
        nodes = placement.nodes
        traffic = transfer.carried_by(self.transport)
        inside = busiest(message for message in traffic.messages() if nodes[message[0]] == nodes[message[1]])
        between_s = node_link_bytes(traffic, placement) / self.bandwidth_bytes_per_s
        return max(between_s, inside / self._within.bandwidth_bytes_per_s)

    @staticmethod
    def _require_of(transfer: Transfer, placement: Placement) -> None:
        if placement.size != transfer.size:
            raise ValueError(f"the transfer is among {transfer.size} ranks, the placement has {placement.size}")

    @cached_property
    def _within(self) -> Link:
        return self.intra or Link(self.bandwidth_bytes_per_s, self.alpha_s)

    def _waits_s(self, transfer: Transfer, placement: Placement) -> float:
        """Returns the seconds of latency of a transfer, those of the member that waits longest.

        Each round of a ring waits for the slowest link; other messages of a member follow one another, each with the
        latency of its own link.
        """
        nodes, intra = placement.nodes, self._within
        traffic = transfer.carried_by(self.transport)
        waits = [
            (source, to, self.alpha_s if nodes[source] != nodes[to] else intra.latency_s)
            for source, to, _ in traffic.messages()
        ]
        if traffic.is_forwarded:
            return traffic.rounds * max(latency_s for _, _, latency_s in waits)
        return busiest(waits)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CostModel:
        """Returns the cost model again from the dictionary that `dataclasses.asdict` made of it, as JSON files keep it.

        Its transport must have been a `RingOrDirect`.
        """
        kernels = {name: KernelCost(**costs) for name, costs in values["kernels"].items()}
        intra = Link(**values["intra"]) if values.get("intra") else None
        transport = RingOrDirect(**values["transport"])
        host = HostCost.of(values["host"]) if values.get("host") else None
        return cls(**{**values, "kernels": kernels, "intra": intra, "transport": transport, "host": host})

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float, float]], **known: Any) -> CostModel:
        """Fits latency and bandwidth to measured transfers, by least squares of relative errors; returns the model.

        Args:
            samples: (rounds, bytes on the busiest link, measured seconds) of each transfer; rounds are messages one
                after another.
            known: the other fields of the model, `stage_s` among them.

        Raises:
            ValueError: with fewer than two samples, or when the samples do not tell latency from bandwidth.
        """
        if len(samples) < 2:
            raise ValueError(f"CostModel.fit needs at least 2 samples of different size, got {len(samples)}")
        table = np.asarray(samples, dtype=np.float64)
        weighted = table[:, :2] / table[:, 2:]
        rest = 1 - known.get("stage_s", 0.0) / table[:, 2]
        solution, _, rank, _ = np.linalg.lstsq(weighted, rest, rcond=None)
        if rank < 2 or solution[1] <= 0:
            raise ValueError("CostModel.fit: the samples do not separate latency from bandwidth; vary the sizes more")
        return cls(max(float(solution[0]), 0.0), 1.0 / float(solution[1]), **known)


def node_link_bytes(traffic: Traffic, placement: Placement) -> float:
    """Returns the bytes on the busiest node's link: the most that all ranks of one node send, or receive, together.

    Args:
        traffic: the messages of one transfer.
        placement: the node of each rank.
    """
    nodes = placement.nodes
    crossing = ((nodes[source], nodes[to], nbytes) for source, to, nbytes in traffic.messages())
    return busiest(message for message in crossing if message[0] != message[1])
