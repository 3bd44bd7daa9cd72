"""Turns a job into a `Problem` with gradients as items and schemes as options, and parts back into a plan.

Demands of an option are the steps of its scheme under the job's cost model; there are no other formulas here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch

from ...costs.steps import COMPUTE, FINISH, Compute, Step, Transfer
from ...costs.timeline import Task
from ...plans.plan import Plan
from ...schemes import Scheme
from ...schemes.tree import is_local
from ...tensors.bucket import FlatSpec, Layout, Segment, TensorSpec
from ...tensors.density import ParameterProfile
from ..default.compressing import LATE
from ..default.network import Network
from ..default.plan import in_ready_order
from ..solver.joint import split_items
from ..solver.machine import play
from ..solver.problem import Curve, Demand, Option, Part, Problem, Resource
from .job import Job

# Bucket sizes at which a scheme's steps are priced; its demands are linear in between.
KNOTS_BYTES = tuple(1 << exponent for exponent in range(10, 31, 2))

LINKS = (Resource.INTRA.name.lower(), Resource.INTER.name.lower())  # streams in the machine's timeline


@dataclass(frozen=True)
class Way:
    """A scheme that a plan may use, and the gradients that may take it.

    Attributes:
        scheme: the scheme.
        members: names of gradients that share a bucket of their own; None: the scheme is for dense gradients.
        among: without `members`: names of gradients that may take the scheme; None: all dense ones.
    """

    scheme: Scheme[Any]
    members: tuple[str, ...] | None = None
    among: frozenset[str] | None = None


@dataclass(frozen=True)
class Formulation:
    """A job as a `Problem` of numbers, with the gradients and schemes that its items and options stand for.

    Attributes:
        problem: gradients as items with their times and bytes; ways to exchange them as options.
        items: the segments (parameter, start, stop) of each item.
        schemes: the scheme of each option.
        specs: shape and dtype of each parameter.
        world_size: the number of ranks.
        whole: indices of items that must not be cut.
    """

    problem: Problem
    items: tuple[tuple[tuple[str, int, int], ...], ...]  # segments of each item: (name, start, stop)
    schemes: tuple[Scheme[Any], ...]
    specs: Mapping[str, TensorSpec]
    world_size: int
    whole: frozenset[int] = frozenset()  # indices of items that a way with `members` takes, so not to be cut

    def in_pieces(self, largest_bytes: float) -> Formulation:
        """Returns this problem with large gradients cut into equal pieces, which buckets may take one by one.

        A scheme that depends on the shapes of parameters, such as PowerSGD, is not allowed for pieces. A gradient that
        may take no other scheme stays whole.

        `largest_bytes`: most bytes of a piece.
        """
        by_shape = frozenset(number for number, scheme in enumerate(self.schemes) if scheme.traits.depends_on_shapes)
        allowed = self.problem.allowed or (frozenset(range(len(self.schemes))),) * self.problem.size
        whole = self.whole.union(item for item, options in enumerate(allowed) if options <= by_shape)
        pieces = split_items(self.problem, largest_bytes, whole)
        items: list[tuple[tuple[str, int, int], ...]] = []
        may: list[frozenset[int]] = []
        for segments, options, count in zip(self.items, allowed, pieces.counts, strict=True):
            if count == 1:
                items.append(segments)
                may.append(options)
                continue
            ((name, start, stop),) = segments
            ends = [start + (stop - start) * piece // count for piece in range(count + 1)]
            items += [((name, *span),) for span in pairwise(ends)]
            may += [options - by_shape] * count
        return replace(self, problem=replace(pieces.problem, allowed=tuple(may)), items=tuple(items), whole=frozenset())

    def plan(self, parts: Sequence[Part]) -> Plan:
        """Returns the plan whose buckets are these parts, with collectives in the order in which simulated ones begin.

        `parts`: consecutive items (gradients), and the option (scheme) of each bucket, as a search found them.
        """
        buckets = [(list(self._segments(part)), self.schemes[part.option]) for part in parts]
        return Plan.make(self.specs, self.world_size, buckets, self._turns(parts))

    def _turns(self, parts: Sequence[Part]) -> list[tuple[str, str]]:
        tasks: dict[str, list[Task]] = {str(number): [] for number in range(len(parts))}
        for task in play(self.problem, parts):
            if task.stream in LINKS:
                tasks[task.name.partition(":")[0]].append(task)
        turns: list[tuple[float, int, int, str]] = []
        for number, part in enumerate(parts):
            stages = self.schemes[part.option].stages(self.world_size)
            transfers = tasks[str(number)]
            at_s = [task.start_s for task in transfers]
            moving = [not is_local(stage) for stage in stages]
            if len(at_s) != sum(moving):  # demands do not correspond to stages: all stages begin together
                at_s = [at_s[0] if at_s else 0.0] * len(stages)
            elif not all(moving):  # a stage of awaited work begins where the transfer before it ends
                done = list(accumulate(moving))
                begun = [transfers[max(count - 1, 0)] for count in done]
                at_s = [t.start_s if moves else t.end_s for t, moves in zip(begun, moving, strict=True)]
            last = self.problem.options[part.option].chain[-1].resource
            if transfers and last not in (Resource.INTRA, Resource.INTER) and moving[-1]:
                stages, at_s = (*stages, FINISH), [*at_s, max(transfers[-1].end_s, at_s[-1])]
            turns += [(at, number, place, stage) for place, (at, stage) in enumerate(zip(at_s, stages, strict=True))]
        return [(str(number), stage) for _, number, _, stage in sorted(turns)]

    def _segments(self, part: Part) -> Iterator[tuple[str, int, int]]:
        """Yields the part's (parameter, start, stop); adjoining pieces of one tensor become one segment."""
        pieces = [piece for item in self.items[part.start : part.stop] for piece in item]
        for name, same in groupby(pieces, key=lambda piece: piece[0]):
            of_name = list(same)
            yield name, of_name[0][1], of_name[-1][2]


