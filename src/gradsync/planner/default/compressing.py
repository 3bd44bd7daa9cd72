"""Plans with a compressor of the user's choice for dense gradients; all others stay exact, as in the default plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...compressors import (
    Cast,
    Compressor,
    Contraction,
    Exact,
    Feedback,
    Sign,
    SparseMessage,
    Summand,
    TernGrad,
    Unbiased,
)
from ...costs.cluster import Placement
from ...costs.steps import transfers
from ...inputs.settings import NonNegativeInt, PositiveInt, check
from ...plans.plan import Plan
from ...schemes import AllReduce, CompressedAllReduce, CompressedTwoWay, Scheme, SchemeOrCompressor, ways
from ...tensors.bucket import Bucket, FlatSpec, Layout, Segment, TensorSpec, matches
from ...tensors.density import ParameterProfile
from .flat import is_dense
from .plan import BUCKET_BYTES, default_plan, dense_buckets, in_ready_order

logger = logging.getLogger(__name__)

LATE = 1 << 62  # a step number after all warm-up
MOST_LOST = 0.5  # share of a gradient's squared norm; a compressor that may lose more needs error feedback


@dataclass(frozen=True)
class CompressingPlanner:
    """A planner for `attach`: one compressor for dense floating-point gradients, in buckets as by default.

    `cheapest_way` chooses the scheme that carries the compressor's payloads; a scheme of flat buckets, such as
    PowerSGD, may be given in place of a compressor. Dense gradients that were found to be mostly zero are compressed,
    too. Tables with sparse gradients, integers, and parameters excluded by `exact`, `matrices_only` or
    `fewest_elements` stay exact and travel as by default. The planner adds no error feedback: wrap the compressor. It
    warns once if a compressor without error feedback promises no bound by which most of a gradient arrives.

    List in `exact` any table that gets sparse gradients without an `nn.Embedding(sparse=True)`: the plan that follows
    the first step would have no place for its residual.

    Attributes:
        way: a compressor or scheme, or a function from the number of ranks to one.
        exact: names or shell patterns of parameters that are not compressed.
        matrices_only: whether tensors of one dimension, as biases and norms, are not compressed.
        fewest_elements: tensors with fewer elements are not compressed.
        bucket_bytes: the bytes that fill a dense bucket, the first one 1 MiB; tensors are not cut.

    Raises:
        ValueError: when made, for settings out of their range; when asked for a plan, for an `exact` that no parameter
            matches, or a compressor whose numbers cannot be summed over so many ranks.

    Example:
        >>> from gradsync.compressors import ErrorFeedback, TopK
        >>> planner = CompressingPlanner(ErrorFeedback(TopK(0.01)), exact=("*.bias",))
        >>> handle = gradsync.attach(model, plan=planner)  # doctest: +SKIP
    """

    way: SchemeOrCompressor | Callable[[int], SchemeOrCompressor]
    exact: tuple[str, ...] = ()
    matrices_only: bool = False
    fewest_elements: NonNegativeInt = 0
    bucket_bytes: PositiveInt = BUCKET_BYTES

    def __post_init__(self) -> None:
        if not callable(self.way):
            _check_way(self.way)
        check(self)

    def __call__(self, profiles: Sequence[ParameterProfile], world_size: int) -> Plan:
        self._require_names([p.name for p in profiles])
        scheme_of = self._scheme_of(world_size)
        lossy = {p.name for p in profiles if not p.sparse and self.compresses(p.name, p.tensor)}
        default = default_plan([_as_dense(p) if p.name in lossy else p for p in profiles], world_size)
        made = [(bucket.names, bucket.scheme) for bucket in default.buckets]
        dense = {name for names, scheme in made if is_dense(scheme) for name in names}
        ready = in_ready_order([p for p in profiles if p.name in dense])
        compressed = dense_buckets([p for p in ready if p.name in lossy], self.bucket_bytes)
        exact = dense_buckets([p for p in ready if p.name not in lossy], self.bucket_bytes)
        buckets: list[tuple[list[str], Scheme[Any]]] = [
            *((_names(members), scheme_of(members)) for members in compressed),
            *((_names(members), AllReduce()) for members in exact),
            *((names, scheme) for names, scheme in made if not is_dense(scheme)),
        ]
        position = {p.name: p.position for p in profiles}
        buckets.sort(key=lambda bucket: max(position[name] for name in bucket[0]))
        return Plan.make({p.name: p.tensor for p in profiles}, world_size, buckets)

    def compresses(self, name: str, tensor: TensorSpec) -> bool:
        """Whether the planner compresses the parameter `name` of this shape and dtype, if its gradient is dense."""
        return (
            tensor.dtype.is_floating_point
            and tensor.numel >= self.fewest_elements
            and (len(tensor.shape) > 1 or not self.matrices_only)
            and not matches(name, self.exact)
        )

    def _require_names(self, names: Sequence[str]) -> None:
        for pattern in self.exact:
            if not any(matches(name, [pattern]) for name in names):
                raise ValueError(
                    f"CompressingPlanner.exact names {pattern!r}, which no parameter to synchronise matches"
                )

    def _scheme_of(self, world_size: int) -> Callable[[Sequence[ParameterProfile]], Scheme[Any]]:
        """Returns a function from the parameters of a bucket to the scheme that the bucket gets."""
        way = self.way(world_size) if callable(self.way) else self.way
        _check_way(way)
        if isinstance(way, Scheme):
            return lambda members: way

        def scheme_of(members: Sequence[ParameterProfile]) -> Scheme[Any]:
            spec = _end_to_end(members)
            if _needs_feedback(way, spec):
                _advise_feedback(str(way))
            return cheapest_way(way, spec, world_size)

        return scheme_of


def cheapest_way(compressor: Compressor[Any], spec: FlatSpec, world_size: int) -> Scheme[Any]:
    """Returns the scheme that sums a compressor's payloads (encoded tensors) with the fewest bytes on the busiest link.

    Payloads that can be summed go by all-reduce. Others are gathered or, from some number of ranks on, sent to owners:
    ranks that sum one part of the tensor each, and compress the sum again. Sparse payloads are gathered, or summed as
    sparse vectors; their sums are not compressed again, which would lose more elements.

    Args:
        spec: the segments and dtype of the flat tensor that is summed.
        world_size: the number of ranks.

    Raises:
        ValueError: for a compressor whose numbers cannot be summed over so many ranks.
    """
    if issubclass(compressor.traits.payload, Summand):
        most = compressor.traits.most_summands
        if most is not None and world_size > most:
            raise ValueError(
                f"{compressor.title} makes numbers of which {most} can be summed, there are {world_size} ranks: make "
                "it for as many, or give the planner a function of the number of ranks"
            )
        return CompressedAllReduce(compressor)
    sparse = issubclass(compressor.traits.payload, SparseMessage)
    allowed = [way for way in ways(compressor) if not (sparse and isinstance(way, CompressedTwoWay))]
    return min(allowed, key=lambda way: busiest_bytes(way, spec, world_size))


def _needs_feedback(compressor: Compressor[Any], spec: FlatSpec) -> bool:
    """Whether the compressor has no error feedback, is biased, and may lose more than half of a gradient.

    That is, its law (the bound that it promises for its error) lets more than half of the squared norm be lost, or sets
    no such bound. Exempt are signs, which are meant to lose magnitudes, casts, which lose values out of range,
    TernGrad, which clips, and compressors that error feedback cannot help (`feeds_back` of their traits is False).
    """
    if isinstance(compressor, Feedback | Sign | Cast | TernGrad) or not compressor.traits.feeds_back:
        return False
    law = compressor.law(spec)
    return law.delta < MOST_LOST if isinstance(law, Contraction) else not isinstance(law, Exact | Unbiased)


@cache
def _advise_feedback(compressor: str) -> None:
    """Logs a warning, once per compressor, that it needs error feedback."""
    logger.warning(
        "%s is biased and loses what it leaves out of a gradient, which may be most of it: wrap it in ErrorFeedback, "
        "which sends that later",
        compressor,
    )


def busiest_bytes(scheme: Scheme[Any], spec: FlatSpec, world_size: int) -> float:
    """Returns the bytes that cross the busiest link when the scheme sums one flat tensor over `world_size` ranks.

    Each rank counts as a node of its own, and compressors as past their warm-up.
    """
    whole = TensorSpec((spec.numel,), spec.dtype, spec)
    steps = scheme.steps((whole,), (), Placement.one_per_node(world_size), LATE)
    return sum(transfer.busiest_bytes for transfer in transfers(steps))


def _check_way(way: object) -> None:
    if not isinstance(way, Compressor | Scheme):
        raise ValueError(
            f"CompressingPlanner.way must be a compressor, a scheme, or a function of the number of ranks, got {way!r}"
        )
    if isinstance(way, Scheme) and way.traits.layout is not Layout.FLAT:
        raise ValueError(f"CompressingPlanner.way is for dense gradients, but {way.name} is a scheme of sparse tables")


def _as_dense(profile: ParameterProfile) -> ParameterProfile:
    """Returns the profile without measured densities, so that the gradient counts as dense."""
    return replace(profile, density=None, elements=None)


def _names(members: Sequence[ParameterProfile]) -> list[str]:
    return [p.name for p in members]


def _end_to_end(members: Sequence[ParameterProfile]) -> FlatSpec:
    segments = tuple(Segment(p.name, 0, p.tensor.numel) for p in members)
    return Bucket("", segments, tuple(p.tensor for p in members), Layout.FLAT).flat_spec
