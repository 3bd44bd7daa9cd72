"""Planners of other systems: searches that `AutoPlanner` runs on measured gradients instead of gradsync's own.

Each returns one plan, with one of the lossy schemes that the constraints allow: the one with the shortest predicted
step. Gradients that may not take it travel without loss:

- tables, and dense gradients that were found to be sparse by rows, by the scheme that is fastest for them alone;
- other dense gradients in DDP's buckets of 25 MiB, but each by itself where the system merges nothing.

Merged gradients need not be neighbours: a gradient in between that travels otherwise does not split a bucket. The order
in which buckets are exchanged is gradsync's, as these systems do not decide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from gradsync.compressors import Compressor
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import COMPUTE, OFFLOAD, Compute
from gradsync.planner.default.compressing import LATE
from gradsync.planner.search.job import Job
from gradsync.planner.search.options import KNOTS_BYTES, Formulation, Way, formulate
from gradsync.planner.search.predict import predict
from gradsync.planner.search.turns import with_best_turns
from gradsync.planner.search.ways import Constraints, exact_ways, ways_of
from gradsync.planner.solver.problem import Curve, Part, Problem
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, CoarseGrained, CompressedAllGather, CompressedAllReduce, Route, routes
from gradsync.schemes.compressed import parted
from gradsync.schemes.tree import COMPRESS, DECOMPRESS, Kind, RouteTask
from gradsync.tensors.bucket import TensorSpec

from .cuts import best_cuts, by_count, cut_at
from .greedy import bytecomp_device, bytecomp_offload
from .merge import fixed_size, lazy, mergecomp, mg_wfbp, whole
from .rivals import SeCoPa, byteps_compress

MOST_COUNTED = 12  # numbers of buckets up to this one are always tried

Cut = Callable[[Problem, int], Sequence[Part]]
Bucket = tuple[tuple[int, ...], int]  # items, rising, and the option


def layerwise_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns a plan of layer-wise compression: each gradient that may be compressed gets a bucket of its own."""
    return _merged_plans(job, constraints, lambda problem, option: cut_at(problem, option, range(problem.size)))


def best_cuts_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns a plan that compresses all gradients that may be, in the best buckets by MergeComp's model of a step.

    The best number of buckets and all numbers up to `MOST_COUNTED` are compared by gradsync's predicted step, which
    knows more than the model: latencies that transfers hide from each other.
    """
    counted = [partial(_about, count) for count in range(1, MOST_COUNTED + 1)]
    return _merged_plans(job, constraints, lambda problem, option: best_cuts(problem, option).parts, *counted)


@dataclass(frozen=True)
class CountedCuts:
    """A planner of compression in exactly `count` buckets, which are the best by MergeComp's model of a step.

    Raises:
        ValueError: `count` is below 1; on a call, the gradients to compress cannot form so many buckets, or so few.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of buckets must be at least 1, got {self.count}")

    def __call__(self, job: Job, constraints: Constraints) -> list[Plan]:
        return _merged_plans(job, constraints, partial(_counted, self.count))


def mergecomp_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns MergeComp's plan: compresses allowed gradients in up to 4 buckets, as many as still shorten the step.

    Payloads that can be summed go by all-reduce, others by all-gather, as in MergeComp.
    """
    return _merged_plans(
        job, constraints, lambda problem, option: mergecomp(problem, option).parts, carriers=_as_mergecomp
    )


def mg_wfbp_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns MG-WFBP's plan: nothing is compressed; gradients are merged where that saves more than waiting costs."""
    return [_merged_exactly(job, mg_wfbp)]


