"""Costs of exchanging a bucket in the cluster of ByteComp's evaluation: nodes of 8 GPUs on NVLink or PCIe.

Kernels take the constants of the authors' released planner and their measurements of the host, transfers are those of a
`CostModel`. One rate is fitted for each network, see `bytecomp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel
from gradsync.costs.steps import Pattern, Transfer
from gradsync.planner.solver.problem import Curve, Demand, Option, Resource

from ..rivals.rivals import SeCoPa

NODES, RANKS_PER_NODE = 8, 8
KNEE_ELEMENTS = 1 << 20  # a kernel's time is constant up to a shard of this size, then in proportion (released planner)
COLLECTIVE_S = 150e-6  # (released planner)

HOST_BYTES = (0.0, *(4.0 * (1 << exponent) for exponent in (10, 16, 20, 26)))  # sizes at which the host was measured


@dataclass(frozen=True)
class Coding:
    """A compressor's payload ratio and kernel times in microseconds, as constants of ByteComp's authors."""

    name: str
    wire_ratio: float  # payload over dense bytes; indices double a sparse one
    between: tuple[float, float]  # encoding and decoding a shard between nodes, all payloads of an exchange
    inside: tuple[float, float]  # additionally for coding inside nodes before (two-level minus one-level)
    host_encode: tuple[float, ...]  # for HOST_BYTES from the second on
    host_decode: tuple[float, ...]


RANDOM_K = Coding("Random-k", 0.02, (54, 34), (846, 66), (16, 110, 1236, 92372), (7, 22, 285, 38427))
DGC = Coding("DGC", 0.02, (356, 34), (944, 66), (13, 150, 2312, 134170), (4, 14, 211, 38245))
EF_SIGN_SGD = Coding("EFSignSGD", 1 / 32, (130, 140), (260, 280), (16, 81, 1094, 71289), (5, 27, 359, 24972))
ONE_BIT = Coding("OneBit", 1 / 32, (450, 170), (1030, 350), (19, 91, 1099, 73655), (4, 32, 375, 26167))
HALF_US = (4.0, 22.0)  # conversion of a shard to 16 bits and back


@dataclass(frozen=True)
class Interconnect:
    """The rates of links inside nodes, by ByteComp's planner, and between nodes, fitted to published FP32 runs."""

    name: str
    intra_bytes_per_s: float
    inter_bytes_per_s: float


# The rates between nodes are fitted to the three FP32 bars of each network (least squares of the logarithms), see
# lab/tests/papers/test_bytecomp.py.
NVLINK = Interconnect("NVLink, 100 Gb/s", 1e9 / 0.02, 2.3e9)
PCIE = Interconnect("PCIe, 25 Gb/s", 1e9 / 0.4, 1.95e9)

# Numbers of the options. The paper's tree has 174 leaves on one device. Leaves through a root are left out, as they use
# one rank's link only, and so are flat ones among 64 ranks. `GATHERED`: payloads to all, `TWO_WAY`: to owners and back.
FP32, HALF, GATHERED, TWO_WAY, INSIDE_GATHERED, INSIDE_TWO_WAY, HOST_GATHERED, HOST_TWO_WAY = range(8)
ON_DEVICE = (FP32, GATHERED, TWO_WAY, INSIDE_GATHERED, INSIDE_TWO_WAY)
OFFLOADED = {GATHERED: HOST_GATHERED, TWO_WAY: HOST_TWO_WAY}


