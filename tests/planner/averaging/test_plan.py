"""Plans of averages issue what a forward waits for before what only the optimiser's next step waits for."""

from __future__ import annotations

import pytest
from torch import nn
from torch.optim import SGD

from gradsync.comm.shuffle import GroupSchedule, exact, together, with_local_steps
from gradsync.compressors import BlockInt
from gradsync.costs.cluster import Placement
from gradsync.costs.steps import FINISH
from gradsync.planner import AveragingPlanner
from gradsync.plans.plan import OF, Plan

SCHEDULES = [with_local_steps(together(4), 3), exact(4, 2)]


def planned(schedule: GroupSchedule, per_node: int, **settings: object) -> Plan:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 512))
    planner = AveragingPlanner(schedule=schedule, momentum_every=2, **settings)
    return planner.plan(model, SGD(model.parameters(), lr=0.1, momentum=0.9), Placement.regular(4, per_node))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["local", "pairs"])
@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"early": True}, {"compressor": BlockInt(8)}], ids=["exact", "early", "int8"])
def test_forwards_do_not_wait_for_momenta(schedule: GroupSchedule, per_node: int, settings: dict[str, object]) -> None:
    plan = planned(schedule, per_node, **settings)
    plan._check_order()
    momenta = {bucket.id for bucket in plan.buckets if OF in bucket.names[0]}
    assert 0 < len(momenta) < len(plan.buckets)
    first = min(place for place, (bucket, _) in enumerate(plan.order) if bucket in momenta)
    assert {bucket for bucket, stage in plan.order[:first] if stage == FINISH} == {
        bucket.id for bucket in plan.buckets if bucket.id not in momenta
    }


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["local", "pairs"])
def test_a_bucket_ends_before_the_next_exchange_between_nodes_is_waited_for(schedule: GroupSchedule) -> None:
    """A turn waits for the bucket's stage before: that of handing out in the node for the exchange between nodes."""
    order = planned(schedule, 2).order
    ends = [place for place, (_, stage) in enumerate(order) if stage == FINISH]
    assert all(order[place - 1] == (order[place][0], "node pull") for place in ends)
    assert len(ends) == sum(stage == "node pull" for _, stage in order)
