"""Simulates the learning of ranks that average parameters: replicas in one process, each with its own optimiser.

A mixing matrix for each round says which ranks average with which: so groups of ranks and neighbours on a graph are
treated alike. A replica's parameters are a row of a matrix, which each step multiplies by the round's mixing matrix.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.comm.shuffle import Matrix, one_of
from gradsync.compressors import Cast, Compressor
from gradsync.costs.cluster import Cluster, Link, Placement
from gradsync.planner.averaging.plan import STATES
from gradsync.plans.plan import Plan
from gradsync.schemes import CompressedAllGather, HalfPrecision, Hierarchical, Scheme, Shuffled
from gradsync.tensors.bucket import FlatSpec

from ..rivals.gossip import Gossip
from ..workloads import Workload
from .averaging import AveragingMethod

ALIKE_BYTES_PER_S = 1.25e8  # 1 Gbit/s; where all links are alike, the rate changes no decision


def mixings_of(scheme: Scheme[Any], size: int) -> list[Matrix]:
    """Returns the mixing matrix, (size, size), by which each round of the scheme's cycle multiplies ranks' parameters.

    Raises:
        ValueError: the scheme does not average parameters.
    """
    if isinstance(scheme, Gossip):
        return [scheme.mixing(size, round) for round in range(len(scheme.distances))]
    if isinstance(scheme, Shuffled):
        return [each.mixing for each in scheme.schedule.rounds]
    raise ValueError(f"{scheme.title} mixes no parameters")


def rests_of(scheme: Scheme[Any]) -> list[bool]:
    """Returns, for each round of the scheme's cycle, whether no ranks meet."""
    if isinstance(scheme, Shuffled):
        return [each.rests for each in scheme.schedule.rounds]
    return [False] * (len(scheme.distances) if isinstance(scheme, Gossip) else 1)


