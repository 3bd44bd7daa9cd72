"""Gossip: each rank averages its parameters with its neighbours only, in overlapping neighbourhoods instead of groups.

On a ring, it is decentralised parallel SGD (Lian et al., 2017). With one other rank in each round, at distances that
double, it is the one-peer exponential graph (Ying et al., 2021), the default of Bluefog.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsync.comm import LENGTH_BYTES, Group
from gradsync.comm.shuffle import Matrix
from gradsync.compressors import CompressorState
from gradsync.compressors.expressions import register
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import Compute, Step, Transfer
from gradsync.schemes.base import Scheme, State, Traits
from gradsync.tensors.bucket import Bucket, Layout, TensorSpec
from gradsync.tensors.density import DensityProfile

ROUND = "round"


@register
@dataclass(frozen=True)
class Gossip(Scheme[Tensor]):
    """Averages the values of each rank r with those of a few others: the ranks r - d modulo n, for given distances d.

    A round is one such exchange; `distances` has the d of each round, and begins anew after the last one. It is for
    parameters, not gradients. Not exact: the result is not the mean of all ranks.

    Wire: the bucket once for each distance of the round, sent and received by each rank.
    """

    distances: tuple[tuple[int, ...], ...]

    traits = Traits(Layout.FLAT, mixes=True, carries_flags=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.distances or not all(self.distances):
            raise ValueError(f"Gossip.distances must have one or more for each round, got {self.distances!r}")

    @classmethod
    def ring(cls) -> Gossip:
        """Returns gossip with both neighbours on a ring."""
        return cls(((1, -1),))

    @classmethod
    def one_peer_exponential(cls, size: int) -> Gossip:
        return cls(tuple((1 << power,) for power in range(max((size - 1).bit_length(), 1))))

    def mixing(self, size: int, round: int) -> Matrix:
        """Returns the mixing matrix W of the given round (exchange) among `size` ranks, (size, size) float64."""
        places = self._places(size, round)
        w = np.eye(size)
        for distance in places:
            w += np.roll(np.eye(size), -distance, axis=1)
        return w / (1 + len(places))

    def stages(self, size: int) -> tuple[str, ...]:
        return ("swap",)

    def init(self, bucket: Bucket, group: Group) -> State:
        return {ROUND: (CompressorState(bucket.flat_spec, group.rank),)}

    async def synchronize(self, x: Tensor, state: State, group: Group, scale: float) -> tuple[Tensor, State]:
        (counted,) = state[ROUND]
        assert isinstance(counted, CompressorState)
        n, places = group.size, self._places(group.size, counted.step)
        if n == 1:
            return x.mul_(scale), {ROUND: (counted.next(),)}
        # Swap: send the bucket to the ranks at these distances, receive the buckets of ranks as far on the other side.
        message = torch.empty(LENGTH_BYTES + x.nbytes, dtype=torch.uint8, device=x.device)
        message[LENGTH_BYTES:] = x.view(torch.uint8)
        to = {(group.rank + distance) % n: message for distance in places}
        origins = [(group.rank - distance) % n for distance in places]
        arrived = await group.swap(to, origins, len(message), x.device, in_pairs=False)
        for origin in origins:
            x += arrived[origin][LENGTH_BYTES:].view(x.dtype)
        return x.mul_(scale * n / (1 + len(places))), {ROUND: (counted.next(),)}

    def steps(
        self,
        specs: tuple[TensorSpec, ...],
        profiles: tuple[DensityProfile, ...],
        placement: Placement,
        step: int = 0,
    ) -> tuple[Step, ...]:
        (flat,) = specs
        n, nbytes = placement.size, float(flat.nbytes + LENGTH_BYTES)
        messages = [(rank, (rank + d) % n, nbytes) for d in self._places(n, step) for rank in range(n)]
        added = Compute("add_neighbours", 3.0 * flat.nbytes * len(self._places(n, step)))
        return (Transfer.of_messages("swap", n, messages), added) if n > 1 else ()

    def unchanged_since(self, step: int) -> int:
        return step % len(self.distances)

    def _places(self, size: int, round: int) -> list[int]:
        """Returns the round's distances modulo `size`, each once, without 0."""
        distances: dict[int, Any] = {d % size: None for d in self.distances[round % len(self.distances)] if d % size}
        return list(distances)
