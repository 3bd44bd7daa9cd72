"""The few routes per compressor that a search considers: leaves of ByteComp's decision tree that may be worth using.

A search of milliseconds cannot weigh hundreds of leaves for every part, and need not: most take at least as long as
another leaf on every resource. Each leaf is priced by its own steps, at several sizes and under several weightings: all
resources cost the same, or one of them costs more, as if other parts kept it busy. Then the leaf that saves most beside
the schemes present is kept, one after another, up to `MOST_ROUTES`. Dominated leaves never are.

On the CPU the search has one resource for the communication thread and the thread for offloaded work, a core other than
backward's. So a route with all its work on "offload" equals the scheme with the same leaf, which is kept instead. On an
accelerator the scheme computes there, and what is offloaded on the host.

Reference: ByteComp, EuroSys 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...compressors import Compressor, SparseMessage
from ...costs.steps import OFFLOAD, Compute, Step
from ...schemes import LeafConstraints, Route, Scheme, compressions, routes
from ...schemes.tree import DEVICES, RouteTask
from ...tensors.bucket import TensorSpec
from ..default.compressing import LATE
from ..default.network import Network
from ..solver.problem import Resource
from .options import KNOTS_BYTES, resource_of

MOST_ROUTES = 2  # per compressor, beside its schemes
LEAST_SAVED = 0.02  # share of weighted time that a route must save at some size and weighting
SHORTEST_S, LONGEST_S = 1e-12, 1e9  # in place of zero and infinity, so that shares are finite
AMPLE = 0.1  # weight of resources other than the scarce one
SIZES_BYTES = KNOTS_BYTES[::3]
WEIGHTINGS = np.vstack([np.ones(len(Resource)), np.where(np.eye(len(Resource)) > 0, 1.0, AMPLE)])

Array = NDArray[np.float64]


def routes_worth_it(
    compressor: Compressor[Any],
    beside: Sequence[Scheme[Any]],
    network: Network,
    most_bytes: float,
    dtype: torch.dtype,
    leaves: LeafConstraints,
) -> list[Route]:
    """Returns routes (sequences of collectives and coding tasks) for a compressor that may save time, the best first.

    Routes whose kernels were not measured are left out, as are routes that compress sums of sparsifiers, which would be
    made sparse twice.

    Args:
        beside: the schemes that the search considers anyway; a route must save time compared with them.
        network: costs of kernels and links, and the node of each rank.
        most_bytes: size of the largest bucket, in bytes.
        dtype: dtype of the gradients.
        leaves: limits on routes: which collectives and devices they may use, and how often they may compress.
    """
    sizes = [nbytes for nbytes in SIZES_BYTES if nbytes <= most_bytes] or [SIZES_BYTES[0]]
    specs = [TensorSpec((nbytes // dtype.itemsize,), dtype) for nbytes in sizes]
    pricing = _Pricing(network, specs)
    found: list[Route] = []
    prices: list[Array] = []
    alike = _by_devices(_possible(compressor, network, leaves))
    for variants in (each for each in alike if _fits(each[0], network)):
        for route, seconds in pricing.of_variants(variants):
            found.append(route)
            prices.append(_weighed(seconds))
    present = np.min([_weighed(pricing.of(scheme)) for scheme in beside], axis=0, initial=LONGEST_S)
    kept: list[Route] = []
    while found and len(kept) < MOST_ROUTES:
        saved = np.log(present) - np.log(np.minimum(prices, present))  # (routes, sizes, weightings)
        worth = np.where(saved.max(axis=(1, 2)) > LEAST_SAVED, saved.sum(axis=(1, 2)), 0.0)
        best = int(worth.argmax())
        if not worth[best]:
            break
        kept.append(found[best])
        present = np.minimum(present, prices[best])
    return kept


def _possible(compressor: Compressor[Any], network: Network, leaves: LeafConstraints) -> Iterator[Route]:
    """Yields a compressor's routes (task sequences) that `leaves` allows, shortest first; sparsifiers compress once."""
    placement = network.placement
    several = placement.is_hierarchy and placement.ranks_per_node is not None
    most = 1 if issubclass(compressor.traits.payload, SparseMessage) else None
    for route in _all_of(compressor, (placement.ranks_per_node or 1) if several else 1, leaves):
        if most is None or compressions(route.leaf) <= most:
            yield route


