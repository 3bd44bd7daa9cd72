"""Reasons of a plan: alternatives compared by the predicted step, and whether plain DDP is as good."""

from __future__ import annotations

from dataclasses import replace

from gradsync.compressors import BlockInt, ErrorFeedback
from gradsync.costs.cluster import Placement
from gradsync.costs.cost_model import CostModel
from gradsync.planner.default.network import Network
from gradsync.planner.search.predict import predict
from gradsync.planner.search.reasons import describe, explain
from gradsync.planner.search.ways import Constraints, exact_ways, ways_of
from gradsync.plans.plan import Plan
from gradsync.schemes import AllReduce, BalancedParallelism, CompressedTwoWay, HalfPrecision
from tests.planner.search.test_options import PARAMETERS, job

FEEDBACK = ErrorFeedback(BlockInt(8))
ALLOWED = Constraints(lossy=(FEEDBACK,), exact=("head.bias",))
SPECS = {p.name: p.tensor for p in PARAMETERS}
DENSE = ["head.weight", "head.bias", "body", "first"]


def plan_of(*flat: list[str], scheme: object = None) -> Plan:
    buckets = [(names, scheme or AllReduce()) for names in flat]
    tables = BalancedParallelism().planned_for([p.density for p in PARAMETERS if p.density])
    return Plan.make(SPECS, 4, [*buckets, (["half"], AllReduce()), (["users", "items"], tables)])


def test_alternatives_are_the_best_others_with_the_step_that_each_would_make() -> None:
    here, plan = job(), plan_of(["head.weight"], DENSE[1:])
    found = explain(plan, here, ways_of(here, ALLOWED))
    assert found.step_s == predict(plan, here).seconds
    weight, rest, half, tables = found.buckets
    assert weight.names == ("head.weight",) and weight.nbytes == 4 * 512 * 256
    steps = [other.step_s for other in weight.alternatives]
    assert steps == sorted(steps) and len(steps) == 3, "two schemes and a route carry these payloads"
    two_way = next(o for o in weight.alternatives if isinstance(o.scheme, CompressedTwoWay))
    changed = plan.buckets[0].model_copy(update={"scheme": two_way.scheme})
    push_pull = [("0", "push"), ("0", "pull"), *plan.order[1:]]
    same = plan.model_copy(update={"buckets": (changed, *plan.buckets[1:]), "order": tuple(push_pull)})
    assert two_way.step_s == predict(same, here).seconds < found.step_s
    assert not rest.alternatives and rest.why_exact == "no lossy scheme is allowed for it", "it has an exact parameter"
    assert half.why_exact is not None and tables.alternatives


def test_a_bucket_is_exact_because_its_exchange_is_hidden_or_because_losing_takes_longer() -> None:
    here = job()
    plan = plan_of(DENSE)
    ways = ways_of(here, Constraints(lossy=(FEEDBACK,)))
    quick = replace(here, network=Network(CostModel(1e-7, 1e12, memory_bytes_per_s=1e8), Placement.one_per_node(4)))
    assert "ms longer" in str(explain(plan, quick, ways_of(quick, Constraints(lossy=(FEEDBACK,)))).buckets[0].why_exact)
    assert "ms shorter" in str(explain(plan, here, ways).buckets[0].why_exact)
    late = replace(here, ready_s={**here.ready_s, "users": 1.0, "items": 1.0}, backward_s=1.0)
    assert "would gain nothing" in str(explain(plan, late, ways).buckets[0].why_exact)


def test_the_verdict_keeps_ddp_where_little_is_gained() -> None:
    here = job()
    dense = replace(here, profiles=tuple(replace(p, sparse=False, density=None) for p in here.profiles))
    ddp = Plan.make(
        SPECS, 4, [([p.name for p in PARAMETERS if p.name != "half"], AllReduce()), (["half"], AllReduce())]
    )
    found = explain(ddp, dense, exact_ways(dense))
    assert "keep it" in found.verdict and found.verdict.startswith("plain DDP (ddp")
    slow = replace(dense, network=Network(CostModel(3e-4, 1e6), Placement.one_per_node(4)))
    halved = [(names, HalfPrecision()) for names in ([p.name for p in PARAMETERS if p.name != "half"],)]
    best = Plan.make(SPECS, 4, [*halved, (["half"], AllReduce())])
    won = explain(best, slow, exact_ways(slow))
    assert "less than with DDP" in won.verdict
    beside = explain(best, replace(slow, beside_s=1e3), exact_ways(slow))
    assert "keep it" in beside.verdict, "of a long step it is little"
    lines = list(describe(won))
    assert lines[-1] == won.verdict and any("half" in line for line in lines)
