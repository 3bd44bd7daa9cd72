"""The machine of `problem` plays a plan: its timeline, and the recurrences that approximate it (`bytecomp.md` 3.7).

`step_s` is the reference, level (c): every demand is a task, those on COMPUTE interrupt backward. A recurrence takes
the parts one after another and keeps for each resource when it is free: (max,+) linear, so a matrix for each part.
It lets demands stand in the queue of their resource as the machine does, but for those that *follow*, which are on
COMPUTE behind another resource (decoding), or on a resource that the part has used before. Where none follows, the
recurrence is the machine; else there are two levels:

- charged, (b): what follows is charged to its resource at once, before it can begin, and holds the resource in
  whose queue its part stood last until it ends. Never less than `step_s` where options encode, use one channel and
  decode; with several channels it is an estimate.
- deferred, (`deferred_s`): what follows waits for the last transfer of all. MergeComp's model (`mergecomp.md` 2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from ..costs.timeline import Activity, Task, schedule
from .maxplus import Matrix, matrix_of
from .problem import Option, Part, Problem, Resource, check_parts

ROWS = len(Resource) + 1  # state of a recurrence: when each resource is free, and the row END
END = len(Resource)  # when the last part is done; deferred: seconds of all that follows


class Level(Enum):
    """What a recurrence makes of demands that follow."""

    CHARGED = "charged"
    DEFERRED = "deferred"


def play(problem: Problem, parts: Sequence[Part]) -> list[Task]:
    """The timeline of a plan; streams are the resources in small letters. Backward is interrupted, so it is in pieces.

    Where two demands waited equally long, that of the earlier part goes first, then the earlier one of its chain.

    Raises:
        ValueError: where the parts do not cover the items in order, or take what their items may not.
    """
    check_parts(problem, parts)
    return schedule(_activities(problem, parts))


def step_s(problem: Problem, parts: Sequence[Part]) -> float:
    """Seconds from backward's begin to the last demand's end, or to backward's."""
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
    """As MergeComp counts: encoding delays backward, decoding waits for the last transfer."""
    return recurrence_s(problem, parts, Level.DEFERRED)


def recurrence_s(problem: Problem, parts: Sequence[Part], level: Level) -> float:
    """Returns the seconds of a step by the recurrence of this level."""
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
    """What the part makes of the rows, as a (max,+) matrix."""
    backward_s = sum(problem.gaps_s[part.start : part.stop])
    option, seconds = problem.options[part.option], problem.seconds(part.option, part.start, part.stop)
    return matrix_of(lambda rows: advance(rows, backward_s, option, seconds, level), ROWS)


def follows(option: Option) -> tuple[bool, ...]:
    """Which demands of the option do not stand in a resource's queue: see the module."""
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
    """The rows after one more part: its backward, then its demands; with numpy.maximum for `larger`, of many states."""
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
    """Seconds of the step whose parts have led to these rows."""
    if level is not Level.DEFERRED:
        return larger(rows[Resource.COMPUTE] + rest_s, rows[END])
    last = rows[Resource.COMPUTE] + rest_s
    for resource in (Resource.OFFLOAD, Resource.INTRA, Resource.INTER):
        last = larger(last, rows[resource])
    return last + rows[END]