@lru_cache(maxsize=64)
def _all_of(compressor: Compressor[Any], ranks_per_node: int, leaves: LeafConstraints) -> tuple[Route, ...]:
    try:
        found = routes(compressor, ranks_per_node, constraints=leaves)
    except ValueError:  # none is left
        return ()
    return tuple(sorted((route for route in found if not route.traits.exact), key=lambda route: len(route.tasks)))


def _fits(route: Route, network: Network) -> bool:
    try:
        route.check_ranks(network.placement)
    except ValueError:
        return False
    return True


def _by_devices(found: Iterable[Route]) -> Iterable[list[Route]]:
    """Groups routes that differ only in the devices on which they compress and decompress."""
    alike: dict[tuple[str, ...], list[Route]] = {}
    for route in found:
        alike.setdefault(tuple(word.partition("@")[0] for word in route.tasks), []).append(route)
    return alike.values()


def _weighed(seconds: Array) -> Array:
    """Returns the seconds of all resources added with weights: (sizes, resources) -> (sizes, weightings)."""
    weighed: Array = np.maximum(seconds @ WEIGHTINGS.T, SHORTEST_S)
    return weighed


def _on(device: str, task: RouteTask) -> RouteTask:
    """Returns the task on the device, if it computes."""
    return replace(task, choice=device) if task.kind.is_local else task


class _Pricing:
    """Computes the seconds that schemes keep each resource busy, for buckets of several sizes."""

    def __init__(self, network: Network, specs: Sequence[TensorSpec]) -> None:
        self._network, self._specs = network, specs
        self._known: dict[Step, tuple[Resource, float]] = {}  # routes share steps

    def of(self, scheme: Scheme[Any]) -> Array:
        """Returns the seconds that a scheme keeps resources busy, (bucket sizes, resources) float64."""
        found = np.zeros((len(self._specs), len(Resource)))
        for row, spec in zip(found, self._specs, strict=True):
            for step in self._steps(scheme, spec):
                resource, seconds = self._priced(step)
                row[resource] += seconds
        return found

    def of_variants(self, variants: Sequence[Route]) -> Iterator[tuple[Route, Array]]:
        """Yields each route with the seconds that it keeps resources busy, (bucket sizes, resources) float64.

        The routes are sequences of collectives and coding tasks that differ only in the devices of coding. Those with a
        kernel that was not measured are left out.
        """
        moved: Array | None = None
        worked: dict[str, Array] = {}  # by device: seconds of each work, (bucket sizes, works)
        unmeasured: set[str] = set()
        for route in variants:
            devices = [task.choice for task in route.leaf if task.kind.is_local]
            for device in {*devices} - worked.keys() - unmeasured:
                found = self._alone(route, device)
                if found is None:
                    unmeasured.add(device)
                else:
                    moved, worked[device] = found
                if self._network.cost.host is None:  # the same work takes as long on another core
                    worked |= dict.fromkeys(DEVICES, worked[device]) if found is not None else {}
                    unmeasured |= set(DEVICES) if found is None else set()
            if moved is None or not unmeasured.isdisjoint(devices):
                continue
            total = moved.copy()
            for place, device in enumerate(devices):
                resource = Resource.OFFLOAD if device == OFFLOAD else Resource.COMPUTE
                total[:, resource] += worked[device][:, place]
            yield route, total

    def _alone(self, route: Route, device: str) -> tuple[Array, Array] | None:
        """Returns the seconds of a route with all its work on `device`; None if one of its kernels was not measured.

        Returns:
            the seconds of resources without the work that is awaited, (bucket sizes, resources) float64, and those of
                this work, (bucket sizes, works) float64.
        """
        route = Route.of(tuple(map(partial(_on, device), route.leaf)), route.compressor, route.ranks_per_node)
        moved = np.zeros((len(self._specs), len(Resource)))
        worked: list[list[float]] = []
        for row, spec in zip(moved, self._specs, strict=True):
            steps = self._steps(route, spec)
            if self._network.cost.unmeasured(steps):
                return None
            worked.append([])
            for step in steps:
                resource, seconds = self._priced(step)
                if isinstance(step, Compute) and step.awaited:
                    worked[-1].append(seconds)
                else:
                    row[resource] += seconds
        return moved, np.array(worked)

    def _steps(self, scheme: Scheme[Any], spec: TensorSpec) -> tuple[Step, ...]:
        return scheme.steps((spec,), (), self._network.placement, LATE)

    def _priced(self, step: Step) -> tuple[Resource, float]:
        if step not in self._known:
            seconds = self._network.cost.seconds(step, self._network.placement)
            self._known[step] = resource_of(step, self._network), seconds
        return self._known[step]
