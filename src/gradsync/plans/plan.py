"""`Plan`: what is synchronised how and in which order. Pure data, JSON on disk, the same on every rank.

A plan does not know how it was chosen. It names parameters, not modules; `check` holds it against a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator

from ..compressors.expressions import to_expression
from ..costs.steps import FINISH
from ..schemes import Scheme
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec, model_digest
from .document import Document

OF = ":"  # between a parameter's name and that of what the optimiser keeps of it


class What(StrEnum):
    """What of a parameter is synchronised, and so when."""

    GRADIENT = "gradient"  # before the optimiser's step
    PARAMETER = "parameter"  # after it
    EARLY_PARAMETER = "early_parameter"  # after a step of its own inside backward, when its gradient is there


def state_name(parameter: str, key: str) -> str:
    """What a plan calls an optimiser's state of a parameter: `weight:momentum_buffer`."""
    return f"{parameter}{OF}{key}"


class BucketPlan(BaseModel):
    """One bucket: its segments (name, start, stop), what of them travels, and by which scheme."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    segments: tuple[tuple[str, int, int], ...]
    what: What = What.GRADIENT
    scheme: Scheme[Any]  # in JSON its expression

    @field_validator("scheme")
    @classmethod
    def _can_be_named(cls, scheme: Scheme[Any]) -> Scheme[Any]:
        to_expression(scheme)
        return scheme

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.segments]

    def bucket(self, specs: Mapping[str, TensorSpec]) -> Bucket:
        """The bucket over a model's parameters."""
        segments = tuple(Segment(*segment) for segment in self.segments)
        tensors, traits = tuple(specs[s.name] for s in segments), self.scheme.traits
        return Bucket(self.id, segments, tensors, traits.layout, traits.carries_flags)


class Plan(Document):
    """Buckets, and the total order of (bucket, stage) in which they are issued.

    Behind its last stage a bucket may have a turn `FINISH`, to do what is left; else that is done when all turns are
    over.
    """

    noun = "plan"
    by_lines = ("buckets",)

    version: Literal[1] = 1
    world: int
    model: str  # digest of names, shapes, dtypes
    order: tuple[tuple[str, str], ...]
    buckets: tuple[BucketPlan, ...]

    @classmethod
    def make(
        cls,
        specs: Mapping[str, TensorSpec],
        world: int,
        buckets: Sequence[tuple[Sequence[str] | Sequence[tuple[str, int, int]], Scheme[Any]]],
        order: Sequence[tuple[str, str]] | None = None,
        *,
        what: What = What.GRADIENT,
    ) -> Plan:
        """A plan from (parameter names or segments, scheme) pairs; buckets are numbered in the order given.

        Without `order`, first stages follow the order of the buckets and later stages come after them, so that
        one bucket's second round is under way while others are still summed.
        """
        plans = []
        for number, (parts, scheme) in enumerate(buckets):
            segments = tuple((p, 0, specs[p].numel) if isinstance(p, str) else p for p in parts)
            plans.append(BucketPlan(id=str(number), segments=segments, what=what, scheme=scheme))
        turns = order if order is not None else default_order(plans, world)
        return cls(world=world, model=model_digest(specs), order=tuple(turns), buckets=tuple(plans))

    @property
    def what(self) -> What:
        """What the plan synchronises: of one kind in all buckets, see `check`."""
        return self.buckets[0].what if self.buckets else What.GRADIENT

    def check(self, specs: Mapping[str, TensorSpec], world: int) -> None:
        """Holds the plan against a model's parameters.

        Raises:
            ValueError: naming the first thing that does not fit, and what was expected.
        """
        if self.world != world:
            raise ValueError(f"the plan is for {self.world} ranks, this job has {world}; make a plan for it")
        covered: dict[str, list[tuple[int, int]]] = {name: [] for name in specs}
        ids = [bucket.id for bucket in self.buckets]
        if repeated := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"the plan has several buckets with the id {repeated[0]!r}")
        if any(bucket.what is not self.what for bucket in self.buckets):
            raise ValueError("the plan has buckets of gradients and of parameters; it must be all of one kind")
        for bucket in self.buckets:
            for name, start, stop in bucket.segments:
                if name not in covered:
                    raise ValueError(f"bucket {bucket.id!r} names {name!r}, which is no parameter to synchronise here")
                if not 0 <= start < stop <= specs[name].numel and not start == stop == specs[name].numel == 0:
                    raise ValueError(
                        f"bucket {bucket.id!r}: segment [{start}, {stop}) is outside of {name!r}, "
                        f"which has {specs[name].numel} elements"
                    )
                covered[name].append((start, stop))
            if bucket.scheme.traits.mixes and bucket.what is What.GRADIENT:
                raise ValueError(
                    f"bucket {bucket.id!r}: {bucket.scheme.name} is for parameters (what: 'parameter'): ranks "
                    "that average gradients in groups only go apart for ever"
                )
            seen = bucket.bucket(specs)  # raises for mixed dtypes and cut tables
            try:
                bucket.scheme.check(seen.specs)
            except ValueError as error:
                raise ValueError(f"bucket {bucket.id!r}: {error}") from None
        for name, parts in covered.items():
            _check_cover(name, sorted(parts), specs[name].numel)
        self._check_order()
        if self.model != model_digest(specs):
            raise ValueError(f"the plan was made for model {self.model[:12]}, this model is {model_digest(specs)[:12]}")

    def _check_order(self) -> None:
        turns: dict[str, list[str]] = {bucket.id: [] for bucket in self.buckets}
        for bucket_id, stage in self.order:
            if bucket_id not in turns:
                raise ValueError(f"the order names bucket {bucket_id!r}, which the plan does not have")
            turns[bucket_id].append(stage)
        for bucket in self.buckets:
            expected = list(bucket.scheme.stages(self.world))
            if turns[bucket.id] not in (expected, [*expected, FINISH]):
                raise ValueError(f"the order gives bucket {bucket.id!r} the stages {turns[bucket.id]}, not {expected}")


