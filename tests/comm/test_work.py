"""Work that schemes await: done by the thread that it is for, without holding up what does not need it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gradsync.comm import GroupError, JobThread, Pending, Synchronization, Work, WorkGivenUpError, drive
from gradsync.comm.issue import CancelledStepError
from tests.comm.steps import tasks_of

WAIT_S = 20.0


def here() -> str:
    return threading.current_thread().name


def completed(value: Any = None) -> Pending[Any]:
    return Pending(lambda _: value)


def after(event: threading.Event, what: str) -> Callable[[float], None]:
    """An operation that ends once something else has happened."""

    def wait(timeout_s: float) -> None:
        if not event.wait(timeout_s):
            raise GroupError(f"{what} did not happen meanwhile")

    return wait


@contextmanager
def running(
    start: Callable[[str], Any], order: list[tuple[str, str]], prepared: tuple[str, ...] = (), *, early: bool = True
) -> Iterator[Synchronization]:
    """A step with its two threads, which end with it."""
    issuing, other = JobThread("test-issue"), JobThread("test-offload", torch_threads=1)
    yield Synchronization(
        order,
        start,
        where=lambda bucket, stage: f"bucket {bucket}, stage {stage}",
        timeout_s=WAIT_S,
        turn=threading.Lock(),
        thread=issuing,
        early=early,
        prepared=prepared,
        offload=other.submit,
    )
    issuing.stop()
    other.stop()
    assert not {"test-issue", "test-offload"} & {thread.name for thread in threading.enumerate()}


def test_a_prepared_bucket_s_work_is_under_way_while_an_earlier_bucket_is_on_its_way() -> None:
    begun, issued = threading.Event(), threading.Event()

    def compress() -> str:
        begun.set()
        assert issued.wait(WAIT_S)
        time.sleep(0.05)  # in which the flight's beginning is noted
        return here()

    async def synchronize(bucket: str) -> str:
        if bucket == "0":
            issued.set()
            await Pending(after(begun, "the work of bucket 1"))
            return ""
        where: str = await Work(compress, "offload", "compress")
        await completed()
        return where

    with running(synchronize, [("0", "push"), ("1", "push")], prepared=("1",)) as step:
        step.mark_ready("0")
        step.mark_ready("1")
        step.wait()
    assert step.results["1"] == "test-offload"
    tasks = {(task.name, task.stream): task for task in tasks_of(step)}
    flight, work = tasks["0:push", "link"], tasks["1:compress", "offload"]
    assert flight.start_s <= work.end_s and work.start_s <= flight.end_s, "they overlap"


@pytest.mark.parametrize("device", ["compute", "offload"])
def test_no_work_is_begun_before_the_end_is_waited_for_where_nothing_is_early(device: str) -> None:
    begun: list[str] = []

    async def synchronize(bucket: str) -> None:
        await Work(lambda: begun.append(bucket), device, "compress")
        await completed()

    with running(synchronize, [("0", "push"), ("1", "push")], ("0", "1"), early=False) as step:
        for bucket in "10":
            step.mark_ready(bucket)
            step.do_work()
        time.sleep(0.05)
        assert not begun
        step.wait()
    assert begun == ["1", "0"] and step.results.keys() == {"0", "1"}
    assert {task.name for task in tasks_of(step) if task.stream == device} == {"0:compress", "1:compress"}


def test_turns_of_other_buckets_go_on_while_work_is_offloaded() -> None:
    issued = threading.Event()

    async def synchronize(bucket: str) -> None:
        await completed()
        if bucket == "0":
            await Work(lambda: after(issued, "bucket 1's second turn")(WAIT_S), "offload", "decompress")
        else:
            issued.set()
        await completed()

    order = [("0", "push"), ("1", "push"), ("0", "decompress"), ("1", "pull"), ("0", "pull")]
    with running(synchronize, order) as step:
        for bucket in "01":
            step.mark_ready(bucket)
        step.wait()
    assert step.results.keys() == {"0", "1"}


def test_work_for_backward_s_thread_is_done_there_when_the_bucket_is_ready_comes_by_or_at_the_end() -> None:
    where: dict[str, str] = {}

    def note(what: str) -> Work[None]:
        return Work(lambda: where.update({what: here()}), "compute", what)

    reached = threading.Event()

    async def synchronize(bucket: str) -> None:
        await note(f"first of {bucket}")
        await completed()
        reached.set()
        await note(f"second of {bucket}")

    with running(synchronize, [(b, s) for b in "01" for s in ("push", "decompress")], prepared=("0", "1")) as step:
        step.mark_ready("0")
        assert where == {"first of 0": here()}, "before any turn"
        assert reached.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while "second of 0" not in where and time.monotonic() < deadline:
            step.do_work()
        step.mark_ready("1")
        assert "second of 1" not in where
        step.wait()
    assert where == dict.fromkeys(("first of 0", "second of 0", "first of 1", "second of 1"), here())
    tasks = {task.name for task in tasks_of(step) if task.stream == "compute"}
    assert tasks == {"0:first of 0", "0:decompress", "1:first of 1", "1:decompress"}


def test_turns_keep_their_order_when_one_waits_for_backward_s_thread() -> None:
    issued: list[str] = []

    async def synchronize(bucket: str) -> None:
        issued.append(f"{bucket} push")
        await completed()
        await Work(lambda: None, "compute", "decompress")
        issued.append(f"{bucket} pull")
        await completed()

    order = [(bucket, stage) for stage in ("push", "decompress", "pull") for bucket in "01"]
    with running(synchronize, order) as step:
        step.mark_ready("0")
        step.mark_ready("1")
        step.wait()
    assert issued == ["0 push", "1 push", "0 pull", "1 pull"]


@pytest.mark.parametrize("device", ["compute", "offload"])
@pytest.mark.parametrize("prepared", [(), ("0",)])
def test_what_work_raises_is_raised_where_the_step_is_waited_for(device: str, prepared: tuple[str, ...]) -> None:
    def broken() -> None:
        raise ValueError("no such element")

    async def synchronize(bucket: str) -> None:
        await Work(broken, device, "compress")

    with running(synchronize, [("0", "push")], prepared) as step:
        step.mark_ready("0")
        with pytest.raises(ValueError, match="no such element") as caught:
            step.wait()
    assert caught.value.__notes__ == ["while synchronising bucket 0, stage " + ("compress" if prepared else "push")]


def test_what_a_prepared_scheme_raises_at_once_is_raised_there_too() -> None:
    async def synchronize(bucket: str) -> None:
        raise RuntimeError("nothing to compress")

    with running(synchronize, [("0", "push")], ("0",)) as step:
        step.mark_ready("0")
        with pytest.raises(RuntimeError, match="nothing to compress"):
            step.wait()


def test_a_step_that_is_given_up_leaves_no_work_behind() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def compress(bucket: str) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        done.append(bucket)

    async def synchronize(bucket: str) -> None:
        await Work(lambda: compress(bucket), "offload", "compress")

    with running(synchronize, [(bucket, "push") for bucket in "012"], tuple("012")) as step:
        step.mark_ready("0")
        step.mark_ready("1")
        assert begun.wait(WAIT_S)
        step.cancel()
        go_on.set()
        with pytest.raises(CancelledStepError):
            step.wait()
    assert done == ["0"], "what had begun"


def test_work_that_was_given_up_tells_who_waits() -> None:
    work = Work(lambda: 3, "offload", "compress@offload")
    work.submit_to(lambda job: None)
    work.give_up()
    with pytest.raises(WorkGivenUpError, match="compress@offload was given up with its step"):
        work.wait(WAIT_S)


def test_work_that_does_not_end_is_not_waited_for_for_ever() -> None:
    work = Work(lambda: 3, "offload", "compress@offload")
    work.submit_to(lambda job: None)
    with pytest.raises(GroupError, match="compress@offload did not end on this rank within 0 s"):
        work.wait(0.01)


def test_without_another_thread_whoever_waits_does_the_work_once() -> None:
    seen = []

    async def scheme() -> int:
        return await Work(lambda: seen.append(here()) or 3, "offload", "compress")

    assert drive(scheme(), timeout_s=1.0) == 3
    assert seen == [here()]


def test_gradients_are_off_in_work() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not Work(lambda: (weight * 2).requires_grad, "offload", "compress").wait(1.0)


def test_a_thread_s_torch_threads_are_its_own() -> None:
    usual = torch.get_num_threads()
    found: dict[str, int] = {}

    def note(who: str) -> None:
        found[who] = torch.get_num_threads()

    thread = JobThread("test-threads", torch_threads=1)
    thread.submit(lambda: note("offload"))
    thread.stop()
    later = threading.Thread(target=note, args=("later",))
    later.start()
    later.join()
    assert found == {"offload": 1, "later": usual}
    assert torch.get_num_threads() == usual
