"""`Profile`: what was measured of a training job, for planners. Pure data, JSON on disk, the same on every rank.

A profile belongs to a model, a number of ranks and a version of torch; `check` holds it against a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from math import inf
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ..costs.cluster import Link, Placement, format_rate
from ..costs.cost_model import CostModel, KernelCost
from ..costs.transport import Pattern, RingOrDirect
from ..tensors.bucket import TensorSpec, model_digest
from ..tensors.density import DensityProfile, ParameterProfile
from .document import Document

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

ROUNDING = 1e-9  # by which a mean may exceed another one of numbers that do not


class Data(BaseModel):
    """Part of a profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Interval(Data):
    """A number that is not negative, and the interval in which it lies with 95 % confidence."""

    value: float = Field(ge=0, allow_inf_nan=False)
    low: float = Field(ge=0, allow_inf_nan=False)
    high: float | None = Field(ge=0, allow_inf_nan=False)  # None: nothing is known

    @model_validator(mode="after")
    def _in_order(self) -> Interval:
        if not self.low <= self.value <= (inf if self.high is None else self.high):
            raise ValueError(f"value must lie in its interval, got {self.value} in [{self.low}, {self.high}]")
        return self


class Spread(Data):
    """Over the steps, of what a step took on its slowest rank: a few disturbed steps move neither.

    `spread_s` is the median distance from the median, as a standard deviation (times 1.4826).
    """

    median_s: Seconds
    spread_s: Seconds


class PositiveSpread(Spread):
    """Of what takes time in any case."""

    median_s: PositiveSeconds


class StepParts(Data):
    """What a step is made of, without the exchange; one part after the other, each on the rank where it is longest.

    `forward`: to the begin of backward, with the loss; `backward`: undisturbed by any exchange; `optimizer`: its steps;
    `other`: everything else, as to fetch a batch. `beside`: all but backward, on the rank where that is longest; from
    its end backward and the times of gradients count, to the rank that is waited for.
    """

    forward: PositiveSpread
    backward: PositiveSpread
    optimizer: Spread
    other: Spread
    beside: PositiveSpread

    @property
    def step_s(self) -> float:
        """All parts together."""
        return self.beside.median_s + self.backward.median_s


class Density(Data):
    """A `DensityProfile` as data."""

    num_rows: int = Field(ge=0)
    rows: float = Field(ge=0, allow_inf_nan=False)
    densification: dict[int, float] = {}
    pattern: str = ""
    most_rows: float = 0.0
    shares: tuple[float, ...] = ()
    union_shares: tuple[float, ...] = ()
    blocks: dict[int, Density] = {}

    @classmethod
    def of(cls, profile: DensityProfile) -> Density:
        return cls.model_validate(asdict(profile))

    def profile(self) -> DensityProfile:
        blocks = {length: density.profile() for length, density in self.blocks.items()}
        return DensityProfile(**{**self.model_dump(), "blocks": blocks})


