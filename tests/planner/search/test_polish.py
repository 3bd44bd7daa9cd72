"""Polishing a search's plan: changes of schemes and merges that shorten the predicted step."""

from __future__ import annotations

from dataclasses import replace

from gradsync.planner.search.job import Job
from gradsync.planner.search.polish import merged, polished
from gradsync.planner.search.predict import predict
from gradsync.planner.search.ways import Constraints, ways_of
from gradsync.schemes import CompressedTwoWay
from tests.planner.search.test_options import job
from tests.planner.search.test_reasons import ALLOWED, DENSE, FEEDBACK, SPECS, plan_of


def at_once() -> Job:
    """Returns a job whose gradients are all ready from the start, so that nothing is hidden behind backward."""
    return replace(job(), ready_s=dict.fromkeys(job().ready_s, 0.0), backward_s=0.0)


def test_polishing_takes_what_the_engine_would_be_quicker_by() -> None:
    here, plan = job(), plan_of(["head.weight"], DENSE[1:])
    ways = ways_of(here, ALLOWED)
    better = polished(plan, here, ways)
    better.check(SPECS, 4)
    assert predict(better, here).seconds < predict(plan, here).seconds
    assert not better.buckets[0].scheme.traits.exact and better.buckets[1].scheme.traits.exact
    assert polished(better, here, ways).digest == better.digest, "nothing more is gained"


def test_neighbours_that_only_wait_for_each_other_are_merged() -> None:
    here, plan = at_once(), plan_of(*([name] for name in DENSE))
    ways = ways_of(here)
    better = merged(plan, here, ways)
    better.check(SPECS, 4)
    assert predict(better, here).seconds < predict(plan, here).seconds
    *dense, half, tables = (bucket.names for bucket in better.buckets)
    assert sum(dense, []) == DENSE and len(dense) < len(DENSE)
    assert half == ["half"] and tables == ["users", "items"], "other types and tables stay apart"
    assert merged(better, here, ways).digest == better.digest, "nothing more is gained"


def test_pieces_of_a_gradient_are_joined() -> None:
    here, plan = at_once(), plan_of(DENSE)
    first, *others = plan.buckets
    (name, start, stop), *rest = first.segments
    pieces = ((name, start, 1000),), ((name, 1000, stop), *rest)
    cut = [first.model_copy(update={"id": f"piece {i}", "segments": each}) for i, each in enumerate(pieces)]
    turns = [("piece 0", "all_reduce"), ("piece 1", "all_reduce"), *plan.order[1:]]
    in_pieces = plan.model_copy(update={"buckets": (*cut, *others), "order": tuple(turns)})
    in_pieces.check(SPECS, 4)
    better = merged(in_pieces, here, ways_of(here))
    better.check(SPECS, 4)
    assert better.buckets[0].segments == first.segments


def test_what_may_lose_nothing_is_merged_by_an_exact_way_only() -> None:
    here = at_once()
    plan = plan_of(*([name] for name in DENSE), scheme=CompressedTwoWay(FEEDBACK))
    free, bound = (merged(plan, here, ways_of(here, each)) for each in (Constraints((FEEDBACK,)), ALLOWED))
    assert ["head.weight", "head.bias"] in [bucket.names for bucket in free.buckets]
    assert ["head.bias"] in [bucket.names for bucket in bound.buckets]
    assert all(["body", "first"] in [bucket.names for bucket in each.buckets] for each in (free, bound))


def test_what_backward_hides_stays_as_it_is() -> None:
    here, plan = job(), plan_of(["head.weight"], DENSE[1:])
    hidden = replace(here, ready_s={**here.ready_s, **dict.fromkeys(["users", "items"], 1.0)}, backward_s=1.0)
    assert merged(plan, hidden, ways_of(hidden)).digest == plan.digest