@dataclass(frozen=True)
class Costs:
    """The options to exchange a bucket in a cluster of `nodes` nodes, with the costs of collectives and kernels."""

    network: Interconnect
    coding: Coding
    nodes: int = NODES

    @cached_property
    def _placement(self) -> Placement:
        return Placement.regular(self.nodes, RANKS_PER_NODE)

    @cached_property
    def _cost(self) -> CostModel:
        inside = Link(self.network.intra_bytes_per_s)
        return CostModel(0.0, self.network.inter_bytes_per_s, intra=inside, stage_s=COLLECTIVE_S)

    def options(self) -> tuple[Option, ...]:
        """Returns the exchange options in the order of the constants FP32, HALF, ...

        Options that compress between nodes, but not inside them, send 16-bit values inside.
        """
        shard, payload = 1 / RANKS_PER_NODE, self.coding.wire_ratio / RANKS_PER_NODE
        (encode, decode), (encode_inside, decode_inside) = self.coding.between, self.coding.inside
        half = [self._inside(Pattern.ALL_TO_ALL, shard / 2)], [self._inside(Pattern.ALL_GATHER, shard / 2)]
        gather = self._between(Pattern.ALL_GATHER, payload)
        push = self._between(Pattern.ALL_TO_ALL, payload / self.nodes)
        pull = self._between(Pattern.ALL_GATHER, payload / self.nodes)
        recode = _on_device((decode, 1.0), (encode, 1 / self.nodes))  # owners decode parts and encode their sum
        inside = [
            _on_device((encode_inside, 1.0)),
            self._inside(Pattern.ALL_TO_ALL, payload),
            _on_device((decode_inside, 1.0), (encode, 1.0)),
        ]
        host_encode, host_decode = self.coding.host_encode, self.coding.host_decode
        chains = {
            "FP32": self._dense(1.0),
            "16-bit": [_on_device((HALF_US[0], 1.0)), *self._dense(0.5), _on_device((HALF_US[1], 1.0))],
            "gathered": [*half[0], _on_device((encode, 1.0)), *gather, _on_device((decode, 1.0)), *half[1]],
            "two-way": [
                *(*half[0], _on_device((encode, 1.0)), *push, recode),
                *(*pull, _on_device((decode, 1.0)), *half[1]),
            ],
            "inside, gathered": [
                *(*inside, *gather, self._inside(Pattern.ALL_GATHER, self.nodes * payload)),
                _on_device((decode, 1.0)),
            ],
            "inside, two-way": [
                *(*inside, *push, recode, *pull, self._inside(Pattern.ALL_GATHER, payload)),
                _on_device((decode, 1.0)),
            ],
            "host, gathered": [
                *(*half[0], _on_host((host_encode, 1.0, 1.0)), *gather),
                *(_on_host((host_decode, 1.0, float(self.nodes))), *half[1]),
            ],
            "host, two-way": [
                *(*half[0], _on_host((host_encode, 1.0, 1.0)), *push),
                *(_on_host((host_decode, 1.0, 1.0), (host_encode, 1 / self.nodes, 1.0)), *pull),
                *(_on_host((host_decode, 1.0, 1.0)), *half[1]),
            ],
        }
        return tuple(Option(name, tuple(chain)) for name, chain in chains.items())

    def secopa(self) -> SeCoPa:
        """Returns HiPress' rule (whether to compress a gradient) by this cluster's costs, after sums inside nodes."""
        knee = 4.0 * KNEE_ELEMENTS
        encode, decode = (Curve.knee(1e-6 * us, 1e-6 * us / knee, knee) for us in self.coding.between)
        send = Curve.linear(COLLECTIVE_S, 1 / self.network.inter_bytes_per_s)
        return SeCoPa(self.nodes, send, encode, decode, self.coding.wire_ratio)

    def _dense(self, share: float) -> list[Demand]:
        shard = share / RANKS_PER_NODE
        return [
            self._inside(Pattern.ALL_TO_ALL, shard),
            *self._between(Pattern.ALL_REDUCE, shard),
            self._inside(Pattern.ALL_GATHER, shard),
        ]

    def _inside(self, pattern: Pattern, share: float) -> Demand:
        groups = tuple(self._placement.within(node * RANKS_PER_NODE) for node in range(self.nodes))
        return Demand(Resource.INTRA, self._curve(pattern, share, groups))

    def _between(self, pattern: Pattern, share: float) -> list[Demand]:
        """Returns a collective's seconds on links between nodes, `share` of a bucket a rank; no demand for one node."""
        groups = tuple(self._placement.across(rank) for rank in range(RANKS_PER_NODE))
        return [Demand(Resource.INTER, self._curve(pattern, share, groups))] if self.nodes > 1 else []

    def _curve(self, pattern: Pattern, share: float, groups: tuple[tuple[int, ...], ...]) -> Curve:
        """Returns a collective's seconds as a curve over a bucket's bytes, of which each member's part is `share`.

        The curve is a line, as latency is per collective.
        """

        def seconds(nbytes: float) -> float:
            size = self._placement.size
            return self._cost.seconds(Transfer("", pattern, (nbytes * share,) * size, groups=groups), self._placement)

        large = float(1 << 34)
        return Curve.linear(seconds(0.0), (seconds(large) - seconds(0.0)) / large)


def _on_device(*kernels: tuple[float, float]) -> Demand:
    """Returns the demand of device kernels that run in sequence.

    Each is (microseconds for up to `KNEE_ELEMENTS` elements, beyond which time grows in proportion; share of a
    rank's eighth of the bucket that it works on).
    """
    return Demand(Resource.COMPUTE, _sum(map(_knee, kernels)))


def _knee(kernel: tuple[float, float]) -> Curve:
    us, share = kernel
    knee = 4.0 * KNEE_ELEMENTS * RANKS_PER_NODE / share
    return Curve.knee(1e-6 * us, 1e-6 * us / knee, knee)


def _on_host(*kernels: tuple[tuple[float, ...], float, float]) -> Demand:
    """Returns the demand of kernels on the host of a node's ranks.

    Each is (microseconds for each of `HOST_BYTES` but the first, share of the bucket that it works on, number of runs).
    """
    return Demand(
        Resource.OFFLOAD,
        _sum(
            Curve(tuple(amount / share for amount in HOST_BYTES), tuple(1e-6 * us * times for us in (us[0], *us)))
            for us, share, times in kernels
        ),
    )


def _sum(curves: Iterable[Curve]) -> Curve:
    every = list(curves)
    knots = tuple(sorted({amount for curve in every for amount in curve.amounts}))
    return Curve(knots, tuple(sum(curve(amount) for curve in every) for amount in knots))
