"""`Plan`: the buckets, a scheme for each, and the order of their turns. JSON on disk, the same on every rank.

A plan does not know how it was chosen. It names parameters, not modules; `check` compares it with a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, field_validator, model_serializer

from ..compressors.expressions import to_expression
from ..costs.steps import FINISH
from ..schemes import Scheme
from ..tensors.bucket import Bucket, Layout, Segment, TensorSpec, model_digest
from .document import Document, Ranks

OF = ":"  # between the name of a parameter and a key of its optimiser state


class What(StrEnum):
    """The tensors that a bucket synchronises: gradients, or parameters.

    Attributes:
        GRADIENT: before the optimiser's step.
        PARAMETER: after the optimiser's step.
        EARLY_PARAMETER: inside backward, after a step of this parameter once its gradient is ready.
    """

    GRADIENT = "gradient"
    PARAMETER = "parameter"
    EARLY_PARAMETER = "early_parameter"


def state_name(parameter: str, key: str) -> str:
    """Returns the name in plans of an optimiser's state of a parameter, such as "weight:momentum_buffer"."""
    return f"{parameter}{OF}{key}"


class BucketPlan(BaseModel):
    """One bucket of a plan: which slices of parameters are synchronised together, and by which scheme.

    Attributes:
        id: the name of the bucket in the plan's order.
        segments: (parameter, start, stop): elements [start, stop) of the flattened parameter.
        what: the kind of tensors that are synchronised: gradients, or parameters.
        scheme: the algorithm of the exchange; in JSON an expression, {"name": {settings}}.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    segments: tuple[tuple[str, int, int], ...]
    what: What = What.GRADIENT
    scheme: Scheme[Any]

    @field_validator("scheme")
    @classmethod
    def _can_be_named(cls, scheme: Scheme[Any]) -> Scheme[Any]:
        to_expression(scheme)
        return scheme

    @property
    def names(self) -> list[str]:
        """The names of the segments' parameters, in order."""
        return [name for name, _, _ in self.segments]

    def bucket(self, specs: Mapping[str, TensorSpec]) -> Bucket:
        """Returns the bucket, with shapes and dtypes, for a model with these parameters.

        `specs`: shape and dtype of each parameter, by name.

        Raises:
            KeyError: for a parameter that the model does not have.
            ValueError: if the parameters do not fit into one bucket, as ones of different dtypes.
        """
        segments = tuple(Segment(*segment) for segment in self.segments)
        tensors, traits = tuple(specs[s.name] for s in segments), self.scheme.traits
        return Bucket(self.id, segments, tensors, traits.layout, traits.carries_flags)


