"""A step's timeline as predicted: the plan's order played on one issuing thread and one link.

It mirrors `comm/issue.py`: at a bucket's turn the thread waits for what the bucket awaits, computes up to its next
transfer, hands that over and goes on; transfers follow one another on the link. So does awaited work on its device, in
the order in which it comes: what a bucket awaits first of all when the bucket is ready, other work at the bucket's
turn. Backward's thread does such work when the next bucket is ready; after backward it is the issuing thread, which
does it when the bucket's next turn needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from .cluster import Link, Placement
from .comm import Group
from .costs import CostModel
from .steps import COMPUTE, FINISH, Compute, Step
from .timeline import Task

Lasting = Callable[[str, float, float], float]  # stream, when it begins, seconds it would take alone


def forecast(
    order: Sequence[tuple[str, str]],
    steps: Mapping[str, Sequence[Step]],
    ready_s: Mapping[str, float],
    cost: CostModel,
    placement: Placement | None = None,
    lasting: Lasting | None = None,
    *,
    backward_s: float | None = None,
) -> list[Task]:
    """What runs when: tasks "kernel", "link" and those of devices, named `bucket:stage` as the engine's.

    `order` are the turns; `steps` of each bucket; `ready_s` says when its gradients are there; `placement`: of all
    ranks, by default each on a node of its own; `lasting`: how long what costs so many seconds lasts on a stream from a
    time on, by default as long; `backward_s`: when backward ends, by default with the last bucket.
    """
    return _Player(steps, ready_s, cost, placement, lasting, backward_s).play(order)


def turns_as_they_come(
    stages: Mapping[str, Sequence[str]],
    steps: Mapping[str, Sequence[Step]],
    ready_s: Mapping[str, float],
    cost: CostModel,
    placement: Placement | None = None,
    *,
    finish_last: bool,
    backward_s: float | None = None,
) -> list[tuple[str, str]]:
    """An order of turns in which the issuing thread never waits while a bucket's turn could begin.

    `stages` of each bucket. Of the turns that could begin those that only finish a bucket are last, if so asked for;
    first is that which could have begun earliest, then that of the bucket that was ready earliest.
    """
    player = _Player(steps, ready_s, cost, placement, backward_s=backward_s)
    left, order = {bucket: list(names) for bucket, names in stages.items()}, []
    while waiting := [bucket for bucket, names in left.items() if names]:
        from_s = {bucket: player.could_begin_s(bucket) for bucket in waiting}
        free_s = max(player.thread_s, min(from_s.values()))

        def rank(bucket: str, from_s: Mapping[str, float] = from_s) -> tuple[bool, float, float, str]:
            return finish_last and left[bucket][0] == FINISH, from_s[bucket], ready_s[bucket], bucket

        chosen = min((bucket for bucket in waiting if from_s[bucket] <= free_s), key=rank)
        order.append((chosen, left[chosen].pop(0)))
        player.turn(*order[-1])
    return order


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
        lasting: Lasting | None = None,
        backward_s: float | None = None,
    ) -> None:
        self._left = {bucket: deque(todo) for bucket, todo in steps.items()}
        self._ready_s = ready_s
        self._cost = cost
        self._placement = placement
        self._lasting = lasting or (lambda stream, began_s, seconds: seconds)
        self._backward_s = max(ready_s.values(), default=0.0) if backward_s is None else backward_s
        self.thread_s = 0.0  # until when the thread is busy
        self._link_s = 0.0
        self._devices_s: dict[str, float] = {}  # until when each is busy
        self._prepared: dict[str, deque[str]] = {}  # device -> buckets that begin with its work, which it has not begun
        self._in_flight: dict[str, float] = {}  # bucket -> when its transfer or work ends
        self._for_thread: dict[str, tuple[str, Compute]] = {}  # bucket -> stage and work that its next turn does
        self._tasks: list[Task] = []
        for bucket in sorted(self._left, key=lambda b: ready_s[b]):
            first = next(iter(self._left[bucket]), None)
            if isinstance(first, Compute) and first.awaited:
                self._prepared.setdefault(first.device, deque()).append(bucket)

    def play(self, order: Sequence[tuple[str, str]]) -> list[Task]:
        for bucket, stage in order:
            self.turn(bucket, stage)
        for bucket in dict.fromkeys(bucket for bucket, _ in order):
            while self._left[bucket] or bucket in self._in_flight or bucket in self._for_thread:
                self.turn(bucket, FINISH)
        return self._tasks

    def could_begin_s(self, bucket: str) -> float:
        """From when on its next turn could, if the thread were free."""
        ready_s = self._ready_s[bucket]
        for device, waiting in self._prepared.items():
            self._begin_prepared(device, self.thread_s)
            if bucket in waiting:  # at the earliest: what is before it is not known yet
                work = self._left[bucket][0]
                assert isinstance(work, Compute)
                return max(ready_s, self._devices_s.get(device, 0.0)) + self._cost.seconds(work)
        if bucket in self._for_thread:
            ready_s = max(ready_s, self._backward_s)
        return max(ready_s, self._in_flight.get(bucket, 0.0))

    def turn(self, bucket: str, stage: str) -> None:
        for device in self._prepared:
            if bucket in self._prepared[device]:
                self._begin_prepared(device, self._ready_s[bucket])
        self.thread_s = max(self.thread_s, self._ready_s[bucket], self._in_flight.pop(bucket, 0.0))
        if bucket in self._for_thread:
            self.thread_s = self._work(bucket, *self._for_thread.pop(bucket), max(self.thread_s, self._backward_s))
        began_s, left = self.thread_s, self._left[bucket]
        while left and isinstance(left[0], Compute) and not left[0].awaited:
            self.thread_s += self._lasting("kernel", self.thread_s, self._cost.seconds(left.popleft()))
        if self.thread_s > began_s:
            self._tasks.append(Task(f"{bucket}:{stage}", "kernel", began_s, self.thread_s))
        if not left:
            return
        following = left.popleft()
        if not isinstance(following, Compute):
            began_s = max(self.thread_s, self._link_s)
            self._link_s = began_s + self._lasting("link", began_s, self._cost.seconds(following, self._placement))
            self._in_flight[bucket] = self._link_s
            self._tasks.append(Task(f"{bucket}:{stage}", "link", began_s, self._link_s))
        elif following.device != COMPUTE:
            self._in_flight[bucket] = self._work(bucket, stage, following, self.thread_s)
        elif comes_by_s := [s for s in self._ready_s.values() if s >= self.thread_s]:
            self._in_flight[bucket] = self._work(bucket, stage, following, min(comes_by_s))
        else:
            self._for_thread[bucket] = stage, following

    def _work(self, bucket: str, stage: str, work: Compute, from_s: float) -> float:
        """Awaited work on its device, which is given it at a time; when it ends."""
        self._begin_prepared(work.device, from_s)
        began_s = max(from_s, self._devices_s.get(work.device, 0.0))
        ended_s = began_s + self._lasting(work.device, began_s, self._cost.seconds(work))
        self._devices_s[work.device] = ended_s
        self._tasks.append(Task(f"{bucket}:{stage}", work.device, began_s, ended_s))
        return ended_s

    def _begin_prepared(self, device: str, until_s: float) -> None:
        """What buckets that are ready by then await first of all."""
        waiting = self._prepared.get(device)
        while waiting and self._ready_s[waiting[0]] <= until_s:
            bucket = waiting.popleft()
            work = self._left[bucket].popleft()
            assert isinstance(work, Compute)
            stage = f"{work.kernel.partition('_')[0]}@{device}"
            self._in_flight[bucket] = self._work(bucket, stage, work, self._ready_s[bucket])
