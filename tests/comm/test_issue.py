"""Every stage is issued in the planned order, whatever the timing, and what failed says where."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gradsync.comm import (
    Group,
    GroupError,
    JobThread,
    Ledger,
    LocalGroup,
    Pending,
    RecordingGroup,
    Synchronization,
    drive,
    run_local,
)
from gradsync.comm.group import place_of_wait
from gradsync.comm.issue import CancelledStepError
from gradsync.costs.timeline import covered_s
from tests.comm.steps import tasks_of

WAIT_S = 20.0
ORDER = [("0", "push"), ("1", "push"), ("0", "pull"), ("2", "push"), ("1", "pull"), ("2", "pull")]

Start = Callable[[str], Coroutine[Any, Any, Any]]


@contextmanager
def issue_thread(device: torch.device | None = None) -> Iterator[JobThread]:
    thread = JobThread("gradsync-test", device)
    yield thread
    thread.stop()


def completed(value: Any) -> Pending[Any]:
    """An operation whose result is already there."""
    return Pending(lambda _: value)


def synchronization(
    start: Start, order: list[tuple[str, str]], thread: JobThread, timeout_s: float = WAIT_S
) -> Synchronization:
    return Synchronization(
        order,
        start,
        where=lambda bucket, stage: f"bucket {bucket}, stage {stage}",
        timeout_s=timeout_s,
        turn=threading.Lock(),
        thread=thread,
    )


def finish(start: Start, order: list[tuple[str, str]], timeout_s: float = WAIT_S) -> Synchronization:
    """Runs a step whose buckets get ready in order."""
    with issue_thread() as thread:
        running = synchronization(start, order, thread, timeout_s)
        for bucket in dict.fromkeys(bucket for bucket, _ in order):
            running.mark_ready(bucket)
        running.wait()
        return running


def two_rounds(group: Group, issued: list[tuple[str, str]]) -> Start:
    """Coroutines of two stages that sum the bucket's number, then what came of it."""

    async def synchronize(bucket: str) -> float:
        issued.append((bucket, "push"))
        first = await group.all_reduce(torch.tensor([float(bucket) + 1]))
        issued.append((bucket, "pull"))
        return float(await group.all_reduce(first * 10))

    return synchronize


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_issue_in_the_planned_order_whatever_gets_ready_first(seed: int) -> None:
    size = 3

    def rank_main(group: LocalGroup) -> tuple[list[tuple[str, str]], dict[str, Any]]:
        dice = random.Random(1000 * seed + group.rank)
        issued: list[tuple[str, str]] = []
        with issue_thread() as thread:
            running = synchronization(two_rounds(group, issued), ORDER, thread)
            for bucket in dice.sample(["0", "1", "2"], 3):
                time.sleep(dice.uniform(0, 0.003))
                running.mark_ready(bucket)
            running.wait()
        return issued, running.results

    for issued, results in run_local(size, rank_main):
        assert issued == ORDER
        assert results == {bucket: size * 10 * size * (float(bucket) + 1) for bucket in "012"}


def test_a_bucket_is_issued_while_the_one_before_is_still_on_its_way() -> None:
    issued = threading.Event()

    def until_issued(timeout_s: float) -> bool:
        if not issued.wait(timeout_s):
            raise GroupError("bucket 1 was not issued meanwhile")
        return True

    async def synchronize(bucket: str) -> bool:
        if bucket == "0":
            return await Pending(until_issued)
        issued.set()
        return await completed(False)

    running = finish(synchronize, [("0", "push"), ("1", "push")], timeout_s=10)
    assert running.results == {"0": True, "1": False}


def test_nothing_is_issued_before_its_turn_though_it_is_ready() -> None:
    started: list[str] = []

    async def synchronize(bucket: str) -> None:
        started.append(bucket)

    with issue_thread() as thread:
        running = synchronization(synchronize, [("0", "push"), ("1", "push")], thread)
        running.mark_ready("1")
        assert started == []
        running.mark_ready("0")
        running.wait()
    assert started == ["0", "1"]


def test_schemes_may_await_less_or_more_often_than_planned() -> None:
    issued: list[str] = []

    async def synchronize(bucket: str) -> int:
        rounds = {"none": 0, "planned": 2, "more": 4}[bucket]
        for number in range(rounds):
            issued.append(f"{bucket} {number}")
            await completed(None)
        return rounds

    order = [(bucket, stage) for stage in ("push", "pull") for bucket in ("none", "more", "planned")]
    assert finish(synchronize, order).results == {"none": 0, "more": 4, "planned": 2}
    assert issued == ["more 0", "planned 0", "more 1", "planned 1", "more 2", "more 3"]


def test_a_failed_operation_names_bucket_and_the_stage_that_failed() -> None:
    def broken(_: float) -> None:
        raise GroupError("no answer from rank 2 within 5 s")

    async def synchronize(bucket: str) -> None:
        await completed(None)
        await (Pending(broken) if bucket == "1" else completed(None))

    order = [("0", "push"), ("1", "push"), ("0", "pull"), ("1", "pull")]
    with pytest.raises(GroupError, match=r"^bucket 1, stage pull: no answer from rank 2 within 5 s$"):
        finish(synchronize, order)


