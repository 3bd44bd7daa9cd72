"""Jobs as problems: an option demands the costs of its scheme's steps, and parts become a plan that fits the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

import pytest
import torch

from gradsync.compressors import BlockInt, ErrorFeedback, TopK
from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import FINISH, Compute
from gradsync.costs.transport import DIRECT_BYTES, Pattern, RingOrDirect
from gradsync.planner.default.compressing import LATE
from gradsync.planner.default.network import Network
from gradsync.planner.search.errors import name_of
from gradsync.planner.search.job import Job
from gradsync.planner.search.options import KNOTS_BYTES, Way, formulate
from gradsync.planner.search.ways import Constraints, exact_ways, ways_of
from gradsync.planner.solver.machine import play
from gradsync.planner.solver.problem import Part, Resource
from gradsync.schemes import (
    AGSparse,
    AllReduce,
    CoarseGrained,
    CompressedAllGather,
    CompressedTwoWay,
    HalfPrecision,
    Hierarchical,
    PowerSGD,
    ReduceScatter,
    Scheme,
    Sparsified,
)
from gradsync.tensors.bucket import FlatSpec, Segment, TensorSpec
from gradsync.tensors.density import DensityProfile, ParameterProfile

FEEDBACK = ErrorFeedback(BlockInt(8))
LOW_RANK = [Way(PowerSGD(2), among=frozenset({"head.weight", "head.bias"}))]
AT_MEMORY = ("round_values", "widen_values", FEEDBACK.kernel("compress"), FEEDBACK.kernel("decompress"))
KERNELS = {"scale": KernelCost(1e-5, 1e-10), **dict.fromkeys(AT_MEMORY, KernelCost(0.0, 1e-10))}


@dataclass(frozen=True)
class Straight(RingOrDirect):
    """A transport without recursive doubling, on which small all-reduces cost enough that searches merge buckets."""

    def passes_on(self, pattern: Pattern, part_bytes: Sequence[float]) -> bool:
        if pattern is Pattern.ALL_REDUCE:
            return (len(part_bytes) - 1) * part_bytes[0] > DIRECT_BYTES
        return super().passes_on(pattern, part_bytes)

    def doubles(self, pattern: Pattern, part_bytes: Sequence[float]) -> bool:
        return False


COST = CostModel(3e-4, 25e6, kernels=KERNELS, intra=Link(1e9, 1e-5), stage_s=1e-3, transport=Straight())


def dense(name: str, *shape: int, position: int, dtype: torch.dtype = torch.float32) -> ParameterProfile:
    return ParameterProfile(name, TensorSpec(shape, dtype), sparse=False, position=position)


def table(name: str, rows: int, dim: int, position: int, found: float = 10.0) -> ParameterProfile:
    density = DensityProfile(rows, found, {4: 2.0}, "same", found)
    return ParameterProfile(
        name, TensorSpec((rows, dim), torch.float32), sparse=True, density=density, position=position
    )


PARAMETERS = (
    dense("head.weight", 512, 256, position=0),
    dense("head.bias", 512, position=1),
    dense("half", 64, 64, position=2, dtype=torch.bfloat16),
    dense("body", 256, 256, position=3),
    table("users", 1000, 8, position=4),
    table("items", 1000, 8, position=5),
    dense("first", 300, 7, position=6),
)


PARAMETERS_BY_NAME = {p.name: p for p in PARAMETERS}


def job(placement: Placement | None = None) -> Job:
    ready_s = {p.name: 0.001 * (p.position + 1) for p in PARAMETERS}
    return Job(PARAMETERS, ready_s, 0.009, Network(COST, placement or Placement.one_per_node(4)))


def whole(numel: int, *shape: int) -> TensorSpec:
    flat = FlatSpec((Segment("x", 0, numel),), (shape or (numel,),), torch.float32)
    return TensorSpec((numel,), torch.float32, flat)


@pytest.mark.parametrize(
    "scheme",
    [AllReduce(), HalfPrecision(), CompressedTwoWay(FEEDBACK), CompressedAllGather(FEEDBACK), Sparsified(TopK(0.01))],
    ids=lambda scheme: scheme.title,
)
@pytest.mark.parametrize("nodes", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_an_option_demands_what_the_steps_of_its_scheme_cost(scheme: Scheme[Any], nodes: tuple[int, ...]) -> None:
    here = job(Placement(nodes))
    problem = formulate(here, [Way(AllReduce()), *exact_ways(here), Way(scheme, among=frozenset({"body"}))]).problem
    chain = problem.options[-1].chain
    for nbytes in KNOTS_BYTES[:-4]:
        steps = scheme.steps((whole(nbytes // 4),), (), here.network.placement, LATE)
        expected = {kind: 0.0 for kind in (True, False)}
        for step in steps:
            expected[isinstance(step, Compute)] += COST.seconds(step, here.network.placement)
        computing = sum(d.curve(nbytes) for d in chain if d.resource is Resource.OFFLOAD)
        moving = sum(d.curve(nbytes) for d in chain if d.resource is not Resource.OFFLOAD)
        assert computing == pytest.approx(expected[True])
        assert moving >= expected[False] * (1 - 1e-9), "seconds do not fall with the size"
    largest = KNOTS_BYTES[-4]
    steps = scheme.steps((whole(largest // 4),), (), here.network.placement, LATE)
    total = sum(demand.curve(largest) for demand in chain)
    assert total == pytest.approx(COST.total_s(steps, here.network.placement))


def test_low_ranks_cost_what_the_shapes_in_the_bucket_ask_for() -> None:
    here, scheme = job(), PowerSGD(2)
    problem = formulate(here, [*exact_ways(here), Way(scheme, among=frozenset({"head.weight", "head.bias"}))]).problem
    option = len(problem.options) - 1
    together = FlatSpec(
        (Segment("head.weight", 0, 512 * 256), Segment("head.bias", 0, 512)), ((512, 256), (512,)), torch.float32
    )
    spec = TensorSpec((together.numel,), torch.float32, together)
    steps = scheme.steps((spec,), (), here.network.placement, LATE)
    chosen = [d for d in problem.options[option].chain if d.resource is Resource.INTER]
    seconds = [
        s for d, s in zip(problem.options[option].chain, problem.seconds(option, 0, 2), strict=True) if d in chosen
    ]
    moving = [COST.seconds(step, here.network.placement) for step in steps if not isinstance(step, Compute)]
    assert sum(seconds) == pytest.approx(sum(moving), rel=0.02)
    assert sum(problem.seconds(option, 1, 2)) < sum(problem.seconds(option, 0, 1))


def test_items_come_as_they_are_ready_and_tables_of_a_run_are_one() -> None:
    here = job()
    stated = formulate(here, exact_ways(here))
    names = [tuple(name for name, _, _ in item) for item in stated.items]
    assert names == [("head.weight",), ("head.bias",), ("half",), ("body",), ("users", "items"), ("first",)]
    assert stated.problem.gaps_s == pytest.approx((0.001, 0.001, 0.001, 0.001, 0.002, 0.001))
    assert stated.problem.rest_s == pytest.approx(0.002)
    assert stated.problem.allowed is not None
    of_tables = stated.problem.allowed[4]
    assert all(stated.schemes[option].traits.layout == "rows" for option in of_tables)
    assert {AGSparse().name} <= {stated.schemes[option].name for option in of_tables}
    assert not stated.problem.allowed[2] & stated.problem.allowed[3], "different types share no bucket"


def test_parts_become_a_plan_that_fits_the_model() -> None:
    here = job()
    stated = formulate(here, ways_of(here, Constraints(lossy=(FEEDBACK,), exact=("head.bias",))))
    problem = stated.problem
    assert problem.allowed is not None
    lossy = [n for n, scheme in enumerate(stated.schemes) if not scheme.traits.exact]
    parts = [Part(0, 1, lossy[0])]
    parts += [Part(item, item + 1, min(problem.allowed[item])) for item in range(1, problem.size)]
    plan = stated.plan(parts)
    plan.check({p.name: p.tensor for p in PARAMETERS}, 4)
    assert [bucket.names for bucket in plan.buckets][4] == ["users", "items"]
    assert not plan.buckets[0].scheme.traits.exact and plan.buckets[1].scheme.traits.exact
    assert problem.allowed[1].isdisjoint(lossy), "an exact one loses nothing"


def test_always_leaves_no_exact_way_to_gradients_that_were_found_mostly_zero() -> None:
    numel = PARAMETERS[0].tensor.numel
    zeros = replace(PARAMETERS[0], elements=DensityProfile(numel, 0.01 * numel, {2: 1.4, 4: 2.0}, "", 0.01 * numel))
    here = Job((zeros, *PARAMETERS[1:]), job().ready_s, 0.009, job().network)

    def exact_ones(ways: Sequence[Way]) -> list[str]:
        taken = [way for way in ways if zeros.name in (way.members or way.among or PARAMETERS_BY_NAME)]
        return [way.scheme.title for way in taken if not way.scheme.traits.lossy]

    assert "balanced_elements" in {way.scheme.name for way in ways_of(here) if way.members == (zeros.name,)}
    assert exact_ones(ways_of(here)) and not exact_ones(ways_of(here, Constraints(lossy=(FEEDBACK,), always=True)))


def test_turns_come_in_the_order_in_which_transfers_can_begin() -> None:
    here = job()
    stated = formulate(here, [*exact_ways(here), Way(CompressedTwoWay(FEEDBACK))])
    two_way = [n for n, scheme in enumerate(stated.schemes) if isinstance(scheme, CompressedTwoWay)]
    problem = stated.problem
    assert problem.allowed is not None
    parts = [
        Part(item, item + 1, max(set(two_way) & allowed, default=min(allowed)))
        for item, allowed in enumerate(problem.allowed)
    ]
    order = [turn for turn in stated.plan(parts).order if turn[1] != FINISH]
    begins = {
        number: [t.start_s for t in play(problem, parts) if t.stream == "inter" and t.name.startswith(f"{number}:")]
        for number in range(len(parts))
    }
    taken = {str(number): iter(at_s) for number, at_s in begins.items()}
    at_s = [next(taken[bucket]) for bucket, _ in order]
    assert at_s == sorted(at_s) and len(at_s) == sum(map(len, begins.values()))
    plan = stated.plan(parts)
    plan.check({p.name: p.tensor for p in PARAMETERS}, 4)
    last = {bucket: place for place, (bucket, _) in enumerate(plan.order)}
    assert all(plan.order[last[str(n)]][1] == FINISH for n, part in enumerate(parts) if part.option in two_way)


def test_ranks_on_nodes_may_sum_inside_them_first() -> None:
    here = job(Placement.regular(2, 2))
    stated = formulate(here, exact_ways(here))
    inside_first = Hierarchical(ReduceScatter(), AllReduce(), 2)
    option = stated.schemes.index(inside_first)
    resources = [demand.resource for demand in stated.problem.options[option].chain]
    assert resources.index(Resource.INTRA) < resources.index(Resource.INTER)
    assert Resource.INTRA in resources[resources.index(Resource.INTER) :]


def test_what_no_way_is_left_for_is_named() -> None:
    here = job()
    with pytest.raises(ValueError, match=r"no scheme is left for 'head.weight'.*allow at least all_reduce"):
        formulate(here, [way for way in exact_ways(here) if way.members])
    with pytest.raises(ValueError, match="exact names 'nothing', which no parameter"):
        ways_of(here, Constraints(exact=("nothing",)))
    with pytest.raises(ValueError, match=r"most_error must be in \[0, inf\)"):
        Constraints(most_error=-0.1)
    for bound in (-1, inf, nan):
        with pytest.raises(ValueError, match=r"most_delay must be in \[0, inf\)"):
            Constraints(most_delay=bound)
        with pytest.raises(ValueError, match=r"most_delay_frozen must be in \[0, inf\)"):
            Constraints(most_delay_frozen=bound)
    with pytest.raises(ValueError, match="lossy must be compressors"):
        Constraints(lossy=(AGSparse(),))
    with pytest.raises(ValueError, match="ready_s has no time for 1 parameters, the first is 'first'"):
        Job(PARAMETERS, {p.name: 0.0 for p in PARAMETERS[:-1]}, 0.1, here.network)


def test_errors_exempt_parameters_from_ways_that_lose_too_much() -> None:
    here = job()
    errors = {name: {str(FEEDBACK): error} for name, error in (("body", 0.02), ("first", 0.001), ("half", 0.01))}
    ways = ways_of(here, Constraints(lossy=(FEEDBACK,), most_error=0.01, errors=errors))
    (among,) = {way.among for way in ways if way.among is not None}
    assert among == {"half", "first"}, "the others lose more, or nobody knows how much"


def test_what_error_feedback_sends_later_is_bound_by_its_delay() -> None:
    half = HalfPrecision(values="bfloat16")
    errors = {"body": {str(FEEDBACK): 0.7, str(half): 0.02}, "first": {str(FEEDBACK): 0.72, str(half): 0.002}}
    constraints = Constraints(lossy=(FEEDBACK, half), most_error=0.01, most_delay=1.0, errors=errors)
    among: dict[str, set[str]] = {}
    for way in ways_of(job(), constraints):
        if way.among is not None:
            among.setdefault(name_of(way.scheme), set()).update(way.among)
    assert among == {str(FEEDBACK): {"body"}, str(half): {"first"}}


def test_what_is_frozen_may_be_held_back_longer_and_no_tensor_smaller_than_a_chunk() -> None:
    frozen, moving = (CoarseGrained(ratio=0.1, chunk=1 << 12, freeze=freeze) for freeze in (True, False))
    body = next(p for p in PARAMETERS if p.name == "body")
    small = replace(body, tensor=replace(body.tensor, shape=(63, 65)))
    assert body.tensor.numel >= 1 << 12 > small.tensor.numel
    errors = {"body": dict.fromkeys((str(frozen), str(moving)), 0.94)}  # about 7.6 steps' gradients
    constraints = Constraints((frozen, moving), most_delay=1.0, most_delay_frozen=8.0, errors=errors)
    assert constraints.allow(frozen, body) and not constraints.allow(moving, body)
    assert not constraints.allow(frozen, small)
    assert not replace(constraints, most_delay_frozen=7.0).allow(frozen, body)
    assert not replace(constraints, most_delay_frozen=None).allow(frozen, body), "then it is as all others"
    assert not replace(constraints, fewest_elements=body.tensor.numel + 1).allow(frozen, body)
    with pytest.raises(ValueError, match="fewest_elements must be at least 0, got -1"):
        Constraints(fewest_elements=-1)


def test_large_gradients_in_pieces_make_a_plan_of_their_segments() -> None:
    here = job()
    ways = [*exact_ways(here), *LOW_RANK]
    whole = formulate(here, ways)
    cut = whole.in_pieces(1 << 17)
    names = [[name for name, _, _ in segments] for segments in cut.items]
    assert names.count(["head.weight"]) == 4 and names.count(["body"]) == 2, "half a MiB and a quarter of one"
    assert names.count(["users", "items"]) == 1, "tables stay as they are"
    assert sum(cut.problem.nbytes) == sum(whole.problem.nbytes)
    by_shape = {number for number, scheme in enumerate(cut.schemes) if scheme.traits.depends_on_shapes}
    for segments, options in zip(cut.items, cut.problem.allowed or (), strict=True):
        if segments[0][0] in ("head.weight", "body"):
            assert options and not options & by_shape
    plan = cut.plan([Part(item, item + 1, min(options)) for item, options in enumerate(cut.problem.allowed or ())])
    plan.check({p.name: p.tensor for p in PARAMETERS}, 4)
    spans = sorted((start, stop) for b in plan.buckets for name, start, stop in b.segments if name == "head.weight")
    assert spans == [(n << 15, (n + 1) << 15) for n in range(4)]


def test_what_only_takes_ways_that_depend_on_shapes_is_not_cut() -> None:
    others = exact_ways(job(), besides=frozenset({"head.weight"}))
    cut = formulate(job(), [*others, *LOW_RANK]).in_pieces(1 << 10)
    assert (("head.weight", 0, 512 * 256),) in cut.items and (("body", 0, 256),) in cut.items
