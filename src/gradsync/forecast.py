"""A step's timeline as predicted: the plan's order played on one issuing thread and one link.

It mirrors `comm/issue.py`: at a bucket's turn the thread waits for what the bucket awaits, computes up to its next
transfer, hands that over and goes on; transfers follow one another on the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cluster import Link, Placement
from .comm import Group
from .costs import CostModel
from .steps import FINISH, Compute, Step
from .timeline import Task


def forecast(
    order: Sequence[tuple[str, str]],
    steps: Mapping[str, Sequence[Step]],
    ready_s: Mapping[str, float],
    cost: CostModel,
    placement: Placement | None = None,
) -> list[Task]:
    """What runs when: tasks "kernel" and "link", named `bucket:stage` as the engine's.

    `order` are the turns; `steps` of each bucket; `ready_s` says when its gradients are there; `placement`: of all
    ranks, by default each on a node of its own.
    """
    return _Player(steps, ready_s, cost, placement).play(order)


def network_cost(group: Group) -> CostModel | None:
    """What the links of the group's ranks were measured to be, the same on every rank; None where they were not.

    A rank measured what it gets of its node's link in an all-to-all: of n ranks, g on each node, which send (n - 1) / n
    of their bytes each and g (n - g) / n of them over that link.
    """
    if group.alpha_s is None or group.bytes_per_s is None:
        return None
    placement = group.placement
    if not placement.is_hierarchy:
        return CostModel(group.alpha_s, group.bytes_per_s, stage_s=group.stage_s, at_once_bytes=group.at_once_bytes)
    node, across, n = group.within_node(), group.across_nodes(), group.size
    assert node.alpha_s is not None and node.bytes_per_s is not None and across.alpha_s is not None
    node_bytes_per_s = group.bytes_per_s * node.size * (n - node.size) / (n - 1)
    intra = Link(node.bytes_per_s, node.alpha_s)
    return CostModel(
        across.alpha_s, node_bytes_per_s, intra=intra, stage_s=across.stage_s, at_once_bytes=group.at_once_bytes
    )


class _Player:
    def __init__(
        self,
        steps: Mapping[str, Sequence[Step]],
        ready_s: Mapping[str, float],
        cost: CostModel,
        placement: Placement | None,
    ) -> None:
        self._left = {bucket: list(todo) for bucket, todo in steps.items()}
        self._ready_s = ready_s
        self._cost = cost
        self._placement = placement
        self._thread_s = 0.0  # until when the thread is busy
        self._link_s = 0.0
        self._in_flight: dict[str, float] = {}  # bucket -> when its transfer ends
        self._tasks: list[Task] = []

    def play(self, order: Sequence[tuple[str, str]]) -> list[Task]:
        for bucket, stage in order:
            self._turn(bucket, stage)
        for bucket in dict.fromkeys(bucket for bucket, _ in order):
            while self._left[bucket] or bucket in self._in_flight:
                self._turn(bucket, FINISH)
        return self._tasks

    def _turn(self, bucket: str, stage: str) -> None:
        self._thread_s = max(self._thread_s, self._ready_s[bucket], self._in_flight.pop(bucket, 0.0))
        began_s, left = self._thread_s, self._left[bucket]
        while left and isinstance(left[0], Compute):
            self._thread_s += self._cost.seconds(left.pop(0))
        if self._thread_s > began_s:
            self._tasks.append(Task(f"{bucket}:{stage}", "kernel", began_s, self._thread_s))
        if left:
            transfer = left.pop(0)
            began_s = max(self._thread_s, self._link_s)
            self._link_s = began_s + self._cost.seconds(transfer, self._placement)
            self._in_flight[bucket] = self._link_s
            self._tasks.append(Task(f"{bucket}:{stage}", "link", began_s, self._link_s))