@dataclass(frozen=True)
class LazyPlans:
    """A planner with GradientFlow's lazy all-reduce: ready dense gradients wait until there are `nbytes` to send.

    They travel exactly, or by a lossy scheme if the constraints allow one; see `merge.lazy`.

    Raises:
        ValueError: `nbytes` is negative.
    """

    nbytes: float | None = None  # size of a bucket; 0: each gradient by itself, infinite: one bucket, None: the best

    def __post_init__(self) -> None:
        if self.nbytes is not None and not self.nbytes >= 0:
            raise ValueError(f"LazyPlans.nbytes must be a number from 0 on or None, got {self.nbytes!r}")

    def __call__(self, job: Job, constraints: Constraints) -> list[Plan]:
        def cut(problem: Problem, option: int) -> Sequence[Part]:
            return lazy(problem, option, self.nbytes)

        return _merged_plans(job, constraints, cut) if constraints.lossy else [_merged_exactly(job, cut)]


@dataclass(frozen=True)
class FreeRatio:
    """A planner of coarse-grained communication that sends as large a share of the chunks as costs no step time.

    Buckets are those of GradientFlow's lazy all-reduce; choosing the ratio, the share of chunks that are sent, is
    gradsync's own. The candidates are the allowed scheme's ratio, all larger `ratios`, and all-reduce; taken is the
    largest ratio whose predicted step is within `slack` of the shortest. Communication that overlaps with backward
    costs no time, and chunks that are sent cost no accuracy. On a fast link everything is sent, without loss. As the
    plan is made from measurements, and again when step times change, the ratio adapts to the time that backward leaves.

    Raises:
        ValueError: slack or ratios are out of range; on a call, the constraints do not allow exactly one lossy scheme,
            a `CoarseGrained`.
    """

    slack: float = 0.02
    ratios: tuple[float, ...] = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.02, 0.01)

    def __post_init__(self) -> None:
        if not self.slack >= 0:
            raise ValueError(f"FreeRatio.slack must be a number from 0 on, got {self.slack!r}")
        if not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ValueError(f"FreeRatio.ratios must be in (0, 1], got {self.ratios}")

    def __call__(self, job: Job, constraints: Constraints) -> list[Plan]:
        least = [way for way in constraints.lossy if isinstance(way, CoarseGrained)]
        if len(least) != len(constraints.lossy) or len(least) != 1:
            raise ValueError(f"FreeRatio needs CoarseGrained as the one lossy way, got {constraints.lossy}")
        ratios = sorted({*(ratio for ratio in self.ratios if ratio > least[0].ratio), least[0].ratio}, reverse=True)
        shares = [replace(constraints, lossy=(replace(least[0], ratio=ratio),)) for ratio in ratios]
        plans = [plan for share in (replace(constraints, lossy=()), *shares) for plan in LazyPlans()(job, share)]
        seconds = [predict(plan, job).seconds for plan in plans]
        return [next(plan for plan, s in zip(plans, seconds, strict=True) if s <= (1 + self.slack) * min(seconds))]


def secopa_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns a plan by HiPress' rule: each gradient alone, compressed where that makes its own exchange shorter.

    Sends cost a link's latency and rate; coding costs what the compressor's kernels were measured to take. Compressed
    gradients go by a `Route` (collectives and coding tasks in a row) with an all-to-all and an all-gather, so that each
    rank has one partition of a gradient, and are coded on backward's device.
    """
    compressor = _compressor(constraints, "HiPress' rule")
    compressed = Route(_two_way(COMPUTE), compressor)
    formulation = _formulated(job, constraints, [compressed])
    cost = job.network.cost
    rule = SeCoPa(
        nodes=job.world_size,
        send=Curve.linear(cost.alpha_s, 1 / cost.bandwidth_bytes_per_s),
        encode=_kernel_curve("compress", compressor, job),
        decode=_kernel_curve("decompress", compressor, job),
        wire_ratio=_payload_nbytes(compressor, KNOTS_BYTES[-1]) / KNOTS_BYTES[-1],
    )
    return [
        _each(job, formulation, [compressed], lambda problem, dense, options: rule.parts(problem, dense, options[0]))
    ]


def byteps_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns BytePS-Compress' plan: gradients of 64 KiB or more are compressed on host cores, each in its own bucket.

    A compressed gradient goes to owners (each rank sums one part) and back by a `Route` (collectives and coding tasks
    in a row), all of whose coding is offloaded. Where nodes have several ranks, these sum a gradient inside the node
    first (reduce-scatter), and gather it there last. Gradients are not cut into BytePS' partitions of 4 MiB.
    """
    compressor = _compressor(constraints, "BytePS-Compress")
    levels, tasks = _ranks_per_node(job.network.placement), _two_way(OFFLOAD)
    if levels > 1:
        tasks = ("reduce_scatter", *tasks, "all_gather")
    offloaded = Route(tasks, compressor, levels)
    formulation = _formulated(job, constraints, [offloaded])
    return [
        _each(
            job, formulation, [offloaded], lambda problem, dense, options: byteps_compress(problem, dense, options[0])
        )
    ]