class Plan(Document):
    """The plan of a job: buckets with their schemes, and the order in which all ranks issue the buckets' collectives.

    Attributes:
        version: the version of the file format, 1.
        world: the number of ranks.
        model: the digest of the parameters' names, shapes and dtypes.
        device: the type of device that the plan's measurements were made on, as "cuda"; None: it is for any.
        order: pairs (bucket id, stage), called turns; a stage is one collective of the bucket's scheme, mostly. After
            its last stage a bucket may have a turn `FINISH`, for the computation after the last collective; without it
            this is done when all turns are over.
        buckets: in any order.
    """

    noun = "plan"
    by_lines = ("buckets",)

    version: int = 1
    world: Ranks
    model: str
    device: str | None = None
    order: tuple[tuple[str, str], ...]
    buckets: tuple[BucketPlan, ...]

    @model_serializer(mode="wrap")
    def _plain(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves `device` out of the JSON, and so of the digest, of a plan for any device."""
        data: dict[str, Any] = dumped(self)
        return data if self.device is not None else {name: value for name, value in data.items() if name != "device"}

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
        """Returns a plan with one bucket for each (parameter names or segments, scheme) pair.

        Args:
            specs: shape and dtype of each of the model's parameters, by name.
            world: the number of ranks.
            buckets: the pairs; a segment is (parameter, start, stop). The ids are "0", "1", ...
            order: the order of collectives, as (bucket id, stage) pairs; None: the first stages of all buckets, in
                their order, then all second stages, and so on, so that the second stage of one bucket runs while other
                buckets are still summed.
            what: the kind of tensors that all buckets synchronise.
        """
        plans = []
        for number, (parts, scheme) in enumerate(buckets):
            segments = tuple((p, 0, specs[p].numel) if isinstance(p, str) else p for p in parts)
            plans.append(BucketPlan(id=str(number), segments=segments, what=what, scheme=scheme))
        turns = order if order is not None else default_order(plans, world)
        return cls(world=world, model=model_digest(specs), order=tuple(turns), buckets=tuple(plans))

    @property
    def what(self) -> What:
        """The kind of tensors that all buckets synchronise, as `check` demands; gradients if there are no buckets."""
        return self.buckets[0].what if self.buckets else What.GRADIENT

    def measured_on(self, device: str) -> Plan:
        """Returns a copy of the plan marked as one that follows from measurements on this type of device, as "cuda".

        `check` then refuses a job on another type.
        """
        return self.model_copy(update={"device": device})

    def check(self, specs: Mapping[str, TensorSpec], world: int, device: str | None = None) -> None:
        """Checks that the plan fits a model's parameters, the number of ranks and the type of their device.

        Args:
            specs: shape and dtype of each parameter, by name.
            world: the number of ranks.
            device: the type of the parameters' device, as "cuda"; None: not checked.

        Raises:
            ValueError: for the first thing that does not fit, with what was expected.
        """
        if device is not None and self.device not in (None, device):
            raise ValueError(
                f"the plan was made from measurements on {self.device!r}, the parameters are on {device!r}: measure "
                "and plan there; or delete the plan's field `device` and its digest, if it is meant for any"
            )
        if self.world != world:
            raise ValueError(f"the plan is for {self.world} ranks, this job has {world}; make a plan for it")
        covered: dict[str, list[tuple[int, int]]] = {name: [] for name in specs}
        ids = [bucket.id for bucket in self.buckets]
        if repeated := sorted({i for i in ids if ids.count(i) > 1}):
            raise ValueError(f"the plan has several buckets with the id {repeated[0]!r}")
        if any(bucket.what is not self.what for bucket in self.buckets):
            kinds = ", ".join(sorted({repr(bucket.what.value) for bucket in self.buckets}))
            raise ValueError(f"the buckets of a plan must all have the same `what`, got {kinds}")
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
                    f"bucket {bucket.id!r}: {bucket.scheme.name} is for parameters, got what: 'gradient'; use what: "
                    "'parameter', as parameters drift apart on ranks that average gradients only in groups"
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
            if not all(expected) or FINISH in expected or not expected:  # without a turn it would never be exchanged
                raise ValueError(
                    f"bucket {bucket.id!r}: the scheme {bucket.scheme.name} has the stages {expected} on {self.world} "
                    f"ranks; expected at least one name, none of them empty or {FINISH!r}: let its `stages` name each "
                    "await of `synchronize`"
                )
            if turns[bucket.id] not in (expected, [*expected, FINISH]):
                raise ValueError(f"the order gives bucket {bucket.id!r} the stages {turns[bucket.id]}, not {expected}")


def default_order(buckets: Sequence[BucketPlan], world_size: int) -> list[tuple[str, str]]:
    """Returns the order in which to issue the buckets' stages, as (bucket id, stage name) pairs.

    All first stages come first, in the order of `buckets`, then all second ones, and so on. A stage is a named part of
    a scheme's exchange, such as "push"; how many a scheme has may depend on `world_size`.
    """
    stages = [(bucket.id, bucket.scheme.stages(world_size)) for bucket in buckets]
    depth = max((len(names) for _, names in stages), default=0)
    return [(i, names[level]) for level in range(depth) for i, names in stages if level < len(names)]


def describe(plan: Plan, specs: Mapping[str, TensorSpec], densities: Mapping[str, float] | None = None) -> list[str]:
    """Returns the plan in words for users, one line for each bucket: its parameters and its scheme.

    Args:
        specs: shape and dtype of each parameter, by name.
        densities: the share of non-zero rows of parameters with sparse gradients, by name; None: not known.
    """
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
    """Returns a scheme's JSON expression, {"name": {settings}}, in words: the name, then each setting."""
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
    """Yields the values as texts; equal lists in a row become one text with their number, as "3 x []"."""
    for value, run in groupby(values):
        count = len(list(run))
        if count > 1 and isinstance(value, list):
            yield f"{count} x {value}"
        else:
            yield from [str(value)] * count


def _check_cover(name: str, parts: list[tuple[int, int]], numel: int) -> None:
    if numel == 0 and len(parts) > 1:
        raise ValueError(f"the plan has {len(parts)} segments of {name!r}, which has no elements; expected one")
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