def formulate(job: Job, ways: Sequence[Way]) -> Formulation:
    """Returns a job as a planning problem: gradients as items, and the schemes of `ways` as options to exchange them.

    All `members` of a way, such as tables, share a bucket: they are one item, which is ready with the last of them.

    Args:
        ways: schemes, each with the gradients that may take it.

    Raises:
        ValueError: for a gradient that no way takes.
    """
    known = {p.name: p for p in job.profiles}
    items = _items(job, ways)
    options: list[Option] = []
    schemes: list[Scheme[Any]] = []
    allowed: list[set[int]] = [set() for _ in items]
    whole: set[int] = set()
    for way in ways:
        if way.members is not None:
            options.append(_option_of_members(way, [known[name] for name in way.members], job.network))
            schemes.append(way.scheme)
            place = items.index(way.members)
            whole.add(place)
            allowed[place].add(len(options) - 1)
            continue
        for dtype, mine in _by_dtype(items, known, way).items():
            shapes = [flat_of(known[name]) if number in mine else None for number, (name, *_) in enumerate(items)]
            options.append(_option(way.scheme, dtype, shapes, job.network))
            schemes.append(way.scheme)
            for number in mine:
                allowed[number].add(len(options) - 1)
    for item, taken in zip(items, allowed, strict=True):
        if not taken:
            raise ValueError(f"no scheme is left for {item[0]!r} under the constraints: allow at least all_reduce")
    ready_s = [max(job.ready_s[name] for name in item) for item in items]
    begins_s = [0.0, *ready_s]
    problem = Problem(
        gaps_s=tuple(max(b - a, 0.0) for a, b in zip(begins_s, ready_s, strict=False)),
        nbytes=tuple(float(sum(known[name].tensor.nbytes for name in item)) for item in items),
        options=tuple(options),
        allowed=tuple(map(frozenset, allowed)),
        rest_s=max(job.backward_s - max(ready_s, default=0.0), 0.0),
    )
    segments = tuple(tuple((name, 0, known[name].tensor.numel) for name in item) for item in items)
    specs = {p.name: p.tensor for p in job.profiles}
    return Formulation(problem, segments, tuple(schemes), specs, job.world_size, frozenset(whole))


def _items(job: Job, ways: Sequence[Way]) -> list[tuple[str, ...]]:
    """Returns the names of the gradients in each item, the unit of planning, in order of readiness.

    The `members` of a way (a scheme for gradients that share a bucket) are one item; any other gradient is an item.
    """
    together = {name: way.members for way in ways if way.members is not None for name in way.members}
    names = [p.name for p in in_ready_order(job.profiles)]
    items = dict.fromkeys(together.get(name, (name,)) for name in names)
    place = {name: number for number, name in enumerate(names)}
    return sorted(items, key=lambda item: (max(job.ready_s[name] for name in item), max(place[name] for name in item)))


def _by_dtype(
    items: Sequence[tuple[str, ...]], known: Mapping[str, ParameterProfile], way: Way
) -> dict[torch.dtype, set[int]]:
    """Returns, for each dtype, the indices of the items of one dense gradient that may take the scheme of `way`."""
    found: dict[torch.dtype, set[int]] = {}
    for number, (name, *others) in enumerate(items):
        profile = known[name]
        if not others and not profile.sparse and (way.among is None or name in way.among):
            found.setdefault(profile.tensor.dtype, set()).add(number)
    return found


def flat_of(profile: ParameterProfile) -> TensorSpec:
    """Returns the shape and dtype of the flat bucket that holds only this parameter.

    The parameter's own shape is kept in it (`FlatSpec`), for schemes that depend on shapes.
    """
    spec = profile.tensor
    return TensorSpec(
        (spec.numel,), spec.dtype, FlatSpec((Segment(profile.name, 0, spec.numel),), (spec.shape,), spec.dtype)
    )