class Replicas:
    """Replicas of a workload's model, one per simulated rank.

    In a step each replica trains on its own batch, then one round of the schedule averages parameters.
    """

    def __init__(
        self,
        workload: Workload,
        scheme: Scheme[Any],
        *,
        momentum_every: int,
        seed: int,
        ranks: int,
        ablations: Collection[str] = (),
    ) -> None:
        self._workload = workload
        self._mixings = [torch.from_numpy(w).float() for w in mixings_of(scheme, ranks)]
        self._meets = [not rests for rests in rests_of(scheme)]
        if "static" in ablations and any(self._meets):
            first = self._mixings[self._meets.index(True)]
            self._mixings = [first if meets else w for w, meets in zip(self._mixings, self._meets, strict=True)]
        self._is_stale = "stale" in ablations
        self._compressor = _compressor_of(scheme)
        self._momentum_every = momentum_every
        self._models = [workload.model(sparse=False, seed=seed) for _ in range(ranks)]
        self._parameters = _rows([list(model.parameters()) for model in self._models])
        self._buffers = _rows([[b for b in model.buffers() if b.is_floating_point()] for model in self._models])
        self._optimizers: list[Optimizer] = [workload.optimizer(model) for model in self._models]
        self._batches = [workload.batches(rank, ranks, seed) for rank in range(ranks)]
        self._mean = workload.model(sparse=False, seed=seed)
        self._reference = self._parameters[0].clone()  # compressed payloads are differences from this row

    @classmethod
    def of(
        cls, method: AveragingMethod, workload: Workload, *, seed: int, ranks: int, scheme: Scheme[Any] | None
    ) -> Replicas:
        """Returns replicas that average by `scheme`; None: by the one that the method chooses for equal links."""
        if scheme is None:
            model = workload.model(sparse=False, seed=seed)
            made = method.plan(model, ranks)
            if not isinstance(made, Plan):
                alike = Cluster(ranks, Link(ALIKE_BYTES_PER_S)) if ranks > 1 else None
                made = made.plan(model, workload.optimizer(model), Placement.one_per_node(ranks), alike)
            scheme = made.buckets[0].scheme
        return cls(
            workload,
            scheme,
            momentum_every=method.momentum_every,
            seed=seed,
            ranks=ranks,
            ablations=method.ablations,
        )

    def train(self) -> Iterator[nn.Module]:
        """Trains, and yields the replicas' mean model after each step; the next step overwrites it."""
        for step in count():
            before = self._parameters.clone() if self._is_stale else None
            for model, optimizer, batches in zip(self._models, self._optimizers, self._batches, strict=True):
                model.train()
                loss = self._workload.loss(model, next(batches))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            self._mix(step, before)
            yield self._mean_model()

    @property
    def spread(self) -> float:
        """Returns the mean squared distance of the replicas' parameters to their mean."""
        return float((self._parameters - self._parameters.mean(dim=0)).square().sum(dim=1).mean())

    @torch.no_grad()
    def _mix(self, step: int, before: Tensor | None) -> None:
        w = self._mixings[step % len(self._mixings)]
        if before is not None:  # the average of parameters before the step, as if it had overlapped with the step
            self._parameters += w @ before - before
        elif self._compressor is None:
            self._parameters.copy_(w @ self._parameters)
        else:
            apart = self._parameters - self._reference
            sent = torch.stack([_sent(self._compressor, row, rank) for rank, row in enumerate(apart)])
            self._parameters += w @ sent - sent
        self._buffers.copy_(w @ self._buffers)
        if self.mixes_momenta(step):
            for group in zip(*(optimizer.state.values() for optimizer in self._optimizers), strict=True):
                for key in STATES.get(type(self._optimizers[0]), ()):
                    if isinstance(group[0].get(key), Tensor):
                        mixed = torch.einsum("ij,j...->i...", w, torch.stack([kept[key] for kept in group]))
                        for kept, mean in zip(group, mixed, strict=True):
                            kept[key].copy_(mean)

    def mixes_momenta(self, step: int) -> bool:
        """Whether the averaging round of this step averages momenta too, as in `AveragingPlanner`."""
        every, place = self._momentum_every, step % len(self._meets)
        if not (every and self._meets[place]):
            return False
        length = sum(self._meets)  # rounds of a cycle in which ranks meet
        meeting = step // len(self._meets) * length + sum(self._meets[:place])
        return meeting % (every * length) in one_of(every, length)

    @torch.no_grad()
    def _mean_model(self) -> nn.Module:
        for mean, *of_ranks in zip(
            self._mean.parameters(), *(model.parameters() for model in self._models), strict=True
        ):
            mean.copy_(torch.stack(of_ranks).mean(dim=0))
        for mean, *of_ranks in zip(self._mean.buffers(), *(model.buffers() for model in self._models), strict=True):
            mean.copy_(torch.stack(of_ranks).to(torch.float64).mean(dim=0) if mean.is_floating_point() else of_ranks[0])
        return self._mean


def _compressor_of(scheme: Scheme[Any]) -> Compressor[Any] | None:
    """Returns the compressor by which the scheme sends parameters within groups; None if it sends them unchanged."""
    inner: Any = scheme.scheme if isinstance(scheme, Shuffled) else scheme
    inner = inner.inter if isinstance(inner, Hierarchical) else inner
    if isinstance(inner, HalfPrecision):
        return Cast(inner.values)
    return inner.compressor if isinstance(inner, CompressedAllGather) else None


def _sent(compressor: Compressor[Any], row: Tensor, rank: int) -> Tensor:
    """Returns a rank's row of differences, (elements,), compressed and decompressed, as other ranks receive it."""
    payload, _ = compressor.compress(row, compressor.init(FlatSpec.of(row), rank))
    arrived = torch.empty_like(row)
    compressor.sum_into(arrived, [payload], 1.0)
    return arrived


@torch.no_grad()
def _rows(tensors: list[list[Tensor]]) -> Tensor:
    """Moves each rank's tensors to a row of a new matrix, (ranks, elements) float32, of which they become views."""
    rows = torch.stack([torch.cat([t.reshape(-1).float() for t in each] or [torch.zeros(0)]) for each in tensors])
    for row, each in zip(rows, tensors, strict=True):
        for tensor, part in zip(each, row.split([t.numel() for t in each]), strict=True):
            tensor.data = part.view(tensor.shape)
    return rows