def default_order(buckets: Sequence[BucketPlan], world_size: int) -> list[tuple[str, str]]:
    """All first stages in bucket order, then all second stages, and so on."""
    stages = [(bucket.id, bucket.scheme.stages(world_size)) for bucket in buckets]
    depth = max((len(names) for _, names in stages), default=0)
    return [(i, names[level]) for level in range(depth) for i, names in stages if level < len(names)]


def describe(plan: Plan, specs: Mapping[str, TensorSpec], densities: Mapping[str, float] | None = None) -> list[str]:
    """The plan in words, a line a bucket: which parameters take which way."""
    lines = []
    for bucket in plan.buckets:
        way = ", ".join(_words(to_expression(bucket.scheme)))
        if bucket.scheme.traits.layout is Layout.ROWS:
            known = densities or {}
            tables = [f"{n} ({known[n]:.2%} dense)" if n in known else n for n in bucket.names]
            lines.append(f"{', '.join(tables)} -> {way}")
        else:
            nbytes = sum(s.numel * specs[s.name].itemsize for s in (Segment(*x) for x in bucket.segments))
            first, *others = bucket.names
            names = first if not others else f"{first} ... {others[-1]} ({len(bucket.names)} tensors)"
            lines.append(f"{names}, {nbytes / 1e6:.2f} MB -> {way}")
    return lines


def _words(expression: Mapping[str, Any]) -> list[str]:
    ((name, settings),) = expression.items()
    words = [name.replace("_", " ")]
    for key, value in settings.items():
        if isinstance(value, dict):
            words += _words(value)
        elif isinstance(value, str):
            words.append(value.replace("_", " "))
        elif value != []:
            numbers = value if isinstance(value, list) else [value]
            words.append(" ".join([key.replace("_", " "), *_repeated(numbers)]))
    return words


def _repeated(values: Sequence[Any]) -> Iterator[str]:
    """Each; of equal lists in a row, as of rounds in which all ranks rest, one and their number."""
    for value, run in groupby(values):
        count = len(list(run))
        if count > 1 and isinstance(value, list):
            yield f"{count} x {value}"
        else:
            yield from [str(value)] * count


def _check_cover(name: str, parts: list[tuple[int, int]], numel: int) -> None:
    reached = 0
    for start, stop in parts:
        if start < reached:
            raise ValueError(f"the plan's segments of {name!r} overlap: [{start}, {stop}) begins before {reached}")
        if start > reached:
            raise ValueError(f"the plan leaves elements [{reached}, {start}) of {name!r} out")
        reached = stop
    if reached < numel or not parts:
        raise ValueError(
            f"the plan leaves elements [{reached}, {numel}) of {name!r} out; every parameter needs a bucket"
        )
