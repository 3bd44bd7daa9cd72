"""Routes among the schemes for a job: few, and only measured ones; the search takes them where they pay."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from gradsync.comm import LocalGroup, run_local
from gradsync.compressors import QSGD, BlockInt, Cast, Compressor, ErrorFeedback, SharedBlockInt, TopK, dgc
from gradsync.costs.cluster import Link, Placement
from gradsync.costs.cost_model import CostModel, KernelCost
from gradsync.costs.steps import Compute
from gradsync.engine.engine import Engine
from gradsync.planner.default.network import Network
from gradsync.planner.pieces import at_once
from gradsync.planner.search import ways as ways_module
from gradsync.planner.search.candidates import searched
from gradsync.planner.search.errors import relative_errors
from gradsync.planner.search.job import Job
from gradsync.planner.search.options import KNOTS_BYTES, Way, formulate
from gradsync.planner.search.predict import predict
from gradsync.planner.search.routes import MOST_ROUTES
from gradsync.planner.search.ways import Constraints, exact_ways, ways_of
from gradsync.planner.solver.problem import Part, Resource
from gradsync.plans.plan import Plan
from gradsync.schemes import (
    CompressedAllGather,
    CompressedTwoWay,
    LeafConstraints,
    Route,
    Scheme,
    compressions,
    is_flat,
    ways,
)
from gradsync.tensors.bucket import TensorSpec
from gradsync.tensors.density import ParameterProfile
from gradsync.tuning.kernels import flat_schemes, measured_kernels

FEEDBACK = ErrorFeedback(BlockInt(8))
NODES = Placement.regular(2, 2)
SLOW_BETWEEN = CostModel(1e-4, 10e6, intra=Link(5e9, 1e-6))
QUICK = CostModel(1e-6, 1e15, intra=Link(1e15, 1e-6))
WORK_S = 0.05
ACROSS_COMPRESSED = ("reduce_scatter", "compress@{}", "all_gather")


def job(cost: CostModel, placement: Placement = NODES, count: int = 6, numel: int = 1 << 18) -> Job:
    profiles = tuple(
        ParameterProfile(f"p{n}", TensorSpec((numel // 64, 64), torch.float32), sparse=False, position=n)
        for n in range(count)
    )
    ready_s = {p.name: 0.001 * (p.position + 1) for p in profiles}
    return Job(profiles, ready_s, 0.001 * count, Network(cost, placement))


def routes_of(here: Job, compressor: Compressor[Any], **constraints: Any) -> list[Route]:
    found = ways_of(here, Constraints(lossy=(compressor,), **constraints))
    return [way.scheme for way in found if isinstance(way.scheme, Route)]


@pytest.mark.parametrize("compressor", [FEEDBACK, ErrorFeedback(TopK(0.01)), Cast("bfloat16"), QSGD(7)], ids=str)
def test_a_job_over_nodes_has_few_routes_which_compress_once_beside_all_schemes(compressor: Compressor[Any]) -> None:
    here = job(SLOW_BETWEEN)
    found = routes_of(here, compressor)
    assert 0 < len(found) <= MOST_ROUTES and any(not is_flat(route.leaf) for route in found)
    assert {compressions(route.leaf) for route in found} == {1} and {route.compressor for route in found} == {
        compressor
    }
    schemes = [way.scheme for way in ways_of(here, Constraints(lossy=(compressor,)))]
    sparse = isinstance(compressor, ErrorFeedback) and isinstance(compressor.compressor, TopK)
    assert {w.name for w in ways(compressor) if not (sparse and isinstance(w, CompressedTwoWay))} <= {
        s.name for s in schemes
    }


@pytest.mark.parametrize("placement", [NODES, Placement.one_per_node(4)], ids=("nodes", "flat"))
def test_no_route_takes_as_long_as_another_way_on_every_resource_at_every_size(placement: Placement) -> None:
    here = job(replace(SLOW_BETWEEN, memory_bytes_per_s=2e9), placement)
    stated = formulate(here, ways_of(here, Constraints(lossy=(FEEDBACK,))))
    demands = [
        [
            sum(demand.curve(nbytes) for demand in option.chain if demand.resource is resource)
            for nbytes in KNOTS_BYTES
            for resource in Resource
        ]
        for option in stated.problem.options
    ]
    seen = 0
    for number, scheme in enumerate(stated.schemes):
        if isinstance(scheme, Route):
            seen += 1
            for other, mine in enumerate(demands):
                if other != number:
                    assert any(a < b for a, b in zip(demands[number], mine, strict=True)), scheme.title
    assert seen


def test_a_slow_link_between_nodes_is_crossed_compressed_after_a_sum_inside_them() -> None:
    here = job(SLOW_BETWEEN)
    plan = searched(here, Constraints(lossy=(FEEDBACK,))).plan
    schemes = [bucket.scheme for bucket in plan.buckets]
    assert all(isinstance(scheme, Route) for scheme in schemes)
    for scheme in schemes:
        assert scheme.tasks[:3] in {tuple(w.format(d) for w in ACROSS_COMPRESSED) for d in ("compute", "offload")}
    flat_only = searched(here, Constraints(lossy=(FEEDBACK,), leaves=LeafConstraints(flat_only=True))).plan
    assert predict(plan, here).seconds < 0.8 * predict(flat_only, here).seconds


@pytest.mark.parametrize("placement", [NODES, Placement.one_per_node(4)], ids=("nodes", "flat"))
def test_links_that_cost_nothing_are_crossed_exactly(placement: Placement) -> None:
    plan = searched(job(QUICK, placement), Constraints(lossy=(FEEDBACK,))).plan
    assert all(bucket.scheme.traits.exact for bucket in plan.buckets)


def synchronised(group: LocalGroup, plan: Plan, here: Job) -> list[torch.Tensor]:
    """Returns the second step's gradients of an engine that takes the plan's turns."""
    parameters = {p.name: torch.nn.Parameter(torch.zeros(p.tensor.shape)) for p in here.profiles}
    ours = Engine(parameters, group, plan, timeout_s=20)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(2):
        ours.begin()
        for name, parameter in parameters.items():
            ours.load(name, torch.randn(parameter.shape, generator=generator))
        ours.finish()
    results = [ours.unload(name, None, sparse=False).clone() for name in parameters]
    assert all(bucket.sent_bytes == bucket.predicted_bytes > 0 for bucket in ours.running_plan.statistics())
    ours.close()
    return results


@pytest.mark.parametrize("without", [(), ("compute",), ("offload",)], ids=str)
def test_the_plan_that_is_picked_runs_and_sends_the_bytes_that_are_predicted(without: tuple[str, ...]) -> None:
    here = job(SLOW_BETWEEN, count=5, numel=1 << 14)
    plan = searched(here, Constraints((FEEDBACK,), always=True, leaves=LeafConstraints(1, without))).plan
    assert any(isinstance(bucket.scheme, Route) for bucket in plan.buckets)
    first, *others = run_local(4, lambda group: synchronised(group, plan, here), placement=NODES)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_turns_of_a_route_are_where_its_transfers_begin_and_end() -> None:
    """The next bucket is pushed while the previous one crosses between nodes."""
    plan = searched(job(SLOW_BETWEEN), Constraints(lossy=(FEEDBACK,), always=True)).plan
    place = {turn: number for number, turn in enumerate(plan.order)}
    pushed, last = {}, {}
    for bucket in plan.buckets:
        stages = bucket.scheme.stages(4)
        pushed[bucket.id], last[bucket.id] = place[bucket.id, stages[0]], place[bucket.id, stages[-1]]
    first, second = list(pushed)[:2]
    assert pushed[second] < last[first]


def test_users_rule_leaves_out_by_name() -> None:
    here = job(SLOW_BETWEEN)
    flat = ways_of(here, Constraints(lossy=(FEEDBACK,), leaves=LeafConstraints(flat_only=True)))
    assert all(is_flat(way.scheme.leaf) for way in flat if isinstance(way.scheme, Route))
    once = ways_of(here, Constraints(lossy=(FEEDBACK,), leaves=LeafConstraints(most_compressions=1)))
    names = {way.scheme.name for way in once}
    assert CompressedAllGather.name in names and CompressedTwoWay.name not in names, "which compresses twice"
    alone = routes_of(here, FEEDBACK, leaves=LeafConstraints(without=("compute",)))
    assert alone and not any("@compute" in word for route in alone for word in route.tasks)


def test_leaves_that_leave_nothing_or_name_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="leave block_int with feedback no way, under most_compressions=0: loosen"):
        ways_of(job(SLOW_BETWEEN), Constraints(lossy=(FEEDBACK,), leaves=LeafConstraints(most_compressions=0)))
    with pytest.raises(ValueError, match="without names 'telepathy'; expected some of compute, offload, all_reduce"):
        Constraints(leaves=LeafConstraints(without=("telepathy",)))
    with pytest.raises(ValueError, match="leaves must be an instance of LeafConstraints or None, got 1"):
        Constraints(leaves=1)


def test_sums_of_sparsifiers_are_not_compressed_even_where_two_compressions_may_be() -> None:
    twice = LeafConstraints(most_compressions=2)
    found = routes_of(job(SLOW_BETWEEN), ErrorFeedback(TopK(0.01)), leaves=twice)
    assert found and {compressions(route.leaf) for route in found} == {1}


@pytest.mark.parametrize("compressor", [SharedBlockInt(4), dgc(0.01, ranks=2)], ids=lambda c: c.title)
def test_compressors_made_for_so_many_ranks_take_only_routes_of_as_many(compressor: Compressor[Any]) -> None:
    for route in routes_of(job(SLOW_BETWEEN), compressor):
        route.check_ranks(NODES)


def kernels(*schemes: Scheme[Any]) -> dict[str, KernelCost]:
    """Returns costs of the kernels of these schemes, on nodes of one rank."""
    spec = TensorSpec((1 << 12,), torch.float32)
    steps = [step for s in schemes for step in s.steps((spec,), (), Placement.one_per_node(4))]
    return {step.kernel: KernelCost(1e-5, 1e-10) for step in steps if isinstance(step, Compute)}


def test_what_nobody_measured_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    ways_module._say_unmeasured.cache_clear()
    known = kernels(CompressedTwoWay(FEEDBACK))
    here = job(replace(SLOW_BETWEEN, kernels=known))
    with caplog.at_level(logging.WARNING):
        found = [way.scheme for way in ways_of(here, Constraints(lossy=(FEEDBACK, ErrorFeedback(BlockInt(4)))))]
    lossy = [scheme for scheme in found if not scheme.traits.exact]
    assert lossy and all(scheme.compressor == FEEDBACK for scheme in lossy)
    assert not any(
        task in scheme.tasks for scheme in lossy if isinstance(scheme, Route) for task in ("reduce_scatter",)
    )
    assert "as the time of compress_ErrorFeedback(compressor=BlockInt(bits=4" in caplog.text
    everything = {**known, "sum_ranges": KernelCost(1e-5, 1e-10), "join_ranges": KernelCost(1e-5, 1e-10)}
    assert any("reduce_scatter" in r.tasks for r in routes_of(job(replace(SLOW_BETWEEN, kernels=everything)), FEEDBACK))


@pytest.mark.parametrize("compressor", [FEEDBACK, Cast("bfloat16"), ErrorFeedback(TopK(0.1))], ids=lambda c: c.title)
def test_a_rehearsal_measures_all_kernels_of_a_compressor_s_routes(
    compressor: Compressor[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsync.tuning.kernels.planned_schemes", lambda placement: ())
    monkeypatch.setattr("gradsync.tuning.kernels.NUMELS", (256, 1024, 4096))
    measured = at_once(measured_kernels((compressor,), NODES, list))
    cost = replace(SLOW_BETWEEN, kernels={name: KernelCost(1e-5, 1e-10) for name in measured})
    assert routes_of(job(cost), compressor) == routes_of(
        job(replace(cost, kernels={**cost.kernels, "any": KernelCost(1.0, 1.0)})), compressor
    )
    spec = TensorSpec((4096,), torch.float32)
    for route in routes_of(job(SLOW_BETWEEN), compressor):
        assert not cost.unmeasured(route.steps((spec,), (), NODES))


def test_settings_of_a_compressor_are_kernels_of_their_own() -> None:
    assert TopK(0.01).kernel("compress") != TopK(0.1).kernel("compress")
    assert not kernels(CompressedAllGather(TopK(0.01))).keys() & kernels(CompressedAllGather(TopK(0.1))).keys()


def test_a_route_that_is_asked_for_is_known_by_its_compressor_wherever_it_goes() -> None:
    route = Route(("reduce_scatter", "compress@compute", "all_gather", "decompress@compute", "all_gather"), FEEDBACK, 2)
    gradient = torch.randn(64)
    assert relative_errors([route], "w", gradient) == relative_errors([FEEDBACK], "w", gradient) != {}
    assert flat_schemes([route]) == list(ways(FEEDBACK))
    assert [way.scheme for way in ways_of(job(SLOW_BETWEEN), Constraints(lossy=(route,)))][-1] == route


def test_work_on_the_thread_of_backward_delays_what_is_ready_after_it() -> None:
    words, count = ("compress@{}", "all_gather", "decompress@{}"), 7
    slow = {FEEDBACK.kernel("compress"): KernelCost(WORK_S, 0.0), FEEDBACK.kernel("decompress"): KernelCost(0.0, 1e-15)}
    here = job(replace(QUICK, kernels=slow), Placement.one_per_node(4), count=count)
    expected = {}
    for device in ("compute", "offload"):
        route = Route(tuple(word.format(device) for word in words), FEEDBACK)
        stated = formulate(here, [*exact_ways(here), Way(route)])
        parts = [Part(item, item + 1, len(stated.schemes) - 1) for item in range(count)]
        expected[device] = predict(stated.plan(parts), here)
    assert expected["offload"].backward_s == pytest.approx(here.backward_s)
    assert expected["compute"].backward_s == pytest.approx(here.backward_s + (count - 1) * WORK_S), "the last ends it"
    began_s = [t.start_s for t in expected["compute"].tasks if t.name.endswith(":compress@compute")]
    ready_s = sorted(here.ready_s.values())
    assert began_s == pytest.approx([at_s + number * WORK_S for number, at_s in enumerate(ready_s)])
