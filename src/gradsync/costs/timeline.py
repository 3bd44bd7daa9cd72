"""Tasks on named streams with a start and an end: one type for measured and predicted timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

MORE_OR_LESS = 1.25  # a factor, up or down, from which a duration counts as changed


@dataclass(frozen=True)
class Task:
    """One piece of work in a measured or predicted timeline, on one stream.

    Attributes:
        name: the piece of work, such as "0:push" for a bucket and a stage.
        stream: what the work keeps busy, such as "compute" or "link".
        start_s, end_s: seconds since the step began.
        nbytes: bytes that this rank sends on a link; 0 for other work.
    """

    name: str
    stream: str
    start_s: float
    end_s: float
    nbytes: float = 0.0

    @property
    def duration_s(self) -> float:
        """The seconds from the start to the end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Activity:
    """Work with a known duration that `schedule` is to place on a stream, which serves one activity at a time.

    Attributes:
        name: the piece of work.
        stream: what it keeps busy.
        duration_s: its seconds when nothing interrupts it.
        after: indices of the activities that must end before.
        interrupts: whether it begins at once, and stops other work on the stream.
        queue: activities of one stream with the same queue begin in the order of the list; "": no queue.
        nbytes: the bytes of a transfer; 0 for other work.
    """

    name: str
    stream: str
    duration_s: float
    after: tuple[int, ...] = ()
    interrupts: bool = False
    queue: str = ""
    nbytes: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.duration_s < float("inf"):
            raise ValueError(f"{self.name}: duration_s must be finite and not negative, got {self.duration_s}")


def schedule(activities: Sequence[Activity]) -> list[Task]:
    """Schedules activities on their streams, and returns the resulting tasks, by these rules.

    - A stream serves one activity at a time. An activity waits from the moment when all activities in `after` have
      ended.
    - An activity that `interrupts` begins as soon as it waits, unless another such one runs: then as soon as that ends.
      Any other activity that runs on the stream stops, and goes on, before anything else, once no interrupting activity
      waits there.
    - Among other activities a free stream serves the one that waited longest. Activities of one stream with the same
      `queue` (other than "") begin in the order of the list, even if the stream is idle meanwhile.
    - Among several interrupting activities, too, the one that waited longest is first. Between activities that waited
      equally long, the one that is earlier in the list.
    - At one moment activities first end, then begin one at a time: on all streams together interrupting ones first,
      then stopped ones, then the one that waited longest; an activity of no duration ends before the next begins.

    An interrupted activity comes in pieces of the same name, so that tasks on a stream never overlap; `nbytes` are
    shared out by duration.

    Returns:
        the tasks by start, those that start together by end, then as in the list.

    Raises:
        ValueError: where an activity waits for itself or a later one.
    """
    for place, activity in enumerate(activities):
        if any(not 0 <= earlier < place for earlier in activity.after):
            raise ValueError(
                f"activity {place}, {activity.name}, waits for {activity.after}: it must be for earlier ones only"
            )
    pieces = sorted(_Scheduling(activities).run(), key=lambda piece: (piece[1], piece[2], piece[0]))
    return [_task(activities[place], start_s, end_s) for place, start_s, end_s in pieces]


def _task(activity: Activity, start_s: float, end_s: float) -> Task:
    share = (end_s - start_s) / activity.duration_s if activity.duration_s else 1.0
    return Task(activity.name, activity.stream, start_s, end_s, activity.nbytes * share)


class _Stream:
    """The state of one stream while `schedule` runs: the activities on it that wait, run or were interrupted."""

    def __init__(self) -> None:
        self.urgent: list[tuple[float, int]] = []  # heaps of (waiting since, place)
        self.ordinary: list[tuple[float, int]] = []
        self.running: int | None = None
        self.stopped: int | None = None

    def first(self, activities: Sequence[Activity]) -> tuple[int, float, int] | None:
        """Returns the next activity to begin, as (priority, waiting since, index in the list); None if none can."""
        if self.running is not None and activities[self.running].interrupts:
            return None
        if self.urgent:
            return 0, *self.urgent[0]
        if self.running is not None:
            return None
        if self.stopped is not None:
            return 1, 0.0, self.stopped
        return (2, *self.ordinary[0]) if self.ordinary else None