def bytecomp_plans(job: Job, constraints: Constraints) -> list[Plan]:
    """Returns a plan by ByteComp's Algorithms 1 and 2: each gradient alone, by one route (leaf) of the decision tree.

    A route lists collectives and coding tasks. Algorithm 1 codes on backward's device; Algorithm 2 moves all coding of
    some gradients' leaves to the offload device. The leaves are the paper's, without all-reduce of payloads; leaves
    with collectives inside a machine are used only where each machine has several ranks.

    Raises:
        ValueError: the constraints allow no single compressor that has a leaf, or there are too many combinations.
    """
    compressor = _compressor(constraints, "ByteComp")
    found = routes(compressor, _ranks_per_node(job.network.placement), devices=(COMPUTE,))
    on_device = [
        route
        for route in found
        if not any(task.kind is Kind.COMM_L for task in route.leaf) and [t.kind for t in route.leaf] != [Kind.COMM]
    ]
    compressing = [route for route in on_device if not route.traits.exact]
    if not compressing:
        raise ValueError(f"ByteComp has no leaf for {compressor.title}, whose payloads an all-reduce must sum")
    on_host = [Route.of(tuple(map(_offloaded, route.leaf)), compressor, route.ranks_per_node) for route in compressing]
    formulation = _formulated(job, constraints, [*on_device, *on_host])

    def choose(problem: Problem, dense: int, options: Sequence[int]) -> Sequence[Part]:
        number = dict(zip([*on_device, *on_host], options, strict=True))
        by_device = [dense, *(number[route] for route in on_device)]
        offloaded = {number[here]: number[there] for here, there in zip(compressing, on_host, strict=True)}
        first = bytecomp_device(problem, by_device, dense=dense)
        return bytecomp_offload(problem, first.parts, offloaded, dense=dense).parts

    return [_each(job, formulation, [*on_device, *on_host], choose)]


# Implementation.


def _merged_plans(
    job: Job, constraints: Constraints, *cuts: Cut, carriers: Callable[[Sequence[Way]], Sequence[Way]] = list
) -> list[Plan]:
    """Returns, in a list, the plan with the shortest predicted step, over all `cuts` and lossy schemes.

    `carriers` selects the schemes (ways) to try from those that the constraints allow; `list` keeps all.
    """
    exact = exact_ways(job)
    plans = []
    for way in carriers(_lossy_ways(job, constraints)):
        formulation = formulate(job, [*exact, way])
        numbers = _numbers(formulation, way.scheme)
        merged = {plan.digest: plan for plan in (_merged(formulation, numbers, cut) for cut in cuts)}
        plans += [with_best_turns(plan, job) for plan in merged.values()]
    return [min(plans, key=lambda plan: predict(plan, job).seconds)]


def _merged_exactly(job: Job, cut: Cut) -> Plan:
    """Returns the plan that synchronises dense gradients by all-reduce, in buckets made by `cut`."""
    dense = [p if p.sparse else replace(p, density=None, elements=None) for p in job.profiles]
    job = replace(job, profiles=tuple(dense))  # MG-WFBP does not look for zeros
    formulation = formulate(job, exact_ways(job))
    return with_best_turns(_merged(formulation, _numbers(formulation, AllReduce()), cut), job)


