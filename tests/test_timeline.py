"""The rules by which works on streams become a timeline."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gradsync.timeline import Task, Work, covered_s, schedule


def times(works: list[Work]) -> list[tuple[str, float, float]]:
    return [(task.name, task.start_s, task.end_s) for task in schedule(works)]


def test_a_stream_serves_one_work_at_a_time_and_streams_run_side_by_side() -> None:
    works = [Work("a", "link", 2.0), Work("b", "link", 3.0), Work("c", "core", 4.0)]
    assert times(works) == [("a", 0.0, 2.0), ("c", 0.0, 4.0), ("b", 2.0, 5.0)]


def test_a_work_waits_for_all_of_its_predecessors() -> None:
    works = [Work("a", "x", 2.0), Work("b", "y", 5.0), Work("c", "z", 1.0, after=(0, 1))]
    assert times(works)[-1] == ("c", 5.0, 6.0)


def test_what_waited_longest_is_served_first() -> None:
    works = [
        Work("holds", "link", 10.0),
        Work("late", "core", 3.0),
        Work("early", "other", 2.0),
        Work("of late", "link", 1.0, after=(1,)),
        Work("of early", "link", 1.0, after=(2,)),
    ]
    assert times(works)[-2:] == [("of early", 10.0, 11.0), ("of late", 11.0, 12.0)]


def test_of_works_that_waited_equally_long_the_earlier_in_the_list_is_first() -> None:
    assert [name for name, _, _ in times([Work("a", "x", 1.0), Work("b", "x", 1.0)])] == ["a", "b"]


def test_a_queue_keeps_the_order_of_the_list_though_its_stream_idles() -> None:
    works = [
        Work("slow", "core", 4.0),
        Work("of slow", "link", 1.0, after=(0,), queue="first"),
        Work("ready", "link", 1.0, queue="first"),
        Work("of another queue", "link", 1.0, queue="second"),
    ]
    assert times(works) == [
        ("of another queue", 0.0, 1.0),
        ("slow", 0.0, 4.0),
        ("of slow", 4.0, 5.0),
        ("ready", 5.0, 6.0),
    ]


def test_an_interrupting_work_pushes_what_runs_and_what_waits_to_the_right() -> None:
    works = [
        Work("backward", "compute", 10.0, nbytes=100.0),
        Work("signal", "core", 4.0),
        Work("more backward", "compute", 1.0, after=(0,)),
        Work("encode", "compute", 3.0, after=(1,), interrupts=True),
    ]
    assert [(task.name, task.start_s, task.end_s, task.nbytes) for task in schedule(works)] == [
        ("backward", 0.0, 4.0, 40.0),
        ("signal", 0.0, 4.0, 0.0),
        ("encode", 4.0, 7.0, 0.0),
        ("backward", 7.0, 13.0, 60.0),
        ("more backward", 13.0, 14.0, 0.0),
    ]


def test_an_interrupting_work_does_not_interrupt_its_like() -> None:
    works = [
        Work("backward", "compute", 10.0),
        Work("a", "core", 1.0),
        Work("b", "other", 2.0),
        Work("of b", "compute", 4.0, after=(2,), interrupts=True),
        Work("of a", "compute", 4.0, after=(1,), interrupts=True),
    ]
    assert times(works)[-3:] == [("of a", 1.0, 5.0), ("of b", 5.0, 9.0), ("backward", 9.0, 18.0)]


def test_the_stopped_work_goes_on_before_what_waited_longer() -> None:
    works = [
        Work("waits", "compute", 1.0),
        Work("signal", "core", 0.5),
        Work("encode", "compute", 1.0, after=(1,), interrupts=True),
        Work("waits too", "compute", 1.0),
    ]
    assert [name for name, _, _ in times(works)] == ["waits", "signal", "encode", "waits", "waits too"]


def test_works_of_no_duration_take_their_turn() -> None:
    works = [
        Work("a", "compute", 0.0),
        Work("of a", "compute", 0.0, after=(0,), interrupts=True),
        Work("b", "compute", 2.0, after=(0,)),
        Work("sent", "link", 0.0, after=(1,), nbytes=7.0),
    ]
    assert times(works) == [("a", 0.0, 0.0), ("of a", 0.0, 0.0), ("sent", 0.0, 0.0), ("b", 0.0, 2.0)]
    assert schedule(works)[2].nbytes == 7.0


def test_an_earlier_work_that_waits_for_a_later_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"work 0, a, waits for \(1,\): it must be for earlier ones only"):
        schedule([Work("a", "x", 1.0, after=(1,)), Work("b", "x", 1.0)])
    with pytest.raises(ValueError, match="duration_s must be finite and not negative, got -1"):
        Work("a", "x", -1.0)


def random_works(seed: int) -> list[Work]:
    random_ = random.Random(seed)
    works = []
    for place in range(random_.randrange(1, 14)):
        after = tuple({random_.randrange(place) for _ in range(random_.randrange(3))}) if place else ()
        interrupts = random_.random() < 0.3
        queue = random_.choice(["", "urgent"] if interrupts else ["", "1", "2"])
        duration_s = float(random_.choice([0, 0, 1, 2, 3]))
        works.append(Work(f"{place}", random_.choice("xyz"), duration_s, after, interrupts, queue))
    return works


def test_every_work_is_done_whole_after_its_predecessors_with_nothing_beside_it() -> None:
    for seed in range(300):
        works = random_works(seed)
        tasks = schedule(works)
        pieces: dict[str, list[Task]] = {work.name: [] for work in works}
        for task in tasks:
            pieces[task.name].append(task)
        for work in works:
            done = pieces[work.name]
            assert sum(task.duration_s for task in done) == work.duration_s, seed
            assert all(pieces[str(place)][-1].end_s <= done[0].start_s for place in work.after), seed
            assert len(done) == 1 or not work.interrupts, seed
        for stream in "xyz":
            served = [task for task in tasks if task.stream == stream and task.duration_s]
            assert all(a.end_s <= b.start_s for a, b in pairwise(served)), seed
            for queue in ("1", "2", "urgent"):
                begins = [pieces[w.name][0].start_s for w in works if (w.stream, w.queue) == (stream, queue)]
                assert begins == sorted(begins), seed


def test_covered_s_counts_what_overlaps_once() -> None:
    tasks = [Task("a", "link", 0.0, 2.0), Task("b", "core", 1.0, 3.0), Task("c", "link", 5.0, 6.0)]
    assert covered_s(tasks, 0.5, 5.5) == 3.0