def _option_of_members(way: Way, members: Sequence[ParameterProfile], network: Network) -> Option:
    """Returns the option (chain of timed tasks) to exchange `members` by `way.scheme`.

    The times are constant, as these parameters are always one bucket.
    """
    if way.scheme.traits.layout is Layout.ROWS:
        specs, seen = tuple(p.tensor for p in members), tuple(p.density for p in members)
    else:
        (only,) = members
        specs, seen = (flat_of(only),), (only.elements,)
    profiles = tuple(density for density in seen if density is not None)
    steps = way.scheme.steps(specs, profiles, network.placement, LATE)
    demands = [Demand(where, Curve.linear(seconds, 0.0)) for where, seconds in _chain(steps, network)]
    return Option(way.scheme.title, tuple(demands))


def _option(scheme: Scheme[Any], dtype: torch.dtype, flats: Sequence[TensorSpec | None], network: Network) -> Option:
    """Returns a scheme's option (timed tasks) for dense gradients; `flats`: each one's spec, None if not allowed."""
    if scheme.traits.depends_on_shapes:
        return _option_by_shapes(scheme, flats, network)
    chains = [
        _chain(_steps(scheme, TensorSpec((nbytes // dtype.itemsize,), dtype), network), network)
        for nbytes in KNOTS_BYTES
    ]
    demands = []
    for place, (where, _) in enumerate(chains[0]):
        seconds = list(accumulate((chain[place][1] for chain in chains), max))  # a ring for larger ones may be faster
        demands.append(Demand(where, Curve((0.0, *map(float, KNOTS_BYTES)), (seconds[0], *seconds))))
    return Option(scheme.title, tuple(demands))


def _steps(scheme: Scheme[Any], spec: TensorSpec, network: Network) -> tuple[Step, ...]:
    return scheme.steps((spec,), (), network.placement, LATE)


def _option_by_shapes(scheme: Scheme[Any], flats: Sequence[TensorSpec | None], network: Network) -> Option:
    """Returns the option (chain of timed tasks) of a scheme whose steps depend on shapes, with one task per step.

    `flats`: the spec of each item (gradient), None if it may not take the scheme. The `amounts` of a task are the bytes
    of its step for each item alone.
    """
    alone = [{} if flat is None else _by_name(_steps(scheme, flat, network)) for flat in flats]
    longest = max(alone, key=len)
    demands = []
    for name, step in longest.items():
        amounts = tuple(_amount(steps[name]) if name in steps else 0.0 for steps in alone)
        seconds = [network.cost.seconds(_scaled(step, nbytes), network.placement) for nbytes in (0, *KNOTS_BYTES)]
        curve = Curve((0.0, *map(float, KNOTS_BYTES)), tuple(accumulate(seconds, max)))
        demands.append(Demand(resource_of(step, network), curve, amounts))
    return Option(scheme.title, tuple(demands))


def _by_name(steps: Iterable[Step]) -> dict[str, Step]:
    return {step.stage if isinstance(step, Transfer) else step.kernel: step for step in steps}


def _amount(step: Step) -> float:
    return step.nbytes if isinstance(step, Compute) else max(step.part_bytes)


def _scaled(step: Step, nbytes: float) -> Step:
    if isinstance(step, Compute):
        return replace(step, nbytes=float(nbytes))
    return replace(step, part_bytes=(float(nbytes),) * step.size)


def _chain(steps: Iterable[Step], network: Network) -> list[tuple[Resource, float]]:
    """Returns (resource, seconds) of the steps; computations in a row on one resource are merged."""
    found: list[tuple[Resource, float]] = []
    for step in steps:
        where, seconds = resource_of(step, network), network.cost.seconds(step, network.placement)
        if found and isinstance(step, Compute) and found[-1][0] is where:
            found[-1] = where, found[-1][1] + seconds
        else:
            found.append((where, seconds))
    return found


def resource_of(step: Step, network: Network) -> Resource:
    """Returns where a scheme's computation or transfer runs: on backward's core, another core, or a kind of link.

    Args:
        step: the computation or transfer.
        network: tells which links stay inside a node, and whether kernels run on an accelerator.
    """
    if isinstance(step, Compute):
        if network.cost.host is not None:  # backward's device does all that is not offloaded to the host
            return Resource.OFFLOAD if step.is_copied else Resource.COMPUTE
        # The communication thread does what is not awaited, on another core.
        return Resource.COMPUTE if step.awaited and step.device == COMPUTE else Resource.OFFLOAD
    nodes = network.placement.nodes
    stays = all(nodes[source] == nodes[to] for source, to, _ in step.carried_by(network.cost.transport).messages())
    return Resource.INTRA if stays else Resource.INTER