class ParameterTimes(Data):
    """One parameter: when its gradient is ready after the begin of backward, and what it looks like.

    `position` is its place in the order in which gradients are ready. `rows` and `elements` are those of
    `ParameterProfile`: None where nothing is known, or nothing is gained from being sparse. `errors`: by lossy
    candidate, how much of a step's gradient it would change, norm over norm, see `planner.errors`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32"
    sparse: bool
    position: int = Field(ge=0)
    ready: PositiveSpread
    rows: Density | None = None
    elements: Density | None = None
    errors: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = {}

    @field_validator("dtype")
    @classmethod
    def _is_a_dtype(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"torch has no element type {name!r}")
        return name

    @property
    def tensor(self) -> TensorSpec:
        return TensorSpec(self.shape, getattr(torch, self.dtype))

    def profile(self) -> ParameterProfile:
        """What planners take."""
        rows, elements = (None if d is None else d.profile() for d in (self.rows, self.elements))
        return ParameterProfile(self.name, self.tensor, self.sparse, rows, self.position, elements)


class KernelEstimate(Data):
    """What a kernel takes: so much a call, and so much for every byte that it reads or writes beyond the knee."""

    call_s: Interval
    byte_s: Interval
    knee_bytes: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # of a call, up to which bytes cost nothing

    @model_validator(mode="after")
    def _takes_time(self) -> KernelEstimate:
        if not self.call_s.value and not self.byte_s.value:
            raise ValueError("call_s and byte_s must not both be 0: every kernel takes time")
        return self

    @property
    def cost(self) -> KernelCost:
        """The cost without its intervals, as cost models take it."""
        return KernelCost(self.call_s.value, self.byte_s.value, self.knee_bytes)


class LinkEstimate(Data):
    """`stage_s + rounds * alpha_s + busiest bytes / bandwidth`, see `CostModel`."""

    stage_s: Interval
    alpha_s: Interval
    bandwidth_bytes_per_s: Interval

    @field_validator("bandwidth_bytes_per_s")
    @classmethod
    def _carries(cls, bandwidth: Interval) -> Interval:
        if not bandwidth.value:
            raise ValueError("a bandwidth must be positive, got 0")
        return bandwidth


class LinkPoint(Data):
    """One size of a collective: its bytes as `Transfer` has them, and what it took from its issue to its end."""

    part_bytes: float = Field(ge=0, allow_inf_nan=False)  # of `Transfer.part_bytes`, the same for every member
    rounds: Count
    busiest_bytes: float = Field(gt=0, allow_inf_nan=False)
    seconds: Interval


class CollectiveEstimate(Data):
    """One type of collective: the fit, and the points that it goes through."""

    link: LinkEstimate
    points: tuple[LinkPoint, ...]


class Span(StrEnum):
    """Who talks to whom."""

    ALL = "all"  # all ranks
    INSIDE = "inside"  # the ranks of a node, on all nodes at once
    ACROSS = "across"  # the ranks in the same place on their nodes, for all places at once


class SpanEstimate(Data):
    """What exchanges in such groups cost, as each of their members sees it: all types alike, and each type."""

    span: Span
    size: int = Field(ge=2)  # members of one group
    at_once_bytes: float = Field(ge=0, allow_inf_nan=False)  # `Group.at_once_bytes`
    link: LinkEstimate
    collectives: dict[Pattern, CollectiveEstimate]


class Overlap(Data):
    """How many times as long something takes while something else goes on; None where that was not to be seen.

    As measured: noise may bring a factor below 1.
    """

    backward_by_transfer: Interval | None = None  # of backward, while a transfer is in flight
    transfer_by_backward: Interval | None = None  # of that transfer
    backward_by_kernel: Interval | None = None  # of backward, while the communication thread computes
    kernel_by_backward: Interval | None = None  # of that computation
    transfer_by_kernel: Interval | None = None  # of a transfer, while the communication thread computes
    kernel_by_transfer: Interval | None = None  # of that computation


class Profile(Document):
    """What `gradsync.measure` returns. Parameters come in the model's order, `nodes[rank]` is the node of a rank."""

    noun = "profile"
    by_lines = ("links", "kernels", "parameters")

    version: Literal[2] = 2  # in the first one kernels of a compressor had one name whatever its numbers
    torch: str
    device: str
    threads: Count
    model: str  # digest of names, shapes, dtypes
    world: Count
    nodes: tuple[int, ...]
    steps: Count  # that the parts and ready times are of
    parts: StepParts
    overlap: Overlap
    links: tuple[SpanEstimate, ...]
    kernels: dict[str, KernelEstimate]
    parameters: tuple[ParameterTimes, ...]

    @model_validator(mode="after")
    def _fits_together(self) -> Profile:
        if len(self.nodes) != self.world:
            raise ValueError(f"nodes must name the node of each of the {self.world} ranks, got {len(self.nodes)}")
        count = len(self.parameters)
        if sorted(p.position for p in self.parameters) != list(range(count)):
            raise ValueError(f"the positions of the {count} parameters must be 0 to {count - 1}, each once")
        backward_s = self.parts.backward.median_s * (1 + ROUNDING)
        late = next((p for p in self.parameters if p.ready.median_s > backward_s), None)
        if late is not None:
            raise ValueError(
                f"{late.name!r} is ready after {late.ready.median_s:g} s, when backward has ended "
                f"({self.parts.backward.median_s:g} s)"
            )
        if self.model != model_digest(self.specs):
            raise ValueError(
                f"model says {self.model[:12]}, the parameters are those of {model_digest(self.specs)[:12]}"
            )
        spans, expected = [link.span.value for link in self.links], [span.value for span in spans_of(self.placement)]
        if sorted(spans) != sorted(expected):
            raise ValueError(f"links must be of {expected} for ranks on these nodes, got {spans}")
        return self

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Shape and element type of each parameter."""
        return {p.name: p.tensor for p in self.parameters}

    @property
    def placement(self) -> Placement:
        return Placement(self.nodes)

    def in_ready_order(self) -> list[ParameterTimes]:
        """The parameters, the first one to be ready first."""
        return sorted(self.parameters, key=lambda p: p.position)

    def parameter_profiles(self) -> list[ParameterProfile]:
        """What planners take of the gradients, in the model's order."""
        return [p.profile() for p in self.parameters]

    def link(self, span: Span) -> SpanEstimate:
        """
        Raises:
            ValueError: where there are no such groups.
        """
        found = next((link for link in self.links if link.span is span), None)
        if found is None:
            raise ValueError(f"there are no groups {span.value!r} among the nodes {self.nodes}")
        return found

    def cost_model(self) -> CostModel:
        """What planners take of links and kernels.

        Of several ranks on each of several nodes, all of a node send at once: its link carries what they get of it
        together.
        """
        kernels = {name: kernel.cost for name, kernel in self.kernels.items()}
        if self.world == 1:
            return CostModel(0.0, inf, kernels=kernels)
        hierarchy = self.placement.is_hierarchy
        of = self.link(Span.ACROSS if hierarchy else Span.ALL)
        intra, sharing = None, 1
        if hierarchy:
            inside = self.link(Span.INSIDE)
            intra = Link(inside.link.bandwidth_bytes_per_s.value, inside.link.alpha_s.value)
            sharing = inside.size
        return CostModel(
            of.link.alpha_s.value,
            sharing * of.link.bandwidth_bytes_per_s.value,
            kernels=kernels,
            intra=intra,
            stage_s=of.link.stage_s.value,
            transport=RingOrDirect(self.link(Span.ALL).at_once_bytes),
        )

    def check(self, specs: Mapping[str, TensorSpec], world: int) -> None:
        """Holds the profile against a job.

        Raises:
            ValueError: where it was measured with another model, number of ranks or version of torch.
        """
        if self.world != world:
            raise ValueError(f"the profile is of {self.world} ranks, this job has {world}; measure again")
        if self.torch != torch.__version__:
            raise ValueError(
                f"the profile was measured with torch {self.torch}, this is {torch.__version__}; measure again"
            )
        if self.model != model_digest(specs):
            raise ValueError(
                f"the profile is of model {self.model[:12]}, this model is {model_digest(specs)[:12]}: "
                f"{_first_difference(self.specs, specs)}; measure again"
            )