def _merged(formulation: Formulation, numbers: frozenset[int], cut: Cut) -> Plan:
    """Returns the plan in which `cut` makes the buckets of gradients that may take one of the options `numbers`.

    Other gradients take the option that is fastest for them alone, in buckets of DDP's size.
    """
    problem = _narrowed(formulation.problem, numbers)
    assert problem.allowed is not None
    taken = [item for item, may in enumerate(problem.allowed) if may <= numbers]
    others = [item for item, may in enumerate(problem.allowed) if not may <= numbers]
    buckets: list[Bucket] = []
    for items, cutting in ((taken, cut), (others, fixed_size)):
        if items:
            parts = cutting(_rearranged(problem, items), min(numbers))
            buckets += [(tuple(items[part.start : part.stop]), part.option) for part in parts]
    return _plan(formulation, buckets)


def _about(count: int, problem: Problem, option: int) -> Sequence[Part]:
    """Returns the best cuts by MergeComp's model into `count` buckets, or the nearest number, all taking `option`."""
    return _counted(min(max(count, len(whole(problem, option))), problem.size), problem, option)


def _counted(count: int, problem: Problem, option: int) -> Sequence[Part]:
    size, fewest = problem.size, len(whole(problem, option))
    if not fewest <= count <= size:
        least = f", of which no fewer than {fewest} buckets can be made" if fewest > 1 else ""
        raise ValueError(
            f"{count} buckets of compressed gradients were asked for; there are {size} gradients to compress{least}"
        )
    if count == size:
        return cut_at(problem, option, range(size))
    return next(parts for _, parts in by_count(problem, option, count) if len(parts) == count)


def _each(
    job: Job,
    formulation: Formulation,
    schemes: Sequence[Route],
    choose: Callable[[Problem, int, Sequence[int]], Sequence[Part]],
) -> Plan:
    """Returns the plan of which `choose(problem, dense option, options of the schemes)` returns a bucket per gradient.

    Where gradients have several element types, only those of the first can be compressed.
    """
    dense = _numbers(formulation, AllReduce())
    options = [min(_numbers(formulation, scheme)) for scheme in schemes]
    problem = _narrowed(formulation.problem, dense | frozenset(options))
    return with_best_turns(formulation.plan(choose(problem, min(dense), options)), job)


def _formulated(job: Job, constraints: Constraints, schemes: Sequence[Route]) -> Formulation:
    """Returns the planning problem with these schemes, for gradients that may be compressed, and with exact schemes."""
    among = _lossy_ways(job, constraints)[0].among
    return formulate(job, [*exact_ways(job), *(Way(scheme, among=among) for scheme in schemes)])


def _lossy_ways(job: Job, constraints: Constraints) -> list[Way]:
    found = [way for way in ways_of(job, constraints) if not way.scheme.traits.exact]
    if not found:
        names = ", ".join(map(str, constraints.lossy)) or "nothing"
        raise ValueError(f"no gradient of the job may be compressed; allowed is {names}, within {constraints}")
    return found


def _as_mergecomp(ways: Sequence[Way]) -> Sequence[Way]:
    for kind in (CompressedAllReduce, CompressedAllGather):
        if found := [way for way in ways if isinstance(way.scheme, kind)]:
            return found
    return ways


def _numbers(formulation: Formulation, scheme: object) -> frozenset[int]:
    """Returns the numbers of the options that use this scheme: there is one option for each element type."""
    return frozenset(number for number, other in enumerate(formulation.schemes) if other == scheme)


