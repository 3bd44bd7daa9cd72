"""Predicts the timeline of a training step: simulates a plan's turns on one issuing thread and one link.

It mirrors `comm/issue.py`: at a bucket's turn the thread waits for what the bucket awaits, computes up to its next
transfer, hands the transfer over and goes on; transfers in flight share the link. Awaited work is computed on a device,
in the order in which it comes: work that a bucket awaits first of all when the bucket is ready, other work at the
bucket's turn. Backward's thread does its work when the next bucket is ready; after backward it is the issuing thread,
which does the work when the bucket's next turn needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from math import inf
from typing import NamedTuple

from .cluster import Placement
from .cost_model import CostModel
from .steps import COMPUTE, FINISH, Compute, Pattern, Step
from .timeline import Task
from .transport import Transport

Lasting = Callable[[str, float, float], float]  # (stream, start, seconds alone) -> seconds


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
    """Returns the predicted tasks of a training step's exchange, each named `bucket:stage` and on one stream.

    The streams are "kernel" (the thread that issues collectives computes between transfers), "link" (transfers) and,
    for computations that a bucket awaits like transfers (`Compute.awaited`), "compute" (backward's thread) and
    "offload" (another core).

    Args:
        order: the plan's turns, (bucket, stage): at each the issuing thread starts that stage, mostly one collective.
        steps: the computations and transfers of each bucket's scheme.
        ready_s: seconds from the begin of backward until each bucket's gradients are ready.
        cost: the model that says how long computations and transfers take.
        placement: the node of each rank; None: each on a node of its own.
        lasting: a function (stream, start, seconds alone) -> seconds, which slows tasks down; None: nothing does.
        backward_s: seconds of backward; None: it ends when the last bucket is ready.
    """
    return _Player(steps, ready_s, cost, placement, lasting, backward_s).play(order)


def greedy_turns(
    stages: Mapping[str, Sequence[str]],
    steps: Mapping[str, Sequence[Step]],
    ready_s: Mapping[str, float],
    cost: CostModel,
    placement: Placement | None = None,
    *,
    finish_last: bool,
    backward_s: float | None = None,
) -> list[tuple[str, str]]:
    """Returns an order of collectives in which the issuing thread never waits while it could begin one of them.

    An entry, a turn, is (bucket, stage): one collective of the bucket, mostly. The next turn is the one that could have
    begun earliest; among several, that of the bucket that was ready earliest.

    Args:
        stages: the names of each bucket's stages, in order.
        steps: the computations and transfers of each bucket's scheme.
        ready_s: seconds from the begin of backward until each bucket's gradients are ready.
        cost: the model that says how long computations and transfers take.
        placement: the node of each rank; None: each on a node of its own.
        finish_last: whether turns that only finish a bucket come behind all others that could begin.
        backward_s: seconds of backward; None: it ends when the last bucket is ready.
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
        self.thread_s = 0.0  # when the thread becomes free
        self._link = _Link(cost.transport)
        self._sent: dict[str, tuple[str, float]] = {}  # bucket -> stage of its transfer in flight, and when it began
        self._devices_s: dict[str, float] = {}  # when each device becomes free
        self._prepared: dict[str, deque[str]] = {}  # device -> prepared buckets whose work it has not begun
        self._in_flight: dict[str, float] = {}  # bucket -> when its work ends
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
            while self._left[bucket] or any(
                bucket in waited_for for waited_for in (self._sent, self._in_flight, self._for_thread)
            ):
                self.turn(bucket, FINISH)
        return self._tasks

    def could_begin_s(self, bucket: str) -> float:
        """Returns when the issuing thread, if free, could begin the bucket's next turn (work up to a transfer)."""
        ready_s = self._ready_s[bucket]
        for device, waiting in self._prepared.items():
            self._begin_prepared(device, self.thread_s)
            if bucket in waiting:  # the earliest time: other work may come before
                work = self._left[bucket][0]
                assert isinstance(work, Compute)
                return max(ready_s, self._devices_s.get(device, 0.0)) + self._cost.seconds(work)
        if bucket in self._for_thread:
            ready_s = max(ready_s, self._backward_s)
        if bucket in self._sent:
            ready_s = max(ready_s, self._link.end_s(bucket))
        return max(ready_s, self._in_flight.get(bucket, 0.0))

    def turn(self, bucket: str, stage: str) -> None:
        for device in self._prepared:
            if bucket in self._prepared[device]:
                self._begin_prepared(device, self._ready_s[bucket])
        self.thread_s = max(self.thread_s, self._ready_s[bucket], self._in_flight.pop(bucket, 0.0))
        if bucket in self._sent:
            ended_s, (sent, began_s) = self._link.end_s(bucket), self._sent.pop(bucket)
            self._tasks.append(Task(f"{bucket}:{sent}", "link", began_s, ended_s))
            self.thread_s = max(self.thread_s, ended_s)
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
            seconds = self._cost.seconds(following, self._placement)
            busy_s = seconds - self._cost.latency_s(following, self._placement)
            lasts_s = self._lasting("link", self.thread_s, seconds)
            self._link.add(bucket, self.thread_s, lasts_s, busy_s / lasts_s if lasts_s else 0.0, following.pattern)
            self._sent[bucket] = stage, self.thread_s
        elif following.device != COMPUTE:
            self._in_flight[bucket] = self._work(bucket, stage, following, self.thread_s)
        elif comes_by_s := [s for s in self._ready_s.values() if s >= self.thread_s]:
            self._in_flight[bucket] = self._work(bucket, stage, following, min(comes_by_s))
        else:
            self._for_thread[bucket] = stage, following

    def _work(self, bucket: str, stage: str, work: Compute, from_s: float) -> float:
        """Simulates `work`, which the bucket awaits, on its device, which gets it at `from_s`; returns when it ends."""
        self._begin_prepared(work.device, from_s)
        began_s = max(from_s, self._devices_s.get(work.device, 0.0))
        ended_s = began_s + self._lasting(work.device, began_s, self._cost.seconds(work))
        self._devices_s[work.device] = ended_s
        self._tasks.append(Task(f"{bucket}:{stage}", work.device, began_s, ended_s))
        return ended_s

    def _begin_prepared(self, device: str, until_s: float) -> None:
        """Simulates the work on `device` with which a bucket's steps begin, for buckets that are ready by `until_s`."""
        waiting = self._prepared.get(device)
        while waiting and self._ready_s[waiting[0]] <= until_s:
            bucket = waiting.popleft()
            work = self._left[bucket].popleft()
            assert isinstance(work, Compute)
            stage = f"{work.kernel.partition('_')[0]}@{device}"
            self._in_flight[bucket] = self._work(bucket, stage, work, self._ready_s[bucket])


class _Flow(NamedTuple):
    """A transfer on the link: the seconds that it would still take alone, and the share of the link that it wants."""

    bucket: str
    left_s: float
    share: float


class _Link:
    """A simulation of the busiest node's link: transfers share its rate equally, and leave it free in their latencies.

    Each queue of the transport carries a fixed number of transfers at a time, in the order in which they are issued.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._now_s = 0.0
        self._queues: tuple[deque[_Flow], ...] = tuple(deque() for _ in transport.queues)
        self._ended_s: dict[str, float] = {}
        self._expected_s: dict[str, float] = {}  # the ends of all transfers, if no other one is issued

    def add(self, bucket: str, now_s: float, lasts_s: float, share: float, pattern: Pattern) -> None:
        """Adds a transfer that would last `lasts_s` alone, issued at `now_s` after all others."""
        self._run(self._queues, self._now_s, now_s, self._ended_s)
        self._now_s = now_s
        self._queues[self._transport.queue_of(pattern)].append(_Flow(bucket, lasts_s, share))
        self._expected_s.clear()

    def end_s(self, bucket: str) -> float:
        """Returns when the bucket's last transfer ends if no other transfer is issued before."""
        if not self._expected_s:
            self._expected_s = dict(self._ended_s)
            self._run(tuple(map(deque, self._queues)), self._now_s, inf, self._expected_s)
        return self._expected_s[bucket]

    def _run(self, queues: tuple[deque[_Flow], ...], now_s: float, until_s: float, ended_s: dict[str, float]) -> None:
        """Simulates the queues from `now_s` to `until_s`; removes transfers that end, and notes when in `ended_s`."""
        while True:
            heads = [list(islice(queue, most)) for queue, most in zip(queues, self._transport.queues, strict=True)]
            rates = self._rates([flow.share for flows in heads for flow in flows])
            times_s = [flow.left_s / rate for flow, rate in zip(chain(*heads), rates, strict=True)]
            if not times_s or now_s >= until_s:
                return
            soonest_s = min(times_s)
            passed_s = min(soonest_s, until_s - now_s)
            now_s += passed_s
            each = iter(zip(times_s, rates, strict=True))
            for queue, flows in zip(queues, heads, strict=True):
                going_on = []
                for flow, (lasts_s, rate) in zip(flows, each, strict=False):
                    queue.popleft()
                    if lasts_s <= passed_s:
                        ended_s[flow.bucket] = now_s
                    else:
                        going_on.append(flow._replace(left_s=flow.left_s - passed_s * rate))
                queue.extendleft(reversed(going_on))

    @staticmethod
    def _rates(shares: Sequence[float]) -> list[float]:
        """Returns the speed of each transfer, 1 if it gets the share of the link that it wants, else less."""
        rates, free = [1.0] * len(shares), 1.0
        rising = sorted(range(len(shares)), key=lambda place: shares[place])
        for number, place in enumerate(rising):
            got = min(shares[place], free / (len(rising) - number))
            free -= got
            if got < shares[place]:
                rates[place] = got / shares[place]
        return rates
