"""`Profile`: measurements of a training job, for planners. Pure data, JSON on disk, the same on every rank.

A profile belongs to a model, a number of ranks and a version of torch; `check` compares it with a job. The suffix of
a field is its unit: `_s` seconds, `_bytes` bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from math import inf
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from ..costs.cluster import MOST_RANKS, Link, Placement, format_rate
from ..costs.cost_model import CostModel, HostCost, KernelCost
from ..costs.transport import Pattern, RingOrDirect
from ..tensors.bucket import TensorSpec, model_digest
from ..tensors.density import DensityProfile, ParameterProfile
from .document import Document, Ranks

MOST_S = 1e6  # eleven days: of a part of a step, a call or a collective
MOST_BYTE_S = 1.0  # of a kernel, for a byte
MOST_BYTES_PER_S = 1e15  # of a link
MOST_NBYTES = 1e18
MOST_FACTOR = 1e6  # by which one activity slows another down
MOST_ERROR = 1e9  # of a lossy compressor, relative to the gradient
MOST_COUNT = 10**9  # of steps and threads

Seconds = Annotated[float, Field(ge=0, le=MOST_S)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MOST_S)]
Bytes = Annotated[float, Field(ge=0, le=MOST_NBYTES)]
Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Node = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-6)]  # a sum of shares is rounded
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]

ROUNDING = 1e-9  # the relative error of a mean by rounding


class Data(BaseModel):
    """The base class of the parts of a profile: a frozen pydantic model without extra fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Interval(Data):
    """A measured number, 0 or more, with its 95 % confidence interval.

    Attributes:
        value: the number.
        low, high: the ends of the interval; `high` is None if no upper end is known.
    """

    value: float = Field(ge=0, allow_inf_nan=False)
    low: float = Field(ge=0, allow_inf_nan=False)
    high: float | None = Field(ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_order(self) -> Interval:
        if not self.low <= self.value <= (inf if self.high is None else self.high):
            raise ValueError(f"value must lie in its interval, got {self.value} in [{self.low}, {self.high}]")
        return self


def _at_most(most: float) -> AfterValidator:
    """Returns a validator of intervals that lie below `most`, as does their upper end if it is known."""

    def read(found: Interval) -> Interval:
        if max(found.value, found.high or 0.0) > most:
            raise ValueError(f"an interval must lie in [0, {most:g}], got {found.value} in [{found.low}, {found.high}]")
        return found

    return AfterValidator(read)


Time = Annotated[Interval, _at_most(MOST_S)]
ByteTime = Annotated[Interval, _at_most(MOST_BYTE_S)]
Rate = Annotated[Interval, _at_most(MOST_BYTES_PER_S)]
Factor = Annotated[Interval, _at_most(MOST_FACTOR)]


class Spread(Data):
    """A measured time, on the slowest rank: its median over training steps, and how much steps differ.

    A few disturbed steps hardly matter.

    Attributes:
        median_s: the median over training steps, in seconds.
        spread_s: the median distance from the median, in seconds, scaled to a standard deviation (times 1.4826).
    """

    median_s: Seconds
    spread_s: Seconds


class PositiveSpread(Spread):
    """A time in seconds over training steps as in `Spread`, median and spread, whose median must be above 0."""

    median_s: PositiveSeconds


class StepParts(Data):
    """The parts of a training step without communication, each on the rank where the part takes longest.

    Attributes:
        forward: forward and the loss, until backward begins.
        backward: backward, undisturbed by communication.
        optimizer: the optimiser's step.
        other: everything else, such as fetching a batch.
        beside: the sum of all parts but backward, on the rank where it is longest. Backward and ready times count from
            its end, as in a synchronised step all ranks wait for that rank.
    """

    forward: PositiveSpread
    backward: PositiveSpread
    optimizer: Spread
    other: Spread
    beside: PositiveSpread

    @property
    def step_s(self) -> float:
        """The seconds of a training step without communication: the medians of backward and of all else (`beside`)."""
        return self.beside.median_s + self.backward.median_s


class Density(Data):
    """The measured density of a gradient's rows or elements, as a pydantic model that is written as JSON.

    Its fields are those of `DensityProfile`, the form in which schemes and planners take densities.

    Attributes:
        num_rows: the number of rows, zero or not.
        rows: non-zero rows of one rank, a mean over the ranks.
        densification: the density of the sum over k ranks over that of one rank, by k.
        pattern: a name that tables with the same non-zero rows on every rank share; "": not known.
        most_rows: the most non-zero rows of any rank; 0: not known.
        shares: the shares of one rank's non-zero rows in even contiguous partitions; (): taken as even.
        union_shares: the same in the union over all ranks.
        blocks: densities of a flat tensor in blocks, by their length in elements.
    """

    num_rows: int = Field(ge=0)
    rows: Finite
    densification: dict[Annotated[int, Field(ge=1)], Finite] = {}
    pattern: str = ""
    most_rows: Finite = 0.0
    shares: tuple[Share, ...] = ()
    union_shares: tuple[Share, ...] = ()
    blocks: dict[Annotated[int, Field(ge=1)], Density] = {}

    @model_validator(mode="after")
    def _has_these_rows(self) -> Density:
        most = max(self.rows, self.most_rows)
        if most > self.num_rows * (1 + ROUNDING):
            raise ValueError(f"rows and most_rows must be at most the {self.num_rows} rows, got {most:g}")
        return self

    @classmethod
    def of(cls, profile: DensityProfile) -> Density:
        """Returns the density as a pydantic model, for JSON, with the fields of `profile`."""
        return cls.model_validate(asdict(profile))

    def profile(self) -> DensityProfile:
        """Returns the density in the form that schemes and planners take, a dataclass with the same fields."""
        blocks = {length: density.profile() for length, density in self.blocks.items()}
        return DensityProfile(**{**self.model_dump(), "blocks": blocks})


class ParameterObservation(Data):
    """The layout, density and order of one parameter's gradient, as training steps showed them, without times.

    Its fields are those of `ParameterProfile`, the form in which planners take them.

    Attributes:
        name: the parameter's name.
        shape: the parameter's shape.
        dtype: the name in torch, as "float32".
        sparse: whether the gradient is a sparse tensor.
        position: the place in the order in which gradients are ready, from 0.
        rows, elements: how many rows and elements of the gradient are not zero; None if they are unknown, or if sparse
            schemes gain nothing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool
    position: int = Field(ge=0)
    rows: Density | None = None
    elements: Density | None = None

    @field_validator("dtype")
    @classmethod
    def _is_a_dtype(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"torch has no dtype {name!r}")
        return name

    @property
    def tensor(self) -> TensorSpec:
        """The shape and dtype of the parameter."""
        return TensorSpec(self.shape, getattr(torch, self.dtype))

    @classmethod
    def of(cls, profile: ParameterProfile, position: int, **measured: Any) -> Self:
        """Returns the observation of a parameter whose gradient is ready at this place of the order.

        Args:
            profile: the parameter's shape, and its gradient's layout and density.
            position: the place in the order in which gradients are ready, from 0.
            measured: further fields that a subclass has, by name.
        """
        return cls(
            name=profile.name,
            shape=profile.tensor.shape,
            dtype=str(profile.tensor.dtype).removeprefix("torch."),
            sparse=profile.sparse,
            position=position,
            rows=None if profile.density is None else Density.of(profile.density),
            elements=None if profile.elements is None else Density.of(profile.elements),
            **measured,
        )

    def profile(self) -> ParameterProfile:
        """Returns what planners need of the parameter: shape, dtype, densities and place in the order of readiness."""
        rows, elements = (None if d is None else d.profile() for d in (self.rows, self.elements))
        return ParameterProfile(self.name, self.tensor, self.sparse, rows, self.position, elements)


class ParameterTimes(ParameterObservation):
    """The measurements of one parameter: when its gradient is ready, and how dense the gradient is.

    Attributes:
        ready: when the gradient is ready, in seconds from the start of backward.
        errors: for each lossy scheme or compressor, by name, the norm of its error relative to the norm of the gradient
            in a step, see `planner.search.errors`.
    """

    ready: PositiveSpread
    errors: dict[str, Annotated[float, Field(ge=0, le=MOST_ERROR)]] = {}


class KernelEstimate(Data):
    """The measured cost of a kernel: a call takes call_s + byte_s * max(0, bytes - knee_bytes) seconds.

    The two times are an `Interval` each.

    Attributes:
        call_s: seconds of a call.
        byte_s: seconds of a byte that the call reads or writes.
        knee_bytes: bytes of a call that cost nothing beyond `call_s`.
    """

    call_s: Time
    byte_s: ByteTime
    knee_bytes: Bytes = 0.0

    @model_validator(mode="after")
    def _takes_time(self) -> KernelEstimate:
        if not self.call_s.value and not self.byte_s.value:
            raise ValueError("call_s and byte_s must not both be 0: every kernel takes time")
        return self

    @property
    def cost(self) -> KernelCost:
        """The cost of the kernel without confidence intervals, in the form that `CostModel` takes."""
        return KernelCost(self.call_s.value, self.byte_s.value, self.knee_bytes)


class HostEstimate(Data):
    """The measured costs of computations that are offloaded from an accelerator to the host.

    Attributes:
        fetch, send: copies to the host, and back.
        kernels: kernels on the host, by name.
    """

    fetch: KernelEstimate
    send: KernelEstimate
    kernels: dict[str, KernelEstimate]

    @property
    def cost(self) -> HostCost:
        """The costs of offloaded computations without confidence intervals, in the form that `CostModel` takes."""
        return HostCost(self.fetch.cost, self.send.cost, {name: kernel.cost for name, kernel in self.kernels.items()})


class LinkEstimate(Data):
    """The measured cost of a collective: stage_s + rounds * alpha_s + busiest bytes / bandwidth, in seconds.

    Rounds are messages one after the other, busiest bytes those on the busiest link. Each number is an `Interval`.

    Attributes:
        stage_s: seconds of a collective.
        alpha_s: seconds of a message.
        bandwidth_bytes_per_s: the rate of the busiest link, in bytes a second.
    """

    stage_s: Time
    alpha_s: Time
    bandwidth_bytes_per_s: Rate

    @field_validator("bandwidth_bytes_per_s")
    @classmethod
    def _carries(cls, bandwidth: Interval) -> Interval:
        if not bandwidth.value:
            raise ValueError("a bandwidth must be positive, got 0")
        return bandwidth


class LinkPoint(Data):
    """A measurement of one collective with messages of one size.

    Attributes:
        part_bytes: bytes of a member, as in `Transfer.part_bytes`; all have the same.
        rounds: messages one after the other.
        busiest_bytes: bytes on the busiest link.
        seconds: the seconds from issue to completion.
    """

    part_bytes: Bytes
    rounds: Count
    busiest_bytes: float = Field(gt=0, le=MOST_NBYTES)
    seconds: Time


class CollectiveEstimate(Data):
    """The measurements of one type of collective.

    Attributes:
        link: the cost formula that fits the points.
        points: times at several sizes.
    """

    link: LinkEstimate
    points: tuple[LinkPoint, ...]


class Span(StrEnum):
    """The ranks that communicate in a measurement of links.

    Attributes:
        ALL: all ranks.
        INSIDE: the ranks of each node, on all nodes at once.
        ACROSS: the ranks with the same local rank, for all local ranks at once.
    """

    ALL = "all"
    INSIDE = "inside"
    ACROSS = "across"


class SpanEstimate(Data):
    """The measured costs of collectives in one kind of group: all ranks, the ranks of a node, or one rank per node.

    With several such groups, all of them communicated at the same time.

    Attributes:
        span: the kind of groups.
        size: the number of ranks in a group.
        at_once_bytes: most bytes that a member sends in an all-gather whose messages all start at once; above, it is a
            ring.
        link: the cost formula fitted to all types of collectives together.
        collectives: measurements of each type.
    """

    span: Span
    size: int = Field(ge=2, le=MOST_RANKS)
    at_once_bytes: Bytes
    link: LinkEstimate
    collectives: dict[Pattern, CollectiveEstimate]


class Overlap(Data):
    """The factors by which two activities slow each other down; None if the factor was not measured.

    `a_by_b` is the time of a while b runs, divided by the time of a alone; noise may bring a factor below 1. A transfer
    is a collective in flight, a kernel a computation of the communication thread.

    Attributes:
        backward_by_transfer: the factor of backward, while a transfer is in flight.
        transfer_by_backward: the factor of a transfer, while backward runs.
        backward_by_kernel: the factor of backward, while the communication thread computes.
        kernel_by_backward: the factor of a computation of the communication thread, while backward runs.
        transfer_by_kernel: the factor of a transfer, while the communication thread computes.
        kernel_by_transfer: the factor of a computation of the communication thread, while a transfer is in flight.
    """

    backward_by_transfer: Factor | None = None
    transfer_by_backward: Factor | None = None
    backward_by_kernel: Factor | None = None
    kernel_by_backward: Factor | None = None
    transfer_by_kernel: Factor | None = None
    kernel_by_transfer: Factor | None = None


class Profile(Document):
    """The measurements of a training job, as `gradsync.measure` returns them and planners read them.

    Attributes:
        version: the version of the file format, 2.
        torch: the version of torch.
        device: the type of the device that the gradients were on, as "cuda".
        card: the name of rank 0's accelerator; "" on the CPU.
        threads: the threads of torch on a rank.
        model: the digest of the parameters' names, shapes and dtypes.
        world: the number of ranks.
        nodes: the node of each rank, by rank.
        steps: the number of training steps in which `parts` and ready times were measured.
        parts: the times of forward, backward and the rest of a step.
        overlap: how much communication and computation slow each other down.
        links: the costs of collectives among all ranks, inside nodes and across nodes.
        kernels: the costs of kernels, by the names that schemes use in their lists of computations.
        host: the costs of work that is offloaded to the host; None where gradients are on the CPU.
        parameters: in the model's order.
    """

    noun = "profile"
    by_lines = ("links", "kernels", "parameters")

    version: int = 2  # version 1 had one kernel name for a compressor, whatever its settings
    torch: str
    device: str
    card: str = ""
    threads: Count
    model: str
    world: Ranks
    nodes: tuple[Node, ...]
    steps: Count
    parts: StepParts
    overlap: Overlap
    links: tuple[SpanEstimate, ...]
    kernels: dict[str, KernelEstimate]
    host: HostEstimate | None = None
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
                f"the profile's model digest is {self.model[:12]}, but its parameters have the digest "
                f"{model_digest(self.specs)[:12]}"
            )
        spans, expected = [link.span.value for link in self.links], [span.value for span in spans_of(self.placement)]
        if sorted(spans) != sorted(expected):
            raise ValueError(f"links must have the spans {expected} for the nodes {self.nodes}, got {spans}")
        return self

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The shape and dtype of each parameter, by name."""
        return {p.name: p.tensor for p in self.parameters}

    @property
    def placement(self) -> Placement:
        """The node of each rank, as a `Placement`, which also says whether nodes have several ranks."""
        return Placement(self.nodes)

    def in_ready_order(self) -> list[ParameterTimes]:
        """Returns the parameters in the order in which their gradients are ready."""
        return sorted(self.parameters, key=lambda p: p.position)

    def parameter_profiles(self) -> list[ParameterProfile]:
        """Returns what planners need of each parameter, in model order: shape, dtype, densities, order of readiness."""
        return [p.profile() for p in self.parameters]

    def link(self, span: Span) -> SpanEstimate:
        """Returns the measured costs of collectives among all ranks, inside nodes or across nodes, as `span` says.

        Raises:
            ValueError: if they were not measured, as there are no such groups of ranks.
        """
        found = next((link for link in self.links if link.span is span), None)
        if found is None:
            spans = ", ".join(repr(link.span.value) for link in self.links) or "none"
            raise ValueError(f"the profile has no groups {span.value!r} among the nodes {self.nodes}; it has {spans}")
        return found

    def cost_model(self) -> CostModel:
        """Returns the cost model of this job's links and kernels, by which planners predict times.

        With several ranks on each of several nodes, all ranks of a node send at once, so the bandwidth of the node's
        link is the measured bandwidth of a rank times the ranks of the node.
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
            host=None if self.host is None else self.host.cost,
        )

    def check(self, specs: Mapping[str, TensorSpec], world: int) -> None:
        """Checks that the profile was measured with this model, this number of ranks and this version of torch.

        `specs`: shape and dtype of each parameter, by name.

        Raises:
            ValueError: if it was not; says to measure again.
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
    """Returns the kinds of groups of ranks whose links are measured for this placement; none for one rank.

    They are all ranks and, with several ranks on each of several nodes, those inside nodes and across nodes.
    """
    if placement.size == 1:
        return ()
    return (Span.ALL, Span.INSIDE, Span.ACROSS) if placement.is_hierarchy else (Span.ALL,)


def describe_profile(profile: Profile) -> list[str]:
    """Returns the profile in words for users, one line for each measurement."""
    parts = profile.parts
    named = {"forward": parts.forward, "backward": parts.backward, "optimiser": parts.optimizer, "other": parts.other}
    each = ", ".join(f"{name} {_spread(part)}" for name, part in named.items())
    nodes = profile.placement.num_nodes
    lines = [
        f"{len(profile.parameters)} parameters, {profile.world} ranks on {nodes} nodes, "
        f"{profile.card or profile.device}, torch {profile.torch}",
        f"a step without communication: {parts.step_s * 1e3:.2f} ms over {profile.steps} steps: {each}",
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
    lines += _kernel_lines("kernels", profile.kernels)
    if profile.host is not None:
        copies = {"copies from the device": profile.host.fetch, "copies to the device": profile.host.send}
        lines += _kernel_lines("the host's kernels", {**copies, **profile.host.kernels})
    return lines


def _kernel_lines(what: str, kernels: Mapping[str, KernelEstimate]) -> list[str]:
    slow = sorted(kernels.items(), key=lambda item: -item[1].byte_s.value)
    lines = [
        f"  {name}: {_interval(k.call_s, 1e6)} us a call, {_interval(k.byte_s, 1e12)} ms a GB"
        + (f" beyond {k.knee_bytes:.0f} bytes" if k.knee_bytes else "")
        for name, k in slow
    ]
    return [f"{what}, those with the slowest bytes first:", *lines] if lines else []


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
