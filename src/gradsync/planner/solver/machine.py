"""Simulates a plan on the machine model of `problem`, exactly and by recurrences that approximate it.

`step_s` is the reference: every demand is a task, and demands on COMPUTE interrupt backward. A recurrence takes the
parts one after another and keeps when each resource is free; it is (max,+) linear, so a part is a matrix. Recurrences
queue demands on their resources as the machine does, except demands that *follow*: on COMPUTE behind another resource
(decoding), or on a resource that the part has used before. If none follows, a recurrence is exact; else there are two
levels:

- charged: a follower is charged to its resource at once, before it can begin, and holds the resource in whose
  queue its part stood last until it ends. Never less than `step_s` where options encode, use one channel and decode; an
  estimate with several channels.
- `deferred_s`: followers wait for the last transfer of all, as in MergeComp's model (arXiv 2103.15195).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from ...costs.timeline import Activity, Task, schedule
from .maxplus import Matrix, matrix_of
from .problem import Option, Part, Problem, Resource, check_parts

ROWS = len(Resource) + 1  # length of a recurrence's state: when each resource is free, and the entry END
END = len(Resource)  # when the last part is done; in level DEFERRED, seconds of all followers


class Level(Enum):
    """The ways in which approximate simulations treat decoding, and other tasks for which they have no queue.

    CHARGED takes their resource's time at once, before they can begin; DEFERRED runs them after all transfers.
    """

    CHARGED = "charged"
    DEFERRED = "deferred"


def play(problem: Problem, parts: Sequence[Part]) -> list[Task]:
    """Simulates a plan and returns its timeline: tasks with begin, end and stream, which is a resource in lower case.

    Backward is in pieces, as tasks of the exchange interrupt it. Of tasks that have waited equally long, the one of the
    earlier bucket goes first, then the one that comes earlier in its bucket's chain.

    `parts`: the buckets, each with consecutive items (gradients) and an option (way of exchange).

    Raises:
        ValueError: if the buckets do not cover the items in order, if an item that must be alone shares a bucket, or if
            an item may not be exchanged by its bucket's option.
    """
    check_parts(problem, parts)
    return schedule(_activities(problem, parts))


def step_s(problem: Problem, parts: Sequence[Part]) -> float:
    """Simulates a plan; returns the seconds from backward's begin until it and all tasks of its buckets have ended.

    `parts`: the buckets, each with consecutive items (gradients) and an option (way of exchange).
    """
    return max((task.end_s for task in play(problem, parts)), default=0.0)


def _activities(problem: Problem, parts: Sequence[Part]) -> list[Activity]:
    activities: list[Activity] = []
    backward: tuple[int, ...] = ()
    for number, part in enumerate(parts):
        for item in range(part.start, part.stop):
            activities.append(Activity(f"backward {item}", _stream(Resource.COMPUTE), problem.gaps_s[item], backward))
            backward = (len(activities) - 1,)
        before = backward
        turns = dict.fromkeys(Resource, 0)
        option = problem.options[part.option]
        for demand, seconds in zip(option.chain, problem.seconds(part.option, part.start, part.stop), strict=True):
            turns[demand.resource] += 1
            interrupts = demand.resource is Resource.COMPUTE
            link = demand.resource in (Resource.INTRA, Resource.INTER)
            activities.append(
                Activity(
                    f"{number}: {option.name}",
                    _stream(demand.resource),
                    seconds,
                    before,
                    interrupts,
                    queue="" if interrupts else str(turns[demand.resource]),
                    nbytes=problem.amount(demand, part.start, part.stop) if link else 0.0,
                )
            )
            before = (len(activities) - 1,)
    if problem.rest_s:
        activities.append(Activity("backward", _stream(Resource.COMPUTE), problem.rest_s, backward))
    return activities


def _stream(resource: Resource) -> str:
    return resource.name.lower()


def deferred_s(problem: Problem, parts: Sequence[Part]) -> float:
    """Returns the seconds of a plan's step in MergeComp's model, where all decoding waits for the last transfer.

    `parts`: the buckets, each with consecutive items (gradients) and an option (way of exchange).
    """
    return recurrence_s(problem, parts, Level.DEFERRED)


def recurrence_s(problem: Problem, parts: Sequence[Part], level: Level) -> float:
    """Returns the approximate seconds of a plan's training step, by a recurrence that takes one bucket after another.

    Args:
        problem: the gradients with their times and bytes, and the ways to exchange them.
        parts: the buckets, each with consecutive items (gradients) and an option (way of exchange).
        level: whether decoding takes its resource's time at once (CHARGED) or follows all transfers (DEFERRED).
    """
    check_parts(problem, parts)
    rows = [0.0] * ROWS
    for part in parts:
        rows = advance(
            rows,
            sum(problem.gaps_s[part.start : part.stop]),
            problem.options[part.option],
            problem.seconds(part.option, part.start, part.stop),
            level,
        )
    seconds: float = finish(rows, problem.rest_s, level)
    return seconds


def matrix(problem: Problem, part: Part, level: Level) -> Matrix:
    """Returns the (max,+) matrix that maps the times when resources are free before a bucket to those after it.

    Resources are cores and kinds of links. `maxplus.apply` of the matrix and these times does what `advance` does for
    this bucket, by additions and maxima.

    Args:
        problem: the gradients with their times and bytes, and the ways to exchange them.
        part: the bucket: consecutive items (gradients) and an option (way of exchange).
        level: whether decoding takes its resource's time at once (CHARGED) or follows all transfers (DEFERRED).
    """
    backward_s = sum(problem.gaps_s[part.start : part.stop])
    option, seconds = problem.options[part.option], problem.seconds(part.option, part.start, part.stop)
    return matrix_of(lambda rows: advance(rows, backward_s, option, seconds, level), ROWS)


def follows(option: Option) -> tuple[bool, ...]:
    """Returns, for each task of a way to exchange a bucket, whether approximate simulations have no queue for it.

    These are tasks on backward's core (`COMPUTE`) behind a task elsewhere, mostly decoding, and all tasks but the first
    on each other resource.
    """
    used: set[Resource] = set()
    found = []
    for demand in option.chain:
        found.append(bool(used) if demand.resource is Resource.COMPUTE else demand.resource in used)
        if demand.resource is not Resource.COMPUTE:
            used.add(demand.resource)
    return tuple(found)


def advance(
    rows: Sequence[Any],
    backward_s: Any,
    option: Option,
    seconds: Sequence[Any],
    level: Level,
    larger: Callable[[Any, Any], Any] = max,
) -> list[Any]:
    """Returns when each resource (backward's core, another core, links) is free after one more bucket.

    `backward_s` passes until the bucket is ready; then the way to exchange it, `option`, takes `seconds` for each of
    its tasks in turn.

    Args:
        rows: the times before, by `Resource`, then the entry END, when all buckets are done; each entry may be an
            array, of one element per state, if `larger` is numpy.maximum.
        level: in CHARGED, a task that `follows` names (mostly decoding) takes its resource's time at once; in DEFERRED
            its seconds are only added to END, which then is the sum of such seconds.
        larger: the function that returns the larger of two entries of `rows`.
    """
    after = list(rows)
    ready = after[Resource.COMPUTE] = after[Resource.COMPUTE] + backward_s
    holder = Resource.COMPUTE
    for demand, follower, taken in zip(option.chain, follows(option), seconds, strict=True):
        if not follower:
            ready = after[demand.resource] = larger(after[demand.resource], ready) + taken
            holder = demand.resource
        elif level is Level.DEFERRED:
            after[END] = after[END] + taken
        else:
            ready = ready + taken
            if demand.resource is not holder:
                after[demand.resource] = after[demand.resource] + taken
            after[holder] = ready
    if level is not Level.DEFERRED:
        after[END] = larger(after[END], ready)
    return after


def finish(rows: Sequence[Any], rest_s: float, level: Level, larger: Callable[[Any, Any], Any] = max) -> Any:
    """Returns the seconds of the whole step, given when resources get free after the last bucket.

    Args:
        rows: the time when each resource (a core, or a kind of link) is free, by `Resource`; then the end of the last
            bucket, or in level DEFERRED the seconds of all decoding, which then comes after all else.
        rest_s: the seconds of backward after the last bucket is ready.
        level: whether decoding takes its resource's time at once (CHARGED) or follows all transfers (DEFERRED).
        larger: the function that returns the larger of two entries of `rows`.
    """
    if level is not Level.DEFERRED:
        return larger(rows[Resource.COMPUTE] + rest_s, rows[END])
    last = rows[Resource.COMPUTE] + rest_s
    for resource in (Resource.OFFLOAD, Resource.INTRA, Resource.INTER):
        last = larger(last, rows[resource])
    return last + rows[END]