class _Scheduling:
    def __init__(self, activities: Sequence[Activity]) -> None:
        self._activities = activities
        self._streams = {activity.stream: _Stream() for activity in activities}
        self._missing = [len(set(activity.after)) for activity in activities]
        self._successors: dict[int, list[int]] = defaultdict(list)
        self._queues: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place in reversed(range(len(activities))):
            for earlier in set(activities[place].after):
                self._successors[earlier].append(place)
            if activities[place].queue:
                self._queues[activities[place].stream, activities[place].queue].append(place)  # the last entry is next
        self._waiting_since: dict[int, float] = {}
        self._left_s = [activity.duration_s for activity in activities]
        self._began_s = [0.0] * len(activities)
        self._ends: list[tuple[float, int]] = []  # a heap; entries of activities that were stopped are stale

    def run(self) -> Iterator[tuple[int, float, float]]:
        """Yields pieces of activities, as they end or are interrupted: (index in the list, start, end)."""
        now_s = 0.0
        for place, missing in enumerate(self._missing):
            if not missing:
                self._wait(place, now_s)
        yield from self._begin(now_s)
        while self._ends:
            now_s = self._ends[0][0]
            while self._ends and self._ends[0][0] == now_s:
                _, place = heappop(self._ends)
                if self._is_end(place, now_s):
                    yield self._end(place, now_s)
            yield from self._begin(now_s)

    def _is_end(self, place: int, now_s: float) -> bool:
        runs = self._streams[self._activities[place].stream].running == place
        return runs and self._began_s[place] + self._left_s[place] == now_s

    def _wait(self, place: int, now_s: float) -> None:
        self._waiting_since[place] = now_s
        activity = self._activities[place]
        if not activity.queue or self._queues[activity.stream, activity.queue][-1] == place:
            self._offer(place)

    def _offer(self, place: int) -> None:
        stream = self._streams[self._activities[place].stream]
        heap = stream.urgent if self._activities[place].interrupts else stream.ordinary
        heappush(heap, (self._waiting_since[place], place))

    def _begin(self, now_s: float) -> Iterator[tuple[int, float, float]]:
        """Begins activities; yields (index, start, end) of pieces that they interrupt and activities of no duration."""
        while True:
            offers = [
                offer for stream in self._streams.values() if (offer := stream.first(self._activities)) is not None
            ]
            if not offers:
                return
            rank, _, place = min(offers)
            activity = self._activities[place]
            stream = self._streams[activity.stream]
            if rank == 0:
                heappop(stream.urgent)
                if stream.running is not None:
                    yield from self._stop(stream, now_s)
            elif rank == 1:
                stream.stopped = None
            else:
                heappop(stream.ordinary)
            stream.running = place
            self._began_s[place] = now_s
            if rank != 1:
                self._advance_queue(place)
            end_s = now_s + self._left_s[place]
            if end_s == now_s:
                yield self._end(place, now_s)
            else:
                heappush(self._ends, (end_s, place))

    def _advance_queue(self, place: int) -> None:
        activity = self._activities[place]
        if activity.queue:
            queue = self._queues[activity.stream, activity.queue]
            queue.pop()
            if queue and queue[-1] in self._waiting_since:
                self._offer(queue[-1])

    def _stop(self, stream: _Stream, now_s: float) -> Iterator[tuple[int, float, float]]:
        place = stream.running
        assert place is not None and stream.stopped is None
        stream.stopped = place
        began_s = self._began_s[place]
        self._left_s[place] = max(self._left_s[place] - (now_s - began_s), 0.0)
        if now_s > began_s:
            yield place, began_s, now_s

    def _end(self, place: int, now_s: float) -> tuple[int, float, float]:
        self._streams[self._activities[place].stream].running = None
        for later in self._successors[place]:
            self._missing[later] -= 1
            if not self._missing[later]:
                self._wait(later, now_s)
        return place, self._began_s[place], now_s


def covered_s(intervals: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Returns the seconds between `start_s` and `end_s` that at least one interval, (begin, end), covers."""
    total, reached = 0.0, start_s
    for first, last in sorted(intervals):
        begin, end = max(first, reached), min(last, end_s)
        if end > begin:
            total += end - begin
            reached = end
    return total
