"""The order in which a plan's buckets take turns on the engine's one communication thread."""

from __future__ import annotations

from ...costs.forecast import greedy_turns
from ...costs.steps import FINISH, Compute
from ...plans.plan import Plan
from ..pieces import InPieces, Pieces
from .job import Job
from .predict import predict_steps, steps_of


@InPieces
def with_best_turns(plan: Plan, job: Job) -> Pieces[Plan]:
    """Returns the plan with its collectives in the order, of a few that are tried, with the shortest predicted step.

    An entry of the order is (bucket id, stage): one collective of one bucket. Ties go to the plan's own order. The
    search orders them by the begin of their transfers; but one thread issues them all, so a collective that waits for
    its transfer keeps other buckets waiting, too.
    """
    schemes = {bucket.id: bucket.scheme for bucket in plan.buckets}
    steps = {bucket.id: steps_of(bucket, schemes[bucket.id], job) for bucket in plan.buckets}
    ready_s = {bucket.id: max(job.ready_s[name] for name in bucket.names) for bucket in plan.buckets}
    stages = {
        bucket: (
            *schemes[bucket].stages(plan.world),
            *([FINISH] if todo and isinstance(todo[-1], Compute) and not todo[-1].awaited else []),
        )
        for bucket, todo in steps.items()
    }
    network, backward_s = job.network, job.backward_s
    plans = [plan]
    for last in (True, False):
        yield
        order = greedy_turns(
            stages, steps, ready_s, network.cost, network.placement, finish_last=last, backward_s=backward_s
        )
        plans.append(plan.model_copy(update={"order": tuple(order)}))
    steps_s = []
    for each in plans:
        yield
        steps_s.append(predict_steps(each, job, steps).seconds)
    return plans[steps_s.index(min(steps_s))]
