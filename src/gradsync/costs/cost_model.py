"""From a step to seconds: the latency-bandwidth (alpha-beta) model, fitted from measurements."""

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
    """What a kernel takes: so much a call, and so much a byte that it must read or write beyond a call's first ones."""

    call_s: float
    byte_s: float
    knee_bytes: float = 0.0  # of a call, up to which more of them take no longer

    def seconds(self, nbytes: float, calls: float) -> float:
        return calls * self.call_s + max(nbytes - calls * self.knee_bytes, 0.0) * self.byte_s


@dataclass(frozen=True)
class CostModel:
    """`stage_s + rounds * alpha_s + busiest bytes / bandwidth` for a transfer; for a computation what its kernel was
    measured to take, else `bytes / memory bandwidth`.

    `stage_s` is what any transfer takes, be it one message: to wake threads, and to wait for the slowest rank. Latency
    and bandwidth are those of a node's link, which all of its ranks share; ranks of one node have an `intra` link each.
    Without one they have a link like the node's. How much of an all-gather crosses between nodes depends on its way: up
    to `at_once_bytes` of a member go straight to the others. (Among the ranks of one node, and among ranks of as many
    nodes, both ways load the links alike.)
    """

    alpha_s: float
    bandwidth_bytes_per_s: float
    memory_bytes_per_s: float = 10e9
    kernels: Mapping[str, KernelCost] = field(default_factory=dict)
    intra: Link | None = None
    stage_s: float = 0.0
    transport: Transport = DEFAULT_TRANSPORT

    def seconds(self, step: Step, placement: Placement | None = None) -> float:
        """`placement`: of all ranks; None: each on a node of its own."""
        if isinstance(step, Compute):
            kernel = self.kernels.get(step.kernel) or KernelCost(0.0, 1 / self.memory_bytes_per_s)
            return kernel.seconds(step.nbytes, step.calls)
        known = self._known.get((step, placement))
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[step, placement] = self.latency_s(step, placement) + self._bytes_s(step, placement)
        return known

    def latency_s(self, transfer: Transfer, placement: Placement | None = None) -> float:
        """What of a transfer's seconds leaves the links free."""
        if placement is None or placement.num_nodes == placement.size:
            return self.stage_s + transfer.carried_by(self.transport).rounds * self.alpha_s
        self._require_of(transfer, placement)
        return self.stage_s + self._waits_s(transfer, placement)

    def unmeasured(self, steps: Iterable[Step]) -> list[str]:
        """Kernels of these steps that take what memory takes as nobody knows better; none where none was measured."""
        if not self.kernels:
            return []
        names = dict.fromkeys(step.kernel for step in steps if isinstance(step, Compute))
        return [name for name in names if name not in self.kernels]

    def total_s(self, steps: Iterable[Step], placement: Placement | None = None) -> float:
        """All steps one after the other, nothing overlapping."""
        return sum(self.seconds(step, placement) for step in steps)

    @cached_property
    def _known(self) -> dict[tuple[Transfer, Placement | None], float]:
        """Transfers that were priced: a search asks for the same ones over and over."""
        return {}

    def _bytes_s(self, transfer: Transfer, placement: Placement | None) -> float:
        """Where nodes have several ranks: the slower of what passes between nodes and of what stays within one."""
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

    @property
    def _within(self) -> Link:
        return self.intra or Link(self.bandwidth_bytes_per_s, self.alpha_s)

    def _waits_s(self, transfer: Transfer, placement: Placement) -> float:
        """Of a ring's rounds each waits for the slowest link; other messages follow one another, each on its own."""
        nodes, intra = placement.nodes, self._within
        traffic = transfer.carried_by(self.transport)
        waits = [
            (source, to, self.alpha_s if nodes[source] != nodes[to] else intra.latency_s)
            for source, to, _ in traffic.messages()
        ]
        if traffic.passed_on:
            return traffic.rounds * max(latency_s for _, _, latency_s in waits)
        return busiest(waits)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CostModel:
        """What `dataclasses.asdict` made of a cost model."""
        kernels = {name: KernelCost(**costs) for name, costs in values["kernels"].items()}
        intra = Link(**values["intra"]) if values.get("intra") else None
        transport = RingOrDirect(**values["transport"])
        return cls(**{**values, "kernels": kernels, "intra": intra, "transport": transport})

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float, float]], **known: Any) -> CostModel:
        """Least squares over (rounds, busiest bytes, measured seconds) of transfers, by relative errors.

        `known` are the other fields, `stage_s` among them.

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
    """Returns the most bytes that leave one node, or reach one, of all of its ranks together."""
    nodes = placement.nodes
    crossing = ((nodes[source], nodes[to], nbytes) for source, to, nbytes in traffic.messages())
    return busiest(message for message in crossing if message[0] != message[1])
