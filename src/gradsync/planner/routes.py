"""The routes of a compressor that a search is given: of ByteComp's decision tree the few leaves that may be worth it.

A search of milliseconds cannot weigh hundreds of leaves for every part, and need not: most take as long as another one
on every resource, or longer. Each is priced by its own steps, at several sizes, under several weightings: all resources
worth the same, and each scarce in its turn, as the one is that other parts keep busy. Then one after another is kept
that saves most beside those that are there already, up to `MOST_ROUTES`; one that another one dominates never is.

To the search the thread that issues and that for offloaded work are one, another core than backward's: there a route
that does all its work on "offload" is the scheme that is the same leaf, which is kept in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..compressors import Compressor, SparseMessage
from ..costs.steps import OFFLOAD, Compute, Step
from ..schemes import LeafConstraints, Route, Scheme, compressions, routes
from ..tensors.bucket import TensorSpec
from .compressing import LATE
from .network import Network
from .options import KNOTS_BYTES, resource_of
from .problem import Resource

MOST_ROUTES = 2  # of a compressor, beside its schemes
LEAST_SAVED = 0.02  # share of the weighed time, at the size and weighting where it saves most
SHORTEST_S, LONGEST_S = 1e-12, 1e9  # what costs nothing, and what cannot be done, so that shares can be told
AMPLE = 0.1  # what a second costs on other resources than the scarce one
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
    """Routes that save something `beside` these schemes, of buckets of up to `most_bytes`; that which saves most first.

    Those whose kernels were not measured are none of them, nor those that compress sums of sparsifiers: sparse twice
    over.
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
    """Those that compress, with the fewest tasks first."""
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
    """Together those that differ in nothing but where they compress and decompress."""
    alike: dict[tuple[str, ...], list[Route]] = {}
    for route in found:
        alike.setdefault(tuple(word.partition("@")[0] for word in route.tasks), []).append(route)
    return alike.values()


def _weighed(seconds: Array) -> Array:
    """(sizes, resources) -> (sizes, weightings)."""
    weighed: Array = np.maximum(seconds @ WEIGHTINGS.T, SHORTEST_S)
    return weighed


class _Pricing:
    """Seconds on each resource of buckets of these specs."""

    def __init__(self, network: Network, specs: Sequence[TensorSpec]) -> None:
        self._network, self._specs = network, specs
        self._known: dict[Step, tuple[Resource, float]] = {}  # routes have legs in common

    def of(self, scheme: Scheme[Any]) -> Array:
        """(sizes, resources)."""
        found = np.zeros((len(self._specs), len(Resource)))
        for row, spec in zip(found, self._specs, strict=True):
            for step in self._steps(scheme, spec):
                resource, seconds = self._priced(step)
                row[resource] += seconds
        return found

    def of_variants(self, variants: Sequence[Route]) -> Iterator[tuple[Route, Array]]:
        """The same of routes that do the same on other devices; none whose kernels were not measured."""
        moved = np.zeros((len(self._specs), len(Resource)))
        worked: list[list[float]] = []
        for row, spec in zip(moved, self._specs, strict=True):
            steps = self._steps(variants[0], spec)
            if self._network.cost.unmeasured(steps):
                return
            worked.append([])
            for step in steps:
                resource, seconds = self._priced(step)
                if isinstance(step, Compute) and step.awaited:
                    worked[-1].append(seconds)
                else:
                    row[resource] += seconds
        for route in variants:
            devices = [task.choice for task in route.leaf if task.kind.is_local]
            total = moved.copy()
            for device, each in zip(devices, np.array(worked).T, strict=True):
                total[:, Resource.OFFLOAD if device == OFFLOAD else Resource.COMPUTE] += each
            yield route, total

    def _steps(self, scheme: Scheme[Any], spec: TensorSpec) -> tuple[Step, ...]:
        return scheme.steps((spec,), (), self._network.placement, LATE)

    def _priced(self, step: Step) -> tuple[Resource, float]:
        if step not in self._known:
            seconds = self._network.cost.seconds(step, self._network.placement)
            self._known[step] = resource_of(step, self._network), seconds
        return self._known[step]