def test_an_error_in_a_scheme_keeps_its_type_and_carries_bucket_and_stage() -> None:
    async def synchronize(bucket: str) -> None:
        await completed(None)
        if bucket == "1":
            raise ValueError("index 9 is outside")

    order = [("0", "push"), ("1", "push"), ("0", "pull"), ("1", "pull")]
    with pytest.raises(ValueError, match="index 9 is outside") as caught:
        finish(synchronize, order)
    assert caught.value.__notes__ == ["while synchronising bucket 1, stage pull"]


def test_a_cancelled_step_issues_nothing_more_and_says_what_it_waited_for() -> None:
    started: list[str] = []

    async def synchronize(bucket: str) -> None:
        started.append(bucket)

    with issue_thread() as thread:
        running = synchronization(synchronize, [("0", "push"), ("1", "push")], thread)
        running.mark_ready("0")
        running.cancel()
        running.mark_ready("1")
        with pytest.raises(CancelledStepError, match="the step was given up"):
            running.wait()
    assert "1" not in started


def test_an_operation_that_times_out_gets_the_step_s_timeout() -> None:
    patience: list[float] = []

    async def synchronize(bucket: str) -> None:
        await Pending(patience.append)

    finish(synchronize, [("0", "push")], timeout_s=7.5)
    assert patience == [7.5]


def test_a_group_can_ask_for_which_bucket_and_stage_a_thread_waits() -> None:
    places: list[str] = []

    async def synchronize(bucket: str) -> None:
        await Pending(lambda _: places.append(place_of_wait()))
        await Pending(lambda _: places.append(place_of_wait()))

    finish(synchronize, [("0", "push"), ("1", "push"), ("0", "pull"), ("1", "pull")])
    assert places == [f"bucket {bucket}, stage {stage}" for stage in ("push", "pull") for bucket in (0, 1)]
    assert place_of_wait() == "outside of steps"


def test_tasks_tell_link_and_kernel_times_in_order() -> None:
    async def synchronize(bucket: str) -> None:
        await completed(None)
        await completed(None)

    running = finish(synchronize, [("0", "push"), ("0", "pull")])
    assert [(task.name, task.stream) for task in tasks_of(running)] == [
        ("0:push", "kernel"),
        ("0:push", "link"),
        ("0:pull", "kernel"),
        ("0:pull", "link"),
        ("0:finish", "kernel"),
    ]
    assert all(0 <= task.start_s <= task.end_s for task in tasks_of(running))
    ended_s = tasks_of(running)[-1].end_s
    assert 0 <= covered_s(((task.start_s, task.end_s) for task in tasks_of(running)), 0.0, ended_s) <= ended_s


def test_gradients_are_off_whoever_issues() -> None:
    weight = torch.ones(2, requires_grad=True)

    async def synchronize(bucket: str) -> bool:
        await completed(None)
        return (weight * 2).requires_grad

    assert finish(synchronize, [("0", "push"), ("1", "push")]).results == {"0": False, "1": False}


def test_early_buckets_are_issued_by_the_thread_and_the_last_one_by_whoever_waits() -> None:
    issuers: dict[str, str] = {}
    idle = threading.Event()

    async def synchronize(bucket: str) -> None:
        issuers[bucket] = threading.current_thread().name

    with issue_thread() as thread:
        running = synchronization(synchronize, [("0", "push"), ("1", "push")], thread)
        running.mark_ready("0")
        thread.submit(idle.set)  # behind the turn, whose loop would take the next bucket too
        assert idle.wait(10)
        running.mark_ready("1")
        running.wait()
    assert issuers == {"0": "gradsync-test", "1": threading.current_thread().name}


def test_a_stopped_thread_ends_after_what_was_queued() -> None:
    seen: list[str] = []
    thread = JobThread("gradsync-test-stop")
    thread.submit(lambda: seen.append("done"))
    thread.stop()
    assert seen == ["done"]
    with pytest.raises(RuntimeError, match="'gradsync-test-stop' was stopped"):
        thread.submit(lambda: None)
    assert "gradsync-test-stop" not in [alive.name for alive in threading.enumerate()]


def test_drive_runs_a_coroutine_to_its_end() -> None:
    patience: list[float] = []

    def give(value: int) -> Pending[int]:
        def wait(timeout_s: float) -> int:
            patience.append(timeout_s)
            return value

        return Pending(wait)

    async def scheme() -> int:
        return await give(3) + await give(4)

    async def silent() -> str:
        return "no await"

    assert drive(scheme(), timeout_s=2.0) == 7
    assert patience == [2.0, 2.0]
    assert drive(silent(), timeout_s=2.0) == "no await"


def test_drive_raises_what_an_operation_raises() -> None:
    async def scheme() -> None:
        await Pending(lambda _: (_ for _ in ()).throw(GroupError("gone")))

    with pytest.raises(GroupError, match="gone"):
        drive(scheme(), timeout_s=1.0)


def test_operations_in_flight_carry_the_bytes_that_the_ledger_counts() -> None:
    recording = [RecordingGroup(member, Ledger()) for member in LocalGroup.world(2)]

    async def gather(bucket: str) -> None:
        await recording[0].all_gather(torch.zeros(int(bucket)))

    recording[1].all_gather(torch.zeros(3))
    recording[1].all_gather(torch.zeros(5))
    running = finish(gather, [("3", "gather"), ("5", "gather")])
    links = {task.name: task.nbytes for task in tasks_of(running) if task.stream == "link"}
    assert links == {"3:gather": 12.0, "5:gather": 20.0}
    assert sum(links.values()) == recording[0].ledger.sent_bytes