def spans_of(placement: Placement) -> tuple[Span, ...]:
    """The groups that are measured among so placed ranks."""
    if placement.size == 1:
        return ()
    return (Span.ALL, Span.INSIDE, Span.ACROSS) if placement.is_hierarchy else (Span.ALL,)


def describe_profile(profile: Profile) -> list[str]:
    """The profile in words, a line for each thing that was measured."""
    parts = profile.parts
    named = {"forward": parts.forward, "backward": parts.backward, "optimiser": parts.optimizer, "other": parts.other}
    each = ", ".join(f"{name} {_spread(part)}" for name, part in named.items())
    nodes = profile.placement.num_nodes
    lines = [
        f"{len(profile.parameters)} parameters, {profile.world} ranks on {nodes} nodes, torch {profile.torch}",
        f"a step without exchange: {parts.step_s * 1e3:.2f} ms over {profile.steps} steps: {each}",
    ]
    if ready := profile.in_ready_order():
        first, last = ready[0], ready[-1]
        lines.append(
            f"gradients are ready from {_spread(first.ready)} ({first.name}) to {_spread(last.ready)} ({last.name})"
        )
    for link in profile.links:
        lines.append(f"{link.span.value}, {link.size} members: {_link(link.link)}")
        lines += [f"  {pattern.value}: {_link(fit.link)}" for pattern, fit in link.collectives.items()]
    factors = {name.replace("_", " "): factor for name, factor in profile.overlap if factor is not None}
    lines += [f"{name}: x {_interval(factor, 1.0)}" for name, factor in factors.items()]
    if profile.kernels:
        lines.append("kernels, those with the slowest bytes first:")
    slow = sorted(profile.kernels.items(), key=lambda item: -item[1].byte_s.value)
    lines += [
        f"  {name}: {_interval(k.call_s, 1e6)} us a call, {_interval(k.byte_s, 1e12)} ms a GB"
        + (f" beyond {k.knee_bytes:.0f} bytes" if k.knee_bytes else "")
        for name, k in slow
    ]
    return lines


def _spread(spread: Spread) -> str:
    return f"{spread.median_s * 1e3:.2f} +- {spread.spread_s * 1e3:.2f} ms"


def _interval(estimate: Interval, factor: float) -> str:
    high = "-" if estimate.high is None else f"{estimate.high * factor:.3g}"
    return f"{estimate.value * factor:.3g} [{estimate.low * factor:.3g}-{high}]"


def _link(link: LinkEstimate) -> str:
    rate = link.bandwidth_bytes_per_s
    low, high = format_rate(max(rate.low, 1.0)), "-" if rate.high is None else format_rate(rate.high)
    return (
        f"{format_rate(rate.value)} [{low}-{high}], {_interval(link.alpha_s, 1e6)} us a message, "
        f"{_interval(link.stage_s, 1e6)} us a stage"
    )


def _first_difference(ours: Mapping[str, TensorSpec], theirs: Mapping[str, TensorSpec]) -> str:
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            return f"{name!r} is {ours.get(name, 'not there')} in the profile, {theirs.get(name, 'not there')} here"
    return "its parameters come in another order"
