"""The ways (schemes with their gradients) that a plan may choose from: exact ones always, lossy ones if allowed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from math import inf
from typing import Any

from ...compressors import Compressor, SparseMessage
from ...costs.steps import OFFLOAD
from ...inputs.settings import NonNegativeFinite, NonNegativeInt, check
from ...schemes import (
    DEVICES,
    WITH_SUMS,
    CoarseGrained,
    CompressedAllGather,
    CompressedAllReduce,
    CompressedTwoWay,
    LeafConstraints,
    Scheme,
    SchemeOrCompressor,
    Sparsified,
    ways,
)
from ...tensors.bucket import Layout, matches
from ...tensors.density import ParameterProfile
from ..default.compressing import LATE
from ..default.flat import dense_schemes
from ..default.plan import found_schemes, in_ready_order, sparse_schemes, timed_schemes
from ..pieces import InPieces, Pieces
from .errors import delay_of, name_of, sends_later
from .job import Job
from .options import Way, flat_of
from .routes import routes_worth_it

logger = logging.getLogger(__name__)

ONE_LOSSY_STEP = LeafConstraints(most_compressions=1)

_COMPRESS, _DECOMPRESS = f"compress@{OFFLOAD}", f"decompress@{OFFLOAD}"
_SAME_AS: dict[type[Scheme[Any]], tuple[str, ...]] = {
    CompressedAllGather: (_COMPRESS, "all_gather", _DECOMPRESS),
    CompressedAllReduce: (_COMPRESS, "all_reduce", _DECOMPRESS),
    CompressedTwoWay: (_COMPRESS, "all_to_all", _DECOMPRESS, _COMPRESS, "all_gather", _DECOMPRESS),
}


@dataclass(frozen=True)
class Constraints:
    """The limits on what a job's gradients may lose; all stay exact unless `lossy` names schemes or compressors.

    `CoarseGrained`, which sends whole chunks of gradients, is not allowed for tensors smaller than one chunk.

    Attributes:
        lossy: the schemes and compressors that may lose data; (): all gradients stay exact.
        always: True: no exact schemes for gradients that may take a lossy one.
        exact: names or shell patterns of parameters that stay exact.
        matrices_only: whether tensors of one dimension, as biases and norms, stay exact.
        fewest_elements: tensors with fewer elements stay exact.
        most_error: the largest relative error of a parameter in one step: the norm of the error over the gradient's
            norm. It holds with and without error feedback, which sends the error later. None: any.
        most_delay: used instead where there is error feedback: the most steps' worth of gradient that a residual holds,
            see `delay_of`. None: `most_error` holds.
        most_delay_frozen: the same bound for schemes that freeze optimiser state of what was not sent: momentum does
            not decay there, so a residual may hold more. None: as for all.
        errors: the relative errors, by parameter, then by the name that `errors.name_of` gives the scheme or
            compressor; with a bound, those without an entry are not allowed.
        leaves: how compressed gradients may travel: by which routes (sequences of collectives and coding tasks, the
            leaves of ByteComp's decision tree). A scheme that does the tasks of a route is allowed as the route is.
            None: all schemes, and routes that compress once; `errors` holds errors of one compression, and a second
            one, of sums, adds to them.
    """

    lossy: tuple[SchemeOrCompressor, ...] = ()
    always: bool = False
    exact: tuple[str, ...] = ()
    matrices_only: bool = False
    fewest_elements: NonNegativeInt = 0
    most_error: NonNegativeFinite | None = None
    most_delay: NonNegativeFinite | None = None
    most_delay_frozen: NonNegativeFinite | None = None
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    leaves: LeafConstraints | None = None

    def __post_init__(self) -> None:
        for way in self.lossy:
            if not isinstance(way, Compressor | Scheme) or (
                isinstance(way, Scheme) and way.traits.layout is not Layout.FLAT
            ):
                raise ValueError(f"Constraints.lossy must be compressors, or schemes of flat buckets, got {way!r}")
        check(self)
        if self.leaves is not None:
            WITH_SUMS.check_names(self.leaves)

    def require_names(self, names: Sequence[str]) -> None:
        """Checks that each entry of `exact`, a name or shell pattern, matches one of these names of parameters.

        Raises:
            ValueError: for an entry that matches none.
        """
        for pattern in self.exact:
            if not any(matches(name, [pattern]) for name in names):
                raise ValueError(f"Constraints.exact names {pattern!r}, which no parameter to synchronise matches")

    def allow(self, way: SchemeOrCompressor, profile: ParameterProfile) -> bool:
        """Whether the constraints allow the gradient of this parameter to be sent by this lossy scheme or compressor.

        Sparse gradients and integers are never allowed.
        """
        tensor = profile.tensor
        if profile.sparse or not tensor.dtype.is_floating_point or matches(profile.name, self.exact):
            return False
        if tensor.numel < self.fewest_elements or (self.matrices_only and len(tensor.shape) < 2):
            return False
        if isinstance(way, CoarseGrained) and tensor.numel < way.chunk:
            return False
        error = self.errors.get(profile.name, {}).get(name_of(way), inf)
        frozen = isinstance(way, Scheme) and way.traits.freezes and self.most_delay_frozen is not None
        most_delay = self.most_delay_frozen if frozen else self.most_delay
        if most_delay is not None and sends_later(way):
            return delay_of(error) <= most_delay
        return self.most_error is None or error <= self.most_error


@InPieces
def ways_of(job: Job, constraints: Constraints | None = None) -> Pieces[list[Way]]:
    """Returns all schemes that a plan for the job may use, each with the gradients that may take it, exact ones first.

    A compressor stands for each scheme that can carry its payloads (encoded tensors), and for the few routes (sequences
    of collectives and coding tasks) that may save time, see `routes.py`. Where kernels were measured, a lossy scheme
    with an unmeasured kernel is left out, with a warning once.

    `constraints`: the lossy schemes and compressors allowed, and limits on their errors; None: all gradients stay
    exact.

    Raises:
        ValueError: for an `exact` that no parameter matches, constraints `leaves` that leave a compressor neither
            scheme nor route, or a compressor whose numbers cannot be summed over so many ranks.
    """
    constraints = constraints or Constraints()
    constraints.require_names([p.name for p in job.profiles])
    lossy = []
    for way in _lossy_ways(job, constraints, besides=by_rows(job)):
        lossy.append(way)
        yield
    taken = frozenset[str]().union(*(way.among or () for way in lossy)) if constraints.always else frozenset[str]()
    return [*exact_ways(job, besides=taken), *lossy]


def exact_ways(job: Job, *, besides: frozenset[str] = frozenset()) -> list[Way]:
    """Returns all exact schemes (ones that lose nothing) that a search may choose from, each with its gradients.

    Embedding tables that are ready together share a bucket. Dense gradients that were found to be mostly zero may go by
    rows, as tables, or by elements.

    `besides`: names of gradients that must be compressed, so that only schemes of tables may take them.
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
    return found + [Way(scheme, (name,)) for name, scheme in found_zero.items() if name not in by_row | besides]


def _runs_of_tables(profiles: Sequence[ParameterProfile]) -> Iterator[list[ParameterProfile]]:
    """Yields tables of one dtype that become ready in a row, without a dense gradient between them."""
    for sparse, run in groupby(in_ready_order(profiles), key=lambda p: p.sparse):
        if sparse:
            by_dtype = sorted(run, key=lambda p: str(p.tensor.dtype))
            yield from (list(same) for _, same in groupby(by_dtype, key=lambda p: p.tensor.dtype))


def by_rows(job: Job) -> frozenset[str]:
    """Returns the names of dense gradients that are sent by rows, like tables, as most of their rows are zero.

    They cannot be compressed: schemes that send rows have no error feedback.
    """
    found = found_schemes(job.profiles, job.world_size, job.network, job.network.placement)
    return frozenset(name for name, scheme in found.items() if scheme.traits.layout is Layout.ROWS)


def _lossy_ways(job: Job, constraints: Constraints, besides: frozenset[str]) -> Iterator[Way]:
    for lossy in constraints.lossy:
        among = frozenset(p.name for p in job.profiles if constraints.allow(lossy, p)) - besides
        if among:
            members = [p for p in job.profiles if p.name in among]
            yield from (Way(scheme, among=among) for scheme in _schemes_of(lossy, members, job, constraints))


def _schemes_of(
    lossy: SchemeOrCompressor, members: Sequence[ParameterProfile], job: Job, constraints: Constraints
) -> Iterator[Scheme[Any]]:
    """Yields schemes and routes (collectives and coding tasks in a row) for a compressor; for a scheme only itself.

    None of them compresses sums of a sparsifier's payloads again, as the sums would be made sparse twice.
    """
    largest = max(members, key=lambda profile: profile.tensor.nbytes)
    if isinstance(lossy, Scheme):
        if _is_measured(lossy, largest, job):
            yield lossy
        return
    most = lossy.traits.most_summands
    if most is not None and job.world_size > most:
        raise ValueError(f"{lossy.title} makes numbers of which {most} can be summed, there are {job.world_size} ranks")
    sparse = issubclass(lossy.traits.payload, SparseMessage)
    leaves = constraints.leaves or ONE_LOSSY_STEP
    legal = [way for way in ways(lossy) if not (sparse and isinstance(way, CompressedTwoWay))]
    legal = [way for way in legal if constraints.leaves is None or _admits(leaves, way)]
    schemes = [way for way in legal if _is_measured(way, largest, job)]
    exact = () if constraints.always else dense_schemes(job.network.placement)
    found = routes_worth_it(
        lossy,
        [*exact, *schemes],
        job.network,
        sum(profile.tensor.nbytes for profile in members),
        largest.tensor.dtype,
        leaves,
    )
    if not legal and not found:
        raise ValueError(f"Constraints.leaves leave {lossy.title} no way, under {leaves}: loosen them")
    yield from schemes
    yield from found


def _admits(leaves: LeafConstraints, scheme: Scheme[Any]) -> bool:
    """Whether limits on routes (sequences of collectives and coding tasks) allow the route whose tasks the scheme does.

    Limits on devices are ignored. `Sparsified` is like no route: it is allowed if routes may compress at least once.
    """
    collectives = replace(leaves, without=tuple(name for name in leaves.without if name not in DEVICES))
    if isinstance(scheme, Sparsified):
        return leaves.most_compressions is None or leaves.most_compressions > 0
    return collectives.admits(WITH_SUMS.parse(_SAME_AS[type(scheme)]))


def _is_measured(scheme: Scheme[Any], member: ParameterProfile, job: Job) -> bool:
    unknown = job.network.cost.unmeasured(scheme.steps((flat_of(member),), (), job.network.placement, LATE))
    if unknown:
        _say_unmeasured(scheme.title, unknown[0])
    return not unknown


@cache
def _say_unmeasured(title: str, kernel: str) -> None:
    """Logs a warning, once per scheme and kernel, that a kernel's time was not measured."""
    logger.warning(
        "plans cannot use %s, as the time of %s was not measured here; measure the job with it among the candidates "
        "(gradsync measure --compressor)",
        title,
        kernel,
    )