def _narrowed(problem: Problem, choices: frozenset[int]) -> Problem:
    """Returns the problem with each gradient (item) limited to the `choices` that it may take.

    A gradient that may take none of them is limited to the option that is fastest for it alone.
    """
    assert problem.allowed is not None

    def quickest(item: int, may: Iterable[int]) -> int:
        return min(sorted(may), key=lambda option: sum(problem.seconds(option, item, item + 1)))

    allowed = (may & choices or frozenset({quickest(item, may)}) for item, may in enumerate(problem.allowed))
    return replace(problem, allowed=tuple(allowed))


def _rearranged(problem: Problem, items: Sequence[int]) -> Problem:
    """Returns the problem of these items (gradients) in this order, each ready when all items before it are."""
    ready_s = list(accumulate(problem.gaps_s))
    reached_s = list(accumulate((ready_s[item] for item in items), max))

    def of_items(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[item] for item in items)

    options = []
    for option in problem.options:
        chain = (d if d.amounts is None else replace(d, amounts=of_items(d.amounts)) for d in option.chain)
        options.append(replace(option, chain=tuple(chain)))
    return Problem(
        gaps_s=tuple(after - before for before, after in pairwise([0.0, *reached_s])),
        nbytes=of_items(problem.nbytes),
        options=tuple(options),
        allowed=None if problem.allowed is None else of_items(problem.allowed),
        alone=None if problem.alone is None else of_items(problem.alone),
        rest_s=max(ready_s[-1] - reached_s[-1], 0.0) + problem.rest_s,
    )


def _plan(formulation: Formulation, buckets: Sequence[Bucket]) -> Plan:
    """Returns the plan of the buckets in ready order; items are rearranged so that each bucket's are consecutive."""
    in_order = sorted(buckets, key=lambda bucket: bucket[0][-1])
    items = [item for members, _ in in_order for item in members]
    stops = accumulate(len(members) for members, _ in in_order)
    parts = [Part(stop - len(members), stop, option) for stop, (members, option) in zip(stops, in_order, strict=True)]
    arranged = replace(
        formulation,
        problem=_rearranged(formulation.problem, items),
        items=tuple(formulation.items[item] for item in items),
    )
    return arranged.plan(parts)


def _compressor(constraints: Constraints, who: str) -> Compressor[Any]:
    if len(constraints.lossy) != 1 or not isinstance(constraints.lossy[0], Compressor):
        given = ", ".join(map(str, constraints.lossy)) or "nothing"
        raise ValueError(f"{who} takes one compressor, which its routes carry; Constraints.lossy is {given}")
    return constraints.lossy[0]


def _two_way(device: str) -> tuple[str, ...]:
    """Returns a `Route`'s tasks: owners get parts, sum and compress them, send the sums to all; coding on `device`."""
    encode, decode = f"{COMPRESS}@{device}", f"{DECOMPRESS}@{device}"
    return encode, "all_to_all", decode, encode, "all_gather", decode


def _offloaded(task: RouteTask) -> RouteTask:
    return replace(task, choice=OFFLOAD) if task.kind.is_local else task


def _ranks_per_node(placement: Placement) -> int:
    """Returns the ranks on each node; 1 where the placement is not hierarchical."""
    return (placement.ranks_per_node or 1) if placement.is_hierarchy else 1


def _payload_nbytes(compressor: Compressor[Any], nbytes: int) -> int:
    """Returns the bytes of the compressor's payload for `nbytes` of float32 values."""
    spec, _ = parted((TensorSpec((nbytes // torch.float32.itemsize,), torch.float32),))
    return compressor.nbytes(spec, LATE)


def _kernel_curve(what: str, compressor: Compressor[Any], job: Job) -> Curve:
    """Returns the seconds of the compressor's kernel `what` (compress or decompress) as a curve over dense bytes."""
    works = [
        Compute(compressor.kernel(what), float(nbytes + _payload_nbytes(compressor, nbytes))) for nbytes in KNOTS_BYTES
    ]
    seconds = list(accumulate((job.network.cost.seconds(work) for work in works), max))
    return Curve((0.0, *map(float, KNOTS_BYTES)), (seconds[0], *seconds))
