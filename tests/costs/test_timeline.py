"""The rules by which activities on streams become a timeline."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gradsync.costs.timeline import Activity, Task, schedule


def times(activities: list[Activity]) -> list[tuple[str, float, float]]:
    return [(task.name, task.start_s, task.end_s) for task in schedule(activities)]


def test_a_stream_serves_one_activity_at_a_time_and_streams_run_side_by_side() -> None:
    activities = [Activity("a", "link", 2.0), Activity("b", "link", 3.0), Activity("c", "core", 4.0)]
    assert times(activities) == [("a", 0.0, 2.0), ("c", 0.0, 4.0), ("b", 2.0, 5.0)]


def test_an_activity_waits_for_all_of_its_predecessors() -> None:
    activities = [Activity("a", "x", 2.0), Activity("b", "y", 5.0), Activity("c", "z", 1.0, after=(0, 1))]
    assert times(activities)[-1] == ("c", 5.0, 6.0)


def test_what_waited_longest_is_served_first() -> None:
    activities = [
        Activity("holds", "link", 10.0),
        Activity("late", "core", 3.0),
        Activity("early", "other", 2.0),
        Activity("of late", "link", 1.0, after=(1,)),
        Activity("of early", "link", 1.0, after=(2,)),
    ]
    assert times(activities)[-2:] == [("of early", 10.0, 11.0), ("of late", 11.0, 12.0)]


def test_of_activities_that_waited_equally_long_the_earlier_in_the_list_is_first() -> None:
    assert [name for name, _, _ in times([Activity("a", "x", 1.0), Activity("b", "x", 1.0)])] == ["a", "b"]


def test_a_queue_keeps_the_order_of_the_list_though_its_stream_idles() -> None:
    activities = [
        Activity("slow", "core", 4.0),
        Activity("of slow", "link", 1.0, after=(0,), queue="first"),
        Activity("ready", "link", 1.0, queue="first"),
        Activity("of another queue", "link", 1.0, queue="second"),
    ]
    assert times(activities) == [
        ("of another queue", 0.0, 1.0),
        ("slow", 0.0, 4.0),
        ("of slow", 4.0, 5.0),
        ("ready", 5.0, 6.0),
    ]


def test_an_interrupting_activity_pushes_what_runs_and_what_waits_to_the_right() -> None:
    activities = [
        Activity("backward", "compute", 10.0, nbytes=100.0),
        Activity("signal", "core", 4.0),
        Activity("more backward", "compute", 1.0, after=(0,)),
        Activity("encode", "compute", 3.0, after=(1,), interrupts=True),
    ]
    assert [(task.name, task.start_s, task.end_s, task.nbytes) for task in schedule(activities)] == [
        ("backward", 0.0, 4.0, 40.0),
        ("signal", 0.0, 4.0, 0.0),
        ("encode", 4.0, 7.0, 0.0),
        ("backward", 7.0, 13.0, 60.0),
        ("more backward", 13.0, 14.0, 0.0),
    ]


def test_an_interrupting_activity_does_not_interrupt_its_like() -> None:
    activities = [
        Activity("backward", "compute", 10.0),
        Activity("a", "core", 1.0),
        Activity("b", "other", 2.0),
        Activity("of b", "compute", 4.0, after=(2,), interrupts=True),
        Activity("of a", "compute", 4.0, after=(1,), interrupts=True),
    ]
    assert times(activities)[-3:] == [("of a", 1.0, 5.0), ("of b", 5.0, 9.0), ("backward", 9.0, 18.0)]


def test_the_stopped_activity_goes_on_before_what_waited_longer() -> None:
    activities = [
        Activity("waits", "compute", 1.0),
        Activity("signal", "core", 0.5),
        Activity("encode", "compute", 1.0, after=(1,), interrupts=True),
        Activity("waits too", "compute", 1.0),
    ]
    assert [name for name, _, _ in times(activities)] == ["waits", "signal", "encode", "waits", "waits too"]


def test_activities_of_no_duration_take_their_turn() -> None:
    activities = [
        Activity("a", "compute", 0.0),
        Activity("of a", "compute", 0.0, after=(0,), interrupts=True),
        Activity("b", "compute", 2.0, after=(0,)),
        Activity("sent", "link", 0.0, after=(1,), nbytes=7.0),
    ]
    assert times(activities) == [("a", 0.0, 0.0), ("of a", 0.0, 0.0), ("sent", 0.0, 0.0), ("b", 0.0, 2.0)]
    assert schedule(activities)[2].nbytes == 7.0


def test_an_earlier_activity_that_waits_for_a_later_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"activity 0, a, waits for \(1,\): it must be for earlier ones only"):
        schedule([Activity("a", "x", 1.0, after=(1,)), Activity("b", "x", 1.0)])
    with pytest.raises(ValueError, match="duration_s must be finite and not negative, got -1"):
        Activity("a", "x", -1.0)


def random_activities(seed: int) -> list[Activity]:
    random_ = random.Random(seed)
    activities = []
    for place in range(random_.randrange(1, 14)):
        after = tuple({random_.randrange(place) for _ in range(random_.randrange(3))}) if place else ()
        interrupts = random_.random() < 0.3
        queue = random_.choice(["", "urgent"] if interrupts else ["", "1", "2"])
        duration_s = float(random_.choice([0, 0, 1, 2, 3]))
        activities.append(Activity(f"{place}", random_.choice("xyz"), duration_s, after, interrupts, queue))
    return activities


def test_every_activity_is_done_whole_after_its_predecessors_with_nothing_beside_it() -> None:
    for seed in range(300):
        activities = random_activities(seed)
        tasks = schedule(activities)
        pieces: dict[str, list[Task]] = {activity.name: [] for activity in activities}
        for task in tasks:
            pieces[task.name].append(task)
        for activity in activities:
            done = pieces[activity.name]
            assert sum(task.duration_s for task in done) == activity.duration_s, seed
            assert all(pieces[str(place)][-1].end_s <= done[0].start_s for place in activity.after), seed
            assert len(done) == 1 or not activity.interrupts, seed
        for stream in "xyz":
            served = [task for task in tasks if task.stream == stream and task.duration_s]
            assert all(a.end_s <= b.start_s for a, b in pairwise(served)), seed
            for queue in ("1", "2", "urgent"):
                begins = [pieces[w.name][0].start_s for w in activities if (w.stream, w.queue) == (stream, queue)]
                assert begins == sorted(begins), seed
