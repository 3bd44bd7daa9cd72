"""The ways that a plan may choose from: exact ones always, lossy ones as the user allows, for whom it allows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from typing import Any

from ..bucket import Layout, matches
from ..compressors import Compressor, SparseMessage
from ..density import ParameterProfile
from ..schemes import CompressedTwoWay, Scheme, SchemeOrCompressor, ways
from .default import found_schemes, in_ready_order, sparse_schemes, timed_schemes
from .errors import name_of
from .flat import dense_schemes
from .job import Job
from .options import Way


@dataclass(frozen=True)
class Constraints:
    """What of a job's gradients may lose how much; without `lossy` nothing loses anything.

    `most_error` bounds, for each parameter, the root of the squared error that one step makes over the squared
    gradient, as `errors` has it by parameter and lossy way; without a figure the way is not allowed then. With error
    feedback a step's error is sent later, and without it is lost: the bound is for either.
    """

    lossy: tuple[SchemeOrCompressor, ...] = ()
    always: bool = False  # what may take a lossy way takes one, exact ways are for all others
    exact: tuple[str, ...] = ()  # names or shell patterns of parameters that lose nothing
    matrices_only: bool = False  # tensors of one dimension, as biases and norms, lose nothing
    most_error: float | None = None
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by parameter, by `name_of` a way

    def __post_init__(self) -> None:
        for way in self.lossy:
            if not isinstance(way, Compressor | Scheme) or (isinstance(way, Scheme) and way.layout is not Layout.FLAT):
                raise ValueError(f"Constraints.lossy must be compressors, or schemes of flat buckets, got {way!r}")
        if isinstance(self.exact, str):
            raise ValueError(f"Constraints.exact must be a tuple of names or patterns, got {self.exact!r}")
        if self.most_error is not None and not self.most_error >= 0:
            raise ValueError(f"Constraints.most_error must not be negative, got {self.most_error}")

    def require_names(self, names: Sequence[str]) -> None:
        """
        Raises:
            ValueError: for an `exact` that none of the names matches.
        """
        for pattern in self.exact:
            if not any(matches(name, [pattern]) for name in names):
                raise ValueError(f"Constraints.exact names {pattern!r}, which no parameter to synchronise matches")

    def allow(self, way: SchemeOrCompressor, profile: ParameterProfile) -> bool:
        """Whether the parameter may lose what this way makes it lose."""
        tensor = profile.tensor
        if profile.sparse or not tensor.dtype.is_floating_point or matches(profile.name, self.exact):
            return False
        if self.matrices_only and len(tensor.shape) < 2:
            return False
        error = self.errors.get(profile.name, {}).get(name_of(way), inf)
        return self.most_error is None or error <= self.most_error


def ways_of(job: Job, constraints: Constraints | None = None) -> list[Way]:
    """All ways of a job, exact ones first.

    Raises:
        ValueError: for an `exact` that no parameter matches.
    """
    constraints = constraints or Constraints()
    constraints.require_names([p.name for p in job.profiles])
    lossy = list(_lossy_ways(job, constraints, besides=by_rows(job)))
    taken = frozenset[str]().union(*(way.among or () for way in lossy)) if constraints.always else frozenset[str]()
    return [*exact_ways(job, besides=taken), *lossy]


def exact_ways(job: Job, *, besides: frozenset[str] = frozenset()) -> list[Way]:
    """Tables that are ready together in one bucket, by every scheme of tables; dense gradients by all-reduce.

    And dense gradients that were found to be mostly zero by the scheme that suits them: by rows as tables, or by
    elements. `besides`: dense gradients that take another way.
    """
    placement, network = job.network.placement, job.network
    found_zero = found_schemes(job.profiles, job.world_size, network, placement)
    by_row = by_rows(job)
    others = None if not besides else frozenset(p.name for p in job.profiles) - besides
    found = [Way(scheme, among=others) for scheme in dense_schemes(placement)]
    for tables in _runs_of_tables([replace(p, sparse=p.sparse or p.name in by_row) for p in job.profiles]):
        members = tuple(p.name for p in tables)
        known = tuple(p.density for p in tables if p.density is not None)
        if len(known) == len(tables):
            found += [Way(scheme.planned_for(known), members) for scheme in timed_schemes(placement)]
        else:
            found.append(Way(sparse_schemes(tables, job.world_size)[0], members))
    return found + [Way(scheme, (name,)) for name, scheme in found_zero.items() if name not in by_row]


def _runs_of_tables(profiles: Sequence[ParameterProfile]) -> Iterator[list[ParameterProfile]]:
    """Tables of one element type that become ready one after another, without a dense gradient between them."""
    for sparse, run in groupby(in_ready_order(profiles), key=lambda p: p.sparse):
        if sparse:
            by_dtype = sorted(run, key=lambda p: str(p.tensor.dtype))
            yield from (list(same) for _, same in groupby(by_dtype, key=lambda p: p.tensor.dtype))


def by_rows(job: Job) -> frozenset[str]:
    """Dense gradients that were found to be sparse by rows: they travel as tables, which keep no residual."""
    found = found_schemes(job.profiles, job.world_size, job.network, job.network.placement)
    return frozenset(name for name, scheme in found.items() if scheme.layout is Layout.ROWS)


def _lossy_ways(job: Job, constraints: Constraints, besides: frozenset[str]) -> Iterator[Way]:
    for lossy in constraints.lossy:
        among = frozenset(p.name for p in job.profiles if constraints.allow(lossy, p)) - besides
        if among:
            yield from (Way(scheme, among=among) for scheme in _schemes_of(lossy, job.world_size))


def _schemes_of(lossy: SchemeOrCompressor, world_size: int) -> Iterable[Scheme[Any]]:
    """Those that may carry a compressor's payloads. Owners do not compress sums of sparsifiers: sparse twice over."""
    if isinstance(lossy, Scheme):
        return [lossy]
    most = lossy.most_summands
    if most is not None and world_size > most:
        raise ValueError(f"{lossy.title} makes numbers of which {most} can be summed, there are {world_size} ranks")
    sparse = issubclass(lossy.payload, SparseMessage)
    return [way for way in ways(lossy) if not (sparse and isinstance(way, CompressedTwoWay))]
