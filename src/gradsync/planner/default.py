"""The plan made when the user gives none: all-reduce for dense gradients, a sparse scheme for sparse ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ..bucket import TensorSpec, cut_by_bytes
from ..cluster import Placement
from ..density import DensityProfile, ParameterProfile
from ..plan import Plan
from ..schemes import AGSparse, AllReduce, BalancedParallelism, Scheme
from ..steps import transfers

FIRST_BUCKET_BYTES = 1 << 20  # DDP's first bucket: an early start of communication
BUCKET_BYTES = 25 << 20  # DDP's default, so that dense models run as they do there
FEWEST_BUCKET_BYTES = 1 << 20  # the smallest size worth a trial: at 1 Gbit a ring of it takes 13 ms, 5 of them latency
BUCKETS_TO_OVERLAP = 4  # the size between: a guess, of which the trial says whether it was a good one

SPARSE_SCHEMES: tuple[Scheme[Any], ...] = (BalancedParallelism(), AGSparse())


def default_plans(profiles: Sequence[ParameterProfile], world_size: int) -> list[Plan]:
    """The default plan, and those with other sizes of dense buckets, where they differ.

    Small buckets hide more of their way behind backward and cost more calls; on a fast network they also take cores
    from backward. Which size wins follows from none of the figures known here, so the engine tries.
    """
    if world_size == 1:
        return [default_plan(profiles, world_size)]
    between = sum(p.tensor.nbytes for p in profiles if not p.sparse) // BUCKETS_TO_OVERLAP
    sizes = [BUCKET_BYTES, FEWEST_BUCKET_BYTES]
    if between >= 2 * FEWEST_BUCKET_BYTES and not BUCKET_BYTES / 2 < between < 2 * BUCKET_BYTES:
        sizes.insert(1, between)
    plans = [default_plan(profiles, world_size, bucket_bytes=size) for size in sizes]
    return list({plan.digest: plan for plan in plans}.values())


def default_plan(profiles: Sequence[ParameterProfile], world_size: int, *, bucket_bytes: int = BUCKET_BYTES) -> Plan:
    """Dense parameters in DDP-sized buckets in ready order, then all sparse tables of a dtype in one bucket.

    Deterministic in its arguments, which are the same on every rank. Parameters come in model order; before readiness
    was measured (`position` all equal) the reverse of that order is taken, as backward runs.
    """
    specs = {p.name: p.tensor for p in profiles}
    ready = sorted(reversed(profiles), key=lambda p: p.position)
    buckets: list[tuple[list[str], Scheme[Any]]] = []
    dense = [p for p in ready if not p.sparse]
    # A dtype's buckets are cut on their own; within it ready order stays.
    for _, same in groupby(sorted(dense, key=lambda p: str(p.tensor.dtype)), key=lambda p: str(p.tensor.dtype)):
        sizes = [(p.name, p.tensor.nbytes) for p in same]
        buckets += [(names, AllReduce()) for names in cut_by_bytes(sizes, FIRST_BUCKET_BYTES, bucket_bytes)]
    sparse = sorted((p for p in ready if p.sparse), key=lambda p: str(p.tensor.dtype))
    for _, same in groupby(sparse, key=lambda p: str(p.tensor.dtype)):
        tables = list(same)
        buckets.append(([p.name for p in tables], cheapest_sparse_scheme(tables, world_size)))
    return Plan.make(specs, world_size, buckets)


def cheapest_sparse_scheme(tables: Sequence[ParameterProfile], world_size: int) -> Scheme[Any]:
    """The sparse scheme whose busiest rank moves the fewest bytes for the measured densities; the first without any."""
    densities = [p.density for p in tables]
    if any(d is None for d in densities):
        return SPARSE_SCHEMES[0]
    known: tuple[DensityProfile, ...] = tuple(d for d in densities if d is not None)
    specs: tuple[TensorSpec, ...] = tuple(p.tensor for p in tables)
    placement = Placement.one_per_node(world_size)

    def busiest_bytes(scheme: Scheme[Any]) -> float:
        return sum(t.busiest_bytes for t in transfers(scheme.steps(specs, known, placement)))

    return min(SPARSE_SCHEMES, key=busiest_bytes)
